"""What `shardwise sensitivity` evaluates: alternatives at points of their ranges, each simulated once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from itertools import chain, product
from pathlib import Path
from typing import Final, Literal

import numpy as np

from simulator.base.errors import Fault, InputError
from simulator.base.processes import cores, mapped
from simulator.cli.compare import other_prices, subject_of
from simulator.cli.programs import checkpoint_of, is_program, place_of, program_at
from simulator.formats.study import read_study
from simulator.formats.study.overrides import parse_overrides, patched
from simulator.predict.confidence import upward
from simulator.spec.prices import Price, Prices, cost
from simulator.studies.compare import Subject
from simulator.studies.goodput import LongRun, expected_run_s
from simulator.studies.goodput.failures import DAY_S, JobSize
from simulator.studies.search import Journal, PlanOutcome
from simulator.studies.search.study import identity_of
from simulator.studies.sensitivity import Design, Ends, Error, Evaluated, Input, Range, Sensitivity, analysed, together
from simulator.work.checkpoint import Saving

Settings = tuple[str, ...]
Alternative = tuple[str, Path | None, Settings]  # its name, its file, what is set of it
Task = tuple[str, Alternative, dict[str, str]]
OnProgress = Callable[[int, int], None]  # predictions done, and in all


class Known:
    """Outcomes of alternatives under settings, including those read from a journal."""

    def __init__(
        self, alternatives: Sequence[Alternative], flags: dict[str, str], journal: Journal | None, jobs: int | None
    ) -> None:
        self._alternatives, self._flags, self._journal = alternatives, flags, journal
        self._jobs = jobs or cores()
        self._found: dict[str, PlanOutcome] = dict(journal.outcomes()) if journal is not None else {}
        self._requested: set[str] = set()

    def __getitem__(self, one: tuple[int, Settings]) -> PlanOutcome:
        return self._found[_key(*one)]

    def __len__(self) -> int:
        return len(self._requested)

    def find(self, wanted: Sequence[tuple[int, Settings]], on_progress: OnProgress) -> None:
        """Simulate the missing outcomes. Raises InputError if a plan is illegal at some point."""
        keys = dict.fromkeys(_key(*one) for one in wanted)
        self._requested |= keys.keys()
        missing = [key for key in keys if key not in self._found]
        missing.sort(key=lambda key: int(json.loads(key)[0]))  # plan by plan: in the steps of one the same tensors live
        tasks = [(key, self._alternatives[json.loads(key)[0]], self._flags) for key in missing]
        for done, outcome in enumerate(mapped(_evaluated, tasks, self._jobs, chunk=4), start=1):
            if outcome.status == "failed":
                raise InputError.at(", ".join(json.loads(outcome.key)[1]) or "the study", outcome.reason, _SINGLE)
            if self._journal is not None:
                self._journal.add(outcome)
            self._found[outcome.key] = outcome
            on_progress(done, len(tasks))


def _key(number: int, settings: Settings) -> str:
    return json.dumps([number, settings], ensure_ascii=False)


def _evaluated(task: Task) -> PlanOutcome:
    key, (name, file, settings), flags = task
    try:
        simulated = [one for one in settings if not one.strip().startswith("price.")]
        subject = subject_of(name, file, flags, (*simulated, *json.loads(key)[1]), None)
        prediction = subject.predicted(quick=True)
    except InputError as exc:
        return PlanOutcome(key=key, status="failed", reason="; ".join(map(str, exc.faults)))
    status = prediction.verdict
    if not status.runs:
        return PlanOutcome(key=key, status=status, reason=prediction.cause, num_devices=prediction.num_devices)
    return PlanOutcome(
        key=key,
        status=status,
        num_devices=prediction.num_devices,
        step_s=float(prediction.step_s),
        tokens_per_step=prediction.tokens_per_step,
        spread={name: float(one) for name, one in prediction.spread.items()},
        stack_sigma=prediction.stack_sigma,
    )


Figure = Literal["time", "cost", "run-days", "run-cost"]
FIGURES: Final[dict[Figure, str]] = {
    "time": "microseconds a token",
    "cost": "{currency} a billion tokens",
    "run-days": "days of the run",
    "run-cost": "{currency} of the run",
}
_LITTLE: Final = 5e-4  # errors that move no alternative's step by more are left out
_ERROR_ENDS: Final = (0.05, 0.95)  # an error has no end
_NOT_SIMULATED: Final = ("price.", "run.")
_MTBF: Final = "run.mtbf"
_SINGLE: Final = "a range whose every number is legal; `explore --vary KEY=V,V` takes single values"


@dataclass(frozen=True, kw_only=True)
class SensitivityStudy:
    """Alternatives, ranges and the figure. errors: those of the prediction vary too. run: where the figure is a run's."""

    alternatives: tuple[Alternative, ...]
    flags: dict[str, str]
    ranges: tuple[Range, ...]
    figure: Figure
    prices: Prices | None
    run: LongRun | None
    errors: bool
    samples: int
    seed: int

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """The alternatives as they are. Raises InputError with every fault, those of both ends of each range too."""
        faults: dict[Fault, None] = {}
        found = []
        for number, (name, file, settings) in enumerate(self.alternatives):
            for more in (None, *product(range(len(self.ranges)), (0.0, 1.0))):
                try:
                    moved = self._settings(number, [more]) if more is not None else ()
                    subject = subject_of(name, file, self.flags, (*settings, *moved), self.prices)
                    found += [subject] if more is None else []
                    if self.figure in ("cost", "run-cost") and subject.prices is not None:
                        subject.prices.of(subject.cluster)
                except InputError as exc:
                    faults |= dict.fromkeys(self._at_range(fault) for fault in exc.faults)
        faults |= dict.fromkeys(self._run_faults())
        InputError.raise_for(faults)
        return tuple(found)

    def _at_range(self, fault: Fault) -> Fault:
        """The fault of a range's end, placed at the option that gave the range."""
        leaf = fault.place.removeprefix("--set ")
        varied = leaf != fault.place and leaf in {one.leaf for one in self.ranges}
        return replace(fault, place=f"--vary {leaf}") if varied else fault

    def _run_faults(self) -> list[Fault]:
        try:
            for share in (0.0, 1.0):
                for number in range(len(self.alternatives)):
                    self._run_at(number, [share] * len(self.ranges))
        except InputError as exc:
            return list(exc.faults)
        return []

    def _settings(
        self, number: int, moved: Sequence[tuple[int, float]], *, without: tuple[str, ...] = ("run.",)
    ) -> Settings:
        """Settings of an alternative at these positions in its ranges, without keys that begin with `without`."""
        at = [(self.ranges[which], share) for which, share in moved]
        return tuple(
            f"{one.leaf}={one.text(share)}"
            for one, share in at
            if one.concerns(number) and not one.leaf.startswith(without)
        )

    def _moved(self, row: Sequence[float | None]) -> list[tuple[int, float]]:
        return [
            (which, share) for which, (_, share) in enumerate(zip(self.ranges, row, strict=False)) if share is not None
        ]

    def answer(self, journal: Journal | None, jobs: int | None, on_progress: OnProgress) -> Sensitivity:
        """Simulate each needed point once and compute the answer from them."""
        base = [(number, self._simulated(number, [])) for number in range(len(self.subjects))]
        known = Known(self.alternatives, self.flags, journal, jobs)
        known.find(base, on_progress)
        inputs: tuple[Input, ...] = (*self.ranges, *self._errors([known[one] for one in base]))
        if not inputs:
            raise InputError.at("--vary", "nothing varies", "--vary KEY=LOW..HIGH")
        design = Design.of(len(inputs), self.samples, self.seed)
        points: list[list[float | None]] = design.points.tolist()
        single = [self._only(inputs, number, end) for number in range(len(inputs)) for end in (0, 1)]
        rows = [*points, *single]
        wanted = [(number, self._simulated(number, row)) for row in rows for number, _ in base]
        known.find(wanted, on_progress)
        values = [[self._figure(known[a, self._simulated(a, row)], a, row, inputs) for row in rows] for a, _ in base]
        now = [self._figure(known[one], one[0], [None] * len(inputs), inputs) for one in base]
        ends = [[row[len(points) + each] for row in values] for each in range(len(single))]
        found = Evaluated(
            figure=FIGURES[self.figure].format(currency=self.prices.currency if self.prices else ""),
            pays=self._pays(),
            values=np.array(values)[:, : len(points)],
            now=now,
            ends=[Ends(low=tuple(low), high=tuple(high)) for low, high in zip(ends[::2], ends[1::2], strict=True)],
            num_evaluated=len(known),
        )
        return analysed([name for name, _, _ in self.alternatives], inputs, design, found, seed=self.seed)

    def _only(self, inputs: Sequence[Input], number: int, end: int) -> list[float | None]:
        """One input at an end of its range, the others unchanged."""
        row: list[float | None] = [None] * len(inputs)
        row[number] = float(end) if isinstance(inputs[number], Range) else _ERROR_ENDS[end]
        return row

    def _simulated(self, number: int, row: Sequence[float | None]) -> Settings:
        """The settings of a point that affect the simulation of an alternative."""
        return self._settings(number, self._moved(row), without=_NOT_SIMULATED)

    def _errors(self, outcomes: Sequence[PlanOutcome]) -> Iterator[Error]:
        """Prediction errors: a category's error scales each alternative by that category's share; the unexplained error is shared per software."""
        if not self.errors:
            return
        for name in dict.fromkeys(name for one in outcomes for name in one.spread):
            sigmas = tuple(one.spread.get(name, 0.0) for one in outcomes)
            if max(sigmas) > _LITTLE:
                yield Error(key=f"error of {name}", sigmas=sigmas, upward=upward(name))
        done: set[int] = set()
        for number, subject in enumerate(self.subjects):
            alike = {n for n, other in enumerate(self.subjects) if subject.same_software(other)}
            sigmas = tuple(one.stack_sigma if n in alike else 0.0 for n, one in enumerate(outcomes))
            if number not in done and max(sigmas) > _LITTLE:
                yield Error(key=f"unexplained of {chr(ord('A') + number)}", sigmas=sigmas)
            done |= alike

    def _figure(self, outcome: PlanOutcome, number: int, row: Sequence[float | None], inputs: Sequence[Input]) -> float:
        """The compared figure at a point that was simulated."""
        if outcome.step_s is None:
            return math.inf
        moved = [(one, u) for one, u in zip(inputs, row, strict=True) if u is not None]
        step_s = outcome.step_s * math.exp(together(((one, u) for one, u in moved if isinstance(one, Error)), number))
        if self.figure == "time":
            return step_s / outcome.tokens_per_step * 1e6
        if self.figure == "cost":
            return cost(self._price(number, row), outcome.num_devices, step_s) / outcome.tokens_per_step * 1e9
        seconds = self._run_s(number, outcome, step_s, row)
        if self.figure == "run-days":
            return seconds / DAY_S
        run, _ = self._run_at(number, row)
        spare = run.spare_hosts * self.subjects[number].cluster.gpus_per_node if run is not None else 0
        return cost(self._price(number, row), outcome.num_devices + spare, seconds)

    def _pays(self) -> list[str]:
        """The price of each alternative as text; empty if cost is not compared."""
        if self.figure not in ("cost", "run-cost"):
            return []
        found = []
        for subject in self.subjects:
            assert subject.prices is not None
            one = subject.prices.cheapest(subject.cluster)
            found.append(
                f"{one.gpu_hour:.2f} {subject.prices.currency} a GPU and hour: {one.kind}, {one.date}, {one.source}"
            )
        return found

    def _price(self, number: int, row: Sequence[float | None]) -> Price:
        """The cheapest of an alternative's cluster at a point."""
        priced = [(which, share) for which, share in self._moved(row) if self.ranges[which].leaf.startswith("price.")]
        return self._cheapest(number, self._settings(number, priced))

    @cached_property
    def _cheapest(self) -> Callable[[int, Settings], Price]:
        @cache
        def cheapest(number: int, changed: Settings) -> Price:
            subject = self.subjects[number]
            assert subject.prices is not None
            prices = other_prices(subject.prices, subject.cluster, list(changed)) if changed else subject.prices
            return prices.cheapest(subject.cluster)

        return cheapest

    def _run_at(self, number: int, row: Sequence[float | None]) -> tuple[LongRun | None, float]:
        """The run at a point, and times as long between failures. Raises InputError."""
        moved = [(which, share) for which, share in self._moved(row) if self.ranges[which].concerns(number)]
        mtbf = math.prod(self.ranges[which].value(share) for which, share in moved if self.ranges[which].leaf == _MTBF)
        runs = [(which, share) for which, share in moved if self.ranges[which].leaf.startswith("run.")]
        overrides, faults = parse_overrides(self._settings(number, runs, without=(_MTBF,)), ("run",))
        InputError.raise_for(faults)
        return patched(self.run, overrides, InputError) if self.run is not None else None, mtbf

    def _run_s(self, number: int, outcome: PlanOutcome, step_s: float, row: Sequence[float | None]) -> float:
        run, mtbf = self._run_at(number, row)
        assert run is not None
        size = JobSize.of(self.subjects[number].cluster, outcome.num_devices)
        saved, load_s = self._checkpoints[number]
        tokens = outcome.tokens_per_step
        return expected_run_s(run, saved, load_s, step_s=step_s, tokens_per_step=tokens, size=size, mtbf_factor=mtbf)

    @cached_property
    def _checkpoints(self) -> tuple[tuple[Saving, float], ...]:
        """The cost of a checkpoint of each alternative."""
        found = []
        for _, file, settings in self.alternatives:
            left = [one for one in settings if not one.startswith("price.")]
            if file is not None and is_program(file):
                flags = {name: text for name, text in self.flags.items() if name != "tokens_per_step"}
                found.append(checkpoint_of(program_at(file, place := place_of(flags, left)), place))
            else:
                found.append(checkpoint_of(None, read_study(file, self.flags, {}, left)))
        return tuple(found)


def identity(study: SensitivityStudy) -> str:
    """A hash of everything that an outcome depends on, but for the point."""
    nouns = [(one.model, one.plan, one.cluster, one.calibration, one.stack) for one in study.subjects]
    programs = [asdict(one.program) for one in study.subjects if one.program is not None]
    return identity_of("sensitivity", *chain.from_iterable(nouns), *programs)
