"""Orders: what an implementation of data parallelism issues around the compute of each unit, forward and back.

`Replicated` is for those whose ranks hold all parameters while they compute, `Sharded` for those that gather a unit before
they use it. Who waits for whom is read from torch 2.13 `_fully_shard/_fsdp_param_group.py` (FSDP2), `fsdp/_runtime_utils.py`
(FSDP1), `nn/parallel/distributed.py` (DDP) and Megatron-Core's distributed optimizer; see docs/background/schedules.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from typing_extensions import override

from simulator.spec.plan import FsdpPlan, Plan
from simulator.spec.plan.records import USUAL_FSDP
from simulator.spec.software.stack import Stack
from simulator.work.script.instructions import (
    Direction,
    Evict,
    GatherUpdated,
    Gradient,
    Phase,
    Reduce,
    Reshard,
    Restore,
    Run,
    UnitInstruction,
    Unshard,
)

UnitGroups: TypeAlias = tuple[tuple[UnitInstruction, ...], ...]
Gathers: TypeAlias = tuple[tuple[int, int | None], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a rank's layers in forward order, and which ends of the model it holds.

    Its units are numbered from 0: the embedding if it is here, the layers, the head if it is here.
    """

    num_layers: int
    embedding: bool = True
    head: bool = True

    @property
    def num_units(self) -> int:
        return self.embedding + self.num_layers + self.head

    def is_head(self, unit: int) -> bool:
        """The unit is the model's head."""
        return self.head and unit == self.num_units - 1

    def is_embedding(self, unit: int) -> bool:
        """The unit is the model's embedding."""
        return self.embedding and unit == 0


def ahead(unit: int, depth: int, last: int) -> Gathers:
    """What a backward sends for before a unit, so that it comes `depth` units ahead: all of these before the last unit.

    Each waits for the backward of the unit whose room it takes.
    """
    newest = unit - depth
    coming = range(last, max(newest, 0) - 1, -1) if unit == last else range(newest, newest - 1, -1)
    return tuple((one, one + depth + 1 if one + depth + 1 <= last else None) for one in coming if one >= 0)


def _fsdp(plan: Plan) -> FsdpPlan:
    """How far FSDP gathers ahead; other software has no word for it."""
    return plan.fsdp if plan.traits.hooks_modules else USUAL_FSDP


