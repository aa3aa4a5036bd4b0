"""What compressed data-parallel traffic holds around the blocks of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from typing_extensions import override

from simulator.memory.step import ROOT, Writer
from simulator.memory.strategies import DeepSpeed3
from simulator.memory.tape import GATHER
from simulator.model import Model
from simulator.plan import Plan
from simulator.zero import pieces
from simulator.zero.quantised import quantised_bytes


class ZeroPlusPlus(DeepSpeed3):
    """Gathered int8 until the parameters are used; the second copy, from the first forward to the optimizer; int4.

    DeepSpeed's `_partition_param_sec` makes the second copy when a forward releases a unit, and `invalidate_secondary_tensor`
    drops all of them in the step.
    """

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        super().__init__(writer, model, plan)
        self._zeropp = plan.zeropp
        self._narrow: dict[int, int] = {}  # unit -> slot of its gathered int8
        self._second: dict[int, int] = {}  # unit -> slot of this rank's part of the second copy
        self._matrix = max(prod(shape) for _, shapes in pieces(model) for shape in shapes)

    @override
    def _gather(self, unit: int) -> None:
        if not self._zeropp.quantized_weights:
            super()._gather(unit)
        elif unit not in self.parameters and unit not in self._narrow and unit in self._numels:
            self._narrow[unit] = self.writer.alloc(quantised_bytes(self._numels[unit]), "all_gather", GATHER)

    def _widen(self, unit: int) -> None:
        if unit in self._narrow:
            size = self._numels[unit] * self.compute
            self.parameters[unit] = [self.writer.alloc(size, "unsharded_parameters")]
            self.writer.free(self._narrow.pop(unit))

    @override
    def before_forward(self, unit: int) -> None:
        super().before_forward(unit)
        self._widen(unit)

    @override
    def after_forward(self, unit: int) -> None:
        near = self._zeropp.secondary_ranks
        if near > 1 and unit not in self._second:
            size = -(-self._numels[unit] // near) * self.compute
            self._second[unit] = self.writer.alloc(size, "unsharded_parameters")
        super().after_forward(unit)

    @override
    def before_backward(self, unit: int) -> None:
        super().before_backward(unit)
        self._widen(unit)

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        super().after_backward(unit, gradients, sync=sync)
        if self._zeropp.quantized_gradients and unit != ROOT:
            # one matrix at a time: its int4, and what it receives
            self.writer.free(*[self.writer.alloc(self._matrix // 2, "reduce_scatter") for _ in range(2)])

    @override
    def optimizer(self, state: Callable[[], None]) -> None:
        self.writer.free(*self._second.values())
        self._second = {}
        super().optimizer(state)
