"""The search itself: survey the space, then simulate best floor first until no floor can beat what was found.

Which candidates are simulated depends on the study alone, never on timing: candidate i is simulated if its floor does not
exceed the worst plan of the table as it stood after candidate i - WINDOW. So any number of processes, and any number of
interruptions, ends with the same table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from simulator.errors import InputError
from simulator.search.engines import Engine, Task
from simulator.search.journal import Journal
from simulator.search.outcome import Outcome
from simulator.search.report import SearchReport, make_report
from simulator.search.space import Branch, Killed, tightest
from simulator.search.study import SearchStudy
from simulator.search.survey import Prospect, Survey

WINDOW: Final = 16  # candidates on the way at once, whatever the number of processes
_BRANCHES_A_TASK: Final = 4


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
    survey: Survey | None = None
    simulated: dict[str, Outcome] = {}
    try:
        survey = _surveyed(study, engine, tell)
        prospects = sorted(survey.prospects, key=lambda each: (each.floor, each.key))
        num_open = _simulated(study, engine, journal, tell, prospects, simulated)
    except KeyboardInterrupt:
        report = make_report(study, survey, list(simulated.values()), interrupted=True) if survey else None
        raise Interrupted(report) from None
    return make_report(study, survey, list(simulated.values()), num_pruned=num_open)


def _surveyed(study: SearchStudy, engine: Engine, tell: Tell) -> Survey:
    """The whole space. Raises InputError where nothing in it is legal."""
    found, killed = Survey(), Killed()
    branches = list(study.space.branches(killed))
    found.killed.merge(killed)
    tasks = [engine.survey(part) for part in _parts(branches)]
    for done, task in enumerate(tasks, start=1):
        part: Survey = task.result()
        found.merge(part)
        tell(Progress("survey", done, len(tasks)))
    if found.num_legal == 0:
        raise InputError(tightest(found.killed))
    return found


def _parts(branches: list[Branch]) -> Iterator[list[Branch]]:
    for start in range(0, len(branches), _BRANCHES_A_TASK):
        yield branches[start : start + _BRANCHES_A_TASK]


def _simulated(
    study: SearchStudy,
    engine: Engine,
    journal: Journal | None,
    tell: Tell,
    prospects: list[Prospect],
    simulated: dict[str, Outcome],
) -> int:
    """Fills `simulated` in the order of the prospects; the number of them that were never simulated."""
    known = journal.outcomes() if journal else {}
    best: list[float] = []  # of the table, sorted
    on_the_way: deque[tuple[str, Outcome | Task]] = deque()
    number = 0
    for number, prospect in enumerate(prospects):  # noqa: B007  how far it went
        if len(on_the_way) == WINDOW:
            _take(study, journal, tell, on_the_way.popleft(), simulated, best, len(prospects))
        if len(best) == study.top and prospect.floor > best[-1]:
            break
        on_the_way.append((prospect.key, known.get(prospect.key) or engine.evaluate(prospect.key)))
    else:
        number = len(prospects)
    for item in on_the_way:
        _take(study, journal, tell, item, simulated, best, len(prospects))
    return len(prospects) - number


def _take(
    study: SearchStudy,
    journal: Journal | None,
    tell: Tell,
    item: tuple[str, Outcome | Task],
    simulated: dict[str, Outcome],
    best: list[float],
    total: int,
) -> None:
    """Wait for a candidate, keep it on disk, then let it count."""
    key, found = item
    if not isinstance(found, Outcome):
        outcome: Outcome = found.result()
        if journal is not None:
            journal.add(outcome)
        found = outcome
    simulated[key] = found
    if found.ranked and found.step_s is not None and found.used_bytes is not None:
        best.append(study.value(found.step_s, found.num_devices, found.tokens_per_step, found.used_bytes))
        best.sort()
        del best[study.top :]
    tell(Progress("simulation", len(simulated), total, best[0] if best else None))
