"""Samples by the part of the machine that they are of: a rank's GPU and what it does, or a collective on a group of ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from validate.fit.ranks import SHARED
from validate.samples import Sample, SampleFile

_CATEGORIES: Final = {
    "gemm": "products", "attention_forward": "attention", "attention_backward": "attention", "decode_attention": "attention",
    "gemm_long": "products", "gemm_scaled": "products", "stream": "memory",
    "membound_forward": "memory", "membound_backward": "memory", "cross_entropy_forward": "memory",
    "cross_entropy_backward": "memory", "adamw": "memory", "hbm_copy": "memory", "h2d_pinned": "host copies",
    "d2h_pinned": "host copies", "h2d_pageable": "host copies", "d2h_pageable": "host copies",
    "h2d_d2h_together": "host copies", "h2d_d2h_together_pageable": "host copies", "storage_read": "storage",
    "storage_write": "storage", "device_malloc": "driver", "device_free": "driver",
}  # fmt: skip
SMALL_BYTES: Final = 2**20  # collectives below tell of latency, above of bandwidth
_COMPARED: Final = frozenset({"gpu", "cpu", "network card"})  # every rank has one, and they are alike
# (kind of part, whose, what): ("gpu", "rank 3 on node1", "products"), ("link", "8 ranks on 2 nodes", "all_reduce, large")


@dataclass(frozen=True, slots=True, order=True)
class Component:
    """A part of the machine. what: gpu or cpu (a rank's own work), network card, or link (what ranks do together).

    who: a rank, two, or a group.
    """

    what: str
    who: str
    category: str

    @property
    def is_own(self) -> bool:
        """A rank's own work."""
        return self.what in ("gpu", "cpu")

    def __str__(self) -> str:
        return f"{self.who}: {self.category}"


Measured = Mapping[Component, Mapping[str, float]]  # component -> what was measured -> log seconds


def measured(found: SampleFile) -> dict[Component, dict[str, float]]:
    """Logarithms of times by component and by what was measured; of repetitions, and of a collective's ranks, the median."""
    times: dict[Component, dict[str, list[float]]] = {}
    worker = worker_of(found)
    for sample in found.samples:
        component = of(sample, worker)
        times.setdefault(component, {}).setdefault(sample.key, []).append(math.log(sample.time_s))
    return {part: {key: statistics.median(logs) for key, logs in keys.items()} for part, keys in times.items()}


def worker_of(found: SampleFile) -> str:
    """What a rank computes on: gpu or cpu."""
    return "cpu" if found.machine.text("architecture") == "cpu" else "gpu"


def of(sample: Sample, worker: str) -> Component:
    """The part that a sample is of. worker: what ranks compute on."""
    shape = sample.shape
    if sample.kind not in SHARED:
        category = _CATEGORIES.get(sample.kind, "host")
        return Component(worker, rank_name(sample), f"{category}, sustained" if sample.sustained else category)
    if sample.kind == "rail":
        return Component("network card", rank_name(sample), "send to the next node")
    if sample.kind == "pair":
        ends = f"rank {shape['source']} to {shape['target']}" + (f" on {sample.host}" if sample.host else "")
        return Component("link", ends, "send")
    nodes = int(shape.get("num_nodes", 1))
    group = f"{shape.get('num_ranks', '?')} ranks" + (f" on {nodes} nodes" if nodes > 1 else "")
    if sample.kind != "collective":
        return Component("link", group, sample.kind.replace("_", " "))
    band = "small" if int(shape["size_bytes"]) < SMALL_BYTES else "large"
    return Component("link", group, f"{shape['op']}, {band}")


def rank_name(sample: Sample) -> str:
    """A rank with its host, where there are several."""
    return f"rank {sample.rank}" + (f" on {sample.host}" if sample.host else "")


def against_peers(run: Measured) -> dict[Component, list[float]]:
    """Each rank's log times less the median of all ranks for the same thing; only what three ranks or more have measured."""
    columns: dict[tuple[str, str], dict[Component, float]] = {}
    for part, keys in run.items():
        for key, log in keys.items() if part.what in _COMPARED else ():
            columns.setdefault((part.category, key), {})[part] = log
    found: dict[Component, list[float]] = {}
    for column in columns.values():
        if len(column) >= 3:
            middle = statistics.median(column.values())
            for part, log in column.items():
                found.setdefault(part, []).append(log - middle)
    return found


def against_baseline(new: Measured, old: Measured) -> dict[Component, list[float]]:
    """New log times less old ones, of what both have measured."""
    found = {
        part: [log - old[part][key] for key, log in keys.items() if key in old[part]]
        for part, keys in new.items()
        if part in old
    }
    return {part: logs for part, logs in found.items() if logs}


def pooled(baselines: list[dict[Component, dict[str, float]]]) -> dict[Component, dict[str, float]]:
    """The median of several files' log times."""
    found: dict[Component, dict[str, list[float]]] = {}
    for run in baselines:
        for part, keys in run.items():
            for key, log in keys.items():
                found.setdefault(part, {}).setdefault(key, []).append(log)
    return {part: {key: statistics.median(logs) for key, logs in keys.items()} for part, keys in found.items()}
