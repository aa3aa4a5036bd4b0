"""The search itself: a few scouts, then bounds of the whole space against the scouts, then simulation of what is left.

1. Scouts: simple plans of a few branches of each level of split, with their bounds. For a table of layouts some are
   simulated, so that the survey has a limit.
2. Survey: the whole space, level by level, those first whose scouts have the lowest bounds, in rounds: each has as many
   branches as all before it. Plans whose bound exceeds the limit are dropped; after a round some of the others are
   simulated, if they are expected to lower it.
3. Simulation of what is left, in the order that the table asks for, until nothing left could change it, or the study's
   budget is spent.

The budget is of work that is estimated beforehand (`survey.work_of`), so a plan that is slow to simulate counts as much
as the many that it takes the place of. Before all of the space is known, a part of it may be spent. A long survey takes
a part of it too.

Which candidates are simulated depends only on the study, never on timing: candidate i is chosen by the table as it stood
so many candidates before, the table's window. So any number of processes, and any number of interruptions, ends with the same table.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final

from simulator.base.errors import InputError
from simulator.studies.search.context import AROUND
from simulator.studies.search.engines import Engine, Task
from simulator.studies.search.journal import Journal
from simulator.studies.search.outcome import STATUSES, PlanOutcome, parsed
from simulator.studies.search.report import Counts, SearchReport, ranked
from simulator.studies.search.space import Branch, Pruned, tightest
from simulator.studies.search.study import SearchStudy
from simulator.studies.search.survey import Prospect, Survey
from simulator.studies.search.table import Table, table_of

_SCOUTED: Final = 3  # branches of each level of split in which scouts look
_DOUBLINGS: Final = 4  # of what is surveyed, from the first round to the whole space
_BEFORE: Final = 0.25  # of the budget that scouts may spend, and as much between the rounds of the survey
_TOGETHER: Final = 30_000  # work of a survey and its simulations: a size of micro-batch of a branch is one, as measured
_LEAST: Final = 0.25  # of the budget that is for simulations however long the survey is
_MANY: Final = 1500  # branches of which all are surveyed
_TOKENS: Final = 4096  # of a sequence on a rank: fewer are rare, as messages then outlast the products between them
_BRANCHES_A_TASK: Final = 16
_AHEAD: Final = 16  # tasks of a survey for each worker: a million branches' at once fill a scheduler's memory
_WORK_A_TASK: Final = 300  # of simulations: a tenth of a second, beside which what a task costs is little


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a search stands. phase: listing, scouting or survey (of branches) or simulation; total: None where it is not known.

    stack: whose plans are searched, where there are several. spent: of the budget of simulations, where there is one.
    """

    phase: str
    done: int
    total: int | None
    best: float | None = None
    stack: str = ""
    spent: float | None = None


OnProgress = Callable[[Progress], None]


class Interrupted(Exception):  # noqa: N818  no error: the answer so far
    """Ctrl-C. report: what is known until then, or None before anything was simulated."""

    def __init__(self, report: SearchReport | None) -> None:
        super().__init__()
        self.report = report


def search(
    study: SearchStudy, engine: Engine, journal: Journal | None = None, on_progress: OnProgress = lambda _: None
) -> SearchReport:
    """The best plans of the study. Raises InputError where no plan is legal; Interrupted on Ctrl-C."""
    run = _Run(study, engine, journal, on_progress)
    try:
        run.whole()
    except KeyboardInterrupt:
        raise Interrupted(_report(run, interrupted=True) if run.simulated else None) from None
    return _report(run)


def _report(run: _Run, *, interrupted: bool = False) -> SearchReport:
    limit, table, survey, outcomes = run.table.limit, run.table, run.survey, list(run.simulated.values())
    num_pruned = 0 if interrupted else sum(each.floor > limit for each in run.open)
    statuses = Counter(o.status for o in outcomes)
    return SearchReport(
        study=run.study,
        rows=ranked(run.study, outcomes),
        counts=Counts(
            refused=dict(sorted(survey.pruned.counts.items(), key=lambda item: (-item[1], item[0]))),
            unchecked=survey.num_unchecked,
            legal=survey.num_legal,
            equal=survey.num_equal,
            too_large=survey.num_too_large,
            too_slow=survey.num_too_slow + num_pruned,
            simulated={status: statuses[status] for status in STATUSES},
            open=len(run.open) - num_pruned,
            scouts=run.num_scouts,
        ),
        failures=dict(sorted(Counter(o.reason for o in outcomes if o.status == "failed").items())),
        quickest_open=min((each.floor for each in run.open if table.may_win(each)), default=None),
        num_left_out=run.num_left_out,
        work=table.work,
        interrupted=interrupted,
    )


