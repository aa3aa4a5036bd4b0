"""Work: what the phases of a block cost on one rank, in seconds by category. Kernels become time here, once a block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from simulator.calibration import Calibration
from simulator.device import Device
from simulator.kernels import Attention, Gemm, Kernel, launches
from simulator.ops import Block, Op, recompute_ops
from simulator.plan import Plan
from simulator.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of device time by category, and the host's time to launch it."""

    parts: tuple[tuple[str, float], ...]
    host_s: float

    @property
    def duration_s(self) -> float:
        return sum(seconds for _, seconds in self.parts)

    def only(self, *categories: str) -> Work:
        """The named categories, without host time: a concurrent piece of the same launch sequence."""
        return Work(parts=tuple(p for p in self.parts if p[0] in categories), host_s=0.0)

    def without(self, *categories: str) -> Work:
        return Work(parts=tuple(p for p in self.parts if p[0] not in categories), host_s=self.host_s)

    def __add__(self, other: Work) -> Work:
        totals: dict[str, float] = {}
        for category, seconds in (*self.parts, *other.parts):
            totals[category] = totals.get(category, 0.0) + seconds
        return Work(parts=tuple(totals.items()), host_s=self.host_s + other.host_s)


NO_WORK = Work(parts=(), host_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """The three phases of a block. `recompute` runs just before `backward` where the block is checkpointed."""

    forward: Work
    backward: Work
    recompute: Work
    flop: int  # forward and backward
    recompute_flop: int


class Clock:
    """Turns kernels into Work: calibration's kernel times under a stack's factors and launch costs."""

    def __init__(self, device: Device, calibration: Calibration, stack: Stack) -> None:
        self._stack = stack
        self._architecture, self._ideal = device.architecture, calibration.kind == "ideal"
        self._attention_factor = stack.attention.speed_factor.get(device.architecture, 1.0)
        self._timer = calibration.timer(device, stack.attention)

    def seconds(self, kernel: Kernel) -> float:
        time_s = self._timer.kernel_s(kernel)
        if isinstance(kernel, Gemm):
            return time_s if self._ideal else time_s / self._stack.gemm_factor_on(self._architecture, kernel.dtype)
        return time_s / self._attention_factor if isinstance(kernel, Attention) else time_s

    def work(self, category: str, kernels: Iterable[Kernel]) -> Work:
        """All `kernels` under one category."""
        kernels = tuple(kernels)
        return Work(parts=((category, sum(map(self.seconds, kernels))),), host_s=self._host_s(kernels))

    def block(self, block: Block, plan: Plan) -> BlockWork:
        """Forward, backward and recomputation of one block."""
        repeated = recompute_ops(block, plan, self._stack)
        again = self._ops(repeated, forward=True)
        return BlockWork(
            forward=self._ops(block.ops, forward=True),
            backward=self._ops(block.ops, forward=False),
            recompute=Work(parts=(("recompute", again.duration_s),), host_s=again.host_s),
            flop=sum(kernel.flop for op in block.ops for kernel in (*op.forward, *op.backward)),
            recompute_flop=sum(kernel.flop for op in repeated for kernel in op.forward),
        )

    def _ops(self, ops: Iterable[Op], *, forward: bool) -> Work:
        totals: dict[str, float] = {}
        host_s = 0.0
        for op in ops:
            kernels = op.forward if forward else op.backward
            seconds = sum(map(self.seconds, kernels))
            if op.category not in ("gemm", "attention"):
                seconds *= self._stack.elementwise_factor
            totals[op.category] = totals.get(op.category, 0.0) + seconds
            host_s += self._host_s(kernels)
        return Work(parts=tuple(totals.items()), host_s=host_s)

    def _host_s(self, kernels: tuple[Kernel, ...]) -> float:
        return self._stack.host_launch_s * sum(map(launches, kernels))
