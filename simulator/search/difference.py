"""How sure the difference of two predictions is. Errors that both share cancel.

A category's error (one curve prices all products, another all collectives) moves both steps in one direction, each by the
category's share of it: what is left of it is the difference of the two contributions. Of a stack's own spread, what the
kernels do not explain, half the variance is taken as common to plans of one stack and the rest as each plan's own; two
stacks have nothing in common. Of the logarithm of the ratio of two steps this leaves

    σ² = Σ over categories (a_c − b_c)² + (a_s² + b_s²) (1 − common),  common = 1/2 within a stack, 0 between two

experiments/search_regret.py counts how often measured differences lie inside the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from simulator.predict import Z90

COMMON: Final = 0.5  # of the variance of a stack's own spread, shared by its plans


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
    stack: str


def difference(step: Timed, other: Timed) -> Difference:
    """`step` over `other`."""
    names = dict.fromkeys((*step.spread, *other.spread))
    variance = sum((step.spread.get(name, 0.0) - other.spread.get(name, 0.0)) ** 2 for name in names)
    common = COMMON if step.stack == other.stack else 0.0
    variance += (step.stack_sigma**2 + other.stack_sigma**2) * (1 - common)
    reach = math.exp(Z90 * math.sqrt(variance))
    ratio = step.step_s / other.step_s
    return Difference(ratio=ratio, low=ratio / reach, high=ratio * reach)
