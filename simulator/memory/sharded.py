"""Implementations that shard parameters: what they have in common, and FSDP2."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from simulator.base.kernels import DTYPE_BYTES
from simulator.memory.step import ROOT, Strategy, Writer
from simulator.memory.tape import GATHER, REDUCE
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.zero import ParameterUnit, gathered_sizes, keeps_layers, keeps_root, units


class Sharded(Strategy):
    """Common to FSDP and ZeRO-3: units are gathered for use, and freed."""

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        super().__init__(writer, model, plan)
        self.compute, self.master = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.master_dtype]
        self.reduced = DTYPE_BYTES[plan.gradient_dtype]
        self.units: dict[int, ParameterUnit] = dict(enumerate(units(model, plan), start=ROOT))
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
        if self.leaves(unit):
            self.writer.free(slot)
        else:
            self.shards[unit] = slot

    def leaves(self, unit: int) -> bool:
        """The unit's reduced gradient does not stay as it is: it is added to an earlier one, or goes to the host."""
        return unit in self.shards or self.plan.offload.optimizer != "none"

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
        self._summed: list[int] = []  # what replicas all-reduced, where it is not the gradient itself
        self._smaller: dict[int, int] = {}  # unit -> its copy resharded to a smaller group

    def _gather(self, unit: int) -> None:
        if unit in self._buffers or unit in self.parameters or unit not in self.units:
            return
        piece = self.units[unit]
        given = [] if unit in self._smaller else self._given(piece)
        num_bytes = (
            sum(gathered_sizes(piece, self.plan)) if self.plan.fp8_all_gather else piece.padded_numel * self.compute
        )
        self._buffers[unit] = self.writer.alloc(num_bytes, "all_gather", GATHER)
        self.writer.free(*given)

    def _given(self, piece: ParameterUnit) -> list[int]:
        """What a gather reads beside the shards themselves: all of them cast at once, or, from the host, one by one."""
        alloc = self.writer.alloc
        if self.plan.offload.parameters == "none":
            if self.plan.fp8_all_gather:
                sizes = zip(gathered_sizes(piece, self.plan), piece.tensor_shards, strict=True)
                return [alloc(sum(size // ranks for size, ranks in sizes), "all_gather", GATHER)]
            numel = sum(piece.local_numels)
            return [alloc(numel * self.compute, "all_gather", GATHER)] if self.compute != self.master else []
        given = []
        for numel in piece.local_numels:
            fetched = alloc(numel * self.master, "all_gather", GATHER)
            if self.compute != self.master:
                cast = alloc(numel * self.compute, "all_gather", GATHER)
                self.writer.free(fetched)
                fetched = cast
            given.append(fetched)
        return given

    def _copy_out(self, unit: int) -> None:
        sizes = gathered_sizes(self.units[unit], self.plan)
        self.parameters[unit] = [self.writer.alloc(size, "unsharded_parameters") for size in sizes]

    @override
    def before_forward(self, unit: int) -> None:
        if unit in self.parameters:
            return
        self._gather(unit)
        self._copy_out(unit)
        self._release()
        self._last = self._buffers.pop(unit)
        for ahead in range(unit + 1, unit + 1 + self.plan.forward_prefetch):
            self._gather(ahead)

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
        self._end_scatter()
        self._scattering = self.writer.alloc(piece.padded_numel * self.reduced, "reduce_scatter")
        self.writer.free(*slots[1:])
        shard = self.writer.alloc(piece.shard_numel * self.reduced, "gradients", REDUCE)
        self.scatter(piece)
        self.writer.free(*slots[:1])  # one reference outlives the copy
        if self.reduced != self.master:
            wide = self.writer.alloc(piece.shard_numel * self.master, "gradients", REDUCE)
            self._release_sum(shard)
            shard = wide
        elif self.plan.sums_replicas and self.leaves(unit):
            self._release_sum(shard)
            return
        self.keep_shard(unit, shard)

    def _release_sum(self, slot: int) -> None:
        """What was all-reduced among replicas is held to the end of the backward (torch 2.13, AllReduceState)."""
        if self.plan.sums_replicas:
            self._summed.append(slot)
        else:
            self.writer.free(slot)

    def _own_part(self, slot: int, numel: int) -> int:
        """Of DTensor's gradient of a whole table, the rank's part is copied, and the rest goes."""
        if numel != self.whole_table_numel:
            return slot
        size = DTYPE_BYTES[self.plan.compute_dtype]
        part = self.writer.alloc(numel // self.plan.tp * size, "gradients")
        self.writer.free(slot)
        return part

    def scatter(self, piece: ParameterUnit) -> None:
        """What the reduce-scatter itself holds meanwhile: NCCL's buffers are its own."""

    def _end_scatter(self) -> None:
        if self._scattering is not None:
            self.writer.free(self._scattering)
            self._scattering = None

    @override
    def end_backward(self) -> None:
        self._end_scatter()
        self.writer.free(*self._summed)
        self._summed = []


class Fsdp2OverGloo(Fsdp2):
    """gloo scatters by an all-reduce of a copy of the input, of which each rank keeps its part (torch 2.13)."""

    @override
    def scatter(self, piece: ParameterUnit) -> None:
        if piece.shards > 1:
            self.writer.free(self.writer.alloc(piece.padded_numel * self.reduced, "reduce_scatter"))
