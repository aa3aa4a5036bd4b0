"""Robust least squares on the logarithm of time, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
) -> Fitted:
    """Minimise soft-L1 of weight × ln(seconds / measured) over `starts`. A start with low = high is held."""
    free = [name for name, s in starts.items() if s.low < s.high]
    held = {name: s.value for name, s in starts.items()}
    weight = np.ones_like(measured_s) if weights is None else weights
    scale = [max(abs(starts[name].value), 0.1) for name in free]

    def residuals(x: Array) -> Array:
        log: Array = np.log(seconds({**held, **dict(zip(free, map(float, x), strict=True))}) / measured_s)
        return log

    def weighted(x: Array) -> Array:
        return weight * residuals(x)

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
        values={**held, **dict(zip(free, map(float, solution.x), strict=True))},
        errors=dict(zip(free, _standard_errors(np.asarray(solution.jac), final), strict=True)),
        residuals=final,
    )


def _standard_errors(jacobian: Array, residuals: Array) -> list[float]:
    """From the curvature at the solution; the spread is taken from the median residual, which a tail cannot move."""
    spread = 1.4826 * float(np.median(np.abs(residuals)))
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * spread**2
    return [math.sqrt(max(0.0, float(v))) for v in np.diag(covariance)]


def held(value: float) -> Start:
    return Start(value, value, value)


def rounded(x: float, digits: int = 4) -> float:
    """Coefficients are stored to four significant digits: more would be noise."""
    return float(f"{x:.{digits}g}")


def quantile(residuals: Array, q: float) -> float:
    return rounded(float(np.quantile(np.abs(residuals), q)), 3)
