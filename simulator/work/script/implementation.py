"""Implementation: a way to run data parallelism as one value, and the table of those that are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from simulator.base.registry import IMPLEMENTATIONS
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.traits import Traits
from simulator.work.script.buffers import Buffers
from simulator.work.script.order import Order
from simulator.work.script.queries import Sizes
from simulator.work.script.storage import Storages

Library = Literal["nccl", "gloo"]
MakeBuffers: TypeAlias = Callable[[Storages, Model, Plan], Buffers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation(Sizes):
    """An implementation of data parallelism.

    traits: what a plan and its legality need to know. order: what it issues around each unit. buffers: what it holds around
    the units of a step, with collectives of that library.
    """

    traits: Traits
    order: Callable[[Plan], Order]
    buffers: Callable[[Plan, Library], MakeBuffers]


def register(one: Implementation) -> Implementation:
    """Make an implementation known by its name, as a plan's `data_parallel` has it."""
    IMPLEMENTATIONS.register(one.traits.name, one)
    return one


def implementation_of(plan: Plan) -> Implementation:
    """Whose data parallelism runs a plan."""
    return cast("Implementation", IMPLEMENTATIONS[plan.implementation])
