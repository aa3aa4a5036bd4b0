"""What travels, and which passes over memory each implementation adds around it."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from simulator.base.kernels import DTYPE_BYTES, Stream, StreamOp
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.zero.hooks import hook_hops
from simulator.work.zero.quantised import with_zeropp
from simulator.work.zero.unit_comm import UnitComm
from simulator.work.zero.units import (
    ParameterUnit,
    Shape,
    apart,
    buckets,
    expert_shard_ranks,
    gathered_sizes,
    keeps_layers,
    keeps_root,
    numel_of,
    pieces,
    shard_ranks,
    units,
)


def communication(model: Model, plan: Plan, node_ranks: int | None = None) -> tuple[UnitComm, ...]:
    """What each piece of the model sends, in forward order: embedding, layer0.., head.

    node_ranks: ranks of a shard group on one node; None: all of them.
    """
    comms = _communication(model, plan, node_ranks)
    if plan.sync_every_steps == 1:
        return comms
    return tuple(replace(comm, all_reduce_bytes=0) for comm in comms)  # replicas agree apart: `agreement`


def _communication(model: Model, plan: Plan, node_ranks: int | None) -> tuple[UnitComm, ...]:
    match plan.implementation:
        case "fsdp1" | "fsdp2":
            return _fsdp_communication(model, plan)
        case "ddp" | "zero_redundancy":
            return _ddp_communication(model, plan)
        case _:
            near = node_ranks or shard_ranks(plan)
            return tuple(
                replace(
                    with_zeropp(_flat_communication(name, shapes, plan, shard_ranks(plan)), shapes, plan, near),
                    experts=_flat_communication(name, routed, plan, expert_shard_ranks(plan)) if routed else None,
                )
                for name, shapes, routed in apart(model, plan)
            )


def _fsdp_communication(model: Model, plan: Plan) -> tuple[UnitComm, ...]:
    root, *layers = units(model, plan)
    comm = _fsdp_comm(root, plan, kept=keeps_root(plan))
    embedding = replace(comm, unit="embedding", all_gather_backward_bytes=0, gather_backward_kernels=())
    head = UnitComm(
        unit="head",
        all_gather_backward_bytes=comm.all_gather_backward_bytes,
        backward_gather_ranks=comm.backward_gather_ranks,
        gather_backward_kernels=comm.gather_backward_kernels,
    )
    if not layers:
        return embedding, head
    made: dict[tuple[Shape, ...], UnitComm] = {}
    for unit in layers:
        if unit.shapes not in made:
            made[unit.shapes] = _fsdp_comm(unit, plan, kept=keeps_layers(plan))
    return embedding, *(replace(made[unit.shapes], unit=unit.name) for unit in layers), head


def _fsdp_comm(unit: ParameterUnit, plan: Plan, *, kept: bool) -> UnitComm:
    """What a unit sends; passes over its memory are those of all its tensors."""
    rest, routed = unit.apart()
    comm = _fsdp_bytes(rest, plan, kept=kept)
    passes = _gather_passes(unit, plan) if plan.zero > 0 else ()
    return replace(
        comm,
        experts=None if routed is None else _fsdp_bytes(routed, plan, kept=kept),
        gather_forward_kernels=passes,
        gather_backward_kernels=() if kept else passes,
        gradient_kernels=_gradient_passes(unit, plan),
        keep_kernels=_keep_passes(unit.padded_numel, plan),
        add_kernels=_add_passes(unit.padded_numel, plan),
    )


def _fsdp_bytes(unit: ParameterUnit, plan: Plan, *, kept: bool) -> UnitComm:
    compute, reduced = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.gradient_dtype]
    sharded = unit.shards > 1
    whole = sum(gathered_sizes(unit, plan)) if plan.fp8_all_gather else unit.padded_numel * compute
    gathered = whole if plan.zero > 0 else 0
    again = 0 if kept else gathered
    ranks = plan.reshard_ranks or unit.shards
    replicas = plan.dp_replicate
    return UnitComm(
        unit=unit.name,
        all_gather_forward_bytes=gathered if sharded else 0,
        all_gather_backward_bytes=again if sharded else 0,
        backward_gather_ranks=ranks,
        reduce_scatter_bytes=unit.padded_numel * reduced if sharded else 0,
        all_reduce_bytes=unit.shard_numel * reduced if replicas > 1 else 0,
    )


def _keep_passes(numel: int, plan: Plan) -> tuple[Stream, ...]:
    """FSDP2 keeps unreduced gradients in the dtype of the reduction (`to_accumulated_grad_if_needed`)."""
    compute, reduced = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.gradient_dtype]
    if plan.syncs_every_micro_batch or plan.implementation != "fsdp2" or compute == reduced:
        return ()
    return (Stream(op="widen", read_bytes=numel * compute, write_bytes=numel * reduced, numel=numel),)


def _add_passes(numel: int, plan: Plan) -> tuple[Stream, ...]:
    """A gradient added to the kept one, of the same dtype or (FSDP2) of a wider one."""
    compute, reduced = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.gradient_dtype]
    if plan.syncs_every_micro_batch:
        return ()
    kept = reduced if plan.implementation == "fsdp2" else compute
    add: StreamOp = "widen" if kept > compute else "elementwise"
    return (Stream(op=add, read_bytes=numel * (kept + compute), write_bytes=numel * kept, numel=numel),)


def _gather_passes(unit: ParameterUnit, plan: Plan) -> tuple[Stream, ...]:
    """Cast of the shard to the compute dtype; FSDP2 also copies the gathered buffer out into parameters."""
    compute, master = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.master_dtype]
    shard, full = unit.shard_numel, unit.padded_numel * compute
    if plan.fp8_all_gather:
        # maxima of all weights are found together after the optimizer (precompute_float8_dynamic_scale_for_fsdp): one more
        # read of the shard; their own all-reduce, some bytes a step, is left out
        sizes = gathered_sizes(unit, plan)
        parts = sum(size // ranks for size, ranks in zip(sizes, unit.tensor_shards, strict=True))
        narrow = Stream(op="cast", read_bytes=2 * shard * master, write_bytes=parts, launches=2)
        return narrow, Stream(op="copy", read_bytes=sum(sizes), write_bytes=sum(sizes))
    cast = Stream(op="cast", read_bytes=shard * master, write_bytes=shard * compute)
    if plan.implementation == "fsdp1":
        return (cast,) if compute != master else ()
    return cast, Stream(op="copy", read_bytes=full, write_bytes=full)


def _gradient_passes(unit: ParameterUnit, plan: Plan) -> tuple[Stream, ...]:
    """Full-size passes before the reduction: 6 B a parameter in FSDP2 (bf16 to fp32), 18 in FSDP1."""
    compute, reduced = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.gradient_dtype]
    numel = unit.padded_numel
    if plan.implementation == "fsdp2":
        pack: StreamOp = "widen" if reduced > compute else "copy"
        return (Stream(op=pack, read_bytes=numel * compute, write_bytes=numel * reduced, numel=numel),)
    flatten = Stream(op="copy", read_bytes=numel * compute, write_bytes=numel * compute)
    divide = Stream(op="elementwise", read_bytes=numel * reduced, write_bytes=numel * reduced)
    if compute == reduced:
        return flatten, divide
    return flatten, Stream(op="widen", read_bytes=numel * compute, write_bytes=numel * reduced, numel=numel), divide


def _ddp_communication(model: Model, plan: Plan) -> tuple[UnitComm, ...]:
    """All-reduce a bucket, booked on the piece whose backward fills it; ZeRO-1's owners broadcast new parameters."""
    master = DTYPE_BYTES[plan.master_dtype]
    filled: dict[str, list[tuple[Shape, ...]]] = {}
    for _, shapes, piece in buckets(model, plan):
        filled.setdefault(piece, []).append(shapes)
    numels = {piece: [numel_of(shapes) for shapes in held] for piece, held in filled.items()}
    return tuple(
        UnitComm(
            unit=name,
            all_reduce_bytes=0 if hops else sum(numels.get(name, [])) * DTYPE_BYTES[plan.gradient_dtype],
            num_buckets=len(numels.get(name, [])) or 1,
            parameter_gather_bytes=numel_of(shapes) * master if plan.zero == 1 else 0,
            num_broadcasts=len(shapes) if plan.zero == 1 else 0,
            gradient_kernels=_bucket_passes(sum(numels.get(name, [])) * master, plan),
            add_kernels=(Stream(op="elementwise", read_bytes=2 * size, write_bytes=size),),
            hops=hops,
        )
        for name, shapes in pieces(model)
        for size, hops in ((numel_of(shapes) * master, hook_hops(tuple(filled.get(name, ())), plan)),)
    )


