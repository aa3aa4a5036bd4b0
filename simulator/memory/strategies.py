"""What each implementation of data parallelism holds around the blocks of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from typing_extensions import override

from simulator.kernels import DTYPE_BYTES
from simulator.memory.step import ROOT, Strategy, Writer
from simulator.memory.tape import DONE, FREE_LATER, GATHER, REDUCE
from simulator.model import Model
from simulator.plan import Plan
from simulator.zero import Unit, keeps_layers, keeps_root, shard_ranks, stepped_numels, units

__all__ = ["strategy_of"]


Library = Literal["nccl", "gloo"]


def strategy_of(plan: Plan, library: Library = "nccl") -> Callable[[Writer, Model, Plan], Strategy]:
    """The strategy that runs a plan; library: what its collectives are."""
    match plan.implementation:
        case "fsdp2":
            return Fsdp2OverGloo if library == "gloo" else Fsdp2
        case "fsdp1":
            return Fsdp1
        case "deepspeed":
            return DeepSpeed3 if plan.zero == 3 else DeepSpeed
        case "megatron":
            return MegatronFsdp if plan.zero == 3 else Megatron
        case _:
            return Replicated


class Replicated(Strategy):
    """DDP and torch's ZeRO-1: gradients beside the buckets, or inside them as views."""

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        super().__init__(writer, model, plan)
        self.keeps_gradients = not plan.gradient_as_bucket_view or plan.num_data_parallel == 1

    @override
    def stepped(self) -> list[tuple[int, ...]]:
        return [(numel,) for numel in stepped_numels(self.model, self.plan)]


