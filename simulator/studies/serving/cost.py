"""Cost: the seconds of a serving step by what spends them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from simulator.base.kernels import Kernel
from simulator.base.sums import summed
from simulator.play.lower.work import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of products, attention, streams over memory, collectives between them, and the host that launches all.

    gaps_s: between kernels that are launched one by one, and before collectives whose ranks' hosts are not in step.
    """

    gemm_s: float = 0.0
    attention_s: float = 0.0
    stream_s: float = 0.0
    exchange_s: float = 0.0
    host_s: float = 0.0
    gaps_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            gemm_s=self.gemm_s + other.gemm_s,
            attention_s=self.attention_s + other.attention_s,
            stream_s=self.stream_s + other.stream_s,
            exchange_s=self.exchange_s + other.exchange_s,
            host_s=self.host_s + other.host_s,
            gaps_s=self.gaps_s + other.gaps_s,
        )

    def times(self, count: float) -> Cost:
        """`count` of these, one after another."""
        return Cost(
            gemm_s=count * self.gemm_s,
            attention_s=count * self.attention_s,
            stream_s=count * self.stream_s,
            exchange_s=count * self.exchange_s,
            host_s=count * self.host_s,
            gaps_s=count * self.gaps_s,
        )

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
