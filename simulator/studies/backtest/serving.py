"""Backtest of a table of measured servers: every row predicted, scored by source, engine, GPU and metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from simulator.base.processes import mapped
from simulator.studies.backtest.baselines import Baseline, held_out, one_efficiency, two_terms
from simulator.studies.backtest.outcome import (
    Progress,
    Report,
    Status,
    by_group,
    flat,
    gathered,
    judged,
    relative_error,
)
from simulator.studies.backtest.rows import BadRow, ServingRow, Table
from simulator.studies.backtest.scores import ErrorScore, error_score, spearman
from simulator.studies.backtest.serving_figures import predicted
from simulator.studies.backtest.serving_rows import SECONDS, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOutcome:
    """One row: its status, why if it is not ok, and predicted beside measured in the row's unit; None where unknown.

    load: its `concurrency_or_rate`. stack: that predicted it. floors: seconds of its work on a machine without losses, products and bytes, for baselines.
    """

    id: str
    line: int
    status: Status
    reason: str | None = None
    kind: str = ""
    source: str = ""
    engine: str = ""
    gpu: str = ""
    load: str = ""
    metric: str = ""
    unit: str = ""
    stack: str = ""
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    measured: float | None = None
    floors: tuple[float, float] | None = None

    @property
    def scored(self) -> bool:
        return self.status == "ok"

    @property
    def error(self) -> float | None:
        return relative_error(self.predicted, self.measured)

    @property
    def inside(self) -> bool:
        """The measurement lies in the 90 % interval."""
        known = self.low is not None and self.high is not None and self.measured is not None
        return known and self.low <= self.measured <= self.high  # type: ignore[operator]  # all three are known

    @property
    def seconds(self) -> float:
        """The measurement as a time: a rate's is that of one of its unit."""
        measured = self.measured or 1.0
        return measured * SECONDS[self.unit.casefold()] if self.unit.casefold() in SECONDS else 1 / measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingGroup:
    """The rows of one source, engine, GPU and metric. rows: status -> rows; refused: kind of reason -> rows."""

    source: str
    engine: str
    gpu: str
    metric: str
    rows: dict[Status, int]
    refused: dict[str, int]
    score: ErrorScore
    spearman: float | None
    coverage_90: float | None
    baselines: tuple[Baseline, ...]

    def baseline(self, name: str) -> Baseline:
        return next(one for one in self.baselines if one.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport(Report[ServingOutcome]):
    """Every row of a table in its order, and a group for each source, engine, GPU and metric."""

    groups: tuple[ServingGroup, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`; docs/reference/serving-table.md describes every key."""
        rows = [{**asdict(outcome), "error": outcome.error, "scored": outcome.scored} for outcome in self.outcomes]
        for row in rows:
            del row["floors"]
        return {**self.head_json(), "groups": [flat(group) for group in self.groups], "rows": rows}


def run(table: Table, *, progress: Progress | None = None, jobs: int = 1) -> ServingReport:
    """Predict every row, in the table's order. jobs: processes; the report does not depend on it.

    Ctrl-C ends it early: the report then holds the rows done so far and is marked `interrupted`.
    """
    rows = [row for row in table.rows if isinstance(row, ServingRow | BadRow)]
    outcomes, interrupted = gathered(mapped(evaluate_row, rows, jobs), len(rows), progress)
    return make_report(table.name, outcomes, interrupted=interrupted, unread=table.unread)


def evaluate_row(row: ServingRow | BadRow) -> ServingOutcome:
    """The outcome of one row. Never raises: an unexpected exception is the outcome `failed`."""
    if isinstance(row, BadRow):
        return ServingOutcome(id=row.id, line=row.line, status="bad", reason="; ".join(map(str, row.faults)))
    start = ServingOutcome(
        id=row.id,
        line=row.line,
        status="failed",
        source=row.source,
        engine=row.engine,
        gpu=row.gpu,
        load=row.concurrency_or_rate,
        metric=row.metric,
        unit=row.unit,
        measured=row.value,
    )
    return judged(start, lambda: _predicted(row, start))


def _predicted(row: ServingRow, start: ServingOutcome) -> ServingOutcome:
    server = resolve(row)
    found = predicted(server)
    return replace(
        start,
        status="calibration" if row.id in server.stack.fitted.calibration_runs else "ok",
        stack=server.stack.name,
        predicted=found.value,
        low=found.low,
        high=found.high,
        floors=found.floors,
    )


def make_report(
    table: str, outcomes: Sequence[ServingOutcome], *, interrupted: bool = False, unread: Sequence[str] = ()
) -> ServingReport:
    """Group and score. Groups are sorted by (source, engine, GPU, metric); bad rows are in none."""
    groups = tuple(_group(key, members) for key, members in by_group(outcomes, "source", "engine", "gpu", "metric"))
    return ServingReport(
        table=table, interrupted=interrupted, groups=groups, outcomes=tuple(outcomes), unread=tuple(unread)
    )


def _group(key: tuple[str, ...], members: Sequence[ServingOutcome]) -> ServingGroup:
    source, engine, gpu, metric = key
    scored = [one for one in members if one.scored and one.error is not None]
    pairs = [(one.predicted or 0.0, one.measured or 0.0) for one in scored]
    samples = [(one.floors, one.seconds) for one in scored if one.floors]
    fits = {"one_efficiency": one_efficiency, "two_terms": two_terms}
    return ServingGroup(
        source=source,
        engine=engine,
        gpu=gpu,
        metric=metric,
        rows=dict(sorted(Counter(one.status for one in members).items())),
        refused=dict(sorted(Counter(one.kind for one in members if one.status == "refused").items())),
        score=error_score([one.error for one in scored if one.error is not None]),
        spearman=spearman([p for p, _ in pairs], [m for _, m in pairs]),
        coverage_90=sum(one.inside for one in scored) / len(scored) if scored else None,
        baselines=tuple(held_out(name, fit, samples, "|".join(key)) for name, fit in fits.items()),
    )
