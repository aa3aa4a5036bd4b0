"""BacktestReport: outcomes and their scores, as JSON and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from simulator.studies.backtest.baselines import Baseline, baselines
from simulator.studies.backtest.outcome import RowOutcome, Status
from simulator.studies.backtest.scores import MemoryScore, StepScore, Verdicts, memory_scores, step_score, verdicts

SCHEMA_VERSION: Final = 1  # rises when a key is removed or changes its meaning; new keys do not raise it

GroupKey = tuple[str, str, str]  # source, GPU, precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rows of one source, GPU and precision: what became of them, and the scores of those that count.

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
class BacktestReport:
    """Every row of a table in its order, and a group for each source, GPU and precision. unread: columns that nobody knows."""

    table: str
    interrupted: bool
    groups: tuple[Group, ...]
    outcomes: tuple[RowOutcome, ...]
    unread: tuple[str, ...] = ()

    def count(self, status: Status) -> int:
        return sum(o.status == status for o in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`; docs/reference/runs-table.md describes every key. None where unknown."""
        return {
            "schema_version": SCHEMA_VERSION,
            "table": self.table,
            "interrupted": self.interrupted,
            "unread_columns": list(self.unread),
            "groups": [asdict(group) for group in self.groups],
            "rows": [_row(outcome) for outcome in self.outcomes],
        }


def _row(o: RowOutcome) -> dict[str, Any]:
    return {
        "id": o.id,
        "line": o.line,
        "status": o.status,
        "reason": o.reason,
        "source": o.source or None,
        "gpu": o.gpu or None,
        "precision": o.precision or None,
        "predicted_step_s": o.predicted_step_s,
        "low_step_s": o.low_step_s,
        "high_step_s": o.high_step_s,
        "measured_step_s": o.measured_step_s,
        "mem_metric": o.mem_metric or None,
        "predicted_memory_bytes": o.predicted_memory_bytes,
        "measured_memory_bytes": o.measured_memory_bytes,
        "fits": o.fits,
        "open": o.open or None,
        "mfu_predicted": o.mfu_predicted,
        "mfu_measured": o.mfu_measured,
        "duplicate_of": o.duplicate_of or None,
        "moments": {name: asdict(moment) for name, moment in o.moments.items()} or None,
        "unmodelled": list(o.unmodelled),
        "unread": list(o.unread),
    }


def make_report(
    table: str, outcomes: Sequence[RowOutcome], *, interrupted: bool = False, unread: Sequence[str] = ()
) -> BacktestReport:
    """Group and score. Groups stand in the order of (source, GPU, precision); bad rows belong to none."""
    grouped: dict[GroupKey, list[RowOutcome]] = {}
    for outcome in outcomes:
        if outcome.status != "bad":
            grouped.setdefault((outcome.source, outcome.gpu, outcome.precision), []).append(outcome)
    groups = tuple(_group(key, members) for key, members in sorted(grouped.items()))
    return BacktestReport(
        table=table, interrupted=interrupted, groups=groups, outcomes=tuple(outcomes), unread=tuple(unread)
    )


def _group(key: GroupKey, members: Sequence[RowOutcome]) -> Group:
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
