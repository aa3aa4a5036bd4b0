"""Faults of a plan with unknown fields: those that remain whatever values the fields get.

No fault is judged by its words: it stands where all fields that its rule reads are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from simulator.base.errors import Fault
from simulator.parallel.legality import Case, broken, faults
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

BY_DEVICES: Final = frozenset({"dp_shard", "dp_replicate", "micro_batch_size", "num_micro_batches"})


def plan_faults(plan: Plan, model: Model | None, cluster: Cluster | None, *, others: bool) -> list[Fault]:
    """The plan's own faults; where it or another input has any, those with model and cluster that would be reported next."""
    if not others and not faults(Case(plan=plan)):
        return []
    return faults(Case(plan=plan, model=model, cluster=cluster))


def certain_faults(plan: Plan, model: Model | None, cluster: Cluster | None, unknown: Collection[str]) -> list[Fault]:
    """The faults of a plan (also with model and cluster) that remain whatever values the `unknown` fields get."""
    case = Case(plan=plan, model=model, cluster=cluster)
    return [rule.fault(subject) for rule, subject in broken(case) if case.read_by(rule).isdisjoint(unknown)]


def unknown_fields(details: Iterable[ErrorDetails]) -> frozenset[str] | None:
    """The plan's fields that validation refused, or that an unknown key may have meant; None: the plan cannot be read."""
    found: set[str] = set()
    for detail in details:
        match detail["loc"]:
            case ("plan", *path) if path:
                name = str(Plan.flat_path(path)[0])
                inside = [flat for flat, place in Plan.flat_names.items() if place.startswith(f"{name}.")]
                known = [name] if name in Plan.flat_names else inside
                found.update(known or get_close_matches(name, Plan.flat_names))
            case ("plan", *_):
                return None
            case ("nodes", *_):
                found |= {"dp_shard", "dp_replicate"}
            case _:
                pass
    return frozenset(found)
