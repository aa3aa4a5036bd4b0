"""DeepSpeed: ZeRO stages 0 to 3, and ZeRO++ (DeepSpeed 0.18, `runtime/zero`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Final

from typing_extensions import override

from simulator.base.kernels import DTYPE_BYTES, Stream
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.traits import Traits
from simulator.work.parameters import trained_numel
from simulator.work.script.buffers import Buffers, ShardedBuffers
from simulator.work.script.flat import communication_apart, flat_communication, flat_resident, flat_units, padded
from simulator.work.script.implementation import Implementation, Library, MakeBuffers
from simulator.work.script.one_bit import one_bit_states
from simulator.work.script.order import Replicated, Sharded
from simulator.work.script.quantised import quantised_bytes, with_zeropp
from simulator.work.script.sharding import Shape, apart, expert_shard_ranks, pieces, shard_ranks, stepped_numel
from simulator.work.script.storage import GATHER, ROOT, Storages
from simulator.work.script.unit_comm import UnitComm


class DeepSpeedBuffers(Buffers):
    """ZeRO-0, 1 and 2 (runtime/engine.py, runtime/zero/stage_1_and_2.py).

    Stage 2 makes a bucket of its full size with the first gradient and moves gradients there as they come; this rank's are copied
    out. The others flatten what is there behind the last backward: stage 1 ignored `contiguous_gradients` in releases from 0.5.9
    on, and no longer does in 0.19, where it has a bucket, too.
    """

    def __init__(self, storages: Storages, model: Model, plan: Plan) -> None:
        super().__init__(storages, model, plan)
        self._size, self._room = DTYPE_BYTES[plan.compute_dtype], plan.deepspeed.reduce_bucket_numel
        self._parts = plan.zero == 2 and plan.traits.zero_engine
        self._at_the_end = plan.pp > 1 and plan.zero < 2
        self._bucket, self._part, self._filled, self._last = list[int](), list[int](), 0, False
        self.keeps_gradients = plan.zero < 2 and plan.offload.optimizer == "none"

    @override
    def before_backward(self, unit: int, ahead: Sequence[int] = (), *, late: bool = False) -> None:
        if self._parts and not self._bucket and (late or unit != ROOT):
            self._bucket = [self.storages.alloc(self._room * self._size, "buckets")]

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        self._last = sync
        self._filled += sum(numel for _, numel in gradients)
        if self.keeps_gradients:
            super().after_backward(unit, gradients, sync=sync)
        elif self._filled > self._room:
            self._travel()

    def _travel(self) -> None:
        numel = min(self._filled, self._room)
        self._filled -= numel
        self.storages.free(self.storages.alloc(numel * self._size, "reduce_scatter"))
        if self._parts and not self._part and self.plan.offload.optimizer == "none":
            self._part = [self.storages.alloc(_part_numel(self.model, self.plan) * self._size, "gradients")]

    @override
    def end_backward(self) -> None:
        if (self._last or self.plan.zero == 2) and not self._at_the_end:
            self._exchange()

    def _exchange(self) -> None:
        """What is not reduced yet. The part of a later micro-batch is added to the first one's."""
        self.before_backward(ROOT, late=True)
        self._travel()
        self.storages.free(*self._bucket, *(self._part if self.gradients else ()))
        self.gradients = self.gradients or self._part
        self._bucket, self._part, self._filled = [], [], 0

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        """The part's gradients become flat and fp32; 16-bit ones go before the update. Offloaded, nothing happens here."""
        if self._at_the_end:
            self._exchange()
        if self.plan.offload.optimizer != "none":
            return
        shard = stepped_numel(self.model, self.plan)
        cast = self.plan.zero > 0 and self.plan.traits.zero_engine and self._size < 4
        flat = [self.storages.alloc(shard * self._size, "gradients")] if cast else []
        wide = self.storages.alloc(shard * 4, "gradients")
        self.storages.free(*flat)
        self.zero_grad()
        state()
        self.temporaries([shard])
        self.storages.free(wide)


class Fp32SumBuffers(Buffers):
    """A pipeline in bf16: every backward makes new 16-bit gradients, which are added to fp32 ones that stay.

    They live until the next backward begins (runtime/bf16_optimizer.py, runtime/pipe/engine.py: clear_lp_grads).
    """

    keeps_gradients = True

    def __init__(self, storages: Storages, model: Model, plan: Plan) -> None:
        super().__init__(storages, model, plan)
        self._made: list[int] = []
        self._begun = False
        self._largest = max(prod(shape) for _, shapes in pieces(model, plan) for shape in shapes)

    @override
    def before_backward(self, unit: int, ahead: Sequence[int] = ()) -> None:
        if not self._begun:
            self._begun = True
            self.zero_grad()

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        self._made.extend(slot for slot, _ in gradients)

    @override
    def end_backward(self) -> None:
        """Each gradient is cast before it is added."""
        self._begun = False
        self.storages.free(self.storages.alloc(4 * self._largest, "temporaries"))

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        state()
        self.temporaries([stepped_numel(self.model, self.plan)])

    @override
    def zero_grad(self) -> None:
        self.storages.free(*self._made)
        self._made = []


