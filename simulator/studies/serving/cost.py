"""Cost: the seconds of a serving step by what spends them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from simulator.base.kernels import Kernel
from simulator.base.sums import summed
from simulator.play.lower.work import Clock
from simulator.studies.serving.blocks import ForwardOps


class Cost(NamedTuple):
    """Seconds of products, attention, streams over memory, collectives between them, and the host that launches all.

    gaps_s: between kernels that are launched one by one, and before collectives whose ranks' hosts are not in step.
    """

    gemm_s: float = 0.0
    attention_s: float = 0.0
    stream_s: float = 0.0
    exchange_s: float = 0.0
    host_s: float = 0.0
    gaps_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]  # sums of seconds, not of tuples
        return Cost(*map(add, self, other))

    def times(self, count: float) -> Cost:
        """`count` of these, one after another."""
        return Cost(*(count * seconds for seconds in self))

    @property
    def device_s(self) -> float:
        return self.gemm_s + self.attention_s + self.stream_s

    @property
    def busy_s(self) -> float:
        return self.device_s + self.exchange_s


class ClocksByUse:
    """The clocks that the power cap leaves (simulator.play.lower.power), by use of the matrix units in hundredths."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._found: dict[int, Clock] = {}

    def of(self, layer: ForwardOps, tokens: int) -> Clock:
        """That of a step of such layers."""
        clock = self._clock
        if not clock.depends_on_use:
            return clock
        kernels = [kernel for _, _, kernels, _ in layer.at(tokens) for kernel in kernels]
        for _ in range(2):
            use = round(100 * _mean_use(clock, kernels))
            if use not in self._found:
                self._found[use] = self._clock.under(max(use, 1) / 100)
            clock = self._found[use]
        return clock


def _mean_use(clock: Clock, kernels: Sequence[Kernel]) -> float:
    """Share of the matrix units that kernels use, one after another."""
    times = [(clock.seconds(kernel), clock.tensor_use(kernel)) for kernel in kernels]
    whole_s = summed(seconds for seconds, _ in times)
    return summed(seconds * use for seconds, use in times) / whole_s if whole_s else 1.0
