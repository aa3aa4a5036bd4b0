"""Faults of a plan with unknown fields: those that remain whatever values the fields get.

No fault is judged by its words. The plan is checked once more for every unknown field, with another value in its place;
a fault that rests on one of them is then gone, or says something else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel

from simulator.base.errors import Fault, InputError
from simulator.base.value_errors import words_of
from simulator.parallel.mesh import degree_faults, model_faults
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

BY_DEVICES: Final = frozenset({"dp_shard", "dp_replicate", "micro_batch_size", "num_micro_batches"})
_OTHER: Final = 7919  # a prime beyond any degree: as another value of a count it divides nothing


def plan_faults(plan: Plan, model: Model | None, cluster: Cluster | None, *, others: bool) -> list[Fault]:
    """The plan's own faults; where it or another input has any, those with model and cluster that would be told next."""
    faults: list[Fault] = []
    try:
        plan.check()
    except InputError as exc:
        faults += exc.faults
    if faults or others:
        faults += degree_faults(plan, cluster) if cluster is not None else []
        faults += model_faults(plan, model) if model is not None else []
    return faults


def certain_faults(plan: Plan, model: Model | None, cluster: Cluster | None, unknown: Collection[str]) -> list[Fault]:
    """The faults of a plan (also with model and cluster) that remain whatever values the `unknown` fields get."""
    found = plan_faults(plan, model, cluster, others=True)
    changes = [{name: _other_value(plan, name)} for name in sorted(unknown)]
    together = {name: value for change in changes for name, value in change.items()}
    for change in (*changes, together):
        told = plan_faults(plan.model_copy(update=change), model, cluster, others=True)
        same = {(fault.place, fault.problem) for fault in told}
        found = [fault for fault in found if (fault.place, fault.problem) in same]
    return found


def unknown_fields(details: Iterable[ErrorDetails]) -> frozenset[str] | None:
    """The plan's fields that validation refused, or that an unknown key may have meant; None: the plan cannot be read."""
    found: set[str] = set()
    for detail in details:
        match detail["loc"]:
            case ("plan", str(name), *_) if name in Plan.model_fields:
                found.add(name)
            case ("plan", str(name), *_):
                found.update(get_close_matches(name, Plan.model_fields))
            case ("plan", *_):
                return None
            case ("nodes", *_):
                found |= {"dp_shard", "dp_replicate"}
            case _:
                pass
    return frozenset(found)


def _other_value(noun: BaseModel, name: str) -> object:
    """A legal value of the field that the noun does not have; the one it has where there is no telling (text, lists)."""
    info, value = type(noun).model_fields[name], getattr(noun, name)
    kinds = _parts(info.annotation)
    words = words_of(info.annotation)
    if words:
        return next(word for word in words if word != value)
    if bool in kinds:
        return not value
    if int in kinds:
        near = value if isinstance(value, int) else 0
        return next(number for number in (_OTHER, near + 1, near - 1) if number != value and _within(info, number))
    if float in kinds:
        return next((number for number in (0.5, 1.5) if number != value and _within(info, number)), value)
    if isinstance(value, BaseModel):
        return value.model_copy(update={key: _other_value(value, key) for key in type(value).model_fields})
    return value


def _within(info: FieldInfo, number: float) -> bool:
    """Inside the field's limits."""
    limits = info.metadata
    return all(getattr(one, "ge", number) <= number <= getattr(one, "le", number) for one in limits) and not any(
        number <= getattr(one, "gt", number - 1) for one in limits
    )


def _parts(annotation: object) -> list[Any]:
    """The alternatives of a union; of anything else itself."""
    return list(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else [annotation]