class Order:
    """What the passes of every implementation have in common. Subclasses say what they gather and when."""

    gathers_before_use: ClassVar[bool] = False  # parameters updated in shards become whole before the next forward

    def forward_gathers(self, plan: Plan, chunk: Chunk, unit: int) -> Gathers:  # noqa: ARG002
        """All-gathers to issue before a unit's forward, each with the unit whose forward it waits for."""
        return ()

    def backward_gathers(self, plan: Plan, chunk: Chunk, unit: int) -> Gathers:  # noqa: ARG002
        """The same before its backward."""
        return ()

    def backward_after(self, chunk: Chunk, unit: int) -> int | None:  # noqa: ARG002
        """The unit whose reduction must be over before this one's backward."""
        return None

    def forward(self, plan: Plan, stack: Stack, chunk: Chunk, *, first: bool) -> UnitGroups:
        """A chunk's forward. first: of the step."""
        groups = [self._forward_of(plan, chunk, unit) for unit in range(chunk.num_units)]
        if not (first and self.gathers_before_use):
            return tuple(groups)
        updated = [GatherUpdated(unit) for unit in range(chunk.num_units)]
        if stack.overlap.late_parameters:
            return ((*updated, *groups[0]), *groups[1:]) if groups else ()
        return tuple((one, *group) for one, group in zip(updated, groups, strict=True))

    def _forward_of(self, plan: Plan, chunk: Chunk, unit: int) -> tuple[UnitInstruction, ...]:
        leaves = (Evict(unit),) if plan.offload.activations != "none" and not chunk.is_head(unit) else ()
        found: tuple[UnitInstruction, ...] = (
            Unshard(unit, self.forward_gathers(plan, chunk, unit)),
            Run(unit, "forward"),
            *leaves,
        )
        if chunk.is_head(unit):
            return (*found, Reshard(unit), Run(unit, "loss"))
        return found if chunk.is_embedding(unit) else (*found, Reshard(unit))  # FSDP's root stays to the head

    def backward(self, plan: Plan, stack: Stack, chunk: Chunk, direction: Direction, *, syncs: bool) -> UnitGroups:
        """A chunk's backward, or a half of it. syncs: gradients are reduced."""
        units = range(chunk.num_units - 1, -1, -1)
        groups = [tuple(self._backward_of(plan, chunk, unit, direction)) for unit in units]
        if direction == "inputs" or not syncs:
            return tuple(groups)
        reductions = [Reduce(unit) for unit in units]
        if direction == "backward" and self.reduces_late(plan, stack):
            return (*groups[:-1], (*groups[-1], *reductions)) if groups else ()
        return tuple((*group, one) for group, one in zip(groups, reductions, strict=True))

    def reduces_late(self, plan: Plan, stack: Stack) -> bool:  # noqa: ARG002
        """All gradients are reduced behind the last unit's backward."""
        return False

    def _backward_of(self, plan: Plan, chunk: Chunk, unit: int, direction: Direction) -> Iterator[UnitInstruction]:
        phase: Phase = "backward" if direction == "forward" else direction
        if chunk.is_head(unit):
            yield Run(unit, "loss_backward")
        if direction != "inputs":
            yield Unshard(unit, self.backward_gathers(plan, chunk, unit))
        if plan.offload.activations != "none":
            yield Restore(unit, ahead(unit, plan.offload.prefetch, chunk.num_units - 1))
        yield Run(unit, phase, self.backward_after(chunk, unit))
        if direction != "inputs":
            yield Gradient(unit)


class Replicated(Order):
    """DDP and ZeRO-1/2: every rank holds the parameters; gradients are reduced as they appear.

    DeepSpeed and torch's ZeRO-1 gather what their optimizers updated in shards inside optimizer.step().
    """

    @override
    def reduces_late(self, plan: Plan, stack: Stack) -> bool:
        return stack.overlap.late_gradients


class GathersBeforeUse(Replicated):
    """Megatron's distributed optimizer gathers updated parameters before their next use.

    So the step shown begins with those gathers, as in a steady run.
    """

    gathers_before_use = True


class Sharded(Order):
    """FSDP and ZeRO-3: gather before use, reduce-scatter after the gradient.

    Two all-gathers may be under way in the forward: that of a unit waits for the forward of the unit two back, whose
    buffer it takes.
    """

    def forward_window(self, plan: Plan) -> int | None:
        """A unit's all-gather may start once the unit so many back has been computed; None: at any time."""
        return 2 + _fsdp(plan).forward_prefetch

    @override
    def forward_gathers(self, plan: Plan, chunk: Chunk, unit: int) -> Gathers:
        """The unit itself unless prefetched, and those `forward_prefetch` units ahead."""
        window, newest = self.forward_window(plan), unit + _fsdp(plan).forward_prefetch
        ahead = range(min(newest + 1, chunk.num_units)) if unit == 0 else range(newest, newest + 1)
        gates = ((one, one - window if window is not None and one >= window else None) for one in ahead)
        return tuple((one, gate) for one, gate in gates if one < chunk.num_units)

    @override
    def backward_gathers(self, plan: Plan, chunk: Chunk, unit: int) -> Gathers:
        """The unit itself unless prefetched, and those `backward_prefetch` units ahead."""
        return ahead(unit, _fsdp(plan).backward_prefetch, chunk.num_units - 1)

    @override
    def backward_after(self, chunk: Chunk, unit: int) -> int | None:
        """The reduce-scatter's input buffer of the unit before last must be free again."""
        return unit + 2 if unit + 2 < chunk.num_units else None
