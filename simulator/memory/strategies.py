"""What each implementation of data parallelism holds around the blocks of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from typing_extensions import override

from simulator.base.kernels import DTYPE_BYTES
from simulator.memory.sharded import Sharded
from simulator.memory.step import ROOT, Strategy, Writer
from simulator.memory.tape import DONE, FREE_LATER, GATHER, REDUCE
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.zero import gradient_tensors, pieces, shard_ranks, stepped_numels, units


class Replicated(Strategy):
    """DDP and torch's ZeRO-1: gradients beside the buckets, or inside them as views."""

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        super().__init__(writer, model, plan)
        # Views of the buckets are made as a bucket is filled: what is accumulated before that is kept beside them
        self._views = plan.gradient_as_bucket_view and plan.num_data_parallel > 1
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
            self.writer.free(*self._accumulated.pop(unit, ()), *slots)
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


class Fsdp1(Sharded):
    """FullyShardedDataParallel: the gathered vector is the parameters; frees wait for the compute stream.

    With limit_all_gathers the host waits, before a gather, for the unit two back; without, it runs ahead and frees
    come late.
    """

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        super().__init__(writer, model, plan)
        self._events: list[int] = []  # frees the host has not waited for
        self._next_event = 1000

    def _gather(self, unit: int) -> None:
        if unit in self.parameters or unit not in self.units:
            return
        if self.plan.limit_all_gathers and len(self._events) >= 2:
            self.writer.events.append((0, DONE, self._events.pop(0), 0))
        piece = self.units[unit]
        cast = None
        if self.compute != self.master:
            cast = self.writer.alloc(piece.shard_numel * self.compute, "all_gather", GATHER)
        if piece.shards > 1 or cast is None:
            num_bytes = piece.padded_numel * self.compute if piece.shards > 1 else 0
            self.parameters[unit] = [self.writer.alloc(num_bytes, "unsharded_parameters", GATHER)] if num_bytes else []
            if cast is not None:
                self._free_later(cast)
        else:
            self.parameters[unit] = [cast]

    def _free_later(self, *slots: int) -> None:
        self.writer.events.extend([(slot, FREE_LATER, self._next_event, 0) for slot in slots])

    def _reshard(self, unit: int) -> None:
        self._free_later(*self.parameters.pop(unit))
        self._events.append(self._next_event)
        self._next_event += 1

    @override
    def before_forward(self, unit: int) -> None:
        self._gather(unit)
        for ahead in range(unit + 1, unit + 1 + self.plan.forward_prefetch):
            self._gather(ahead)

    @override
    def after_forward(self, unit: int) -> None:
        if self.reshards(unit):
            self._reshard(unit)

    @override
    def before_backward(self, unit: int) -> None:
        self._gather(unit)
        first = unit if unit != ROOT else len(self.model.body)
        for ahead in range(first - 1, max(first - 1 - self.plan.backward_prefetch, ROOT), -1):
            self._gather(ahead)

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        piece = self.units[unit]
        flat = self.writer.alloc(piece.padded_numel * self.compute, "gradients")
        self.writer.free(*[slot for slot, _ in gradients])
        self._reshard(unit)
        if not sync:
            self.accumulate(unit, [(flat, piece.padded_numel)], self.compute)
            return
        ((flat, _),) = self.take_kept(unit, [(flat, piece.padded_numel)])
        if self.reduced != self.compute:
            wide = self.writer.alloc(piece.padded_numel * self.reduced, "reduce_scatter", REDUCE)
            self._free_later(flat)
            flat = wide
        shard = self.writer.alloc(piece.shard_numel * self.reduced, "gradients", REDUCE)
        self._free_later(flat)
        if self.reduced != self.master:
            wide = self.writer.alloc(piece.shard_numel * self.master, "gradients", REDUCE)
            self._free_later(shard)
            shard = wide
        self.keep_shard(unit, shard)

    @override
    def end_backward(self) -> None:
        for event in range(1000, self._next_event + 1):
            self.writer.events.append((0, DONE, event, 0))
        self._events, self._next_event = [], 1000


