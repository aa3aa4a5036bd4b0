"""One run played from its first step to its last: training, checkpoints, failures, restarts, slow hosts.

Failures are a Poisson process of all causes together, striking during restarts too; a host that is taken out is repaired
and comes back as a spare. What is drawn, and in what order, depends on the seed alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, expm1, floor, inf
from typing import Final

import numpy as np

from simulator.base.sums import summed
from simulator.studies.goodput.failures import Cause
from simulator.studies.goodput.spreads import AnySpread, amount

PARTS: Final = ("training", "checkpoints", "lost work", "down", "waiting for hosts", "slow hosts")
_BATCH: Final = 256  # draws at a time: a generator's call costs more than a draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions of a run. Seconds; rates per second.

    interval_s: training between checkpoints. blocking_s: what one holds training up; written_s: until it can be read back,
    from its beginning. causes: with the rate of each in this job. restart_s: from an interruption to training again.
    """

    work_s: float
    interval_s: float
    blocking_s: float
    written_s: float
    restart_s: float
    causes: tuple[tuple[Cause, float], ...]
    spare_hosts: int = 0
    repair_s: float = 0.0
    straggler_rate: float = 0.0
    straggler_slowdown: float | AnySpread = 0.0
    straggler_detect_s: float | AnySpread = 0.0


