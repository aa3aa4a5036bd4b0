"""Chained: a chain of kernels on its stream, each end known beforehand as long as nothing changes the rate of compute."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, count, repeat

from simulator.work.program import Chain, Number
from simulator.work.trace import Span


def until(end_s: Number, now_s: Number) -> Number:
    """The delay after which a clock at now_s shows end_s, to the last bit: a difference of floats may be rounded."""
    delay = end_s - now_s
    if now_s + delay != end_s:
        return math.nextafter(delay, math.inf if now_s + delay < end_s else 0)
    return delay


class Chained:
    """One chain that began. launched: when the host had launched each of its ops. cause: of the first, as `Span` has it."""

    def __init__(self, chain: Chain, cause: int | None, launched: list[Number], now_s: Number, rate: Number) -> None:
        self._chain, self._launched, self._begin_s = chain, launched, now_s
        self._starts: list[Number] = []
        self._ends: list[Number] = []
        self._causes = [cause, *range(chain.id, chain.last)]
        self._left: tuple[int, Number, Number] = (-1, 0, 0)  # of the op that was cut last: seconds, and since when
        self._plan(0, now_s, rate)

    @property
    def end_s(self) -> Number:
        """Predicted end of the last op at the current rates."""
        return self._ends[-1]

    def change(self, now_s: Number, rate: Number) -> None:
        """Compute has another rate from now on."""
        starts, ends = self._starts, self._ends
        at = bisect_right(ends, now_s)
        if at == len(ends):
            return
        if starts[at] > now_s:  # it waits for the host
            self._plan(at, ends[at - 1] if at else self._begin_s, rate)
            return
        seconds = self._chain.kernels.durations_s
        cut, left_s, since_s = self._left if self._left[0] == at else (at, seconds[at], starts[at])
        left_s = max(left_s - (now_s - since_s) * self._rate, 0)
        self._left = cut, left_s, now_s
        ends[at] = now_s + (left_s if rate == 1 else left_s / rate)
        self._plan(at + 1, ends[at], rate)

    def _plan(self, first: int, clock: Number, rate: Number) -> None:
        """Starts and ends from op `first` on, each as soon as the one before has ended and the host has launched it."""
        starts, ends, self._rate = self._starts, self._ends, rate
        del starts[first:], ends[first:]
        seconds = self._chain.kernels.durations_s[first:]
        if rate != 1:
            seconds = tuple(one / rate for one in seconds)
        if not seconds or self._launched[-1] <= clock:
            times = list(accumulate(seconds, initial=clock))
            starts += times[:-1]
            ends += times[1:]
            return
        for launched, lasts in zip(self._launched[first:], seconds, strict=True):
            clock += max(launched - clock, 0)
            starts.append(clock)
            clock += lasts
            ends.append(clock)

    def spans(self, program: str) -> Iterator[Span]:
        """Of its ops, once it is over. What did not begin when the one before ended waited for the host."""
        starts, (seconds, parts, _, categories) = self._starts, self._chain.kernels
        before = [self._begin_s, *self._ends]
        causes = [
            None if start > end else cause for start, end, cause in zip(starts, before, self._causes, strict=False)
        ]
        chain, same = self._chain, repeat(program)
        return map(
            Span, same, repeat(chain.stream), count(chain.id), chain.labels, categories, starts, self._ends, seconds, parts,
            repeat(None), causes,
        )  # fmt: skip