@dataclass(slots=True)
class _Run:
    """A search under way. open: prospects that are not simulated yet, the lowest floor last. num_scouts: that no survey has found again."""

    study: SearchStudy
    engine: Engine
    journal: Journal | None
    on_progress: OnProgress
    survey: Survey = field(default_factory=Survey)
    open: list[Prospect] = field(default_factory=list)
    simulated: dict[str, PlanOutcome] = field(default_factory=dict)
    known: dict[str, PlanOutcome] = field(default_factory=dict)
    num_surveyed: int = 0
    num_scouts: int = 0
    num_left_out: int = 0
    table: Table = field(init=False)

    def __post_init__(self) -> None:
        self.table = table_of(self.study)

    def whole(self) -> None:
        """Raises InputError where nothing in the space is legal."""
        self.known = self.journal.outcomes(ranked=True) if self.journal else {}
        branches = self._promising(sorted(self._listed(), key=_split))
        if self.study.layouts:
            self.table = table_of(replace(self.study, budget=self._left_by_survey(branches)))
        levels = [list(alike) for _, alike in groupby(branches, key=_split)]
        quickest = self._scout(levels)
        levels.sort(key=lambda level: (quickest.get(_split(level[0]), math.inf), _split(level[0])))
        for some in _doubling(levels, len(branches) >> _DOUBLINGS):
            self._survey(some, len(branches))
            self._simulate(_BEFORE * (1 + self.num_surveyed / len(branches)))
        if self.survey.num_legal == 0 and not self._any_legal(branches):
            raise InputError(tightest(self.survey.pruned, self.study.space.fixed))
        self._simulate()

    def _listed(self) -> Iterator[Branch]:
        space, count, done = self.study.space, 0, 0
        starts = [(one, start, one.num_devices.bit_length() ** 3) for one, start in space.starts()]  # as many degrees
        whole = sum(size for *_, size in starts)
        for cluster, start, size in starts:
            for branch in space.degrees(cluster, start, self.survey.pruned):
                count += 1
                yield branch
            done += size
            self.on_progress(Progress("listing", count, None, spent=done / whole))

    def _left_by_survey(self, branches: list[Branch]) -> int:
        """The budget of simulations: a survey that is as long as they are takes a part of it, which bounds both together."""
        budget, survey = self.study.budget, sum(self.study.space.num_sizes(branch) for branch in branches)
        return min(budget, max(int(_LEAST * budget), _TOGETHER - survey))

    def _promising(self, branches: list[Branch]) -> list[Branch]:
        """Of a very large space, what does not split below what is common; a table of every plan gets all of it."""
        if not self.study.layouts or len(branches) <= _MANY:
            return branches
        promising = [branch for branch in branches if _common(branch, self.study.space.seq_len)]
        self.num_left_out = len(branches) - len(promising) if promising else 0
        return promising or branches

    def _scout(self, levels: list[list[Branch]]) -> dict[int, float]:
        """Simulate simple plans of a few branches of each level, for a first limit; least floor by level."""
        some = [branch for level in levels for branch in level[:: -(-len(level) // _SCOUTED)]]
        tasks = [(len(part), self.engine.survey(part, math.inf, scouts=True)) for part in _parts(some)]
        found, done = list[Prospect](), 0
        for count, task in tasks:
            found += task.result().prospects
            done += count
            self.on_progress(Progress("scouting", done, len(some)))
        if self.study.layouts:  # a table of every plan is filled from the first round of the survey
            self.open = sorted(found, key=_order, reverse=True)
            self._simulate(_BEFORE)
            self.open = []  # the survey finds them again
            self.num_scouts = len(self.simulated)
        quickest: dict[int, float] = {}
        for each in found:
            plan, _ = parsed(each.key)
            split = plan.tp * plan.cp * plan.pp * plan.ep
            quickest[split] = min(each.floor, quickest.get(split, math.inf))
        return quickest

    def _survey(self, branches: list[Branch], total: int) -> None:
        for count, part in self._surveyed(_parts(branches)):
            self.survey.merge(part)
            fresh = [each for each in part.prospects if each.key not in self.simulated]
            self.num_scouts -= len(part.prospects) - len(fresh)
            self.open += fresh
            self.num_surveyed += count
            self.on_progress(Progress("survey", self.num_surveyed, total))
        self.open.sort(key=_order, reverse=True)

    def _surveyed(self, parts: list[list[Branch]]) -> Iterator[tuple[int, Survey]]:
        """Each part's branches, and what is found in them; so many are asked for at once as keep everybody busy."""
        limit, on_the_way = self.table.limit, deque[tuple[int, Task]]()
        for part in parts:
            on_the_way.append((len(part), self.engine.survey(part, limit)))
            if len(on_the_way) > _AHEAD * self.engine.width:
                count, task = on_the_way.popleft()
                yield count, task.result()
        for count, task in on_the_way:
            yield count, task.result()

    def _any_legal(self, branches: list[Branch]) -> bool:
        """Whether one of the plans that were dropped unchecked is legal."""
        unchecked = branches if self.survey.num_unchecked else []
        self.survey.pruned = self.survey.pruned if not unchecked else Pruned()
        plans = (plan for branch in unchecked for plan in self.study.space.plans(branch, self.survey.pruned))
        return next(plans, None) is not None

    def _simulate(self, share: float = 1.0) -> None:
        """Simulate prospects as the table asks for them. share: of the budget that may be spent by now."""
        on_the_way: deque[tuple[Prospect, PlanOutcome | Task]] = deque()
        while True:
            while len(on_the_way) >= self.table.window:
                self._take(*on_the_way.popleft())
            prospect = self.table.choose(self.open, share)
            if prospect is None:
                break
            found = self.known.get(prospect.key) or self.engine.evaluate(prospect.key, self._most_together(prospect))
            on_the_way.append((prospect, found))
        for item in on_the_way:
            self._take(*item)

    def _most_together(self, prospect: Prospect) -> int:
        """Candidates like this one in a task: each process has one before it while another comes."""
        return max(1, min(self.table.window // (2 * self.engine.width), _WORK_A_TASK // max(1, prospect.work)))

    def _take(self, prospect: Prospect, found: PlanOutcome | Task) -> None:
        """Wait for a candidate, write it to disk, then use it."""
        if not isinstance(found, PlanOutcome):
            outcome: PlanOutcome = found.result()
            if self.journal is not None:
                self.journal.add(outcome)
            found = outcome
        self.simulated[prospect.key] = found
        self.table.add(prospect, found)
        spent = min(1.0, self.table.work / self.study.budget) if self.study.layouts else None
        self.on_progress(Progress("simulation", len(self.simulated), None, self.table.best, spent=spent))


def _order(prospect: Prospect) -> tuple[float, str]:
    return prospect.floor, prospect.key


def _split(branch: Branch) -> int:
    """Number of ranks among which the model is split."""
    fields = branch.fields
    product: int = fields["tp"] * fields["cp"] * fields["pp"] * fields["ep"]
    return product


def _common(branch: Branch, seq_len: int) -> bool:
    """Tensor parallelism stays on a node, and context parallelism leaves a rank a piece of some length."""
    fields = branch.fields
    within: bool = fields["tp"] <= branch.cluster.gpus_per_node
    return within and (fields["cp"] == 1 or seq_len // fields["cp"] >= _TOKENS)


def _doubling(levels: list[list[Branch]], least: int) -> Iterator[list[Branch]]:
    """Levels one after another, together as many branches as all before them, and at least so many."""
    some: list[Branch] = []
    done = 0
    for level in levels:
        some += level
        if len(some) >= max(least, done):
            yield some
            done += len(some)
            some = []
    if some:
        yield some


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
    others = ("data_parallel", "zero", "pp", *AROUND)
    return repr([(name, value) for name, value in branch.fields.items() if name not in others])
