"""What compressed data-parallel traffic holds around the blocks of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from typing_extensions import override

from simulator.base.kernels import DTYPE_BYTES
from simulator.memory.step import ROOT, Writer
from simulator.memory.strategies import DeepSpeed3, Replicated
from simulator.memory.tape import GATHER
from simulator.parallel.model_shard import body_names
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.zero import pieces
from simulator.work.zero.hooks import compressed
from simulator.work.zero.quantised import quantised_bytes
from simulator.work.zero.units import Shape, buckets, numel_of


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


class Hooked(Replicated):
    """DDP with a communication hook: what it makes of a bucket beside the bucket, and drops at its end.

    16 bits: the narrow copy. PowerSGD: the bucket before its loss, the tensors that travel whole, factors that no warm
    start keeps, and the new error beside the old one.
    """

    def __init__(self, writer: Writer, model: Model, plan: Plan) -> None:
        super().__init__(writer, model, plan)
        self._names = dict(enumerate(body_names(model))) | {ROOT: "embedding"}
        self._filled: dict[str, list[tuple[Shape, ...]]] = {}
        for _, shapes, piece in buckets(model, plan):
            self._filled.setdefault(piece, []).append(shapes)
        self._head_reduced = False

    @override
    def after_backward(self, unit: int, gradients: Sequence[tuple[int, int]], *, sync: bool) -> None:
        super().after_backward(unit, gradients, sync=sync)
        if not sync:
            return
        names = ([] if self._head_reduced else ["head"]) + [self._names[unit]]
        self._head_reduced = True
        for shapes in (bucket for name in names for bucket in self._filled.get(name, ())):
            self._reduce(shapes)

    @override
    def end_backward(self) -> None:
        super().end_backward()
        self._head_reduced = False

    def _reduce(self, shapes: tuple[Shape, ...]) -> None:
        plan, hook = self.plan, self.plan.comm_hook
        size, numel = DTYPE_BYTES[plan.master_dtype], numel_of(shapes)
        if hook.kind != "powersgd":
            sizes = [numel * DTYPE_BYTES[plan.gradient_dtype]]
        else:
            parts = compressed(shapes, plan)
            copies = [numel * size] * 2 if hook.error_feedback else []
            factors = [] if hook.warm_start else [parts.p_numel * size, parts.q_numel * size]
            sizes = [*copies, parts.whole_numel * size, *factors]
        self.writer.free(*[self.writer.alloc(num_bytes, "buckets") for num_bytes in sizes])
