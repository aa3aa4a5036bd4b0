"""What decides which plan is simulated next: a table of plans, or the best plan of each layout.

`EveryPlan` is exact: the table equals that of a search that simulates everything. `Layouts` looks for the best plan that
surely fits and for others that are split in another way; it stops after the study's `budget` of simulations, and then says how much quicker
a plan that it left out may still be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Protocol

from simulator.base.fit import Fit
from simulator.studies.search.outcome import PlanOutcome
from simulator.studies.search.study import SearchStudy
from simulator.studies.search.survey import Prospect

_SCOUTS: Final = 4  # a part of so many of the simulations comes before the whole space is surveyed
_ROOMY: Final = 0.6  # of the memory: a plan whose floor is below this is tried first, until something fits
_SLOWEST: Final = 1.1  # a layout this much slower than the best answers nobody's question


class Table(Protocol):
    """The state of a search. limit: no plan with a floor above it matters. ready: the limit is worth a survey."""

    @property
    def limit(self) -> float: ...
    @property
    def best(self) -> float | None: ...
    @property
    def ready(self) -> bool: ...
    def add(self, prospect: Prospect, outcome: PlanOutcome) -> None:
        """A prospect has been simulated."""
        ...

    def choose(self, prospects: list[Prospect], *, hopeful: bool = False) -> Prospect | None:
        """Takes the next one to simulate out of what is left, which is sorted by floor; None: nothing is worth it.

        hopeful: only one that is expected to be the best.
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
    _values: list[float] = field(default_factory=list)
    _seen: set[object] = field(default_factory=set)

    @property
    def limit(self) -> float:
        return self._values[-1] if len(self._values) == self.study.top else math.inf

    @property
    def best(self) -> float | None:
        return self._values[0] if self._values else None

    @property
    def ready(self) -> bool:
        return self.limit < math.inf

    def add(self, prospect: Prospect, outcome: PlanOutcome) -> None:  # noqa: ARG002  layouts ask for it
        value = self.study.value_of(outcome)
        if value is not None and outcome.signature not in self._seen:
            self._seen.add(outcome.signature)
            self._values = sorted([*self._values, value])[: self.study.top]

    def choose(self, prospects: list[Prospect], *, hopeful: bool = False) -> Prospect | None:
        if hopeful and self.ready:
            return None
        return prospects.pop(0) if prospects and prospects[0].floor <= self.limit else None

    def may_win(self, prospect: Prospect) -> bool:
        return self.best is None or prospect.floor < self.best


@dataclass(slots=True)
class Layouts:
    """The best plan of each layout, and the best that surely fits.

    Plans of one layout miss their floors by much the same, so the next plan is the one with the lowest floor times what
    its layout missed it by so far (all layouts, where it is the first of its own).
    """

    study: SearchStudy
    fits: float = math.inf
    runs: float = math.inf  # also if it is tight
    work: float = 0.0  # of what was chosen
    _best: dict[str, float] = field(default_factory=dict)
    _chosen: set[str] = field(default_factory=set)
    _missed: dict[str, list[float]] = field(default_factory=dict)

    @property
    def best(self) -> float | None:
        """The value that a plan has to beat."""
        found = self.fits if self.fits < math.inf else self.runs
        return found if found < math.inf else None

    @property
    def limit(self) -> float:
        if self.fits == math.inf:
            return math.inf
        values = sorted(self._best.values())
        last = values[self.study.top - 1] if len(values) >= self.study.top else math.inf
        return max(self.fits, min(last, _SLOWEST * self.fits))

    @property
    def ready(self) -> bool:
        scouts = self.study.budget // _SCOUTS
        return self.work >= (scouts if self.fits < math.inf else 2 * scouts)

    def add(self, prospect: Prospect, outcome: PlanOutcome) -> None:
        value = self.study.value_of(outcome)
        if value is None:
            return
        for layout in (prospect.layout, ""):
            self._missed.setdefault(layout, []).append(value / max(prospect.floor, 1e-30))
        self._best[prospect.layout] = min(value, self._best.get(prospect.layout, math.inf))
        self.runs = min(self.runs, value)
        if outcome.status is Fit.FITS:
            self.fits = min(self.fits, value)

    def choose(self, prospects: list[Prospect], *, hopeful: bool = False) -> Prospect | None:
        if self.work >= self.study.budget:
            return None
        limit, usual = self.limit, self._usual("", 1.0)
        misses = {layout: self._usual(layout, usual) for layout in self._missed}
        worth = [each for each in prospects if each.floor <= limit and self._wants(each)]
        if self.fits == math.inf:
            worth = [each for each in worth if each.share <= _ROOMY] or worth
        if not worth:
            return None
        expected, _, found = min((each.floor * misses.get(each.layout, usual), each.key, each) for each in worth)
        if hopeful and expected >= self.fits:
            return None
        self.work += found.work
        self._chosen.add(found.layout)
        prospects.remove(found)
        return found

    def _usual(self, layout: str, otherwise: float) -> float:
        missed = self._missed.get(layout)
        return sum(missed) / len(missed) if missed else otherwise

    def _wants(self, prospect: Prospect) -> bool:
        """It may be the best, or the table has room for its layout."""
        if self.may_win(prospect):
            return True
        return len(self._chosen) < self.study.top and prospect.layout not in self._chosen

    def may_win(self, prospect: Prospect) -> bool:
        """No proof says that it is not the best plan that surely fits (where none does: that fits)."""
        if self.fits < math.inf:
            return prospect.surely and prospect.floor < self.fits
        return prospect.surely or prospect.floor < self.runs
