"""What a concurrent collective takes from compute on a GPU: SMs for its channels, and a share of the memory's speed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.spec.calibration import Interference
from simulator.spec.cluster.device import Device
from validate.fit.robust import rounded
from validate.samples import Sample

_MOST = 0.9  # the engine slows compute no further
_WHOLE = {"overlap_gemm_alone", "overlap_copy_alone", "overlap_both"}


def fit_interference(samples: Sequence[Sample], device: Device, prior: Interference) -> Interference:
    """`prior` with what was measured in its place.

    hbm_weight: a product beside a device copy takes longer by so many seconds per second of the copy. num_channels: what
    compute loses beside a collective, less its memory traffic's part, is the SMs that the collective holds.
    """
    weight, residuals = _memory_weight(samples, prior)
    losses = compute_losses(samples)
    if not losses:
        return prior.model_copy(update={"hbm_weight": weight, "sources": prior.sources | residuals})
    lost = float(np.median([share - weight * _memory_share(s, device, prior) for share, s in losses]))
    channels = max(0, round(lost * device.num_sms / (prior.sms_per_channel or 1.0)))
    residuals["num_channels"] = (
        f"products beside {len(losses)} collectives, median share lost {np.median([x for x, _ in losses]):.3f}"
    )
    return prior.model_copy(
        update={"hbm_weight": weight, "num_channels": channels, "sources": prior.sources | residuals}
    )


def compute_losses(samples: Sequence[Sample]) -> list[tuple[float, Sample]]:
    """(share of compute's speed lost while a collective ran, the collective alone), by collective, size and rank.

    Compute slowed by the share while the collective lasts does (1 − share) · c of its work beside it, so
    both = c + work − (1 − share) · c, and share = (both − work) / c.
    """
    cells: dict[tuple[object, ...], dict[str, Sample]] = {}
    for s in samples:
        if s.kind == "overlap":
            cells.setdefault((s["op"], s["size_bytes"], s["num_ranks"], s.host, s.rank), {})[s["what"]] = s
    found = []
    for cell in cells.values():
        if {"both", "compute", "collective"} <= cell.keys():
            share = (cell["both"].time_s - cell["compute"].time_s) / cell["collective"].time_s
            found.append((min(_MOST, max(0.0, share)), cell["collective"]))
    return found


def _memory_weight(samples: Sequence[Sample], prior: Interference) -> tuple[float, dict[str, str]]:
    time: dict[str, list[float]] = {}
    for s in samples:
        if s.kind in _WHOLE:
            time.setdefault(s.kind, []).append(s.time_s)
    if time.keys() != _WHOLE:
        return prior.hbm_weight, {}
    both, product, copy = (float(np.median(time[f"overlap_{k}"])) for k in ("both", "gemm_alone", "copy_alone"))
    return rounded(max(0.0, (both - product) / copy), 3), {
        "hbm_weight": "a product beside a device copy at full memory speed"
    }


def _memory_share(sample: Sample, device: Device, prior: Interference) -> float:
    """Of the memory's speed, what the collective's bytes through the port take."""
    ranks, size = float(sample["num_ranks"]), float(sample["size_bytes"])
    passes = 2.0 if sample["op"] == "all_reduce" else 1.0  # a ring's all-reduce crosses the port twice
    link_bytes_per_s = passes * (ranks - 1) / ranks * size / sample.time_s
    return prior.memory_passes * link_bytes_per_s / device.memory_bytes_per_s