class Sharded(Strategy):
    """Common to FSDP and ZeRO-3: units are gathered for use, and freed."""

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        super().__init__(writer, model, plan)
        self.compute, self.master = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.master_dtype]
        self.reduced = DTYPE_BYTES[plan.gradient_dtype]
        self.units: dict[int, Unit] = dict(enumerate(units(model, plan), start=ROOT))
        self.parameters: dict[int, list[int]] = {}  # unit -> slots of its gathered parameters
        self.kept: dict[int, list[tuple[int, int]]] = {}  # unit -> gradients accumulated without a reduction
        self.shards: dict[int, int] = {}  # unit -> slot of its reduced gradient

    @override
    def begin(self) -> None:
        self.shards = {}

    def reshards(self, unit: int) -> bool:
        return not (keeps_root(self.plan) if unit == ROOT else keeps_layers(self.plan))

    @override
    def zero_grad(self) -> None:
        self.writer.free(*self.shards.values())
        self.shards = {}

    def keep_shard(self, unit: int, slot: int) -> None:
        """The reduced gradient of a micro-batch: the first one stays, later ones are added to it; or it leaves HBM."""
        if unit in self.shards or self.plan.offload.optimizer != "none":
            self.writer.free(slot)
        else:
            self.shards[unit] = slot

    def accumulate(self, unit: int, gradients: Sequence[tuple[int, int]], element_bytes: int) -> None:
        """Without a reduction, whole gradients stay, in `element_bytes` an element."""
        if unit not in self.kept:
            self.kept[unit] = [(self.writer.alloc(numel * element_bytes, "gradients"), numel) for _, numel in gradients]
        self.writer.free(*[slot for slot, _ in gradients])

    def take_kept(self, unit: int, gradients: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Gradients to reduce: this micro-batch's, added to those kept before."""
        kept = self.kept.pop(unit, None)
        if kept is None:
            return gradients
        self.writer.free(*[slot for slot, _ in gradients])
        return kept


class Fsdp2(Sharded):
    """fully_shard: gather into one buffer, copy out to parameters; copy gradients into one buffer, scatter.

    The gathered buffer of a forward lives until the next unit's copy-out, the reduce-scatter's input until the next
    unit's gradients are ready (torch 2.13 `_fsdp_param_group.py`; seen so in recorded steps).
    """

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        super().__init__(writer, model, plan)
        self._buffers: dict[int, int] = {}  # unit -> slot of its gathered, not yet copied buffer
        self._last: int | None = None  # the last forward's buffer
        self._scattering: int | None = None  # input of the reduce-scatter in flight
        self._smaller: dict[int, int] = {}  # unit -> its copy resharded to a smaller group

    def _gather(self, unit: int) -> None:
        if unit in self._buffers or unit in self.parameters or unit not in self.units:
            return
        piece = self.units[unit]
        fetched = [self.writer.alloc(numel * self.master, "all_gather", GATHER) for numel in self.fetched(unit)]
        cast = None
        if self.compute != self.master and unit not in self._smaller:
            cast = self.writer.alloc(sum(piece.local_numels) * self.compute, "all_gather", GATHER)
        self._buffers[unit] = self.writer.alloc(piece.padded_numel * self.compute, "all_gather", GATHER)
        self.writer.free(*fetched)
        if cast is not None:
            self.writer.free(cast)

    def fetched(self, unit: int) -> tuple[int, ...]:
        """Elements of the shards that come from the host for a gather."""
        offloaded = self.plan.offload.parameters != "none" and unit not in self._smaller
        return self.units[unit].local_numels if offloaded else ()

    def _copy_out(self, unit: int) -> None:
        tensors = zip(self.units[unit].local_numels, self.units[unit].tensor_shards, strict=True)
        self.parameters[unit] = [
            self.writer.alloc(numel * ranks * self.compute, "unsharded_parameters") for numel, ranks in tensors
        ]

    @override
    def before_forward(self, unit: int) -> None:
        if unit in self.parameters:
            return
        prefetched = unit in self._buffers
        self._gather(unit)
        for ahead in range(unit + 1, unit + 1 + self.plan.forward_prefetch):
            self._gather(ahead)
        self._copy_out(unit)
        self._release()
        if prefetched:
            self.writer.free(self._buffers.pop(unit))
        else:
            self._last = self._buffers.pop(unit)

    def _release(self) -> None:
        if self._last is not None:
            self.writer.free(self._last)
            self._last = None

    @override
    def after_forward(self, unit: int) -> None:
        if self.reshards(unit):
            reshard = self.plan.reshard_ranks
            if reshard is not None:
                size = self.units[unit].padded_numel // reshard * self.compute
                self._smaller[unit] = self.writer.alloc(size, "unsharded_parameters")
            self.writer.free(*self.parameters.pop(unit))
        if unit == ROOT:
            self._release()

    @override
    def before_backward(self, unit: int) -> None:
        if unit not in self.parameters:
            self._gather(unit)
            self._copy_out(unit)
            self.writer.free(self._buffers.pop(unit))
            if unit in self._smaller:
                self.writer.free(self._smaller.pop(unit))
        first = unit if unit != ROOT else len(self.model.body)
        for ahead in range(first - 1, max(first - 1 - self.plan.backward_prefetch, ROOT), -1):
            self._gather(ahead)

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        if not sync:
            self.writer.free(*self.parameters.pop(unit))
            self.accumulate(unit, gradients, self.reduced)
            return
        slots = [self._own_part(slot, numel) for slot, numel in self.take_kept(unit, gradients)]
        self.writer.free(*self.parameters.pop(unit))
        piece = self.units[unit]
        self.end_backward()
        self._scattering = self.writer.alloc(piece.padded_numel * self.reduced, "reduce_scatter")
        self.writer.free(*slots[1:])
        shard = self.writer.alloc(piece.shard_numel * self.reduced, "gradients", REDUCE)
        self.scatter(piece)
        self.writer.free(*slots[:1])  # one reference outlives the copy
        if self.reduced != self.master:
            wide = self.writer.alloc(piece.shard_numel * self.master, "gradients", REDUCE)
            self.writer.free(shard)
            shard = wide
        self.keep_shard(unit, shard)

    def _own_part(self, slot: int, numel: int) -> int:
        """Of DTensor's gradient of a whole table, the rank's part is copied, and the rest goes."""
        if numel != self.whole_table_numel:
            return slot
        size = DTYPE_BYTES[self.plan.compute_dtype]
        part = self.writer.alloc(numel // self.plan.tp * size, "gradients")
        self.writer.free(slot)
        return part

    def scatter(self, piece: Unit) -> None:
        """What the reduce-scatter itself holds meanwhile: NCCL's buffers are its own."""

    @override
    def end_backward(self) -> None:
        if self._scattering is not None:
            self.writer.free(self._scattering)
            self._scattering = None


class Fsdp2OverGloo(Fsdp2):
    """gloo scatters by an all-reduce of a copy of the input, of which each rank keeps its part (torch 2.13)."""

    @override
    def scatter(self, piece: Unit) -> None:
        if piece.shards > 1:
            self.writer.free(self.writer.alloc(piece.padded_numel * self.reduced, "reduce_scatter"))


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
    """ZeRO-0, 1 and 2: gradients pass through a bucket; stage 2 keeps this rank's part of them only."""

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        super().__init__(writer, model, plan)
        self._size = DTYPE_BYTES[plan.compute_dtype]
        self._bucket: int | None = None
        self.keeps_gradients = False

    @override
    def before_backward(self, unit: int) -> None:
        if unit != ROOT or self._bucket is not None:
            return
        ranks = shard_ranks(self.plan) if self.plan.zero == 2 else 1
        if not self.gradients and self.plan.offload.optimizer == "none":
            part = -(-self.model.num_parameters // ranks) * self._size
            self.gradients = [self.writer.alloc(part, "gradients")]
        numel = min(self.plan.reduce_bucket_numel, self.model.num_parameters)
        self._bucket = self.writer.alloc(numel * self._size, "buckets")

    @override
    def end_backward(self) -> None:
        if self._bucket is not None:
            self.writer.free(self._bucket)
            self._bucket = None

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        """The part's gradients are cast to fp32; 16-bit ones go before the update. Offloaded, nothing happens here."""
        if self.plan.offload.optimizer != "none":
            return
        shard = -(-self.model.num_parameters // shard_ranks(self.plan))
        wide = self.writer.alloc(shard * 4, "gradients")
        self.zero_grad()
        state()
        self.temporaries([shard])
        self.writer.free(wide)


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
    """Megatron's distributed optimizer: gradients are added straight into a persistent buffer."""

    keeps_gradients = False
