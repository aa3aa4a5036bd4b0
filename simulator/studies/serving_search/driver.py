"""The search: surveys of all layouts, the fewest engines of each that meet the limits, then pairs of pools.

A layout is dropped where it does not fit in memory, where a bound of its times exceeds a limit (floors.py), or where the
fewest GPUs that take the rate are more than there are, or more than the table's last row has. What is dropped cannot be in
the table; which layouts are played depends on the study alone, as the table is read between sizes of engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from simulator.base.remembered import made_once
from simulator.spec.prices import Price, Prices
from simulator.studies.search.driver import Progress
from simulator.studies.serving import InferencePlan
from simulator.studies.serving.report import judged
from simulator.studies.serving.serving import check_requests
from simulator.studies.serving_search.answers import Answer, Counts, ServingSearchReport, rows_of
from simulator.studies.serving_search.assurance import surely, wholly
from simulator.studies.serving_search.floors import Floors, floors_of
from simulator.studies.serving_search.notes import Notes
from simulator.studies.serving_search.plays import Values
from simulator.studies.serving_search.pools import Side, best_ratio, pair_answer, single_answer
from simulator.studies.serving_search.space import Role, key_of, layouts, of_key
from simulator.studies.serving_search.study import ServingSearch
from simulator.studies.serving_search.tasks import Fewest, Survey, Task, counts_of, excess, fewest_of, slo_of
from simulator.studies.serving_search.workers import Workers

Tell = Callable[[Progress], None]


class SearchInterrupted(Exception):  # noqa: N818  no error: the answer so far
    """Ctrl-C. report: what is known until then."""

    def __init__(self, report: ServingSearchReport) -> None:
        super().__init__()
        self.report = report


def search_serving(
    study: ServingSearch,
    *,
    jobs: int = 1,
    notes: Notes | None = None,
    prices: Prices | None = None,
    tell: Tell = lambda _: None,
) -> ServingSearchReport:
    """The serving plans that meet the study's limits on the fewest GPUs.

    jobs: processes. notes: a journal of finished parts. Raises PlanError where no layout is legal, InputError where a
    request is too long or the cluster has no price; SearchInterrupted on Ctrl-C.
    """
    price = prices.cheapest(study.cluster) if prices is not None else None
    with Workers(study, jobs, notes) as workers:
        run = _Run(study, workers, tell)
        try:
            run.whole()
            report = run.report(price)
            rows, best = wholly(workers.player, report.rows)
            report = replace(report, rows=rows)
            if best is not None:
                report = replace(report, **surely(workers.player, best))
        except KeyboardInterrupt:
            report = replace(run.report(price), interrupted=True, currency=prices.currency if prices else None)
            raise SearchInterrupted(report) from None
    return replace(report, currency=prices.currency if prices else None)


class _Run:
    """What is known so far."""

    def __init__(self, study: ServingSearch, workers: Workers, tell: Tell) -> None:
        self.study, self._workers, self._player, self._tell = study, workers, workers.player, tell
        self.space = layouts(study)
        for one in {layout.max_model_len: layout for layout in self.space.engines}.values():
            check_requests(study.model, one, self._player.requests)
        self._single: list[Answer] = []
        self._paired: dict[str, list[Answer]] = {}  # of a layout that decodes, the best or all
        self._done: dict[tuple[Role, str], Side | None] = {}  # what a pool's own limits leave
        self._tried: set[tuple[str, str]] = set()
        self.nearest: Answer | None = None
        self.surveys: dict[str, Survey] = {}
        self._became: Counter[str] = Counter()
        self._plays = 0
        self._bounds: dict[str, Floors] = {}
        self._nearest_of: dict[Role, tuple[float, str, int]] = {}  # of each pool: excess, layout, engines

    def whole(self) -> None:
        """Everything, small engines first, as the table's limit then drops most of the large ones."""
        space, study = self.space, self.study
        alone, pooled = study.disaggregated != "yes", study.disaggregated != "no"
        pooled = pooled and study.hands_over and any(request.output_tokens > 1 for request in self._player.counted)
        roles: tuple[Role, ...] = (*(("both",) if alone else ()), *(("decode",) if pooled else ()))
        for size in sorted({one.engine_devices for one in (*space.engines, *space.prompts)}):
            engines = [one for one in space.engines if one.engine_devices == size]
            self._survey(engines, roles)
            if alone:
                self._singles(engines)
            if pooled:
                self._survey([one for one in space.prompts if one.engine_devices == size], ("prefill",))
                self._pairs(size)
        if not self.answers and self.nearest is None:
            self._nearest_without_plays()

    def report(self, price: Price | None) -> ServingSearchReport:
        """The table as it stands."""
        became = self._became
        counts = {name: became[name] for name in ("too_large", "too_slow", "short", "pruned", "missed", "met", "pairs")}
        missing = [one.missing_bytes for one in self.surveys.values()]
        num_layouts = len({key_of(one) for one in (*self.space.engines, *self.space.prompts)})
        return ServingSearchReport(
            study=self.study,
            rows=rows_of(self.study, self.answers, price),
            counts=Counts(refused=self.space.num_refused, layouts=num_layouts, plays=self._plays, **counts),
            nearest=None if self.answers else self.nearest,
            least_devices=self._least_devices(),
            missing_bytes=min(missing, default=0) or None,
            price=price,
        )

    @property
    def answers(self) -> list[Answer]:
        """All that are known."""
        return [*self._single, *(one for some in self._paired.values() for one in some)]

    @property
    def _limit(self) -> int:
        """No answer with more GPUs can be in the table."""
        study, most = self.study, self.study.most_devices
        if study.every or study.exhaustive or len(self.answers) < study.top:
            return most
        return sorted(one.num_devices for one in self.answers)[study.top - 1]

    def _least_devices(self) -> int | None:
        """Of layouts that fit, the fewest GPUs that take the rate."""
        least: dict[Role, int] = {}
        for key, survey in self.surveys.items():
            for role, engines in survey.least.items():
                devices = engines * of_key(key).engine_devices
                least[role] = min(least.get(role, devices), devices)
        pair = [least["prefill"] + least["decode"]] if {"prefill", "decode"} <= least.keys() else []
        return min([*([least["both"]] if "both" in least else []), *pair], default=None)

    def _survey(self, some: Sequence[InferencePlan], roles: tuple[Role, ...]) -> None:
        """Memory, bounds and capacity of layouts whose engine alone is not too large for the table."""
        limit = self._limit
        tasks = [Task("survey", key_of(one), roles) for one in some if one.engine_devices <= limit]
        self._became["pruned"] += len(roles) * (len(some) - len(tasks))
        for data in self._workers.answers(tasks, partial(self._report_progress, "survey")):
            found = Survey(**data)
            known = self.surveys.get(found.layout, found)
            self.surveys[found.layout] = replace(
                found,
                capacity=known.capacity | found.capacity,
                least=known.least | found.least,
                floor=known.floor | found.floor,
            )
            if found.missing_bytes:
                self._became["too_large"] += len(roles)
            else:
                self._became["too_slow"] += sum(role not in found.least for role in roles)

    def _sides(self, some: Sequence[InferencePlan], role: Role, spare: int = 0) -> list[Side]:
        """Those that may be in the table, with numbers of engines that take the rate. spare: GPUs that another pool takes."""
        found = []
        for layout in some:
            survey = self.surveys.get(key_of(layout))
            if survey is None or role not in survey.least:
                continue
            counts = counts_of(self.study, layout, survey.least[role], self.space.counts[role])
            if not counts or counts[0] * layout.engine_devices + spare > self.study.most_devices:
                self._became["short"] += 1
            elif counts[0] * layout.engine_devices + spare > self._limit:
                self._became["pruned"] += 1
            else:
                found.append(Side(layout=layout, counts=counts))
        return found

    def _fewest(self, sides: Sequence[Side], role: Role) -> list[Fewest]:
        """Of each; their plays are known from then on."""
        tasks = [Task("fewest", key_of(side.layout), (role,), side.counts) for side in sides]
        found = [fewest_of(data) for data in self._workers.answers(tasks, partial(self._report_progress, "plays"))]
        for one in found:
            self._plays += len(one.plays)
            for play in one.plays:
                self._player.know(play)
            self._became["missed" if one.engines is None else "met"] += 1
        return found

    def _singles(self, some: Sequence[InferencePlan]) -> None:
        """Answers whose engines do both."""
        for found in self._fewest(self._sides(some, "both"), "both"):
            layout = of_key(found.layout)
            if found.engines is not None:
                self._single.append(single_answer(self._player, layout, found.engines))
                continue
            for play in found.plays:
                self._missed(single_answer(self._player, layout, play.engines))

    def _missed(self, answer: Answer | None) -> None:
        if answer is not None and (self.nearest is None or answer.excess < self.nearest.excess):
            self.nearest = answer

    def _pairs(self, size: int) -> None:
        """The best pair of each layout that decodes, of engines of this size at most."""
        spare = self._least_of("decode", self.space.engines), self._least_of("prefill", self.space.prompts)
        if not all(spare):
            return
        prompts = self._enough([one for one in self.space.prompts if one.engine_devices <= size], "prefill", spare[0])
        cheapest = min((side.least_devices for side in prompts), default=0)
        engines = [one for one in self.space.engines if one.engine_devices <= size] if prompts else []
        answers = self._enough(engines, "decode", cheapest)
        for number, (side, other) in enumerate(product(answers, prompts), 1):
            self._pair(other, side)
            self._report_progress("pairs", number, len(answers) * len(prompts))

    def _pair(self, prompts: Side, answers: Side) -> None:
        """Its best ratio, where that may be in the table and has not been looked for."""
        every = self.study.every or self.study.exhaustive
        keys = key_of(prompts.layout), key_of(answers.layout)
        best = self._paired.get(keys[1], [])
        most = self._limit if every or not best else min(self._limit, best[0].num_devices)
        if keys in self._tried or answers.least_devices + prompts.least_devices > most:
            return
        self._tried.add(keys)
        self._became["pairs"] += 1
        bound = excess(judged(self._floors(prompts, answers), self.study.slo)[0])
        if bound > 1 and not self.study.exhaustive:
            return
        found, nearest = best_ratio(self._player, prompts, answers, self._limit)
        self._missed(nearest)
        both = sorted([*best, *([found] if found else [])], key=lambda one: one.order)
        self._paired[keys[1]] = both if self.study.every else both[:1]

    def _floors(self, prompts: Side, answers: Side) -> Values:
        """Bounds of a pair's figures."""
        both = prompts.layout, answers.layout
        first, rest = (made_once(self._bounds, key_of(one), Floors, self.study, one) for one in both)
        return floors_of(first, rest, self._player.counted)

    def _least_of(self, role: Role, some: Sequence[InferencePlan]) -> int:
        """GPUs that a pool takes at least."""
        known = ((one, self.surveys.get(key_of(one))) for one in some)
        return min((one.engine_devices * s.least[role] for one, s in known if s and role in s.least), default=0)

    def _enough(self, some: Sequence[InferencePlan], role: Role, spare: int) -> list[Side]:
        """Those that meet a pool's own limits, with the numbers of engines from the fewest that do; small pools first."""
        new = [one for one in some if (role, key_of(one)) not in self._done]
        sides = self._sides(new, role, spare)
        for side, one in zip(sides, self._fewest(sides, role), strict=True):
            self._note(role, one)
            begin = side.counts[0] if self.study.exhaustive else one.engines
            counts = () if begin is None else tuple(n for n in side.counts if n >= begin)
            self._done[role, one.layout] = Side(layout=side.layout, counts=counts) if counts else None
        known = (self._done.get((role, key_of(one))) for one in some)
        return sorted((side for side in known if side), key=lambda side: (side.least_devices, key_of(side.layout)))

    def _note(self, role: Role, one: Fewest) -> None:
        """The plays of a pool that miss its own limits least."""
        slo = slo_of(role, self.study.slo)
        for play in one.plays:
            found = excess(judged(self._player.values(play, play), slo)[0]), one.layout, play.engines
            self._nearest_of[role] = min(self._nearest_of.get(role, found), found)

    def _nearest_without_plays(self) -> None:
        """No plan was played, as one pool misses its limits, or bounds exclude them: what misses them least, on all GPUs."""
        for role in ("both", "prefill", "decode"):
            found = [(one.floor[role], key) for key, one in self.surveys.items() if role in one.floor]
            if not found or role in self._nearest_of:
                continue
            layout = of_key(min(found)[1])
            counts = counts_of(self.study, layout, self._player.least(role, layout), self.space.counts[role])
            if role == "both" and counts:
                self._missed(single_answer(self._player, layout, counts[-1]))
            elif counts:
                self._nearest_of[role] = min(found)[0], key_of(layout), counts[0]
        if self.nearest is None and {"prefill", "decode"} <= self._nearest_of.keys():
            (_, prompts, p), (_, answers, d) = self._nearest_of["prefill"], self._nearest_of["decode"]
            pair = pair_answer(self._player, of_key(prompts), of_key(answers), (p, d))
            self._missed(pair if pair and pair.num_devices <= self.study.most_devices else None)

    def _report_progress(self, phase: str, done: int, total: int) -> None:
        """Of engines of one size."""
        best = min((one.num_devices for one in self.answers), default=None)
        self._tell(Progress(phase, done, total, best))