class Zero3Buffers(ShardedBuffers):
    """ZeRO-3: units gathered without a copy; gradients go through the persistent bucket into the persistent part."""

    keeps_gradients = False

    def _gather(self, unit: int) -> None:
        if unit not in self.parameters and unit in self._numels:
            size, ranks = self._numels[unit] * self.compute + self._still[unit], shard_ranks(self.plan)
            fetched = self.plan.offload.parameters != "none" and ranks > 1
            shard = [self.storages.alloc(size // ranks, "all_gather", GATHER)] if fetched else []
            self.parameters[unit] = [self.storages.alloc(size, "unsharded_parameters", GATHER)]
            self.storages.free(*shard)

    def __init__(self, storages: Storages, model: Model, plan: Plan) -> None:
        super().__init__(storages, model, plan)
        first, *layers, last = [(unit.padded_numel, unit.frozen_bytes) for unit in flat_units(model, plan)]
        root = first[0] + last[0], first[1] + last[1]
        self._numels = {ROOT: root[0], **{i: numel for i, (numel, _) in enumerate(layers)}}
        self._still = {ROOT: root[1], **{i: size for i, (_, size) in enumerate(layers)}}

    @override
    def reshards(self, unit: int) -> bool:
        return unit != ROOT

    def _ahead(self, unit: int, direction: int) -> None:
        following = unit + direction
        if self._numels.get(following, 2**62) <= self.plan.deepspeed.prefetch_bucket_numel:
            self._gather(following)

    @override
    def before_forward(self, unit: int, ahead: Sequence[int] = ()) -> None:
        self._gather(unit)
        self._ahead(unit, 1)

    @override
    def after_forward(self, unit: int) -> None:
        if self.reshards(unit):
            self.storages.free(*self.parameters.pop(unit))

    @override
    def before_backward(self, unit: int, ahead: Sequence[int] = ()) -> None:
        self._gather(unit)
        self._ahead(unit if unit != ROOT else len(self.model.body), -1)

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        self.storages.free(*self.parameters.pop(unit))

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        """Sub-groups of 1e9 elements: one group's gradients are made flat and fp32 at a time. Offloaded, none are."""
        if self.plan.offload.optimizer != "none":
            return
        shard = min(-(-trained_numel(self.model, self.plan) // shard_ranks(self.plan)), 10**9)
        state()
        flat = [self.storages.alloc(shard * self.compute, "gradients")] if self.compute < 4 else []
        self.storages.free(*flat, self.storages.alloc(shard * 4, "gradients"))


class ZeroPlusPlusBuffers(Zero3Buffers):
    """Gathered int8 until the parameters are used; the second copy, from the first forward to the optimizer; int4.

    DeepSpeed's `_partition_param_sec` makes the second copy when a forward releases a unit, and `invalidate_secondary_tensor`
    drops all of them in the step.
    """

    def __init__(self, storages: Storages, model: Model, plan: Plan) -> None:
        super().__init__(storages, model, plan)
        self._zeropp = plan.deepspeed.zeropp
        self._narrow: dict[int, int] = {}  # unit -> slot of its gathered int8
        self._second: dict[int, int] = {}  # unit -> slot of this rank's part of the second copy
        self._matrix = max(prod(shape) for _, shapes in pieces(model, plan) for shape in shapes)

    @override
    def _gather(self, unit: int) -> None:
        if not self._zeropp.quantized_weights:
            super()._gather(unit)
        elif unit not in self.parameters and unit not in self._narrow and unit in self._numels:
            self._narrow[unit] = self.storages.alloc(quantised_bytes(self._numels[unit]), "all_gather", GATHER)

    def _widen(self, unit: int) -> None:
        if unit in self._narrow:
            size = self._numels[unit] * self.compute
            self.parameters[unit] = [self.storages.alloc(size, "unsharded_parameters")]
            self.storages.free(self._narrow.pop(unit))

    @override
    def before_forward(self, unit: int, ahead: Sequence[int] = ()) -> None:
        super().before_forward(unit, ahead)
        self._widen(unit)

    @override
    def after_forward(self, unit: int) -> None:
        near = self._zeropp.secondary_ranks
        if near > 1 and unit not in self._second:
            size = -(-self._numels[unit] // near) * self.compute
            self._second[unit] = self.storages.alloc(size, "unsharded_parameters")
        super().after_forward(unit)

    @override
    def before_backward(self, unit: int, ahead: Sequence[int] = ()) -> None:
        super().before_backward(unit, ahead)
        self._widen(unit)

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        super().after_backward(unit, gradients, sync=sync)
        if self._zeropp.quantized_gradients and unit != ROOT:
            # one matrix at a time: its int4, and what it receives
            self.storages.free(*[self.storages.alloc(self._matrix // 2, "reduce_scatter") for _ in range(2)])

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        self.storages.free(*self._second.values())
        self._second = {}
        super().optimizer(state)


def _unit_comm(name: str, shapes: tuple[Shape, ...], plan: Plan, ranks: int) -> UnitComm:
    """Gradients are copied into buckets and divided; stage 3 gathers matrices, together what a bucket ahead holds (partitioned_param_coordinator.py).

    MiCS sums among replicas with the last micro-batch alone.
    """
    compute, reduced = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.gradient_dtype]
    numel = padded(shapes, ranks)
    copy = Stream(op="copy", read_bytes=numel * compute, write_bytes=numel * compute)
    divide = Stream(op="elementwise", read_bytes=numel * reduced, write_bytes=numel * reduced)
    matrices = max(1, sum(len(shape) > 1 for shape in shapes))
    sums, ahead = (-(-numel // n) for n in (plan.deepspeed.reduce_bucket_numel, plan.deepspeed.prefetch_bucket_numel))
    comm = flat_communication(name, shapes, plan, ranks, (copy, divide), min(sums, matrices))
    return replace(comm, late_all_reduce=plan.zero == 3, num_gathers=min(max(ahead, 1), matrices))


def _communication(model: Model, plan: Plan, node_ranks: int | None) -> tuple[UnitComm, ...]:
    near, every = node_ranks or shard_ranks(plan), communication_apart(model, plan, _unit_comm)
    pairs = zip(every, apart(model, plan), strict=True)
    return tuple(with_zeropp(comm, shapes, plan, near) for comm, (_, shapes, _) in pairs)


def _resident(model: Model, plan: Plan) -> dict[str, list[int]]:
    compute = DTYPE_BYTES[plan.compute_dtype]

    def gradients(shard: int, full: int) -> list[int]:
        return [shard * compute] if plan.zero == 3 else [full * 4] if plan.sums_in_fp32 else []

    buckets = [plan.deepspeed.reduce_bucket_numel * compute] if plan.zero == 3 else []
    if plan.offload.optimizer != "none" and plan.zero < 3:  # through which gradients leave
        largest = max(prod(shape) for _, shapes in pieces(model, plan) for shape in shapes)
        buckets = [*buckets, largest * compute]
    found = flat_resident(model, plan, gradients, buckets)
    return {**found, "optimizer_state": [*found["optimizer_state"], *one_bit_states(model, plan)]}


def _gradients(model: Model, plan: Plan) -> list[int]:
    if plan.zero == 3:
        return []
    numel = trained_numel(model, plan) if plan.zero < 2 else stepped_numel(model, plan)
    return [numel * DTYPE_BYTES[plan.compute_dtype]]


def _part_numel(model: Model, plan: Plan) -> int:
    """Elements of the tensors that reach into the first rank's part, whole."""
    total, pairs = 0, [one[1:] for one in apart(model, plan)]
    for which, ranks in enumerate((shard_ranks(plan), expert_shard_ranks(plan))):
        sizes = [prod(shape) for pair in pairs for shape in pair[which]]
        begins, all_numel = accumulate(sizes, initial=0), sum(sizes)
        total += sum(size for size, begin in zip(sizes, begins, strict=False) if begin * ranks < all_numel)
    return total


def _buffers(plan: Plan, library: Library) -> MakeBuffers:  # noqa: ARG001
    if plan.deepspeed.zeropp.any:
        return ZeroPlusPlusBuffers
    if plan.sums_in_fp32:
        return Fp32SumBuffers
    return Zero3Buffers if plan.zero == 3 else DeepSpeedBuffers


DEEPSPEED: Final = Implementation(
    traits=Traits(
        name="deepspeed",
        zero_stages=(0, 1, 2, 3),
        master_copy=True,
        states_when_built=True,  # runtime/zero/stage_1_and_2.py, initialize_optimizer_states: a step of zeros
        own_model_code=True,
        sums_in_fp32=True,
        expert_groups=True,
        masks_rows=True,
        zero_engine=True,
    ),
    order=lambda plan: Sharded() if plan.zero == 3 else Replicated(),
    units=flat_units,
    communication=_communication,
    resident=_resident,
    gradients=_gradients,
    buffers=_buffers,
)
