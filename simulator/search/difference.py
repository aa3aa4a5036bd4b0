"""How sure the difference of two predictions is. Errors that both share cancel.

A category's error (one curve prices all products, another all collectives) moves both steps in one direction, each by the
category's share of it: what is left of it is the difference of the two contributions. Of a stack's own spread, what the
kernels do not explain, nothing is known to be common: it counts for both. Of the logarithm of the ratio of two steps,

    σ² = Σ over categories (a_c − b_c)² + a_s² + b_s²

experiments/search_regret.py counts how often measured differences lie inside the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from simulator.predict import Z90


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
    """A step and where its uncertainty comes from (`Prediction.spread`)."""

    step_s: float
    spread: Mapping[str, float]
    stack_sigma: float


def difference(step: Timed, other: Timed) -> Difference:
    """`step` over `other`."""
    names = dict.fromkeys((*step.spread, *other.spread))
    variance = sum((step.spread.get(name, 0.0) - other.spread.get(name, 0.0)) ** 2 for name in names)
    variance += step.stack_sigma**2 + other.stack_sigma**2
    reach = math.exp(Z90 * math.sqrt(variance))
    ratio = step.step_s / other.step_s
    return Difference(ratio=ratio, low=ratio / reach, high=ratio * reach)
