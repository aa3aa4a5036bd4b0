"""SearchReport: the best plans in order, what was pruned by what, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from simulator.predict.difference import Difference, Timed, difference, timed
from simulator.spec.plan import Plan
from simulator.studies.search.outcome import STATUSES, PlanOutcome, Status, fields_of, parsed
from simulator.studies.search.study import SearchStudy
from simulator.studies.search.survey import Survey

SCHEMA_VERSION: Final = 2  # rises when a key is removed or changes its meaning; new keys do not raise it


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan of the table. against_best: its step over the best plan's; None for the best itself."""

    rank: int
    nodes: int
    plan: Plan
    outcome: PlanOutcome
    against_best: Difference | None

    @property
    def within_noise(self) -> bool:
        """At 90 % it cannot be distinguished from the best."""
        return self.against_best is not None and not self.against_best.distinguishable

    @property
    def tokens_per_s(self) -> float:
        assert self.outcome.step_s is not None
        return self.outcome.tokens_per_step / self.outcome.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of all candidates; refused + legal are all, and the last four are the legal ones.

    refused: by rule. too_large: their least memory exceeds the device. too_slow: their least value exceeds the table's
    worst. simulated: by status. open: not reached, as the search was interrupted.
    """

    refused: dict[str, int]
    legal: int
    too_large: int
    too_slow: int
    simulated: dict[Status, int]
    open: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """The answer. failures: reasons of plans that could not be predicted, and how many had each."""

    study: SearchStudy
    rows: tuple[Row, ...]
    counts: Counts
    failures: dict[str, int]
    interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        """Plain data; docs/reference/json-output.md describes every key."""
        return {
            "schema_version": SCHEMA_VERSION,
            "inputs": self.study.inputs(),
            "interrupted": self.interrupted,
            "counts": asdict(self.counts),
            "failures": self.failures,
            "plans": [flat(row) | {"breakdown_s": row.outcome.breakdown} for row in self.rows],
        }


def flat(row: Row) -> dict[str, Any]:
    """A row's figures and its plan."""
    o = row.outcome
    data = {
        "rank": row.rank,
        "nodes": row.nodes,
        "num_devices": o.num_devices,
        "plan": fields_of(row.plan),
        "verdict": o.status,
        "step_s": o.step_s,
        "low_s": o.low_s,
        "high_s": o.high_s,
        "tokens_per_s": row.tokens_per_s,
        "mfu": o.mfu,
        "used_bytes": o.used_bytes,
        "capacity_bytes": o.capacity_bytes,
        "within_noise_of_best": row.within_noise,
    }
    against = row.against_best
    ratios = {"ratio": against.ratio, "low": against.low, "high": against.high} if against else None
    return data | {"against_best": ratios}


def make_report(
    study: SearchStudy,
    survey: Survey,
    outcomes: Sequence[PlanOutcome],
    *,
    num_pruned: int = 0,
    interrupted: bool = False,
) -> SearchReport:
    """Rank what was simulated; the table has `study.top` rows."""
    statuses = Counter(o.status for o in outcomes)
    missing = survey.num_legal - survey.num_too_large - survey.num_too_slow - len(outcomes)
    return SearchReport(
        study=study,
        rows=ranked(study, outcomes),
        counts=Counts(
            refused=dict(sorted(survey.pruned.counts.items(), key=lambda item: (-item[1], item[0]))),
            legal=survey.num_legal,
            too_large=survey.num_too_large,
            too_slow=survey.num_too_slow + num_pruned,
            simulated={status: statuses[status] for status in STATUSES},
            open=missing - num_pruned,
        ),
        failures=dict(sorted(Counter(o.reason for o in outcomes if o.status == "failed").items())),
        interrupted=interrupted,
    )


def ranked(study: SearchStudy, outcomes: Sequence[PlanOutcome]) -> tuple[Row, ...]:
    """The best of what fits; equal values stand in the order of their keys."""
    found = sorted((_value(study, o), o.key, o) for o in outcomes if o.ranked)[: study.top]
    best = found[0][2] if found else None
    rows = []
    for rank, (_, key, outcome) in enumerate(found, start=1):
        plan, nodes = parsed(key)
        against = difference(_timed(outcome), _timed(best)) if best is not None and rank > 1 else None
        rows.append(Row(rank=rank, nodes=nodes, plan=plan, outcome=outcome, against_best=against))
    return tuple(rows)


def _value(study: SearchStudy, o: PlanOutcome) -> float:
    assert o.step_s is not None
    assert o.used_bytes is not None
    return study.value(o.step_s, o.num_devices, o.tokens_per_step, o.used_bytes)


def _timed(o: PlanOutcome) -> Timed:
    assert o.step_s is not None
    return timed(o.step_s, o.spread, o.stack_sigma, parsed(o.key)[0])
