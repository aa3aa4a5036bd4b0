"""What was learned, as JSON and as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from simulator.base.errors import StackError, listed
from simulator.base.units import format_bytes, format_seconds
from simulator.predict import memory_of
from simulator.spec.calibration.learned import ADDED, CoefficientName, Learned
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.evaluate import memory_figure
from simulator.studies.backtest.measured import memory_bytes
from simulator.studies.learning.next_run import NextRun, next_run
from simulator.studies.learning.observed import Observed, Refused
from simulator.studies.learning.posterior import Posterior, posterior, without

SCHEMA_VERSION: Final = 2
_NAMED_SHARE: Final = 0.2  # of a coefficient's teaching: runs with less are not named
_MOVED: Final = 0.98  # of its sigma before: a coefficient with more left is as unknown as before


@dataclass(frozen=True, slots=True, kw_only=True)
class CoefficientUpdate:
    """A coefficient: its factor (overlap, overhead: what is added) and one sigma before and after; runs -> part of the teaching."""

    name: CoefficientName
    value: float
    prior_sigma: float
    sigma: float
    by: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A run: seconds measured, predicted before and after, and predicted by what the other runs teach, with its 90 % interval.

    contradicts: it lies outside that interval. weight: of it among the others, 1 where it agrees.
    """

    id: str
    measured_s: float
    before_s: float
    after_s: float
    left_out_s: float
    low_s: float
    high_s: float
    weight: float
    contradicts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """Memory of a run, where its row states it: the figure of its metric, predicted and measured."""

    id: str
    metric: str
    predicted_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningReport:
    """All that a table of a user's own runs taught."""

    learned: Learned
    coefficients: tuple[CoefficientUpdate, ...]
    runs: tuple[RunResult, ...]
    refused: tuple[Refused, ...]
    next: NextRun | None
    memory: tuple[RunMemory, ...] = ()
    observed: tuple[Observed, ...] = ()

    def stack(self) -> Stack:
        """What was learned as a stack. Raises StackError where the runs are of several stacks or architectures."""
        kinds = {(one.run.stack.name, one.run.cluster.device.architecture): one.run.stack for one in self.observed}
        if len(kinds) > 1:
            problem = f"the runs are of {', '.join(' on '.join(kind) for kind in kinds)}"
            raise StackError.at("runs", problem, "a table for each stack and architecture")
        (_, architecture), stack = next(iter(kinds.items()))
        return self.learned.as_stack(stack.copy_with(known="described"), architecture)

    def as_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`; docs/guides/learn.md describes it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "scatter": self.learned.scatter,
            "coefficients": [asdict(one) for one in self.coefficients],
            "runs": [asdict(one) for one in self.runs],
            "memory": [asdict(one) for one in self.memory],
            "refused": [asdict(one) for one in self.refused],
            "next": asdict(self.next) if self.next else None,
        }


def learning_report(observed: Sequence[Observed], refused: Sequence[Refused], name: str) -> LearningReport:
    """Learn from the runs, at least one, and say what came of it."""
    found = posterior(observed)
    before = [one.step({}).seconds for one in observed]
    return LearningReport(
        learned=found.as_file(name, tuple(dict.fromkeys(one.run.row.id for one in observed))),
        coefficients=tuple(_coefficient_updates(found, observed)),
        runs=tuple(_run_result(found, i, one, before[i]) for i, one in enumerate(observed)),
        refused=tuple(refused),
        next=next_run(found, observed),
        memory=tuple(_memory_of_runs(observed)),
        observed=tuple(observed),
    )


def _memory_of_runs(observed: Sequence[Observed]) -> Iterator[RunMemory]:
    """Memory is computed, not learned: what is off points to something that the row does not say."""
    for one in {each.run.row.id: each for each in observed}.values():
        measured = memory_bytes(one.run.row)
        if measured is not None:
            predicted = memory_figure(one.run, memory_of(one.lowering).memory)
            yield RunMemory(
                id=one.run.row.id,
                metric=one.run.row.mem_metric or "",
                predicted_bytes=predicted,
                measured_bytes=measured,
            )


def _coefficient_updates(found: Posterior, observed: Sequence[Observed]) -> Iterator[CoefficientUpdate]:
    """A run's part: how much less would be known of the coefficient without it."""
    variance = np.diag(found.covariance)
    more = np.array([np.diag(without(found, i)[2]) / variance - 1 for i in range(len(observed))])
    for k, name in enumerate(found.names):
        total = float(more[:, k].sum())
        parts = {one.id: float(more[i, k]) / total for i, one in enumerate(observed)} if total > 0 else {}
        yield CoefficientUpdate(
            name=name,
            value=float(found.theta[k]) if name in ADDED else math.exp(found.theta[k]),
            prior_sigma=float(found.prior[k]),
            sigma=math.sqrt(variance[k]),
            by={
                run: round(part, 3)
                for run, part in sorted(parts.items(), key=lambda item: -item[1])
                if part >= _NAMED_SHARE
            },
        )


def _run_result(found: Posterior, index: int, one: Observed, before_s: float) -> RunResult:
    error, sigma, _ = without(found, index)
    left_out_s = one.measured_s * math.exp(error)
    reach = math.exp(found.reach * sigma)
    low_s, high_s = left_out_s / reach, left_out_s * reach
    return RunResult(
        id=one.id,
        measured_s=one.measured_s,
        before_s=before_s,
        after_s=found.steps[index].seconds * math.exp(found.shared[index]),
        left_out_s=left_out_s,
        low_s=low_s,
        high_s=high_s,
        weight=round(float(found.found.weights[index]), 3),
        contradicts=len(found.steps) > 1 and not low_s <= one.measured_s <= high_s,
    )


def lines(report: LearningReport) -> Iterator[str]:
    """The report as plain text."""
    yield f"{len(report.learned.runs)} runs taught; beside what the coefficients explain, steps scatter by {report.learned.scatter:.1%} (one sigma)"
    alike = report.learned.likeness
    if alike is not None:
        yield f"What runs like each other share lies within {alike.sigma:.1%} (one sigma): predictions of runs like these follow them most."
    if not any(report.learned.values.values()):
        yield "What the others say of a run that is left out is farther off than what its stack says: nothing moves, but for the scatter."
    guessed = sorted({one.run.stack.name for one in report.observed if one.run.stack.known != "described"})
    if guessed:
        yield f"Software that no stack describes is taken as {' and '.join(guessed)}: give the same to predict (--stack), or name it in the table (stack)."
    yield f"\n{'coefficient':12} {'before':>18} {'after':>18}  taught by"
    for one in report.coefficients:
        by = ", ".join(f"{run} ({part:.0%})" for run, part in one.by.items())
        unknown = one.sigma > _MOVED * one.prior_sigma
        by = "no run: as unknown as before" if unknown else by or "all alike"
        yield f"{one.name.replace('_', ' '):12} {_value(one, before=True):>18} {_value(one, before=False):>18}  {by}"
    yield f"\n{'run':24} {'measured':>10} {'before':>8} {'after':>8} {'left out':>9}"
    for run in report.runs:
        errors = ((s / run.measured_s - 1) for s in (run.before_s, run.after_s, run.left_out_s))
        before, after, left = (f"{error:+.1%}" for error in errors)
        yield f"{run.id[:24]:24} {format_seconds(run.measured_s):>10} {before:>8} {after:>8} {left:>9}"
    for memory in report.memory:
        off = f"{memory.predicted_bytes / memory.measured_bytes - 1:+.1%}"
        figures = f"{format_bytes(memory.predicted_bytes)} predicted, {format_bytes(memory.measured_bytes)} measured ({memory.metric})"
        yield f"memory of {memory.id}: {figures}, {off}; nothing is learned of memory"
    yield from _contradictions(report)
    yield from (f"not used: {one}" for one in listed([f"{one.id}: {one.reason}" for one in report.refused]))
    if report.next is not None:
        yield from _next(report.next)


def _value(one: CoefficientUpdate, *, before: bool) -> str:
    sigma = one.prior_sigma if before else one.sigma
    if one.name in ADDED:
        value, unit = (0.0 if before else one.value), (1e3, " ms") if one.name == "overhead" else (1e2, " %")
        return f"{value * unit[0]:+.1f}{unit[1]} ± {sigma * unit[0]:.1f}"
    return f"x {1.0 if before else one.value:.2f} ± {sigma:.0%}"


def _contradictions(report: LearningReport) -> Iterator[str]:
    for run in report.runs:
        if run.contradicts:
            low, high = (f"{s / run.left_out_s - 1:+.0%}" for s in (run.low_s, run.high_s))
            yield (
                f"{run.id} contradicts the others: {run.measured_s / run.left_out_s - 1:+.0%} against what they say "
                f"({low} to {high} at 90 %); it counts {run.weight:.0%}. Measure it again, or look for what differs."
            )


def _next(one: NextRun) -> Iterator[str]:
    """What to measure next."""
    yield f"\nMeasure next: {one.like} with {one.changes}, which is known within ±{math.expm1(one.half):.0%}."
    yield (
        f"It narrows all these plans from ±{math.expm1(one.mean_before):.1%} to ±{math.expm1(one.mean_after):.1%} on average, and "
        f"{one.teaches.replace('_', ' ')} from ±{one.sigma_before:.1%} to ±{one.sigma_after:.1%}."
    )
