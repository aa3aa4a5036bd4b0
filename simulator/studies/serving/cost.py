"""Cost: the seconds of a serving step by what spends them."""

from __future__ import annotations

from collections.abc import Iterable
from operator import add
from typing import NamedTuple

from simulator.base.kernels import Kernel
from simulator.base.sums import summed
from simulator.play.lower.work import Clock


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


def mean_use(clock: Clock, kernels: Iterable[Kernel]) -> float:
    """Share of the matrix units that kernels use, one after another."""
    times = [(clock.seconds(kernel), clock.tensor_use(kernel)) for kernel in kernels]
    whole_s = summed(seconds for seconds, _ in times)
    return summed(seconds * use for seconds, use in times) / whole_s if whole_s else 1.0
