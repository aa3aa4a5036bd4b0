"""nanotron: 16-bit parameters and gradients, and fp32 sums of all gradients beside them, which travel.

Without ZeRO, torch's DDP holds the 16-bit gradients in buckets, and a hook adds each bucket to the sums and all-reduces those
beside the backward. ZeRO-1 has no DDP: behind the last backward one all-reduce carries all sums to all ranks, each steps its
slice of every parameter, and the slices are gathered through flat copies. Sources, at commit e24d2483: src/nanotron
trainer.py (training_step, make_ddp), optim/gradient_accumulator.py, optim/zero.py, optim/clip_grads.py, distributed.py
(all_gather_coalesced), parallel/utils.py (MemoryBuffer).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Final

from typing_extensions import override

from simulator.base.kernels import DTYPE_BYTES, Stream
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.traits import Traits
from simulator.spec.software.stack import Stack
from simulator.work.script.buckets import DEFAULT_BUCKET_BYTES
from simulator.work.script.buffers import Buffers
from simulator.work.script.flat import flat_units
from simulator.work.script.implementation import Implementation, Library, MakeBuffers
from simulator.work.script.order import Replicated
from simulator.work.script.resident import optimizer_tensors
from simulator.work.script.sharding import Shape, numel_of, pieces, shard_ranks
from simulator.work.script.unit_comm import UnitComm

_SUM: Final = 4  # bytes of an element of the sums
# Per slice of a parameter: it is cut twice, put into a flat copy and copied out of it
_LAUNCHES_A_SLICE: Final = 2


class NanotronOrder(Replicated):
    """DDP reduces beside the backward, ZeRO-1 behind the last one."""

    @override
    def reduces_late(self, plan: Plan, stack: Stack) -> bool:
        return plan.zero == 1 or super().reduces_late(plan, stack)


class NanotronBuffers(Buffers):
    """A micro-batch's 16-bit gradients live until its backward is over and they have been added to the sums."""

    @override
    def end_backward(self) -> None:
        self.zero_grad()

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        """ZeRO-1's gather: this rank's slices flat, everybody's flat, and NCCL's own flat copy of those."""
        super().optimizer(state)
        ranks, size = shard_ranks(self.plan), DTYPE_BYTES[self.plan.compute_dtype]
        if ranks > 1:
            part = sum(numel for (numel,) in self.stepped()) * size
            flat = [self.storages.alloc(num_bytes, "buckets") for num_bytes in (part, part * ranks, part * ranks)]
            self.storages.free(*flat)

    @override
    def stepped(self) -> list[tuple[int, ...]]:
        return [(numel,) for numel in _slices(self.model, self.plan)]


def _numels(model: Model) -> list[int]:
    return [prod(shape) for _, shapes in pieces(model) for shape in shapes]


def _slices(model: Model, plan: Plan) -> list[int]:
    """Elements of the slice of each parameter that a rank steps."""
    return [-(-numel // shard_ranks(plan)) for numel in _numels(model)]


def _communication(model: Model, plan: Plan, node_ranks: int | None) -> tuple[UnitComm, ...]:  # noqa: ARG001
    return tuple(_unit_comm(name, shapes, plan) for name, shapes in pieces(model))


def _unit_comm(name: str, shapes: tuple[Shape, ...], plan: Plan) -> UnitComm:
    numel, size, ranks = numel_of(shapes), DTYPE_BYTES[plan.compute_dtype], shard_ranks(plan)
    if not numel:
        return UnitComm(unit=name)
    hooked = plan.zero == 0 and plan.num_data_parallel > 1
    added = Stream(
        op="widen", read_bytes=numel * (size + _SUM), write_bytes=numel * _SUM, launches=len(shapes), numel=numel
    )
    copied = Stream(op="copy", read_bytes=numel * size, write_bytes=numel * size, launches=len(shapes))
    gathers = ranks > 1
    sliced = Stream(
        op="copy",
        read_bytes=3 * numel * size,
        write_bytes=3 * numel * size,
        launches=_LAUNCHES_A_SLICE * len(shapes) * ranks,
    )
    return UnitComm(
        unit=name,
        all_reduce_bytes=numel * _SUM,
        num_buckets=max(1, round(numel * size / DEFAULT_BUCKET_BYTES)) if hooked else 1,
        parameter_gather_bytes=numel * size if gathers else 0,
        gather_forward_kernels=(sliced,) if gathers else (),
        gradient_kernels=(copied, copied) if hooked else (),
        keep_kernels=(added,),
        add_kernels=(added,),
    )


def _resident(model: Model, plan: Plan) -> dict[str, list[int]]:
    size, numels, slices = DTYPE_BYTES[plan.compute_dtype], _numels(model), _slices(model, plan)
    hooked = plan.zero == 0 and plan.num_data_parallel > 1
    tokens = plan.micro_batch_size * plan.seq_len // plan.cp
    gathered = [tokens * model.d_model * size] * 2 if plan.tp > 1 and plan.sequence_parallel else []
    return {
        "parameters": [numel * size for numel in numels],
        "gradients": [sum(numels) * _SUM],
        "optimizer_state": [
            sum(slices) * _SUM, *[state for numel in slices for state in optimizer_tensors(numel, plan)]
        ],
        "buckets": [*([sum(numels) * size] if hooked else []), *gathered],
    }  # fmt: skip


def _update(model: Model, plan: Plan) -> tuple[Stream, ...]:  # noqa: ARG001
    """Over all sums: their norm, their scale, and zeros for the next step; parameter by parameter but for the zeros."""
    numels = _numels(model)
    size, count = sum(numels) * _SUM, len(numels)
    return (
        Stream(op="reduce", read_bytes=size, write_bytes=0, launches=count),
        Stream(op="elementwise", read_bytes=size, write_bytes=size, launches=count),
        Stream(op="memset", read_bytes=0, write_bytes=size),
    )


def _buffers(plan: Plan, library: Library) -> MakeBuffers:  # noqa: ARG001
    return NanotronBuffers


NANOTRON: Final = Implementation(
    traits=Traits(
        name="nanotron",
        zero_stages=(0, 1),
        gradient_dtype="fp32",
        master_copy=True,
        own_model_code=True,
        reduces_among_all=True,
        balances_stages=True,
        messages_in_turn=True,
    ),
    order=lambda _: NanotronOrder(),
    units=flat_units,
    communication=_communication,
    resident=_resident,
    gradients=lambda model, plan: [],  # noqa: ARG005  the backward's own are gone
    buffers=_buffers,
    update=_update,
)
