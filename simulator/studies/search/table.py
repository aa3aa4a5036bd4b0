"""What decides which plan is simulated next: a table of plans, or the best plan of each layout.

`EveryPlan` is exact: the table equals that of a search that simulates everything. `Layouts` looks for the best plan that
surely fits and for others that are split in another way; it stops when the study's `budget` of work is spent, and then
says how much quicker a plan that it left out may still be.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field
from typing import Final, Protocol

from simulator.base.fit import Fit
from simulator.memory.use import RESERVED_HIGH
from simulator.studies.search.outcome import PlanOutcome
from simulator.studies.search.study import SearchStudy
from simulator.studies.search.survey import Prospect

WINDOW: Final = 6  # candidates on the way at once, whatever the number of processes
_WIDEST: Final = 512  # and in a table of every plan, where the next depends on few of those before
_IN_VAIN: Final = 1 / 16  # of what is simulated: so many more at most, as they were chosen before it was known


class Table(Protocol):
    """The state of a search. limit: no plan with a floor above it matters. work: spent. window: candidates on the way at once."""

    work: int

    @property
    def window(self) -> int: ...
    @property
    def limit(self) -> float: ...
    @property
    def best(self) -> float | None: ...
    def add(self, prospect: Prospect, outcome: PlanOutcome) -> None:
        """A prospect has been simulated."""
        ...

    def choose(self, prospects: list[Prospect], share: float = 1.0) -> Prospect | None:
        """Takes the next one to simulate out of what is left, which is sorted by floor, the lowest last; None: nothing is worth it.

        share: of the budget that may be spent by now; below 1 there are prospects that no survey has found yet.
        """
        ...

    def may_win(self, prospect: Prospect) -> bool:
        """Nothing proves that another plan is the best."""
        ...


def table_of(study: SearchStudy) -> Table:
    """The table that a study asks for."""
    return Layouts(study) if study.layouts else EveryPlan(study)


@dataclass(slots=True)
class EveryPlan:
    """The best plans, whatever their layout."""

    study: SearchStudy
    work: int = 0  # without end: not counted
    _num_added: int = 0
    _values: list[float] = field(default_factory=list)
    _seen: set[object] = field(default_factory=set)

    @property
    def window(self) -> int:
        missing = self.study.top - len(self._values)  # until the table is full, no outcome changes what comes next
        return min(_WIDEST, max(WINDOW, missing, int(_IN_VAIN * self._num_added)))

    @property
    def limit(self) -> float:
        return self._values[-1] if len(self._values) == self.study.top else math.inf

    @property
    def best(self) -> float | None:
        return self._values[0] if self._values else None

    def add(self, prospect: Prospect, outcome: PlanOutcome) -> None:  # noqa: ARG002  layouts ask for it
        self._num_added += 1
        value = self.study.value_of(outcome)
        if value is not None and outcome.signature not in self._seen:
            self._seen.add(outcome.signature)
            insort(self._values, value)
            del self._values[self.study.top :]

    def choose(self, prospects: list[Prospect], share: float = 1.0) -> Prospect | None:
        if share < 1 and self.limit < math.inf:
            return None
        return prospects.pop() if prospects and prospects[-1].floor <= self.limit else None

    def may_win(self, prospect: Prospect) -> bool:
        return self.best is None or prospect.floor < self.best


@dataclass(slots=True)
class _Missed:
    """How far plans miss their floors: those of one layout by much the same, else those of its bound group, else all."""

    _sums: dict[tuple[str, ...], tuple[float, float]] = field(default_factory=dict)

    def add(self, prospect: Prospect, found: float, floor: float) -> None:
        for name in _groups(prospect):
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + found, before[1] + floor

    def of(self, prospect: Prospect) -> float:
        """What was found over its floor; 1 before anything was."""
        sums = (self._sums.get(name) for name in _groups(prospect))
        found, floor = next((each for each in sums if each), (1.0, 1.0))
        return found / floor if floor else 1.0


def _groups(prospect: Prospect) -> tuple[tuple[str, ...], ...]:
    """The closest first."""
    return (prospect.bound_group, prospect.layout), (prospect.bound_group,), ()


@dataclass(slots=True)
class Layouts:
    """The best plan of each layout, and the best that surely fits.

    A plan is expected to have its floors of time and memory times what its layout missed them by so far. The next one is
    the best of those that are expected to fit and to stay within the interval of the best, or else the one that the gap
    depends on: both get the same work.
    """

    study: SearchStudy
    fits: float = math.inf
    runs: float = math.inf  # also if it is tight
    work: int = 0
    _reach: float = (
        1.0  # of the interval of the best plan: its middle over its lower end, as what is slower lengthens all alike
    )
    _best: dict[str, float] = field(default_factory=dict)
    _hoping: int = 0  # work that was meant to find a better plan
    _proving: int = 0  # and to lower the gap
    _charged: dict[str, int] = field(default_factory=dict)
    _chosen: set[str] = field(default_factory=set)
    _values: _Missed = field(default_factory=_Missed)
    _shares: _Missed = field(default_factory=_Missed)

    @property
    def window(self) -> int:
        return WINDOW

    @property
    def best(self) -> float | None:
        """The value that a plan has to beat."""
        found = self.fits if self.fits < math.inf else self.runs
        return found if found < math.inf else None

    @property
    def limit(self) -> float:
        """The worst of a full table, but no layout that is surely slower than what the best may take."""
        if self.fits == math.inf:
            return math.inf
        values = sorted(self._best.values())
        last = values[self.study.top - 1] if len(values) >= self.study.top else math.inf
        return max(self.fits, min(last, self._reach * self.fits))

    def add(self, prospect: Prospect, outcome: PlanOutcome) -> None:
        if outcome.used_bytes is not None and outcome.capacity_bytes:
            self._shares.add(prospect, outcome.used_bytes / outcome.capacity_bytes, prospect.share)
        taken = prospect.memory_work if outcome.step_s is None else prospect.work
        self.work += taken - self._charged.get(prospect.key, taken)
        value = self.study.value_of(outcome)
        if value is None:
            return
        self._values.add(prospect, value, prospect.floor)
        self._best[prospect.layout] = min(value, self._best.get(prospect.layout, math.inf))
        self.runs = min(self.runs, value)
        if outcome.status is Fit.FITS and value < self.fits:
            self.fits = value
            if self.study.objective != "memory" and outcome.low_s and outcome.step_s:
                self._reach = outcome.step_s / outcome.low_s

    def choose(self, prospects: list[Prospect], share: float = 1.0) -> Prospect | None:
        budget, limit = self.study.budget, self.limit
        most = budget * share / WINDOW if share < 1 else budget  # those on the way are chosen blindly
        left = budget * min(1.0, share if self.fits < math.inf else 2 * share) - self.work
        worth = [p for p in reversed(prospects) if p.floor <= limit and p.work <= min(most, left) and self._wants(p)]
        hope = self._best_hope(worth, self.fits if share < 1 else self._reach * self.fits)
        proof = self._next_proof(worth) if share == 1 or self.fits == math.inf else None
        found = hope if proof is None or (hope is not None and self._hoping <= self._proving) else proof
        if found is not None:
            cost = self._charged[found.key] = found.work if self._suffices(found) else found.memory_work
            self.work += cost
            self._hoping += cost if found is hope else 0
            self._proving += cost if found is proof else 0
            self._chosen.add(found.layout)
            prospects.remove(found)
        return found

    def _best_hope(self, worth: list[Prospect], below: float) -> Prospect | None:
        """The one that is expected to be the best, of those that are expected to fit and to have a value below that."""
        values = ((self._expected(each), each.key, each) for each in worth if self._suffices(each))
        return min((each for each in values if each[0] < below), default=(0.0, "", None))[2]

    def _next_proof(self, worth: list[Prospect]) -> Prospect | None:
        """The one with the lowest floor, as the gap is that of the lowest; where nothing fits yet, the one that needs least.

        Then layouts whose floor is within the interval of the best: they may be as good.
        """
        ordered = sorted(worth, key=lambda each: each.share) if self.fits == math.inf else worth
        return next((each for each in ordered if self.may_win(each)), next(iter(ordered), None))

    def _expected(self, prospect: Prospect) -> float:
        return prospect.floor * self._values.of(prospect)

    def _suffices(self, prospect: Prospect) -> bool:
        """Its memory is expected to fit surely."""
        return prospect.share * self._shares.of(prospect) * RESERVED_HIGH <= 1

    def _wants(self, prospect: Prospect) -> bool:
        """It may be the best, or the table may have a row for its layout."""
        return self.may_win(prospect) or prospect.layout not in self._chosen

    def may_win(self, prospect: Prospect) -> bool:
        """No proof says that it is not the best plan that surely fits (where none does: that fits)."""
        if self.fits < math.inf:
            return prospect.surely and prospect.floor < self.fits
        return prospect.surely or prospect.floor < self.runs
