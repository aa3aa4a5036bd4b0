"""DDP: torch's DistributedDataParallel, and its communication hooks (torch 2.13 `nn/parallel/distributed.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

from typing_extensions import override

from simulator.base.kernels import DTYPE_BYTES, Stream
from simulator.parallel.model_shard import body_names
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.optimizers import OPTIMIZERS
from simulator.spec.plan.traits import Traits
from simulator.work.script.buffers import Buffers
from simulator.work.script.hooks import compressed, hook_hops, hook_tensors
from simulator.work.script.implementation import Implementation, Library, MakeBuffers
from simulator.work.script.order import Replicated
from simulator.work.script.resident import shaped_states, stepped_numels, torch_resident
from simulator.work.script.sharding import ParameterUnit, Shape, buckets, numel_of, pieces
from simulator.work.script.storage import ROOT, Storages
from simulator.work.script.unit_comm import UnitComm, whole_broadcasts


class ReplicatedBuffers(Buffers):
    """DDP and torch's ZeRO-1: gradients beside the buckets, or inside them as views."""

    def __init__(self, storages: Storages, model: Model, plan: Plan) -> None:
        super().__init__(storages, model, plan)
        # Views of the buckets are made as a bucket is filled: what is accumulated before that is kept beside them
        self._views = plan.ddp.gradient_as_bucket_view and plan.num_data_parallel > 1
        accumulates = plan.num_micro_batches > 1 and not plan.syncs_every_micro_batch
        self.keeps_gradients = accumulates or not self._views
        self._accumulated: dict[int, list[int]] = {}  # unit -> gradients that are not in their bucket yet

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        if not self._views:
            super().after_backward(unit, gradients, sync=sync)
            return
        slots = [slot for slot, _ in gradients]
        if sync:
            self.storages.free(*self._accumulated.pop(unit, ()), *slots)
        else:
            self._accumulated.setdefault(unit, []).extend(slots)
        self.gradients = [slot for kept in self._accumulated.values() for slot in kept]

    @override
    def zero_grad(self) -> None:
        super().zero_grad()
        self._accumulated = {}

    @override
    def stepped(self) -> list[tuple[int, ...]]:
        return [(numel,) for numel in stepped_numels(self.model, self.plan)]


class HookedBuffers(ReplicatedBuffers):
    """DDP with a communication hook: what it makes of a bucket beside the bucket, and drops at its end.

    16 bits: the narrow copy. PowerSGD: the bucket before its loss, the tensors that travel whole, factors that no warm
    start keeps, and the new error beside the old one.
    """

    def __init__(self, storages: Storages, model: Model, plan: Plan) -> None:
        super().__init__(storages, model, plan)
        self._names = dict(enumerate(body_names(model))) | {ROOT: "embedding"}
        self._filled = _filled(model, plan)
        self._head_reduced = False

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        super().after_backward(unit, gradients, sync=sync)
        if not sync:
            return
        names = ([] if self._head_reduced else ["head"]) + [self._names[unit]]
        self._head_reduced = True
        for shapes in (bucket for name in names for bucket in self._filled.get(name, ())):
            self._reduce(shapes)

    @override
    def end_backward(self) -> None:
        super().end_backward()
        self._head_reduced = False

    def _reduce(self, shapes: tuple[Shape, ...]) -> None:
        plan, hook = self.plan, self.plan.ddp.comm_hook
        size, numel = DTYPE_BYTES[plan.precision.master], numel_of(shapes)
        if hook.kind != "powersgd":
            sizes = [numel * DTYPE_BYTES[plan.gradient_dtype]]
        else:
            parts = compressed(shapes, plan)
            copies = [numel * size] * 2 if hook.error_feedback else []
            factors = [] if hook.warm_start else [parts.p_numel * size, parts.q_numel * size]
            sizes = [*copies, parts.whole_numel * size, *factors]
        self.storages.free(*self.storages.alloc_each(sizes, "buckets"))


def bucket_units(model: Model, plan: Plan) -> tuple[ParameterUnit, ...]:
    """One a bucket, in the order in which the backward fills them."""
    return tuple(
        ParameterUnit(
            name=name, shapes=shapes, shards=1, local_numels=tuple(map(prod, shapes)), padded_numel=numel_of(shapes)
        )
        for name, shapes, _ in buckets(model, plan)
    )


