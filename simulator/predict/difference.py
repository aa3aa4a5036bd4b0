"""How sure the difference of two predictions is. Errors that both share cancel.

A category's error (one curve prices all products, another all collectives) moves both steps in one direction where both
run the same shapes: what is left of it is the difference of the two contributions. A curve's residuals at other shapes are
others, as a fit leaves no common error; so where plans run other shapes (tensor parallelism, micro-batch), or send other
messages, both contributions count in full. Of a stack's own spread, what the kernels do not explain, nothing is known to
be common: it counts for both. Of the logarithm of the ratio of two steps,

    σ² = Σ over shared categories (a_c − b_c)² + Σ over the others (a_c² + b_c²) + a_s² + b_s²

A category that only lengthens steps (a network that may be slower than its sheet) moves the ratio up by a's and down by b's.

experiments/search_regret.py counts how often measured differences lie inside the interval.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from simulator.predict.confidence import CARRIERS, EAGER, LEARNED, RELEASE, SLOWER, SOFTWARE, UNCOUNTED, Z90, upward
from simulator.predict.slopes import HOST
from simulator.spec.plan import Plan

_SENT: Final = ("communication", "bubble", *CARRIERS)  # what hangs on messages
COMMON: Final = (
    "imbalance",
    RELEASE,
    EAGER,
    HOST,
    UNCOUNTED,
    SOFTWARE,
    LEARNED,
)  # of the data, the software and the host, whatever the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The ratio of a step to another's, and its 90 % interval."""

    ratio: float
    low: float
    high: float

    @property
    def distinguishable(self) -> bool:
        """At 90 %: the interval leaves out equal steps."""
        return not self.low <= 1 <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A step and where its uncertainty comes from (`Prediction.spread`).

    kernels, traffic: equal where the same kernels run, and the same collectives, so that curves err alike.
    """

    step_s: float
    spread: Mapping[str, float]
    stack_sigma: float
    kernels: Hashable = None
    traffic: Hashable = None


def timed(step_s: float, spread: Mapping[str, float], stack_sigma: float, plan: Plan, device: str = "") -> Timed:
    """A plan's step. device: where others are on other devices, of which one."""
    blocks = (
        device,
        plan.software,
        plan.precision.compute,
        plan.micro_batch_size,
        plan.seq_len,
        plan.sequence_parallel,
    )
    kernels = (*blocks, plan.tp, plan.cp, plan.ep, plan.experts.etp)
    sharding = (plan.implementation, plan.zero, plan.dp_replicate, plan.dp_shard, plan.pp, plan.rank_order)
    return Timed(step_s=step_s, spread=spread, stack_sigma=stack_sigma, kernels=kernels, traffic=(*kernels, *sharding))


def sharing(a: Timed, b: Timed) -> tuple[Timed, Timed]:
    """Steps of one plan under one stack: what its kernels do not explain takes the same seconds in both.

    So of two relative errors that are one absolute one, what is left of their difference is the shorter step's share of
    the longer less than 1.
    """
    short, long = sorted((a, b), key=lambda one: one.step_s)
    left = short.stack_sigma * (1 - short.step_s / long.step_s)
    return replace(a, stack_sigma=left), replace(b, stack_sigma=0.0)


def difference(step: Timed, other: Timed) -> Difference:
    """`step` over `other`."""
    below = above = step.stack_sigma**2 + other.stack_sigma**2
    for name in dict.fromkeys((*step.spread, *other.spread)):
        less, more = _variances(name, step.spread.get(name, 0.0), other.spread.get(name, 0.0), step, other)
        below, above = below + less, above + more
    ratio = step.step_s / other.step_s
    return Difference(ratio=ratio, low=ratio / _reach(below), high=ratio * _reach(above))


def _reach(variance: float) -> float:
    return math.exp(Z90 * math.sqrt(variance))


def _variances(category: str, one: float, another: float, step: Timed, other: Timed) -> tuple[float, float]:
    """Of the difference of a category's two contributions, below it and above. What only lengthens steps moves it to one side each."""
    sent = category.removeprefix(SLOWER) in _SENT
    same = step.traffic == other.traffic if sent else step.kernels == other.kernels
    shared = same or category.removeprefix(SLOWER).startswith(COMMON)
    if not upward(category):
        both = (one - another) ** 2 if shared else one**2 + another**2
        return both, both
    return (max(0.0, another - one) ** 2, max(0.0, one - another) ** 2) if shared else (another**2, one**2)