def _bucket_passes(num_bytes: int, plan: Plan) -> tuple[Stream, ...]:
    """Gradients are copied (and divided) into their bucket, and back after it has travelled, unless they are its views."""
    if num_bytes == 0 or plan.num_devices == 1:
        return ()
    once = Stream(op="copy", read_bytes=num_bytes, write_bytes=num_bytes)
    return (once,) if plan.gradient_as_bucket_view else (once, once)


def _flat_communication(name: str, shapes: tuple[Shape, ...], plan: Plan, ranks: int) -> UnitComm:
    """DeepSpeed and Megatron. Stage 0 all-reduces; 1 and 2 reduce-scatter and gather new parameters; 3 gathers twice."""
    compute, reduced = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.gradient_dtype]
    numel = -(-numel_of(shapes) // ranks) * ranks
    gathered = numel * compute if plan.zero == 3 else 0
    passes: tuple[Stream, ...] = ()
    buckets = 1
    if plan.implementation == "deepspeed":
        copy = Stream(op="copy", read_bytes=numel * compute, write_bytes=numel * compute)
        divide = Stream(op="elementwise", read_bytes=numel * reduced, write_bytes=numel * reduced)
        passes = copy, divide
        buckets = -(-numel // plan.reduce_bucket_numel)
    return UnitComm(
        unit=name,
        all_gather_forward_bytes=gathered,
        all_gather_backward_bytes=gathered,
        backward_gather_ranks=ranks,
        reduce_scatter_bytes=numel * reduced if plan.zero > 0 else 0,
        all_reduce_bytes=numel // ranks * reduced if plan.zero == 0 or plan.dp_replicate > 1 else 0,
        num_buckets=buckets,
        parameter_gather_bytes=numel * compute - _narrowed(name, shapes, plan) if plan.zero in (1, 2) else 0,
        gradient_kernels=passes,
        late_all_reduce=plan.implementation == "deepspeed" and plan.zero == 3,
    )


def _narrowed(name: str, shapes: tuple[Shape, ...], plan: Plan) -> int:
    """Bytes that Megatron's gather of updated parameters saves: matrices of layers travel in fp8."""
    if not plan.fp8_all_gather or name in ("embedding", "head"):
        return 0
    return sum(prod(shape) for shape in shapes if len(shape) > 1)