class DeepSpeed(Strategy):
    """ZeRO-0, 1 and 2: gradients pass through a bucket; stage 2 keeps this rank's part of them only.

    A pipeline reduces once, behind the last backward: its bucket is made then (runtime/zero/stage_1_and_2.py).
    """

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        super().__init__(writer, model, plan)
        self._size = DTYPE_BYTES[plan.compute_dtype]
        self._bucket: int | None = None
        self._begun = False
        self.keeps_gradients = False

    @override
    def before_backward(self, unit: int) -> None:
        if self._begun:
            return
        self._begun = True
        ranks = shard_ranks(self.plan) if self.plan.zero == 2 else 1
        if not self.gradients and self.plan.offload.optimizer == "none":
            part = -(-self.model.num_parameters // ranks) * self._size
            self.gradients = [self.writer.alloc(part, "gradients")]
        if not self._reduces_at_the_end:
            self._bucket = self._new_bucket()

    @property
    def _reduces_at_the_end(self) -> bool:
        return self.plan.pp > 1 and self.plan.zero < 2

    def _new_bucket(self) -> int:
        numel = min(self.plan.reduce_bucket_numel, self.model.num_parameters)
        return self.writer.alloc(numel * self._size, "buckets")

    @override
    def end_backward(self) -> None:
        self._begun = False
        if self._bucket is not None:
            self.writer.free(self._bucket)
            self._bucket = None

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        """The part's gradients are cast to fp32; 16-bit ones go before the update. Offloaded, nothing happens here."""
        if self._reduces_at_the_end:
            self.writer.free(self._new_bucket())
        if self.plan.offload.optimizer != "none":
            return
        shard = -(-self.model.num_parameters // shard_ranks(self.plan))
        wide = self.writer.alloc(shard * 4, "gradients")
        self.zero_grad()
        state()
        self.temporaries([shard])
        self.writer.free(wide)


class DeepSpeedBf16(Strategy):
    """A pipeline in bf16: every backward makes new 16-bit gradients, which are added to fp32 ones that stay.

    They live until the next backward begins (runtime/bf16_optimizer.py, runtime/pipe/engine.py: clear_lp_grads).
    """

    keeps_gradients = True

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        super().__init__(writer, model, plan)
        self._made: list[int] = []
        self._begun = False
        self._largest = max(prod(shape) for _, shapes in pieces(model) for shape in shapes)

    @override
    def before_backward(self, unit: int) -> None:
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
        self.writer.free(self.writer.alloc(4 * self._largest, "temporaries"))

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        state()
        self.temporaries([-(-self.model.num_parameters // shard_ranks(self.plan))])

    @override
    def zero_grad(self) -> None:
        self.writer.free(*self._made)
        self._made = []


class DeepSpeed3(Sharded):
    """ZeRO-3: units gathered without a copy; gradients go through the persistent bucket into the persistent part."""

    keeps_gradients = False

    def _gather(self, unit: int) -> None:
        if unit not in self.parameters and unit in self._numels:
            size, ranks = self._numels[unit] * self.compute, shard_ranks(self.plan)
            fetched = self.plan.offload.parameters != "none" and ranks > 1
            shard = [self.writer.alloc(size // ranks, "all_gather", GATHER)] if fetched else []
            self.parameters[unit] = [self.writer.alloc(size, "unsharded_parameters", GATHER)]
            self.writer.free(*shard)

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        super().__init__(writer, model, plan)
        ((_, embedding), *layers, (_, head)) = [(unit.name, unit.padded_numel) for unit in units(model, plan)]
        self._numels = {ROOT: embedding + head, **{i: numel for i, (_, numel) in enumerate(layers)}}

    @override
    def reshards(self, unit: int) -> bool:
        return unit != ROOT

    def _ahead(self, unit: int, direction: int) -> None:
        following = unit + direction
        if self._numels.get(following, 2**62) <= self.plan.prefetch_bucket_numel:
            self._gather(following)

    @override
    def before_forward(self, unit: int) -> None:
        self._gather(unit)
        self._ahead(unit, 1)

    @override
    def after_forward(self, unit: int) -> None:
        if self.reshards(unit):
            self.writer.free(*self.parameters.pop(unit))

    @override
    def before_backward(self, unit: int) -> None:
        self._gather(unit)
        self._ahead(unit if unit != ROOT else len(self.model.body), -1)

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        self.writer.free(*self.parameters.pop(unit))

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        """Sub-groups of 1e9 elements: only one group's fp32 gradients exist at once. Offloaded, none do."""
        if self.plan.offload.optimizer != "none":
            return
        shard = -(-self.model.num_parameters // shard_ranks(self.plan))
        state()
        wide = self.writer.alloc(min(shard, 10**9) * 4, "gradients")
        self.writer.free(wide)


class MegatronFsdp(DeepSpeed3):
    """Megatron-FSDP: units gathered without a copy, the next one meanwhile.

    Weight gradients go straight into the input of the reduce-scatter; one is filled while another is reduced (its
    docs/runtime_schedule.md).
    """

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        super().__init__(writer, model, plan)
        self._filling: dict[int, int] = {}
        self._reducing: list[int] = []

    @override
    def _ahead(self, unit: int, direction: int) -> None:
        self._gather(unit + direction)

    @override
    def before_backward(self, unit: int) -> None:
        super().before_backward(unit)
        self._filling[unit] = self.writer.alloc(self._numels[unit] * self.reduced, "reduce_scatter")

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        super().after_backward(unit, gradients, sync=sync)
        self.end_backward()
        self._reducing = [self._filling.pop(unit)]

    @override
    def end_backward(self) -> None:
        self.writer.free(*self._reducing)
        self._reducing = []

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        """Reads the fp32 shards where they lie."""
        state()


class Megatron(Strategy):
    """Megatron's distributed optimizer: gradients are added straight into a persistent buffer.

    Where that is not fp32, the optimizer casts its part's (distrib_optimizer.py: _copy_model_grads_to_main_grads), which
    the next step's zero_grad lets go.
    """

    keeps_gradients = False

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        wide = [self.writer.alloc(size, "gradients") for size in gradient_tensors(self.model, self.plan)]
        super().optimizer(state)
        self.writer.free(*wide)
