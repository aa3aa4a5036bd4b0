"""Megatron-Core: its distributed optimizer, and Megatron-FSDP (`distributed/param_and_grad_buffer.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Final

from typing_extensions import override

from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.traits import Traits
from simulator.work.script.buffers import Buffers
from simulator.work.script.deepspeed import Zero3Buffers
from simulator.work.script.flat import communication_apart, flat_communication, flat_resident, flat_units
from simulator.work.script.implementation import Implementation
from simulator.work.script.order import GathersBeforeUse, Sharded
from simulator.work.script.queries import gradient_tensors
from simulator.work.script.sharding import Shape, stepped_numel
from simulator.work.script.storage import Storages
from simulator.work.script.unit_comm import UnitComm


class MegatronFsdpBuffers(Zero3Buffers):
    """Megatron-FSDP: units gathered without a copy, the next one meanwhile.

    Weight gradients go straight into the input of the reduce-scatter; one is filled while another is reduced (its
    docs/runtime_schedule.md).
    """

    def __init__(self, storages: Storages, model: Model, plan: Plan) -> None:
        super().__init__(storages, model, plan)
        self._filling: dict[int, int] = {}
        self._reducing: list[int] = []

    @override
    def _ahead(self, unit: int, direction: int) -> None:
        self._gather(unit + direction)

    @override
    def before_backward(self, unit: int, ahead: Sequence[int] = ()) -> None:
        super().before_backward(unit, ahead)
        self._filling[unit] = self.storages.alloc(self._numels[unit] * self.reduced, "reduce_scatter")

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        super().after_backward(unit, gradients, sync=sync)
        self.end_backward()
        self._reducing = [self._filling.pop(unit)]

    @override
    def end_backward(self) -> None:
        self.storages.free(*self._reducing)
        self._reducing = []

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        """Reads the fp32 shards where they lie."""
        state()


class MegatronBuffers(Buffers):
    """Megatron's distributed optimizer: gradients are added straight into a persistent buffer.

    Where that is not fp32, the optimizer casts its part's (distrib_optimizer.py: _copy_model_grads_to_main_grads), which
    the next step's zero_grad lets go.
    """

    keeps_gradients = False

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        wide = self.storages.alloc_each(gradient_tensors(self.model, self.plan), "gradients")
        super().optimizer(state)
        self.storages.free(*wide)


def _unit_comm(name: str, shapes: tuple[Shape, ...], plan: Plan, ranks: int) -> UnitComm:
    """Where parameters are kept in fp8, matrices of layers are gathered so once they are updated."""
    comm = flat_communication(name, shapes, plan, ranks)
    if not comm.parameter_gather_bytes or not plan.precision.fp8_all_gather or name in ("embedding", "head"):
        return comm
    saved = sum(prod(shape) for shape in shapes if len(shape) > 1)
    return replace(comm, parameter_gather_bytes=comm.parameter_gather_bytes - saved)


def _resident(model: Model, plan: Plan) -> dict[str, list[int]]:
    """Megatron-FSDP adds reduced gradients up in fp32 shards, the distributed optimizer keeps whole gradients."""

    def gradients(shard: int, full: int) -> list[int]:
        return [shard * 4] if plan.zero == 3 else [full * DTYPE_BYTES[plan.gradient_dtype]]

    return flat_resident(model, plan, gradients, [])


def _gradients(model: Model, plan: Plan) -> list[int]:
    """fp32 copies of its part's, gone when the next step begins."""
    copies = plan.zero < 3 and DTYPE_BYTES[plan.gradient_dtype] < 4
    return [stepped_numel(model, plan) * 4] if copies else []


MEGATRON: Final = Implementation(
    traits=Traits(
        name="megatron",
        zero_stages=(0, 1, 3),  # 3: Megatron-FSDP with optim_grads_params
        gathers_fp8=(1,),
        master_copy=True,
        own_model_code=True,
        fuses_gradient_sums=True,
        expert_groups=True,
        core_layers=True,
    ),
    order=lambda plan: Sharded() if plan.zero == 3 else GathersBeforeUse(),
    units=flat_units,
    communication=lambda model, plan, _: communication_apart(model, plan, _unit_comm),
    resident=_resident,
    gradients=_gradients,
    buffers=lambda plan, _: MegatronFsdpBuffers if plan.zero == 3 else MegatronBuffers,
)
