"""Robust least squares on the logarithm of time, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Array = NDArray[np.float64]
SOFT_SCALE = 0.08  # log residuals beyond about 8 % weigh less and less: cuBLAS heuristics make a heavy tail


@dataclass(frozen=True, slots=True)
class Start:
    """Where a coefficient starts, and what is possible."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """Coefficients, the free ones' standard errors, and the log residuals of the fit's own rows."""

    values: dict[str, float]
    errors: dict[str, float]
    residuals: Array


def fit(
    seconds: Callable[[Mapping[str, float]], Array],
    measured_s: Array,
    starts: Mapping[str, Start],
    weights: Array | None,
    pulls: Mapping[str, float] | None = None,
) -> Fitted:
    """Minimise soft-L1 of weight × ln(seconds / measured) over `starts`. A start with low = high is held.

    pulls: coefficient -> distance from its start that costs as much as one sample that is SOFT_SCALE off: a weak prior,
    which decides only what the samples leave open.
    """
    free = [name for name, s in starts.items() if s.low < s.high]
    fixed = {name: s.value for name, s in starts.items()}
    weight = np.ones_like(measured_s) if weights is None else weights
    scale = [max(abs(starts[name].value), 0.1) for name in free]

    def residuals(x: Array) -> Array:
        log: Array = np.log(seconds({**fixed, **dict(zip(free, map(float, x), strict=True))}) / measured_s)
        return log

    pulled = [(free.index(name), starts[name].value, width) for name, width in (pulls or {}).items() if name in free]

    def weighted(x: Array) -> Array:
        data = weight * residuals(x)
        return np.append(data, [SOFT_SCALE * (x[i] - at) / width for i, at, width in pulled]) if pulled else data

    solution = least_squares(
        weighted,
        [starts[name].value for name in free],
        bounds=([starts[name].low for name in free], [starts[name].high for name in free]),
        loss="soft_l1",
        f_scale=SOFT_SCALE,
        x_scale=scale,
    )
    final = residuals(solution.x)
    return Fitted(
        values={**fixed, **dict(zip(free, map(float, solution.x), strict=True))},
        errors=dict(zip(free, _standard_errors(np.asarray(solution.jac), final), strict=True)),
        residuals=final,
    )


def _standard_errors(jacobian: Array, residuals: Array) -> list[float]:
    """From the curvature at the solution; the spread is taken from the median residual, which a tail cannot move."""
    spread = 1.4826 * float(np.median(np.abs(residuals)))
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * spread**2
    return [math.sqrt(max(0.0, float(v))) for v in np.diag(covariance)]


def held(value: float) -> Start:
    """A coefficient that is known."""
    return Start(value, value, value)


def rounded(x: float, digits: int = 4) -> float:
    """Coefficients are stored to four significant digits: more would be noise."""
    return float(f"{x:.{digits}g}")


def quantile(residuals: Array, q: float) -> float:
    """Of the residuals' sizes, to three digits."""
    return rounded(float(np.quantile(np.abs(residuals), q)), 3)


# -- what a handful of samples needs beside a fit --------------------------------------------------------------------

TRIM_SPREADS = 4.0  # log residuals beyond so many spreads are outliers; a normal distribution has 1 in 16,000 there
MIN_SPREAD = 0.005  # timers are no finer: without it a perfect fit would call rounding an outlier
MOST_TRIMMED = 0.35  # of the samples; more outliers than that are no outliers


def spread(residuals: Array) -> float:
    """Standard deviation that a tail cannot move: 1.4826 times the median distance from the median."""
    return max(MIN_SPREAD, 1.4826 * float(np.median(np.abs(residuals - np.median(residuals)))))


def kept(residuals: Array) -> NDArray[np.bool_]:
    """Which samples are no outliers. One-sided noise (somebody else ran) moves even a robust fit, so they are dropped."""
    center, limit = float(np.median(residuals)), TRIM_SPREADS * spread(residuals)
    distance = np.abs(residuals - center)
    limit = max(limit, float(np.quantile(distance, 1 - MOST_TRIMMED)))
    return np.asarray(distance <= limit)


def trimmed(
    seconds: Callable[[Mapping[str, float]], Array],
    measured_s: Array,
    starts: Mapping[str, Start],
    weights: Array,
    pulls: Mapping[str, float] | None = None,
) -> tuple[Fitted, NDArray[np.bool_]]:
    """Fit, drop what lies far off, fit again until nothing more is dropped (three times at most).

    Returns the last fit, with residuals of all rows, and which rows it used.
    """
    use = np.ones(measured_s.shape, dtype=bool)
    found = fit(seconds, measured_s, starts, weights, pulls)
    for _ in range(3):
        inside = kept(found.residuals)
        if bool((inside == use).all()):
            break
        use = inside
        found = fit(seconds, measured_s, starts, weights * use, pulls)
    return found, use


def bootstrap(
    seconds: Callable[[Mapping[str, float]], Array],
    measured_s: Array,
    starts: Mapping[str, Start],
    groups: Sequence[str],
    count: int = 40,
    pulls: Mapping[str, float] | None = None,
) -> list[dict[str, float]]:
    """Coefficients of `count` fits on resampled groups (runs where there are several, else shapes). Seeded."""
    rng = np.random.default_rng(0)
    names = sorted(set(groups))
    member = np.array([names.index(g) for g in groups])
    found = []
    for _ in range(count):
        drawn = np.bincount(rng.integers(0, len(names), len(names)), minlength=len(names))
        found.append(fit(seconds, measured_s, starts, np.sqrt(drawn[member].astype(float)), pulls).values)
    return found
