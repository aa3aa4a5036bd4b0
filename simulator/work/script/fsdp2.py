"""FSDP2: torch's `fully_shard` (torch 2.13 `_fully_shard/_fsdp_param_group.py`, `_fsdp_collectives.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from simulator.base.kernels import DTYPE_BYTES, Stream
from simulator.parallel.model_shard import ModelShard
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.traits import Traits
from simulator.work.script.buffers import ShardedBuffers
from simulator.work.script.fsdp import (
    UnitPasses,
    added,
    fsdp_communication,
    fsdp_ends,
    fsdp_gradients,
    fsdp_resident,
    fsdp_units,
)
from simulator.work.script.implementation import Implementation
from simulator.work.script.order import Sharded
from simulator.work.script.sharding import ParameterUnit, by_rows, gathered_sizes
from simulator.work.script.storage import GATHER, HEAD, REDUCE, ROOT, Storages


class Fsdp2Order(Sharded):
    """An all-gather waits for the copy-out of the unit two back, which follows the kernels of the one three back."""

    @override
    def forward_window(self, plan: Plan) -> int | None:
        return max(3, plan.fsdp.forward_prefetch + 2)


class Fsdp2Buffers(ShardedBuffers):
    """fully_shard: gather into one buffer, copy out to parameters; copy gradients into one buffer, scatter.

    The gathered buffer of a forward lives until the next unit's copy-out, the reduce-scatter's input until the next
    unit's gradients are ready (torch 2.13 `_fsdp_param_group.py`; seen so in recorded steps).
    """

    def __init__(self, storages: Storages, model: Model, plan: Plan) -> None:
        super().__init__(storages, model, plan)
        self._buffers: dict[int, int] = {}  # unit -> slot of its gathered, not yet copied buffer
        self._last: int | None = None  # the last forward's buffer
        self._scattering: int | None = None  # input of the reduce-scatter in flight
        self._summed: list[int] = []  # what replicas all-reduced, where it is not the gradient itself
        self._smaller: dict[int, int] = {}  # unit -> its copy resharded to a smaller group
        self._sizes: dict[int, tuple[int, ...]] = {}  # unit -> bytes of its parameters, once they were gathered
        # torch's pipelines gather once a step (torch 2.13, pipelining/stage.py: set_reshard_after_backward)
        self._stay_gradients = self.compute == self.reduced  # (to_accumulated_grad_if_needed)
        self._unhooked: dict[int, list[tuple[int, int]]] = {}  # unit -> gradients that its next hook widens
        self._stays = plan.pp > 1 and plan.traits.uses_torch_pipelines
        if self._stays and isinstance(model, ModelShard) and model.embedding_chunk not in (None, model.head_chunk):
            self.head = HEAD  # the root of another module
            self.units[ROOT], self.units[HEAD] = fsdp_ends(model, plan, by_rows)

    @property
    @override
    def adds_in_place(self) -> bool:
        return self._stay_gradients and bool(self.kept)

    def _gather(self, unit: int) -> None:
        if unit in self._buffers or unit in self.parameters or unit not in self.units:
            return
        piece = self.units[unit]
        given = [] if unit in self._smaller else self._given(piece)
        narrow = self.plan.precision.fp8_all_gather
        num_bytes = sum(gathered_sizes(piece, self.plan)) if narrow else piece.padded_numel * self.compute
        num_bytes += piece.frozen_bytes
        self._buffers[unit] = self.storages.alloc(num_bytes, "all_gather", GATHER)
        self.storages.free(*given)
        self.copied(piece, num_bytes, "all_gather")

    def _given(self, piece: ParameterUnit) -> list[int]:
        """What a gather reads beside the shards themselves: all of them cast at once, or, from the host, one by one."""
        alloc = self.storages.alloc
        if self.plan.offload.parameters == "none":
            if self.plan.precision.fp8_all_gather:
                sizes = zip(gathered_sizes(piece, self.plan), piece.tensor_shards, strict=True)
                return [alloc(sum(size // ranks for size, ranks in sizes), "all_gather", GATHER)]
            numel = sum(piece.local_numels)
            casts = self.compute != self.master and numel > 0
            return [alloc(numel * self.compute, "all_gather", GATHER)] if casts else []
        given = [alloc(-(-one.size // piece.shards), "all_gather", GATHER) for one in piece.frozen]
        for numel in piece.local_numels:
            fetched = alloc(numel * self.master, "all_gather", GATHER)
            if self.compute != self.master:
                cast = alloc(numel * self.compute, "all_gather", GATHER)
                self.storages.free(fetched)
                fetched = cast
            given.append(fetched)
        return given

    def _copy_out(self, unit: int) -> None:
        sizes = self._sizes.get(unit)
        if sizes is None:
            piece = self.units[unit]
            sizes = self._sizes[unit] = (*gathered_sizes(piece, self.plan), *(one.size for one in piece.frozen))
        self.parameters[unit] = self.storages.alloc_each(sizes, "unsharded_parameters")

    @override
    def before_forward(self, unit: int, ahead: Sequence[int] = ()) -> None:
        if unit in self.parameters:
            return
        self._gather(unit)
        self._copy_out(unit)
        self._release()
        self._last = self._buffers.pop(unit)
        for one in ahead:
            self._gather(one)

    def _release(self) -> None:
        if self._last is not None:
            self.storages.free(self._last)
            self._last = None

    @override
    def after_forward(self, unit: int) -> None:
        if self.reshards(unit):
            reshard = self.plan.reshard_ranks
            if reshard is not None:
                piece = self.units[unit]
                size = (piece.padded_numel * self.compute + piece.frozen_bytes) // reshard
                self._smaller[unit] = self.storages.alloc(size, "unsharded_parameters")
            self.storages.free(*self.parameters.pop(unit))
        if unit < 0:
            self._release()

    @override
    def end_forward(self) -> None:
        self._release()

    @override
    def before_backward(self, unit: int, ahead: Sequence[int] = ()) -> None:
        if unit not in self.parameters:
            self._gather(unit)
            self._copy_out(unit)
            self.storages.free(self._buffers.pop(unit))
            if unit in self._smaller:
                self.storages.free(self._smaller.pop(unit))
        for one in ahead:
            self._gather(one)

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        if not sync:
            if not self._stays:
                self.storages.free(*self.parameters.pop(unit))
            if self._stay_gradients:
                self.kept.setdefault(unit, list(gradients))
            elif self.late:
                self._unhooked[unit] = self._with_unhooked(unit, gradients)
            else:
                self.accumulate(unit, self._with_unhooked(unit, gradients), self.reduced)
            return
        gradients = self._with_unhooked(unit, gradients)
        slots = [self._own_part(slot, numel) for slot, numel in self.take_kept(unit, gradients)]
        self.storages.free(*self.parameters.pop(unit))
        piece = self.units[unit]
        self._end_scatter()
        if not piece.shapes:
            return
        self._scattering = self.storages.alloc(piece.padded_numel * self.reduced, "reduce_scatter")
        self.storages.free(*slots[1:])
        shard = self.storages.alloc(piece.shard_numel * self.reduced, "gradients", REDUCE)
        self.copied(piece, piece.padded_numel * self.reduced, "reduce_scatter")
        self.storages.free(*slots[:1])  # one reference outlives the copy
        if self.reduced != self.master:
            wide = self.storages.alloc(piece.shard_numel * self.master, "gradients", REDUCE)
            self._release_sum(shard)
            shard = wide
        elif self.plan.sums_replicas and self.leaves(unit):
            self._release_sum(shard)
            return
        self.keep_shard(unit, shard)

    def _with_unhooked(self, unit: int, gradients: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Autograd adds gradients in place to those that wait for their unit's hook."""
        waiting = self._unhooked.pop(unit, None)
        if waiting is None:
            return list(gradients)
        self.storages.free(*[slot for slot, _ in gradients])
        return waiting

    @override
    def after_inputs(self, unit: int) -> None:
        if unit in self._unhooked:
            self.accumulate(unit, self._unhooked.pop(unit), self.reduced)

    def _release_sum(self, slot: int) -> None:
        """What was all-reduced among replicas is held to the end of the backward (torch 2.13, AllReduceState)."""
        if self.plan.sums_replicas:
            self._summed.append(slot)
        else:
            self.storages.free(slot)

    def _own_part(self, slot: int, numel: int) -> int:
        """Of DTensor's gradient of a whole table, the rank's part is copied, and the rest goes."""
        if numel != self.whole_table_numel:
            return slot
        size = DTYPE_BYTES[self.plan.compute_dtype]
        part = self.storages.alloc(numel // self.plan.tp * size, "gradients")
        self.storages.free(slot)
        return part

    def copied(self, piece: ParameterUnit, num_bytes: int, category: str) -> None:
        """What a collective itself holds meanwhile: NCCL's buffers are its own."""

    def _end_scatter(self) -> None:
        if self._scattering is not None:
            self.storages.free(self._scattering)
            self._scattering = None

    @override
    def end_backward(self) -> None:
        self._end_scatter()
        self.storages.free(*self._summed)
        self._summed = []


class GlooBuffers(Fsdp2Buffers):
    """gloo gathers into a copy of the output, and scatters by an all-reduce of a copy of the input (torch 2.13)."""

    @override
    def copied(self, piece: ParameterUnit, num_bytes: int, category: str) -> None:
        if piece.shards > 1:
            self.storages.free(self.storages.alloc(num_bytes, category))


def _units(model: Model, plan: Plan) -> tuple[ParameterUnit, ...]:
    return fsdp_units(model, plan, by_rows)


def _passes(unit: ParameterUnit, plan: Plan) -> UnitPasses:
    """Casts, copies out of the gathered buffer, and gradients packed: 6 B a parameter from bf16 to fp32.

    Unreduced gradients are kept in the dtype of the reduction (`to_accumulated_grad_if_needed`).
    """
    compute, reduced = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.gradient_dtype]
    numel = unit.padded_numel
    wide = Stream(op="widen", read_bytes=numel * compute, write_bytes=numel * reduced, numel=numel)
    keeps = not plan.syncs_every_micro_batch and compute != reduced
    pack = Stream(
        op="widen" if reduced > compute else "copy",
        read_bytes=numel * compute,
        write_bytes=numel * reduced,
        numel=numel,
    )
    return UnitPasses(
        gather=_gather_passes(unit, plan),
        gradient=(pack,),
        keep=(wide,) if keeps else (),
        add=added(unit, plan, plan.gradient_dtype),
    )


