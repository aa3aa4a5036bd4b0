"""How far and how surely log ratios differ from nought: the median, a robust t, Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from scipy.stats import binom
from scipy.stats import t as student

FEWEST: Final = 6
# Standard error of a median over that of a mean: sqrt(pi / 2) for normal noise; a tenth more where one in ten is disturbed.
INFLATION: Final = 1.25 * 1.1
MAD: Final = 1.4826  # of a normal distribution's standard deviation
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A ratio of times, with its 95 % interval.

    p_slower, p_faster: probability of at least this if nothing had changed; 1 where not three quarters of the
    measurements agree, since disturbances come in clusters and fool a test that takes them for independent.
    """

    ratio: float
    low: float
    high: float
    p_slower: float
    p_faster: float
    count: int

    @property
    def percent(self) -> float:
        return 100 * (self.ratio - 1)


def scale_of(logs: Sequence[float]) -> float:
    """Spread of log ratios that outliers do not move: the median distance from the median, as a standard deviation."""
    values = np.asarray(logs, dtype=float)
    return MAD * float(np.median(np.abs(values - np.median(values))))


def judge(logs: Sequence[float], scale: float = 0.0) -> Judged | None:
    """The median of log ratios, which disturbed measurements do not move while they are fewer than half; None for too few.

    scale: the usual spread of such values: a few may lie close together by chance. The interval is the sign test's.
    """
    values, n = np.sort(np.asarray(logs, dtype=float)), len(logs)
    if n < FEWEST:
        return None
    middle = float(np.median(values))
    edge = max(int(binom.ppf(0.025, n, 0.5)) - 1, 0)
    error = INFLATION * max(scale, scale_of(logs), 1e-4) / math.sqrt(n)
    p = float(student.sf(middle / error, n - 1))
    lower, upper = (float(one) for one in np.quantile(values, (0.25, 0.75)))
    return Judged(
        ratio=math.exp(middle), low=math.exp(values[edge]), high=math.exp(values[-1 - edge]),
        p_slower=p if lower > 0 else 1.0, p_faster=1 - p if upper < 0 else 1.0, count=n,
    )  # fmt: skip


def corrected(values: Mapping[T, float]) -> dict[T, float]:
    """p-values of several tests together (Holm 1979): of all below a level together that share is wrongly accused."""
    worst, found = 0.0, {}
    for rank, (name, value) in enumerate(sorted(values.items(), key=lambda item: item[1])):
        worst = max(worst, min(1.0, value * (len(values) - rank)))
        found[name] = worst
    return found