def _filled(model: Model, plan: Plan) -> dict[str, list[tuple[Shape, ...]]]:
    """Piece of the model -> the buckets that its backward fills."""
    found: dict[str, list[tuple[Shape, ...]]] = {}
    for _, shapes, piece in buckets(model, plan):
        found.setdefault(piece, []).append(shapes)
    return found


def bucketed_communication(model: Model, plan: Plan, node_ranks: int | None) -> tuple[UnitComm, ...]:  # noqa: ARG001
    """All-reduce a bucket, booked on the piece whose backward fills it; ZeRO-1's owners broadcast new parameters."""
    master = DTYPE_BYTES[plan.precision.master]
    filled = _filled(model, plan)
    numels = {piece: [numel_of(shapes) for shapes in content] for piece, content in filled.items()}
    return tuple(
        UnitComm(
            unit=name,
            all_reduce_bytes=0 if hops else sum(numels.get(name, [])) * DTYPE_BYTES[plan.gradient_dtype],
            num_buckets=len(numels.get(name, [])) or 1,
            parameter_gather_bytes=numel_of(shapes) * master if plan.zero == 1 else 0,
            broadcasts=whole_broadcasts(shapes, master) if plan.zero == 1 else (),
            gradient_kernels=_bucket_passes(sum(numels.get(name, [])) * master, plan),
            add_kernels=(Stream(op="elementwise", read_bytes=2 * size, write_bytes=size),),
            hops=hops,
        )
        for name, shapes in pieces(model, plan)
        for size, hops in ((numel_of(shapes) * master, hook_hops(tuple(filled.get(name, ())), plan)),)
    )


def _bucket_passes(num_bytes: int, plan: Plan) -> tuple[Stream, ...]:
    """Gradients are copied (and divided) into their bucket, and back after it has travelled, unless they are its views."""
    if num_bytes == 0 or plan.num_devices == 1:
        return ()
    once = Stream(op="copy", read_bytes=num_bytes, write_bytes=num_bytes)
    return (once,) if plan.ddp.gradient_as_bucket_view else (once, once)


def whole_resident(model: Model, plan: Plan) -> dict[str, list[int]]:
    """Bytes of every tensor between steps: whole parameters, the optimizer's state, buckets where there are peers."""
    stored = [prod(shape) for _, shapes in pieces(model, plan) for shape in shapes]
    alone = plan.num_data_parallel * plan.cp == 1
    master = DTYPE_BYTES[plan.precision.master]
    gradients = [] if alone else [unit.numel * master for unit in bucket_units(model, plan)] + hook_tensors(model, plan)
    found = OPTIMIZERS[plan.optimizer.kind]
    shaped = found.matrices or plan.optimizer.kind == "adafactor" or (found.bits == 8 and plan.optimizer.wide_embedding)
    by_shape = plan.zero == 0 and shaped
    return torch_resident(
        stored, stepped_numels(model, plan), gradients, plan, shaped_states(model, plan) if by_shape else None
    )


def whole_gradients(model: Model, plan: Plan) -> list[int]:
    """Bytes of the gradients that the backward leaves; none where they are views of the buckets."""
    if plan.ddp.gradient_as_bucket_view:
        return []
    return [prod(shape) * DTYPE_BYTES[plan.precision.master] for _, shapes in pieces(model, plan) for shape in shapes]


def replicated_buffers(plan: Plan, library: Library) -> MakeBuffers:  # noqa: ARG001
    """With a communication hook, what the hook makes of a bucket too."""
    narrow = plan.gradient_dtype != plan.precision.master
    hooked = plan.num_data_parallel > 1 and (narrow or plan.ddp.comm_hook.kind == "powersgd")
    return HookedBuffers if hooked else ReplicatedBuffers


DDP: Final = Implementation(
    traits=Traits(
        name="ddp",
        zero_stages=(0,),
        default_for=(0,),
        gradient_dtype="master",
        whole_modules=True,
        takes_local_steps=True,
    ),
    order=lambda _: Replicated(),
    units=bucket_units,
    communication=bucketed_communication,
    resident=whole_resident,
    gradients=whole_gradients,
    buffers=replicated_buffers,
)
