"""Elastic training on spot machines: the job uses the offered nodes, at a cost for each change of size.

Between changes it trains as `goodput` has it at that size, failures and checkpoints counted. A change costs a restart, in which
the sharded checkpoint is read back on the new ranks; machines taken away without enough notice for a checkpoint cost half an
interval of work besides, which is the mean of what was not saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

from simulator.base.sums import summed
from simulator.studies.goodput.answer import Goodput
from simulator.studies.goodput.failures import DAY_S, HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Nodes available from an hour on."""

    hour: float
    price_per_gpu_hour: float
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The job on so many nodes. tokens_per_s: the run's tokens over its mean days, failures and checkpoints counted."""

    nodes: int
    num_devices: int
    tokens_per_s: float
    restart_s: float
    blocking_s: float
    written_s: float
    interval_s: float

    @classmethod
    def of(cls, nodes: int, answer: Goodput) -> Size:
        """By a run of this size alone."""
        return cls(
            nodes=nodes,
            num_devices=answer.num_devices,
            tokens_per_s=answer.tokens / (answer.days.mean * 24 * HOUR_S),
            restart_s=answer.restart_s,
            blocking_s=answer.saving.blocking_s,
            written_s=answer.saving.total_s,
            interval_s=answer.interval_s,
        )


@dataclass(slots=True)
class Elastic:
    """The result under the offers. days, dollars: until the run ended; days is None if it did not.

    seconds: training, changing its size, paused. lost_tokens: trained again. by_nodes: days with so many.
    """

    days: float | None = None
    dollars: float = 0.0
    tokens: float = 0.0
    lost_tokens: float = 0.0
    changes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"training": 0.0, "changing": 0.0, "paused": 0.0})
    by_nodes: dict[int, float] = field(default_factory=dict)

    @property
    def dollars_per_billion_tokens(self) -> float:
        return self.dollars / (self.tokens / 1e9) if self.tokens else inf

    def report(self) -> dict[str, Any]:
        """Plain data, as `--json` shows it."""
        per = self.dollars_per_billion_tokens
        by_nodes = {str(nodes): days for nodes, days in sorted(self.by_nodes.items())}
        return asdict(self) | {"by_nodes": by_nodes, "dollars_per_billion_tokens": None if per == inf else per}


def follow(
    offers: Sequence[Offer], sizes: Mapping[int, Size], tokens: float, *, most_price: float = inf, notice_s: float = 0.0
) -> Elastic:
    """Train that many tokens on what is offered; the last offer holds on. sizes: by number of nodes, those that can run.

    most_price: above it the job pauses, behind a checkpoint. The first start is free, as that of a plain run is.
    """
    found, size, down_s, began = Elastic(), None, 0.0, 0.0
    for offer, length_s in _lengths(offers):
        fitting = [
            one for nodes, one in sizes.items() if nodes <= offer.nodes and offer.price_per_gpu_hour <= most_price
        ]
        best = max(fitting, key=lambda one: one.tokens_per_s, default=None)
        if best != size:
            if size is not None:
                down_s = _leave(
                    found, size, began, taken=offer.nodes < size.nodes, saved=notice_s >= size.written_s > 0
                )
            down_s += best.restart_s if best is not None and found.seconds["training"] else 0.0
            size, began = best, found.tokens
        down_s = _stay(found, size, offer.price_per_gpu_hour, length_s, down_s, tokens)
        if found.days is not None:
            break
    return found


def _lengths(offers: Sequence[Offer]) -> Iterator[tuple[Offer, float]]:
    for one, following in pairwise(offers):
        yield one, (following.hour - one.hour) * HOUR_S
    yield offers[-1], inf


def _leave(found: Elastic, size: Size, began: float, *, taken: bool, saved: bool) -> float:
    """Leave a size, which began at so many tokens, out of a checkpoint: the seconds of another one, or lost work."""
    found.changes += 1
    if not taken or saved:
        return size.blocking_s
    lost = min(size.tokens_per_s * size.interval_s / 2, found.tokens - began)
    found.tokens -= lost
    found.lost_tokens += lost
    return 0.0


def _stay(found: Elastic, size: Size | None, price: float, length_s: float, down_s: float, tokens: float) -> float:
    """Train at a size for that long or until the run ends; returns the rest of an unfinished change, a pause's checkpoint too."""
    if size is None:
        found.seconds["paused"] += length_s if length_s < inf else 0.0
        return down_s
    changing_s = min(down_s, length_s)
    needed_s = (tokens - found.tokens) / size.tokens_per_s
    training_s = min(length_s - changing_s, needed_s)
    held_s = changing_s + training_s
    found.seconds["changing"] += changing_s
    found.seconds["training"] += training_s
    found.tokens += training_s * size.tokens_per_s
    found.dollars += size.num_devices * price * held_s / HOUR_S
    found.by_nodes[size.nodes] = found.by_nodes.get(size.nodes, 0.0) + held_s / DAY_S
    if training_s == needed_s:
        found.days = summed(found.seconds.values()) / DAY_S
    return down_s - changing_s