def _gather_passes(unit: ParameterUnit, plan: Plan) -> tuple[Stream, ...]:
    """Cast of the shard to the compute dtype, and the gathered buffer copied out into parameters."""
    compute, master = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.precision.master]
    shard, full = unit.shard_numel, unit.padded_numel * compute + unit.frozen_bytes
    if plan.precision.fp8_all_gather:
        # maxima of all weights are found together after the optimizer (precompute_float8_dynamic_scale_for_fsdp): one more
        # read of the shard; their own all-reduce, some bytes a step, is left out
        sizes = gathered_sizes(unit, plan)
        parts = sum(size // ranks for size, ranks in zip(sizes, unit.tensor_shards, strict=True))
        narrow = Stream(op="cast", read_bytes=2 * shard * master, write_bytes=parts, launches=2)
        return narrow, Stream(op="copy", read_bytes=sum(sizes), write_bytes=sum(sizes))
    cast = Stream(op="cast", read_bytes=shard * master, write_bytes=shard * compute)
    return cast, Stream(op="copy", read_bytes=full, write_bytes=full)


FSDP2: Final = Implementation(
    traits=Traits(
        name="fsdp2",
        zero_stages=(2, 3),
        default_for=(2, 3),
        gathers_from=0,
        gathers_fp8=(2, 3),
        gradient_dtype="fp32",
        hooks_modules=True,
        shards_rows=True,
        expert_groups=True,
        offloads_units=True,
        takes_local_steps=True,
    ),
    order=lambda _: Fsdp2Order(),
    units=_units,
    communication=lambda model, plan, _: fsdp_communication(_units(model, plan), plan, _passes),
    resident=lambda model, plan: fsdp_resident(_units(model, plan), plan),
    gradients=lambda model, plan: fsdp_gradients(_units(model, plan), plan),
    buffers=lambda _, library: GlooBuffers if library == "gloo" else Fsdp2Buffers,
)
