"""nanotron: 16-bit parameters and gradients, and fp32 sums of all gradients beside them, which travel.

Without ZeRO, torch's DDP holds the 16-bit gradients in buckets, and a hook adds each bucket to the sums and all-reduces those
beside the backward. ZeRO-1 has no DDP: behind the last backward one all-reduce carries all sums to all ranks, each steps its
slice of every parameter, and the slices are gathered through flat copies. Sources, at commit e24d2483: src/nanotron
trainer.py (training_step, make_ddp), optim/gradient_accumulator.py, optim/zero.py, optim/clip_grads.py, distributed.py
(all_gather_coalesced), parallel/utils.py (MemoryBuffer).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Final

from typing_extensions import override

from simulator.base.kernels import DTYPE_BYTES, Stream
from simulator.parallel.model_shard import body_names, whole_body
from simulator.spec.model import Model, ModelPart
from simulator.spec.plan import Plan
from simulator.spec.plan.traits import Traits
from simulator.spec.software.stack import Stack
from simulator.work.parameters import trained
from simulator.work.script.buffers import Buffers
from simulator.work.script.flat import flat_units
from simulator.work.script.implementation import Implementation
from simulator.work.script.order import Replicated
from simulator.work.script.resident import optimizer_tensors
from simulator.work.script.sharding import DEFAULT_BUCKET_BYTES, Shape, numel_of, shard_ranks
from simulator.work.script.unit_comm import UnitComm

_SUM: Final = 4  # bytes of an element of the sums
_TOGETHER: Final = (
    ("attention.q.weight", "attention.k.weight", "attention.v.weight"),
    ("mlp.gate.weight", "mlp.up.weight"),
)


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
        """ZeRO-1's gather: this rank's slices flat, each rank's flat, and NCCL's one flat copy of those."""
        super().optimizer(state)
        ranks, size = shard_ranks(self.plan), DTYPE_BYTES[self.plan.compute_dtype]
        if ranks > 1:
            part = sum(numel for (numel,) in self.stepped()) * size
            flat = [self.storages.alloc(num_bytes, "buckets") for num_bytes in (*[part] * (1 + ranks), part * ranks)]
            self.storages.free(*flat)

    @override
    def stepped(self) -> list[tuple[int, ...]]:
        return [(numel,) for numel in _slices(self.model, self.plan)]


def _pieces(model: Model, plan: Plan) -> list[tuple[str, tuple[Shape, ...]]]:
    """Units with the shapes of what is trained, as registered."""
    body = [
        (name, _joined(model, kind, plan))
        for name, kind in zip(body_names(model), whole_body(model, plan), strict=True)
    ]
    return [("embedding", _joined(model, "embedding", plan)), *body, ("head", _joined(model, "head", plan))]


def _joined(model: Model, part: ModelPart, plan: Plan) -> tuple[Shape, ...]:
    """Shapes of a part's parameters; queries, keys and values are one, as gate and up are (models/llama.py)."""
    found: dict[str, Shape] = {}
    for name, shape in trained(model, part, plan):
        first = next((together[0] for together in _TOGETHER if name in together), name)
        rows = found[first][0] if first in found else 0
        found[first] = (rows + shape[0], *shape[1:])
    return tuple(found.values())


def _numels(model: Model, plan: Plan) -> list[int]:
    return [prod(shape) for _, shapes in _pieces(model, plan) for shape in shapes]


def _buckets(model: Model, plan: Plan) -> Counter[str]:
    """How many of DDP's buckets each unit fills: one closes as soon as it holds its cap, in the order of the backward."""
    filled, size = Counter[str](), 0
    for name, shapes in reversed(_pieces(model, plan)):
        for shape in reversed(shapes):
            size += prod(shape) * DTYPE_BYTES[plan.compute_dtype]
            if size >= DEFAULT_BUCKET_BYTES:
                filled[name] += 1
                size = 0
    return filled


def _slices(model: Model, plan: Plan) -> list[int]:
    """Elements of the slice of each parameter that a rank steps."""
    return [-(-numel // shard_ranks(plan)) for numel in _numels(model, plan)]


def _communication(model: Model, plan: Plan, node_ranks: int | None) -> tuple[UnitComm, ...]:  # noqa: ARG001
    filled = _buckets(model, plan)
    return tuple(_unit_comm(name, shapes, plan, max(1, filled[name])) for name, shapes in _pieces(model, plan))


def _unit_comm(name: str, shapes: tuple[Shape, ...], plan: Plan, num_buckets: int) -> UnitComm:
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
        launches=len(shapes) * ranks,  # a call a slice copies it out; going in, one call takes a rank's slices
    )
    return UnitComm(
        unit=name,
        all_reduce_bytes=numel * _SUM,
        num_buckets=num_buckets if hooked else 1,
        parameter_gather_bytes=numel * size if gathers else 0,
        gather_forward_kernels=(sliced,) if gathers else (),
        gradient_kernels=(copied, copied) if hooked else (),
        keep_kernels=(added,),
        add_kernels=(added,),
    )


def _resident(model: Model, plan: Plan) -> dict[str, list[int]]:
    size, numels, slices = DTYPE_BYTES[plan.compute_dtype], _numels(model, plan), _slices(model, plan)
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


def _update(model: Model, plan: Plan) -> tuple[Stream, ...]:
    """Over all sums: their norm, their scale, and zeros for the next step; parameter by parameter but for the zeros."""
    numels = _numels(model, plan)
    size, count = sum(numels) * _SUM, len(numels)
    return (
        Stream(op="reduce", read_bytes=size, write_bytes=0, launches=count),
        Stream(op="elementwise", read_bytes=size, write_bytes=size, launches=count),
        Stream(op="memset", read_bytes=0, write_bytes=size),
    )


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
    buffers=lambda *_: NanotronBuffers,
    update=_update,
)
