"""BacktestReport: outcomes and their scores, as JSON and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from simulator.studies.backtest.baselines import Baseline, baselines
from simulator.studies.backtest.outcome import Report, RowOutcome, Status, by_group
from simulator.studies.backtest.scores import MemoryScore, StepScore, Verdicts, memory_scores, step_score, verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rows of one source, GPU and precision: counts by status, and scores of the rows that count.

    rows: status -> rows. refused: kind of reason -> rows. duplicates: rows that repeat an earlier one, not scored.
    """

    source: str
    gpu: str
    precision: str
    rows: dict[Status, int]
    refused: dict[str, int]
    duplicates: int
    step: StepScore
    memory: tuple[MemoryScore, ...]
    verdicts: Verdicts
    baselines: tuple[Baseline, ...]

    def baseline(self, name: str) -> Baseline:
        return next(b for b in self.baselines if b.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BacktestReport(Report[RowOutcome]):
    """Every row of a table in its order, and a group for each source, GPU and precision."""

    groups: tuple[Group, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`; docs/reference/runs-table.md describes every key. None where unknown."""
        return {
            **self.head_json(),
            "groups": [asdict(group) for group in self.groups],
            "rows": [_row(outcome) for outcome in self.outcomes],
        }


_COLUMNS: Final = (
    *("id", "line", "status", "reason", "source", "gpu", "precision"),
    *("predicted_step_s", "low_step_s", "high_step_s", "measured_step_s"),
    *("mem_metric", "predicted_memory_bytes", "measured_memory_bytes", "fits", "open", "mfu_predicted", "mfu_measured"),
    *("duplicate_of", "moments", "unmodelled", "unread", "stack", "described"),
)


def _row(outcome: RowOutcome) -> dict[str, Any]:
    moments = {name: asdict(moment) for name, moment in outcome.moments.items()}
    row = {name: getattr(outcome, name) for name in _COLUMNS} | {"moments": moments or None}
    return {name: None if value == "" else value for name, value in row.items()} | {"id": outcome.id}


def make_report(
    table: str, outcomes: Sequence[RowOutcome], *, interrupted: bool = False, unread: Sequence[str] = ()
) -> BacktestReport:
    """Group and score. Groups are sorted by (source, GPU, precision); bad rows are in none."""
    groups = tuple(_group(key, members) for key, members in by_group(outcomes, "source", "gpu", "precision"))
    return BacktestReport(
        table=table, interrupted=interrupted, groups=groups, outcomes=tuple(outcomes), unread=tuple(unread)
    )


def _group(key: tuple[str, ...], members: Sequence[RowOutcome]) -> Group:
    scored = [o for o in members if o.scored]
    refused = Counter(o.kind for o in members if o.status == "refused")
    source, gpu, precision = key
    return Group(
        source=source,
        gpu=gpu,
        precision=precision,
        rows=dict(sorted(Counter(o.status for o in members).items())),
        refused=dict(sorted(refused.items())),
        duplicates=sum(o.status == "ok" and bool(o.duplicate_of) for o in members),
        step=step_score(scored),
        memory=memory_scores(scored),
        verdicts=verdicts(members),
        baselines=baselines(scored, seed="|".join(key)),
    )
