"""Latency and bandwidth of a link or a copy: t = latency + bytes / bandwidth, with intervals.

Residuals are logarithms; a soft-L1 loss starts the fit, what lies far off is dropped, the rest is fitted again. The
intervals resample runs, not points (a run's points share its circumstances), and widen the bootstrap's standard error
by Student's t for the number of runs. All resampled fits are solved together: two coefficients, closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.base.errors import CalibrationError, Fault
from validate.fit.robust import MOST_TRIMMED, TRIM_SPREADS, Array, spread

MIN_SIZES = 4  # different sizes
MIN_RANGE = 16.0  # largest over smallest
RESAMPLES = 200
_SOFT = 0.08  # log residual beyond which a point weighs less, at the start
_ROUNDS = 25


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its interval of 90 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Line:
    """What was fitted. residuals: ln(predicted / measured) of every point; used: which were no outliers."""

    latency_s: Interval
    bytes_per_s: Interval
    residuals: Array
    used: NDArray[np.bool_]

    def seconds(self, num_bytes: Array) -> Array:
        return np.asarray(self.latency_s.value + num_bytes / self.bytes_per_s.value)


def fit_line(
    num_bytes: Sequence[float], time_s: Sequence[float], runs: Sequence[str] = (), noun: str = "sizes"
) -> Line:
    """The line through (bytes, seconds). runs: which run each point is of; without them every point is its own.

    Raises CalibrationError where there are too few sizes or they lie too close together.
    """
    size, time = np.asarray(num_bytes, float), np.asarray(time_s, float)
    refuse_few(size, noun)
    names = list(runs) if len(set(runs)) > 1 else [str(i) for i in range(len(size))]
    weight = np.ones((1, len(size)))
    start = _start(size, time)
    first = _solve(size, time, weight, start, soft=_SOFT)
    for _ in range(3):
        log = _log(first, size, time)[0]
        use = _inside(log)
        first = _solve(size, time, weight * use, first, soft=0.0)
    log = _log(first, size, time)[0]
    use = _inside(log)
    resampled = _resampled(size, time, names, use, first)
    latency, bandwidth = (_interval(first[0, i], resampled[:, i], len(set(names))) for i in (0, 1))
    inverse = Interval(1 / bandwidth.value, 1 / bandwidth.high, 1 / bandwidth.low)
    return Line(latency, inverse, log, use)


def refuse_few(size: Array, noun: str) -> None:
    """A line through two sizes says nothing about its own error."""
    different = np.unique(size)
    if len(different) < MIN_SIZES or different[-1] < MIN_RANGE * different[0]:
        problem = f"{len(different)} different sizes"
        if len(different) > 1:
            problem += f" from {different[0]:.0f} to {different[-1]:.0f} bytes"
        remedy = f"at least {MIN_SIZES} sizes over a factor of {MIN_RANGE:.0f}: shardwise calibrate run --minutes 8"
        raise CalibrationError(Fault(place=noun, problem=problem, remedy=remedy))


def _start(size: Array, time: Array) -> Array:
    """Latency: the median of the smallest size; seconds a byte: the best of the larger half."""
    latency = float(np.median(time[size == size.min()]))
    large = size >= np.median(size)
    return np.array([[latency, float(np.min(time[large] / size[large]))]])


def _log(x: Array, size: Array, time: Array) -> Array:
    return np.asarray(np.log((x[:, :1] + x[:, 1:] * size) / time))


def _inside(log: Array) -> NDArray[np.bool_]:
    distance = np.abs(log - np.median(log))
    limit = max(TRIM_SPREADS * spread(log), float(np.quantile(distance, 1 - MOST_TRIMMED)))
    return np.asarray(distance <= limit)


def _solve(size: Array, time: Array, weight: Array, start: Array, soft: float) -> Array:
    """Gauss-Newton in (ln latency, ln seconds a byte) for every row of weights at once; soft > 0: soft-L1's weights.

    A row of the result is a row of `weight`. Steps are at most a factor of e, so that no trial leaves the sensible.
    """
    x = np.log(np.broadcast_to(start, (len(weight), 2)).copy())
    for _ in range(_ROUNDS):
        parts = np.exp(x[:, 0])[:, None] * np.ones_like(size), np.exp(x[:, 1])[:, None] * size
        total = parts[0] + parts[1]
        log = np.log(total / time)
        w = weight / np.sqrt(1 + (log / soft) ** 2) if soft else weight
        a, b = parts[0] / total, parts[1] / total  # derivatives of the logarithm
        aa, ab, bb = (w * a * a).sum(1) + 1e-9, (w * a * b).sum(1), (w * b * b).sum(1) + 1e-9
        ra, rb = (w * a * log).sum(1), (w * b * log).sum(1)
        det = aa * bb - ab * ab
        step = np.stack([(bb * ra - ab * rb) / det, (aa * rb - ab * ra) / det], axis=1)
        x -= np.clip(step, -1, 1)
        if float(np.abs(step).max()) < 1e-9:
            break
    return np.asarray(np.exp(x))


def _resampled(size: Array, time: Array, names: Sequence[str], use: NDArray[np.bool_], start: Array) -> Array:
    """Fits on runs drawn with replacement, all at once."""
    rng = np.random.default_rng(0)
    different = sorted(set(names))
    member = np.array([different.index(name) for name in names])
    drawn = rng.multinomial(len(different), np.full(len(different), 1 / len(different)), RESAMPLES)
    return _solve(size, time, drawn[:, member] * use.astype(float), start, soft=0.0)


def _interval(value: float, resampled: Array, runs: int) -> Interval:
    """Student's t around the value, in logarithms: both coefficients are positive."""
    from scipy.stats import t as student

    error = float(np.std(np.log(resampled), ddof=1)) * np.sqrt(runs / max(1, runs - 1))
    half = float(student.ppf(0.95, max(1, runs - 1))) * error
    return Interval(float(value), float(value * np.exp(-half)), float(value * np.exp(half)))
