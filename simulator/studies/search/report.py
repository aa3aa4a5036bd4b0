"""SearchReport: the best plans in order, what was pruned by what, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from simulator.base.fit import Fit
from simulator.predict.difference import Difference, Timed, difference, timed
from simulator.spec.plan import Plan
from simulator.studies.search.outcome import PlanOutcome, Status, fields_of, layout_of, parsed, tidied
from simulator.studies.search.study import SearchStudy

SCHEMA_VERSION: Final = 2  # rises when a key is removed or changes its meaning; new keys do not raise it


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan of the table. against_best: its step over the best plan's; None for the best itself.

    same: in which fields other plans differ that run exactly as this one does. on_front: no other row is as quick and as
    small in memory, and quicker or smaller: the Pareto front of the table.
    """

    rank: int
    nodes: int
    plan: Plan
    outcome: PlanOutcome
    same: tuple[str, ...]
    against_best: Difference | None
    on_front: bool = False

    @property
    def within_noise(self) -> bool:
        """At 90 % it cannot be distinguished from the best."""
        return self.against_best is not None and not self.against_best.distinguishable

    def order(self, study: SearchStudy) -> tuple[int, float, str]:
        """Where it stands in a table."""
        return *_order(study, self.outcome), self.outcome.key

    @property
    def tokens_per_s(self) -> float:
        assert self.outcome.step_s is not None
        return self.outcome.tokens_per_step / self.outcome.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of all candidates; refused + unchecked + legal are all, and the last five are the legal ones.

    refused: by rule. unchecked: too slow, whether legal or not. equal: the same as another plan. too_large: their least memory exceeds the device. too_slow: their least value exceeds the table's
    worst. simulated: by status. open: not reached: the
    search was interrupted, or has simulated as many as it may. scouts: simulated, and then dropped by a bound as well, so counted twice.
    """

    refused: dict[str, int]
    unchecked: int
    legal: int
    equal: int
    too_large: int
    too_slow: int
    simulated: dict[Status, int]
    open: int
    scouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """The answer. failures: reasons of plans that could not be predicted, and how many had each.

    quickest_open: no plan that was left out has a lower value; None: the first row is proven to be the best. without:
    software that has no row, and why. num_left_out: branches of a very large space that were not looked at. work: spent
    on simulations (`SearchStudy.budget`).
    """

    study: SearchStudy
    rows: tuple[Row, ...]
    counts: Counts
    failures: dict[str, int]
    quickest_open: float | None = None
    interrupted: bool = False
    without: tuple[tuple[str, str], ...] = ()
    num_left_out: int = 0
    work: int = 0

    @property
    def gain(self) -> float | None:
        """The gap: by how much a plan that was not simulated may at most be better than the first row, relative to that.

        0: proven to be the best of what was looked at. None: not known, as the search was interrupted.
        """
        if self.interrupted:
            return None
        if not self.rows or self.quickest_open is None:
            return 0.0
        best = self.study.value_of(self.rows[0].outcome)
        return max(0.0, 1 - self.quickest_open / best) if best else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain data; docs/reference/json-output.md describes every key."""
        return {
            "schema_version": SCHEMA_VERSION,
            "inputs": self.study.inputs(),
            "interrupted": self.interrupted,
            "counts": asdict(self.counts),
            "failures": self.failures,
            "at_most_better": self.gain,
            "without": dict(self.without),
            "branches_left_out": self.num_left_out,
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
        "implementation": row.plan.implementation,
        "same": list(row.same),
        "within_noise_of_best": row.within_noise,
        "on_front": row.on_front,
    }
    against = row.against_best
    ratios = {"ratio": against.ratio, "low": against.low, "high": against.high} if against else None
    return data | {"against_best": ratios}


def ranked(study: SearchStudy, outcomes: Sequence[PlanOutcome]) -> tuple[Row, ...]:
    """The best of what fits, `study.top` of them, equal plans as one; of layouts, the best of each, and what surely fits first.

    Equal values stand in the order of their keys.
    """
    alike: dict[object, list[PlanOutcome]] = {}
    for outcome in sorted((o for o in outcomes if o.ranked), key=lambda o: (len(o.key), o.key)):
        alike.setdefault(outcome.signature, []).append(outcome)
    found = sorted(alike.values(), key=lambda same: (*_order(study, same[0]), same[0].key))
    chosen = _of_layouts(found)[: study.top] if study.layouts else found[: study.top]
    rows: list[Row] = []
    for outcome, *others in chosen:
        plan, nodes = parsed(outcome.key)
        plan = tidied(plan, experts=study.space.model.experts is not None)
        same = _differences(outcome, others)
        rows.append(Row(rank=0, nodes=nodes, plan=plan, outcome=outcome, same=same, against_best=None))
    return compared(rows)


def compared(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows in this order with their ranks, each against the first, and which of them are on the Pareto front."""
    best = _timed(rows[0].outcome) if rows else None
    figures = [_figures(row.outcome) for row in rows]
    found: list[Row] = []
    for rank, row in enumerate(rows, start=1):
        against = difference(_timed(row.outcome), best) if best is not None and rank > 1 else None
        on_front = not any(_beats(other, figures[rank - 1]) for other in figures)
        found.append(replace(row, rank=rank, against_best=against, on_front=on_front))
    return tuple(found)


def _figures(outcome: PlanOutcome) -> tuple[float, int]:
    assert outcome.step_s is not None
    assert outcome.used_bytes is not None
    return outcome.step_s, outcome.used_bytes


def _beats(one: tuple[float, int], other: tuple[float, int]) -> bool:
    """In neither figure worse, and better in one."""
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))


def _order(study: SearchStudy, outcome: PlanOutcome) -> tuple[int, float]:
    value = study.value_of(outcome)
    assert value is not None
    return (outcome.status is not Fit.FITS if study.layouts else 0), value


def _of_layouts(found: list[list[PlanOutcome]]) -> list[list[PlanOutcome]]:
    """The first of each layout."""
    firsts: dict[str, list[PlanOutcome]] = {}
    for same in found:
        firsts.setdefault(layout_of(*parsed(same[0].key)), same)
    return list(firsts.values())


def _differences(outcome: PlanOutcome, others: Sequence[PlanOutcome]) -> tuple[str, ...]:
    """What makes no difference: the values of fields in which plans that run the same differ from this one."""
    own, _ = parsed(outcome.key)
    found: dict[str, None] = {}
    for other in others:
        plan, _ = parsed(other.key)
        names = sorted(own.changed_fields().keys() | plan.changed_fields().keys())
        words = [f"{name} {plan.value(name)}" for name in names if plan.value(name) != own.value(name)]
        found[" and ".join(words)] = None
    return tuple(found)


def _timed(o: PlanOutcome) -> Timed:
    assert o.step_s is not None
    return timed(o.step_s, o.spread, o.stack_sigma, parsed(o.key)[0])
