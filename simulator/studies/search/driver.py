"""The search itself: a few scouts, then bounds of the whole space against the scouts, then simulation by rising bound.

1. Scouts: the branches that split the model least, until they contain enough plans that may fit. Of these plans, those
   with the lowest bounds are simulated until the table is full: its worst plan is the limit.
2. Survey: the rest of the space. Plans whose bound exceeds the limit are too slow and are dropped.
3. Simulation of all that is left, lowest bound first, until no bound is below the worst plan of the table.

Which candidates are simulated depends only on the study, never on timing: candidate i is simulated if its bound does not
exceed the worst plan of the table as it stood after candidate i - WINDOW. So any number of processes, and any number of
interruptions, ends with the same table.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from simulator.base.errors import InputError
from simulator.studies.search.engines import Engine, Task
from simulator.studies.search.journal import Journal
from simulator.studies.search.outcome import PlanOutcome
from simulator.studies.search.report import SearchReport, make_report
from simulator.studies.search.space import Branch, tightest
from simulator.studies.search.study import SearchStudy
from simulator.studies.search.survey import Survey

WINDOW: Final = 16  # candidates on the way at once, whatever the number of processes
_SCOUTED: Final = 4  # prospects that scouts find for each row of the table, as many do not fit after all
_BRANCHES_A_TASK: Final = 16


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a search stands. phase: survey or simulation; total: at most so many are to come."""

    phase: str
    done: int
    total: int
    best: float | None = None


Tell = Callable[[Progress], None]


class Interrupted(Exception):  # noqa: N818  no error: the answer so far
    """Ctrl-C. report: what is known until then, or None before anything was simulated."""

    def __init__(self, report: SearchReport | None) -> None:
        super().__init__()
        self.report = report


def search(
    study: SearchStudy, engine: Engine, journal: Journal | None = None, tell: Tell = lambda _: None
) -> SearchReport:
    """The best plans of the study. Raises InputError where no plan is legal; Interrupted on Ctrl-C."""
    run = _Run(study, engine, journal, tell)
    try:
        num_open = run.whole()
    except KeyboardInterrupt:
        found = list(run.simulated.values())
        raise Interrupted(make_report(study, run.survey, found, interrupted=True) if found else None) from None
    return make_report(study, run.survey, list(run.simulated.values()), num_pruned=num_open)


@dataclass(slots=True)
class _Run:
    """A search under way. best: the values of the table, sorted."""

    study: SearchStudy
    engine: Engine
    journal: Journal | None
    tell: Tell
    survey: Survey = field(default_factory=Survey)
    simulated: dict[str, PlanOutcome] = field(default_factory=dict)
    best: list[float] = field(default_factory=list)
    known: dict[str, PlanOutcome] = field(default_factory=dict)
    num_surveyed: int = 0

    def whole(self) -> int:
        """The number of prospects that were never simulated. Raises InputError where nothing in the space is legal."""
        self.known = self.journal.outcomes() if self.journal else {}
        branches = sorted(self.study.space.branches(self.survey.pruned), key=_split)
        rest = self._scouts(branches)
        self._simulate(until_full=True)
        self._survey(rest, len(branches))
        if self.survey.num_legal == 0:
            raise InputError(tightest(self.survey.pruned))
        return self._simulate()

    @property
    def limit(self) -> float:
        """The worst plan of a full table."""
        return self.best[-1] if len(self.best) == self.study.top else math.inf

    def _scouts(self, branches: list[Branch]) -> list[Branch]:
        """Survey the branches that split the model least; those that are left."""
        begin = 0
        for _, alike in groupby(branches, key=_split):
            if len(self.survey.prospects) >= _SCOUTED * self.study.top:
                break
            level = list(alike)
            self._survey(level, len(branches))
            begin += len(level)
        return branches[begin:]

    def _survey(self, branches: list[Branch], total: int) -> None:
        tasks = [(len(part), self.engine.survey(part, self.limit)) for part in _parts(branches)]
        for count, task in tasks:
            part: Survey = task.result()
            self.survey.merge(part)
            self.num_surveyed += count
            self.tell(Progress("survey", self.num_surveyed, total))

    def _simulate(self, *, until_full: bool = False) -> int:
        """Simulate prospects, best floor first; the number of those that were not."""
        prospects = sorted(self.survey.prospects, key=lambda each: (each.floor, each.key))
        on_the_way: deque[tuple[str, PlanOutcome | Task]] = deque()
        number = 0
        for number, prospect in enumerate(prospects):  # noqa: B007  how far it went
            if prospect.key in self.simulated:
                continue
            if len(on_the_way) == WINDOW:
                self._take(on_the_way.popleft(), len(prospects))
            if prospect.floor > self.limit or (until_full and self.limit < math.inf):
                break
            on_the_way.append((prospect.key, self.known.get(prospect.key) or self.engine.evaluate(prospect.key)))
        else:
            number = len(prospects)
        for item in on_the_way:
            self._take(item, len(prospects))
        return sum(prospect.key not in self.simulated for prospect in prospects[number:])

    def _take(self, item: tuple[str, PlanOutcome | Task], total: int) -> None:
        """Wait for a candidate, write it to disk, then use it."""
        study, (key, found) = self.study, item
        if not isinstance(found, PlanOutcome):
            outcome: PlanOutcome = found.result()
            if self.journal is not None:
                self.journal.add(outcome)
            found = outcome
        self.simulated[key] = found
        if found.ranked and found.step_s is not None and found.used_bytes is not None:
            self.best.append(study.value(found.step_s, found.num_devices, found.tokens_per_step, found.used_bytes))
            self.best.sort()
            del self.best[study.top :]
        self.tell(Progress("simulation", len(self.simulated), total, self.best[0] if self.best else None))


def _split(branch: Branch) -> int:
    """Number of ranks among which the model is split."""
    fields = branch.fields
    product: int = fields["tp"] * fields["cp"] * fields["pp"] * fields["ep"]
    return product


def _parts(branches: Iterable[Branch]) -> list[list[Branch]]:
    """Branches whose plans have the same blocks go to one process, which makes those once."""
    alike: dict[object, list[Branch]] = {}
    for branch in branches:
        alike.setdefault((branch.cluster.num_nodes, _blocks(branch)), []).append(branch)
    return [
        same[start : start + _BRANCHES_A_TASK]
        for same in alike.values()
        for start in range(0, len(same), _BRANCHES_A_TASK)
    ]


def _blocks(branch: Branch) -> str:
    others = ("data_parallel", "zero", "pp")
    return repr([(name, value) for name, value in branch.fields.items() if name not in others])
