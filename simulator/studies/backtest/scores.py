"""Scores of predictions: error quantiles, signed bias, rank correlation, coverage. Exact and small: no dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt

from simulator.base.sums import summed
from simulator.studies.backtest.outcome import RowOutcome

_MIN_RANKED = 3  # two points always correlate perfectly


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorScore:
    """n errors (predicted / measured − 1): median and 90th percentile of their size, and their median (the bias)."""

    n: int
    median_abs_error: float | None
    p90_abs_error: float | None
    bias: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScore(ErrorScore):
    """Errors of step time; rank correlation of predicted with measured MFU; share of rows inside their 90 % interval."""

    spearman_mfu: float | None
    coverage_90: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryScore(ErrorScore):
    """Errors of memory by one metric. exact: rows predicted to the byte. oom_*: rows that the table says did not fit, and how many of them we said so of.

    predicted_oom: rows that ran and that we said do not fit.
    """

    mem_metric: str
    exact: int
    oom_rows: int
    oom_found: int
    predicted_oom: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """Of the rows that ran: how many, of how many we said that they do not fit, and how many leave it open."""

    ran: int
    said_oom: int
    open: int


def verdicts(outcomes: Sequence[RowOutcome]) -> Verdicts:
    """The verdicts on the rows that were predicted and ran."""
    ran = [o for o in outcomes if o.status in ("ok", "calibration") and not o.measured_oom]
    return Verdicts(
        ran=len(ran),
        said_oom=summed(o.fits is False for o in ran),
        open=summed(bool(o.open) and o.fits is None for o in ran),
    )


def quantile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile with linear interpolation (numpy's default); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Rank correlation, ties at their mean rank; None below 3 points or where one side is constant."""
    if len(xs) < _MIN_RANKED:
        return None
    ranks = _ranks(xs), _ranks(ys)
    mean = (len(xs) + 1) / 2
    dx, dy = ([r - mean for r in side] for side in ranks)
    scale = sqrt(summed(d * d for d in dx) * summed(d * d for d in dy))
    return summed(a * b for a, b in zip(dx, dy, strict=True)) / scale if scale else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            ranks[index] = (start + 1 + end) / 2
        start = end
    return ranks


def error_score(errors: Sequence[float]) -> ErrorScore:
    """The score of signed relative errors."""
    sizes = [abs(e) for e in errors]
    return ErrorScore(
        n=len(errors),
        median_abs_error=quantile(sizes, 0.5),
        p90_abs_error=quantile(sizes, 0.9),
        bias=quantile(errors, 0.5),
    )


def step_score(outcomes: Sequence[RowOutcome]) -> StepScore:
    """Score of the rows that have both a predicted and a measured step time."""
    both = [o for o in outcomes if o.step_error is not None]
    errors = error_score([o.step_error for o in both if o.step_error is not None])
    mfus = [(o.mfu_predicted, o.mfu_measured) for o in both]
    ranked = [(p, m) for p, m in mfus if p is not None and m is not None]
    inside = [_inside(o) for o in both]
    return StepScore(
        **asdict(errors),
        spearman_mfu=spearman([p for p, _ in ranked], [m for _, m in ranked]),
        coverage_90=summed(inside) / len(inside) if inside else None,
    )


def _inside(outcome: RowOutcome) -> bool:
    low, high, measured = outcome.low_step_s, outcome.high_step_s, outcome.measured_step_s
    return low is not None and high is not None and measured is not None and low <= measured <= high


def memory_scores(outcomes: Sequence[RowOutcome]) -> tuple[MemoryScore, ...]:
    """A score a memory metric, in the order of first appearance."""
    metrics = dict.fromkeys(o.mem_metric for o in outcomes if o.mem_metric)
    return tuple(_memory_score(metric, [o for o in outcomes if o.mem_metric == metric]) for metric in metrics)


def _memory_score(metric: str, outcomes: Sequence[RowOutcome]) -> MemoryScore:
    errors = error_score([o.memory_error for o in outcomes if o.memory_error is not None])
    oom = [o for o in outcomes if o.measured_oom]
    return MemoryScore(
        mem_metric=metric,
        exact=summed(o.predicted_memory_bytes == o.measured_memory_bytes is not None for o in outcomes),
        **asdict(errors),
        oom_rows=len(oom),
        oom_found=summed(o.fits is False for o in oom),
        predicted_oom=summed(o.fits is False for o in outcomes if not o.measured_oom),
    )
