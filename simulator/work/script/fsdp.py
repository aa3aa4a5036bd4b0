"""What FSDP1 and FSDP2 have in common: their units, what these send, and what stays between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias, cast

from simulator.base.kernels import DTYPE_BYTES, Stream, StreamOp
from simulator.base.remembered import remembered
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.script.resident import torch_resident
from simulator.work.script.sharding import (
    ParameterUnit,
    Shape,
    apart,
    by_rows,
    expert_shard_ranks,
    frozen_pieces,
    gathered_sizes,
    keeps_layers,
    keeps_root,
    shard_ranks,
)
from simulator.work.script.unit_comm import UnitComm


class UnitPasses(NamedTuple):
    """Full-size passes over memory around a unit's collectives: before its use, before the reduction of its gradients.

    keep, add: where gradients add up whole over micro-batches, of the first one and of later ones.
    """

    gather: tuple[Stream, ...]
    gradient: tuple[Stream, ...]
    keep: tuple[Stream, ...]
    add: tuple[Stream, ...]


MakeUnit: TypeAlias = Callable[[str, tuple[Shape, ...], int], ParameterUnit]
PassesOf: TypeAlias = Callable[[ParameterUnit, Plan], UnitPasses]


@remembered(16)  # a prediction asks ten times
def fsdp_units(model: Model, plan: Plan, make: MakeUnit) -> tuple[ParameterUnit, ...]:
    """One a transformer block, and the root (embedding, final norm, head), which comes first."""
    ranks = shard_ranks(plan)
    (_, embedding, _), *body, (_, head, _) = apart(model, plan)
    first, *middle, last = frozen_pieces(model, plan)
    share = plan.fsdp.shard_share
    root = replace(make("root", (*embedding, *head), ranks), frozen=(*first, *last)).with_share(share)
    made: dict[object, ParameterUnit] = {}
    for (name, shapes, routed), still in zip(body, middle, strict=True):
        if (shapes, routed, still) not in made:
            one = _with_experts(make(name, shapes, ranks), routed, expert_shard_ranks(plan))
            made[shapes, routed, still] = replace(one, frozen=still).with_share(share)
    units = zip(body, middle, strict=True)
    return root, *(replace(made[shapes, routed, still], name=name) for (name, shapes, routed), still in units)


def fsdp_ends(model: Model, plan: Plan, make: MakeUnit) -> tuple[ParameterUnit, ParameterUnit]:
    """Embedding and head where they are apart, each of them a root."""
    shapes, still = apart(model, plan), frozen_pieces(model, plan)
    first, last = (
        replace(make("root", shapes[end][1], shard_ranks(plan)), frozen=still[end]).with_share(plan.fsdp.shard_share)
        for end in (0, -1)
    )
    return first, last


def _with_experts(unit: ParameterUnit, routed: tuple[Shape, ...], ranks: int) -> ParameterUnit:
    """FSDP2: experts in groups of their own."""
    if not routed:
        return unit
    experts = by_rows(unit.name, routed, ranks)
    return replace(
        unit,
        shapes=(*unit.shapes, *routed),
        local_numels=(*unit.local_numels, *experts.local_numels),
        padded_numel=unit.padded_numel + experts.padded_numel,
        expert_shards=ranks,
        num_expert_tensors=len(routed),
    )


def fsdp_communication(units: Sequence[ParameterUnit], plan: Plan, passes: PassesOf) -> tuple[UnitComm, ...]:
    """What each piece of the model sends. units: of `fsdp_units`; passes: over memory around a unit's collectives."""
    root, *layers = units
    comm = _unit_comm(root, plan, passes, keeps_gathered=keeps_root(plan))
    embedding = replace(comm, unit="embedding", all_gather_backward_bytes=0, gather_backward_kernels=())
    head = UnitComm(
        unit="head",
        all_gather_backward_bytes=comm.all_gather_backward_bytes,
        backward_gather_ranks=comm.backward_gather_ranks,
        gather_backward_kernels=comm.gather_backward_kernels,
    )
    if not layers:
        return embedding, head
    made: dict[object, UnitComm] = {}
    for unit in layers:
        if (unit.shapes, unit.frozen) not in made:
            made[unit.shapes, unit.frozen] = _unit_comm(unit, plan, passes, keeps_gathered=keeps_layers(plan))
    return embedding, *(replace(made[unit.shapes, unit.frozen], unit=unit.name) for unit in layers), head


def _unit_comm(unit: ParameterUnit, plan: Plan, passes_of: PassesOf, *, keeps_gathered: bool) -> UnitComm:
    """What a unit sends; passes over its memory are those of all its tensors."""
    rest, routed = unit.apart()
    comm = _unit_bytes(rest, plan, keeps_gathered=keeps_gathered)
    passes = passes_of(unit, plan)
    gather = passes.gather if plan.zero > 0 else ()
    if not unit.shapes:
        passes = passes._replace(gradient=(), keep=(), add=())
    return replace(
        comm,
        experts=None if routed is None else _unit_bytes(routed, plan, keeps_gathered=keeps_gathered),
        gather_forward_kernels=gather,
        gather_backward_kernels=() if keeps_gathered else gather,
        gradient_kernels=passes.gradient,
        keep_kernels=passes.keep,
        add_kernels=passes.add,
    )


def _unit_bytes(unit: ParameterUnit, plan: Plan, *, keeps_gathered: bool) -> UnitComm:
    compute, reduced = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.gradient_dtype]
    sharded = unit.shards > 1
    full_bytes = sum(gathered_sizes(unit, plan)) if plan.precision.fp8_all_gather else unit.padded_numel * compute
    gathered = full_bytes + unit.frozen_bytes if plan.zero > 0 else 0
    reduced_numel = unit.padded_numel
    if plan.fsdp.shard_sizes != "equal" and sharded:  # a broadcast, or a reduction, of each rank's part
        gathered, reduced_numel = (-(-size * unit.shards // (unit.shards - 1)) for size in (gathered, reduced_numel))
    again = 0 if keeps_gathered else gathered
    ranks = plan.reshard_ranks or unit.shards
    replicas = plan.dp_replicate
    return UnitComm(
        unit=unit.name,
        all_gather_forward_bytes=gathered if sharded else 0,
        all_gather_backward_bytes=again if sharded else 0,
        backward_gather_ranks=ranks,
        reduce_scatter_bytes=reduced_numel * reduced if sharded else 0,
        all_reduce_bytes=unit.shard_numel * reduced if replicas > 1 else 0,
    )


def added(unit: ParameterUnit, plan: Plan, kept_dtype: str) -> tuple[Stream, ...]:
    """A gradient added to the one kept of earlier micro-batches, of the same dtype or a wider one."""
    compute, stored = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[kept_dtype]
    if plan.syncs_every_micro_batch:
        return ()
    numel, add = unit.padded_numel, "widen" if stored > compute else "elementwise"
    return (
        Stream(
            op=cast("StreamOp", add), read_bytes=numel * (stored + compute), write_bytes=numel * stored, numel=numel
        ),
    )


def fsdp_resident(units: Sequence[ParameterUnit], plan: Plan) -> dict[str, list[int]]:
    """Bytes of every tensor between steps: the shards, and the optimizer's state of each."""
    stored = [numel for unit in units for numel in unit.local_numels]
    return torch_resident(stored, stored, [], plan)


def fsdp_gradients(units: Sequence[ParameterUnit], plan: Plan) -> list[int]:
    """FSDP2's sharded gradients are views of one flat output a unit, FSDP1's are that output."""
    return [unit.shard_numel * DTYPE_BYTES[plan.precision.master] for unit in units if unit.shapes]
