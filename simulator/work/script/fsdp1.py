"""FSDP1: torch's FullyShardedDataParallel (torch 2.13 `fsdp/_runtime_utils.py`, `_flat_param.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from simulator.base.kernels import DTYPE_BYTES, Stream
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.traits import Traits
from simulator.work.script.buffers import ShardedBuffers
from simulator.work.script.fsdp import UnitPasses, added, fsdp_communication, fsdp_gradients, fsdp_resident, fsdp_units
from simulator.work.script.implementation import Implementation
from simulator.work.script.order import Chunk, Gathers, Sharded, ahead
from simulator.work.script.sharding import ParameterUnit, flat
from simulator.work.script.storage import GATHER, REDUCE, Storages


class Fsdp1Order(Sharded):
    """With limit_all_gathers, a gather takes the buffer freed by the unit two back; without, the host's lead limits it.

    Adapters are units of their own, and count among them (fsdp/_runtime_utils.py): behind a layer's last ones the next layer's gather
    waits for the last but one to be freed, when the layer has run. Backward, what is gathered ahead is the unit that ran before
    (_exec_order_utils.py: get_handle_to_prefetch): mostly another adapter, and the layer below only from this layer's first ones on,
    which come last.
    """

    @override
    def forward_window(self, plan: Plan) -> int | None:
        if not plan.fsdp.limit_all_gathers:
            return None
        far = plan.fsdp.forward_prefetch
        return 1 + far if _adapts(plan, "mlp", ("gate", "up", "down", "gate_up")) else super().forward_window(plan)

    @override
    def backward_gathers(self, plan: Plan, chunk: Chunk, unit: int) -> Gathers:
        return ahead(unit, 0, chunk.num_units - 1) if _late(plan) else super().backward_gathers(plan, chunk, unit)


def _adapts(plan: Plan, block: str, modules: tuple[str, ...]) -> bool:
    """Some of a block's linear layers have pairs, which FSDP wraps."""
    return plan.adapters_apart and any(plan.peft.adapts(f"{block}.{module}") for module in modules)


def _late(plan: Plan) -> bool:
    """A layer's backward ends in adapters, and sends for the layer below at its end."""
    return plan.fsdp.backward_prefetch > 0 and _adapts(plan, "attention", ("q", "k", "v", "qkv"))


class Fsdp1Buffers(ShardedBuffers):
    """FullyShardedDataParallel: the gathered vector is the parameters; frees wait for the compute stream.

    With limit_all_gathers the host waits, before a gather, for the unit two back; without, it runs ahead and frees
    come late.
    """

    def __init__(self, storages: Storages, model: Model, plan: Plan) -> None:
        super().__init__(storages, model, plan)
        self._events: list[int] = []  # frees the host has not waited for
        self._inputs: list[int] = []  # of units without a gradient, each with its gradient
        self._next_event = 1000

    def _gather(self, unit: int) -> None:
        if unit in self.parameters or unit not in self.units:
            return
        if self.plan.fsdp.limit_all_gathers and len(self._events) >= 2:
            self.storages.happened(self._events.pop(0))
        piece = self.units[unit]
        cast, fetched = None, self._fetched(piece)
        still, trained = piece.frozen_bytes, bool(piece.shapes)
        if self.compute != self.master and trained:
            cast = self.storages.alloc(piece.shard_numel * self.compute, "all_gather", GATHER)
        if piece.shards > 1 or cast is None:
            num_bytes = piece.padded_numel * self.compute + still if piece.shards > 1 else 0
            self.parameters[unit] = (
                [self.storages.alloc(num_bytes, "unsharded_parameters", GATHER)] if num_bytes else []
            )
            if cast is not None:
                self._free_later(cast)
        else:
            self.parameters[unit] = [cast]
        self._free_later(*fetched)

    def _fetched(self, piece: ParameterUnit) -> list[int]:
        """With CPUOffload the rank's part comes up before it is gathered."""
        if self.plan.offload.parameters == "none":
            return []
        size = piece.shard_numel * self.master + piece.frozen_shard_bytes
        return [self.storages.alloc(size, "all_gather", GATHER)]

    def _free_later(self, *slots: int) -> None:
        self.storages.free_later(self._next_event, *slots)

    def _reshard(self, unit: int) -> None:
        self._free_later(*self.parameters.pop(unit))
        self._events.append(self._next_event)
        self._next_event += 1

    @override
    def before_forward(self, unit: int, ahead: Sequence[int] = ()) -> None:
        self._gather(unit)
        for one in ahead:
            self._gather(one)

    @override
    def after_forward(self, unit: int) -> None:
        if self.reshards(unit):
            self._reshard(unit)

    before_backward = before_forward

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        piece = self.units[unit]
        if _late(self.plan):
            self._gather(unit - 1)
        if self.plan.adapters_apart:
            self._keep_input(unit)
        if not piece.shapes:
            self._reshard(unit)
            return
        flat = self.storages.alloc(piece.padded_numel * self.compute, "gradients")
        self.storages.free(*[slot for slot, _ in gradients])
        self._reshard(unit)
        if not sync:
            self.accumulate(unit, [(flat, piece.padded_numel)], self.compute)
            return
        ((flat, _),) = self.take_kept(unit, [(flat, piece.padded_numel)])
        if self.reduced != self.compute:
            wide = self.storages.alloc(piece.padded_numel * self.reduced, "reduce_scatter", REDUCE)
            self._free_later(flat)
            flat = wide
        shard = self.storages.alloc(piece.shard_numel * self.reduced, "gradients", REDUCE)
        self._free_later(flat)
        if self.reduced != self.master:
            wide = self.storages.alloc(piece.shard_numel * self.master, "gradients", REDUCE)
            self._free_later(shard)
            shard = wide
        self.keep_shard(unit, shard)

    def _keep_input(self, unit: int) -> None:
        """A unit without trained parameters waits for its inputs' gradients (`_register_post_backward_reshard_only_hook`).

        Adapters are units of their own. The hook holds the node that accumulates the gradient of a re-entrant checkpoint's
        input, and so the input and its gradient, until the backward is over.
        """
        if self.stream_bytes and unit >= 0:
            self._inputs += [self.storages.alloc(self.stream_bytes, "activations") for _ in range(2)]

    @override
    def end_backward(self) -> None:
        self.storages.free(*self._inputs)
        self._inputs = []
        for event in range(1000, self._next_event + 1):
            self.storages.happened(event)
        self._events, self._next_event = [], 1000