@dataclass(slots=True)
class SimulatedRun:
    """Seconds of one run by part, and its interruptions by cause."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    interruptions: dict[str, int] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return summed(self.seconds.values())


class _Draws:
    """Exponential and uniform draws, in batches."""

    def __init__(self, seed: Sequence[int]) -> None:
        self._generator = np.random.default_rng(seed)
        self._exponential: list[float] = []
        self._uniform: list[float] = []

    def exponential(self, rate: float) -> float:
        if rate <= 0:
            return inf
        if not self._exponential:
            self._exponential = self._generator.standard_exponential(_BATCH).tolist()
        return self._exponential.pop() / rate

    def uniform(self) -> float:
        if not self._uniform:
            self._uniform = self._generator.random(_BATCH).tolist()
        return self._uniform.pop()

    def amount(self, value: float | AnySpread) -> float:
        """A constant takes no draw."""
        return float(value) if isinstance(value, int | float) else amount(value, self.uniform())

    def cause(self, causes: Sequence[tuple[Cause, float]], total: float) -> Cause:
        left = self.uniform() * total
        for cause, rate in causes:
            left -= rate
            if left < 0:
                return cause
        return causes[-1][0]


def expected_interruptions(conditions: Conditions) -> float:
    """Approximate number of interruptions of one run: repeats of training, times the restarts of each.

    Of exponential failures, e^(R/M) restarts of length R are begun for one that is not interrupted, and work is done
    M (e^(τ/M) − 1)/τ times until it is saved, M of those that strike without notice (Daly 2006, section 3).
    """
    c = conditions
    rate = summed(each for _, each in c.causes)
    unsaved = summed(each for cause, each in c.causes if not cause.notice_s >= c.written_s > 0)
    cycle_s = c.interval_s + c.blocking_s
    try:
        repeated = expm1(cycle_s * unsaved) / (c.interval_s * unsaved) if unsaved else cycle_s / c.interval_s
        return c.work_s * repeated * (rate + c.straggler_rate) * exp(c.restart_s * rate)
    except OverflowError:
        return inf


def play(conditions: Conditions, seed: Sequence[int]) -> SimulatedRun:
    """Play one run to its end. Its end needs no checkpoint."""
    return _Run(conditions, _Draws(seed)).play()


class _Run:
    def __init__(self, conditions: Conditions, draws: _Draws) -> None:
        self._c, self._draws = conditions, draws
        self._rate = summed(rate for _, rate in conditions.causes)
        self._played = SimulatedRun()
        self._left_s = conditions.work_s  # not yet saved
        self._clock = 0.0
        self._spares = conditions.spare_hosts
        self._repairs: list[float] = []  # when hosts under repair are back

    def play(self) -> SimulatedRun:
        while True:
            up_s, cause = self._until_next()
            slow_after = self._draws.exponential(self._c.straggler_rate)
            pace = 1.0
            if slow_after < up_s:
                seen_s = slow_after + self._draws.amount(self._c.straggler_detect_s)
                pace += self._draws.amount(self._c.straggler_slowdown)
                if seen_s < up_s:
                    up_s, cause = seen_s, None  # its host is exchanged, behind a checkpoint
            if self._train(up_s, slow_after, pace, saves=self._is_saved(cause)):
                return self._played
            self._interrupt(cause)

    def _until_next(self) -> tuple[float, Cause | None]:
        up_s = self._draws.exponential(self._rate)
        return up_s, None if up_s == inf else self._draws.cause(self._c.causes, self._rate)

    def _is_saved(self, cause: Cause | None) -> bool:
        """Whether its notice leaves time for a checkpoint."""
        return cause is None or cause.notice_s >= self._c.written_s > 0

    def _train(self, up_s: float, slow_after_s: float, pace: float, *, saves: bool) -> bool:
        """Train until the interruption; returns whether the run ended before it. Unsaved work is lost.

        pace: times as long as everything takes from slow_after_s on.
        """
        c, seconds = self._c, self._played.seconds
        needed_s = self._needed_s(self._left_s)
        end_s = needed_s if needed_s <= slow_after_s else slow_after_s + (needed_s - slow_after_s) * pace
        if end_s <= up_s:
            checkpoints_s = needed_s - self._left_s
            self._book(training=self._left_s, checkpoints=checkpoints_s, slow=end_s - needed_s)
            return True
        effective_s = up_s if up_s <= slow_after_s else slow_after_s + (up_s - slow_after_s) / pace
        cycle_s = c.interval_s + c.blocking_s
        begun = floor(effective_s / cycle_s)
        late_s = c.written_s - c.blocking_s  # written beside training: one that is still on its way is lost
        kept = begun if saves else max(floor((effective_s - late_s) / cycle_s), 0)
        reached_s = begun * c.interval_s + min(effective_s - begun * cycle_s, c.interval_s)
        saved_s = reached_s if saves else kept * c.interval_s
        self._left_s -= saved_s
        checkpoints_s = effective_s - reached_s + (c.blocking_s if saves else 0.0)
        self._book(training=saved_s, checkpoints=checkpoints_s, slow=up_s - effective_s)
        seconds["lost work"] += reached_s - saved_s
        self._clock += reached_s - saved_s
        return False

    def _needed_s(self, work_s: float) -> float:
        """Training and the checkpoints between, without a failure."""
        c = self._c
        count = max(-floor(-work_s / c.interval_s) - 1, 0)
        return work_s + count * c.blocking_s

    def _interrupt(self, cause: Cause | None) -> None:
        """Wait until a restart succeeds; interruptions can strike during it too."""
        c = self._c
        while True:
            name = cause.name if cause is not None else "slow host"
            self._played.interruptions[name] = self._played.interruptions.get(name, 0) + 1
            if cause is None or cause.replaces:
                self._replace_host()
            up_s, following = self._until_next()
            down_s = min(c.restart_s, up_s)
            self._played.seconds["down"] += down_s
            self._clock += down_s
            if up_s >= c.restart_s:
                return
            cause = following

    def _replace_host(self) -> None:
        """A spare takes its place at once, or the job waits for the first repaired host."""
        while self._repairs and self._repairs[0] <= self._clock:
            heapq.heappop(self._repairs)
            self._spares += 1
        heapq.heappush(self._repairs, self._clock + self._c.repair_s)
        if self._spares:
            self._spares -= 1
            return
        back = heapq.heappop(self._repairs)
        self._played.seconds["waiting for hosts"] += max(back - self._clock, 0.0)
        self._clock = max(back, self._clock)

    def _book(self, *, training: float, checkpoints: float, slow: float) -> None:
        for part, seconds in (("training", training), ("checkpoints", checkpoints), ("slow hosts", slow)):
            self._played.seconds[part] += seconds
            self._clock += seconds
