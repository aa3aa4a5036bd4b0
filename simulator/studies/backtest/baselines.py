"""Baselines: what a few fitted numbers reach on the same rows. Fitted on one half of a group, tested on the other.

They know the measured times of half the rows; the simulator knows none. So a baseline that is beaten was beaten with
a handicap.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from simulator.studies.backtest.outcome import RowOutcome, Work
from simulator.studies.backtest.scores import error_score, quantile

NUM_SPLITS = 20
# Half of them must determine one number, or two or four and a spare.
MIN_ROWS = {"constant_mfu": 4, "four_terms": 10, "one_efficiency": 4, "two_terms": 6}

Sample = tuple[Work, float]  # what is known of a row, and its measured step seconds
Predictor = Callable[[Work], float]
Floors = tuple[float, float]  # of a figure of a server: seconds of products, and of bytes read, without losses
X = TypeVar("X")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Errors on held-out halves, pooled over the splits. n: rows of the group; reason: why there is no score."""

    name: str
    n: int
    median_abs_error: float | None
    p90_abs_error: float | None
    bias: float | None
    reason: str | None


def baselines(outcomes: Sequence[RowOutcome], seed: str) -> tuple[Baseline, ...]:
    """Both baselines on one group's scored rows. `seed` names the group, so that its splits never change."""
    samples = [
        (o.work, o.measured_step_s) for o in outcomes if o.work and o.measured_step_s and o.step_error is not None
    ]
    return tuple(held_out(name, fit, samples, seed) for name, fit in _FITS.items())


def constant_mfu(samples: Sequence[Sample]) -> Predictor:
    """One MFU for all rows: the median of the measured ones."""
    mfu = quantile([work.ideal_s / measured for work, measured in samples], 0.5) or 1.0
    return lambda work: work.ideal_s / mfu


def four_terms(samples: Sequence[Sample]) -> Predictor:
    """Step time as a line in GEMM FLOP, attention FLOP, elementwise bytes and communication bytes.

    Non-negative least squares of relative errors: Σ aⱼ xⱼ / t against 1, each term scaled by its mean first.
    """
    return _line([(work.terms, measured) for work, measured in samples], lambda work: work.terms)


def one_efficiency(samples: Sequence[tuple[Floors, float]]) -> Callable[[Floors], float]:
    """The longer of both floors over one efficiency: the median of the measured ones."""
    efficiency = quantile([max(floors) / measured for floors, measured in samples], 0.5) or 1.0
    return lambda floors: max(floors) / efficiency


def two_terms(samples: Sequence[tuple[Floors, float]]) -> Callable[[Floors], float]:
    """A line in both floors, fitted as the four terms of a step are."""
    return _line(samples, lambda floors: floors)


def _line(
    samples: Sequence[tuple[Sequence[float], float]], terms_of: Callable[[X], Sequence[float]]
) -> Callable[[X], float]:
    from numpy import array, where
    from scipy.optimize import nnls

    relative = array([[x / measured for x in terms] for terms, measured in samples])
    scale = relative.mean(axis=0)
    scale = where(scale > 0, scale, 1.0)
    weights = nnls(relative / scale, array([1.0] * len(samples)))[0] / scale
    return lambda known: float(sum(w * x for w, x in zip(weights, terms_of(known), strict=True)))


_FITS: dict[str, Callable[[Sequence[Sample]], Predictor]] = {"constant_mfu": constant_mfu, "four_terms": four_terms}


def held_out(
    name: str,
    fit: Callable[[Sequence[tuple[X, float]]], Callable[[X], float]],
    samples: Sequence[tuple[X, float]],
    seed: str,
) -> Baseline:
    """Errors of a fit on the halves that it did not see. samples: what is known of a row, and its measured seconds."""
    n = len(samples)
    if n < MIN_ROWS[name]:
        reason = f"{n} rows are too few: {MIN_ROWS[name]} are needed to fit on half and test on half"
        return Baseline(name=name, reason=reason, **{**asdict(error_score([])), "n": n})
    errors: list[float] = []
    for split in range(NUM_SPLITS):
        order = list(samples)
        random.Random(f"{seed}|{split}").shuffle(order)  # noqa: S311  a reproducible draw, not a secret
        predict = fit(order[: n // 2])
        errors += [predict(work) / measured - 1 for work, measured in order[n // 2 :]]
    return Baseline(name=name, reason=None, **{**asdict(error_score(errors)), "n": n})
