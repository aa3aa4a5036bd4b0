"""Alternatives at points: each simulated once, on all cores, and written to a journal first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from simulator.base.errors import InputError
from simulator.base.processes import cores, mapped
from simulator.cli.compare import subject_of
from simulator.studies.search import Journal, PlanOutcome

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
        tasks = [(key, self._alternatives[json.loads(key)[0]], self._flags) for key in missing]
        for done, outcome in enumerate(_simulated(tasks, self._jobs), start=1):
            if outcome.status == "failed":
                raise InputError.at(", ".join(json.loads(outcome.key)[1]) or "the study", outcome.reason)
            if self._journal is not None:
                self._journal.add(outcome)
            self._found[outcome.key] = outcome
            on_progress(done, len(tasks))


def _key(number: int, settings: Settings) -> str:
    return json.dumps([number, settings], ensure_ascii=False)


def _simulated(tasks: Sequence[Task], jobs: int) -> Iterator[PlanOutcome]:
    """Outcomes in the order of the tasks, on several processes where there is much to do."""
    return mapped(_evaluated, tasks, jobs, chunk=4)


def _evaluated(task: Task) -> PlanOutcome:
    key, (name, file, settings), flags = task
    try:
        simulated = [one for one in settings if not one.strip().startswith("price.")]
        subject = subject_of(name, file, flags, (*simulated, *json.loads(key)[1]), None)
        prediction = subject.predicted()
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
