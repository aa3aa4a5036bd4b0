"""Implementation: a way to run data parallelism as one value, and the table of those that are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from simulator.base.kernels import Stream
from simulator.base.registry import IMPLEMENTATIONS
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.traits import Traits
from simulator.work.script.order import Order
from simulator.work.script.sharding import ParameterUnit
from simulator.work.script.unit_comm import UnitComm

if TYPE_CHECKING:
    from simulator.work.script.buffers import Buffers
    from simulator.work.script.storage import Storages

Library = Literal["nccl", "gloo"]
MakeBuffers: TypeAlias = "Callable[[Storages, Model, Plan], Buffers]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """An implementation of data parallelism. Functions take the rank's part of the model, and the plan.

    traits: what a plan and its legality need to know. order: what it issues around each unit. units: what it gathers and
    reduces together. communication: what each piece of the model sends (ranks of a shard group on one node, or None).
    resident: bytes of every tensor between steps by category, before offload. gradients: bytes of every tensor that the
    backward leaves for the optimizer and that did not exist before. buffers: what it holds around the units of a step,
    with collectives of that library. update: passes over gradients before the optimizer's own kernels.
    """

    traits: Traits
    order: Callable[[Plan], Order]
    units: Callable[[Model, Plan], tuple[ParameterUnit, ...]]
    communication: Callable[[Model, Plan, int | None], tuple[UnitComm, ...]]
    resident: Callable[[Model, Plan], dict[str, list[int]]]
    gradients: Callable[[Model, Plan], list[int]]
    buffers: Callable[[Plan, Library], MakeBuffers]
    update: Callable[[Model, Plan], tuple[Stream, ...]] = lambda model, plan: ()  # noqa: ARG005


def register(one: Implementation) -> Implementation:
    """Make an implementation known by its name, as a plan's `data_parallel` has it."""
    IMPLEMENTATIONS.register(one.traits.name, one)
    return one


def implementation_of(plan: Plan) -> Implementation:
    """Whose data parallelism runs a plan."""
    return cast("Implementation", IMPLEMENTATIONS[plan.implementation])