def _units(model: Model, plan: Plan) -> tuple[ParameterUnit, ...]:
    """What is gathered, reduced and kept as gradients: of a unit where frozen parameters stand beside trained ones, all of it."""
    found = fsdp_units(model, plan, flat)
    return tuple(_mixed(unit, plan) for unit in found) if plan.mixes_units else found


def _mixed(unit: ParameterUnit, plan: Plan) -> ParameterUnit:
    """One flat vector, of which autograd makes one gradient (torch/distributed/fsdp/_flat_param.py: _use_unsharded_views)."""
    if not unit.shapes or not unit.frozen:
        return unit
    still = sum(one.size for one in unit.frozen) // DTYPE_BYTES[plan.precision.master]
    whole = flat(unit.name, (*unit.shapes, (still,)), unit.shards)
    return whole.with_share(plan.fsdp.shard_share)


def _passes(unit: ParameterUnit, plan: Plan) -> UnitPasses:
    """The shard cast to the compute dtype; gradients flattened, widened and divided: 18 B a parameter from bf16 to fp32."""
    compute, master = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.precision.master]
    reduced, numel = DTYPE_BYTES[plan.gradient_dtype], unit.padded_numel
    cast = Stream(op="cast", read_bytes=unit.shard_numel * master, write_bytes=unit.shard_numel * compute)
    flatten = Stream(op="copy", read_bytes=numel * compute, write_bytes=numel * compute)
    divide = Stream(op="elementwise", read_bytes=numel * reduced, write_bytes=numel * reduced)
    wide = Stream(op="widen", read_bytes=numel * compute, write_bytes=numel * reduced, numel=numel)
    return UnitPasses(
        gather=(cast,) if compute != master else (),
        gradient=(flatten, divide) if compute == reduced else (flatten, wide, divide),
        keep=(),
        add=added(unit, plan, plan.compute_dtype),
    )


FSDP1: Final = Implementation(
    traits=Traits(
        name="fsdp1",
        zero_stages=(0, 2, 3),
        gathers_from=0,
        hooks_modules=True,
        wraps_adapters=True,
        offloads_units=True,
    ),
    order=lambda _: Fsdp1Order(),
    units=_units,
    communication=lambda model, plan, _: fsdp_communication(_units(model, plan), plan, _passes),
    resident=lambda model, plan: fsdp_resident(fsdp_units(model, plan, flat), plan),
    gradients=lambda model, plan: fsdp_gradients(_units(model, plan), plan),
    buffers=lambda *_: Fsdp1Buffers,
)
