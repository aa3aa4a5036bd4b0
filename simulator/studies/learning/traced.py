"""What a profiler's trace of a run's step teaches: its kernels' seconds by category, each beside the predicted ones.

A trace tells products from attention and streams without a second run. Waits for links and for the host are left to the step's
time, which the trace's own clock slows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from typing_extensions import override

from simulator.base.errors import Fault, InputError
from simulator.play.lower import Lowering
from simulator.predict.play import SimulatedStep
from simulator.spec.calibration.learned import NAMES, CoefficientName
from simulator.studies.learning.observed import Observed, Step, step_of
from simulator.work.recorded.recording import Recording

Kernels = Mapping[CoefficientName, float]  # seconds of a step
_OWN: Final[Mapping[str, CoefficientName]] = {"gemm": "products", "attention": "attention"}
# Categories of a prediction that are no kernels, or kernels that others stand for
_NO_KERNELS: Final = ("host", "interference", "stragglers", "bubble", "overhead")
# One sigma of a category's seconds from step to step, with the profiler's own cost a kernel: some percent
_SCATTER: Final = 0.03


@dataclass(frozen=True, slots=True)
class Traced(Observed):
    """A category of a traced run. measured_s: its seconds in the trace."""

    category: CoefficientName = "software"

    @property
    @override
    def id(self) -> str:
        return f"{self.run.row.id}, trace: {self.category}"

    @override
    def taken(self, lowering: Lowering, played: SimulatedStep) -> Step:
        """The category alone: its slope and that of all time are 1."""
        full_step = step_of(lowering, played, self.run.time_factor)
        names = ("software", self.category)
        slopes = np.array([float(name in names) for name in NAMES])
        seconds = predicted(played.breakdown)[self.category] * self.run.time_factor
        return Step(seconds, slopes, full_step.prior, math.hypot(_SCATTER, full_step.scatter), full_step.described)


def traced(runs: list[Observed], traces: Mapping[str, Recording]) -> Iterator[Traced]:
    """The observations of traces, by the ids of their runs. Raises InputError with every trace that cannot stand beside its run."""
    by_id = {one.id: one for one in runs}
    faults = [fault for run, one in traces.items() for fault in _faults(run, one, by_id)]
    InputError.raise_for(faults)
    for run, recording in traces.items():
        one = by_id[run]
        shown = predicted(one.played.breakdown)
        for category, seconds in recorded(recording).items():
            if seconds and shown.get(category):
                yield Traced(one.run, seconds, one.calibration, one.lowering, category)


def _faults(run: str, recording: Recording, by_id: Mapping[str, Observed]) -> Iterator[Fault]:
    place = f"--traces {run}"
    if run not in by_id:
        yield Fault(place, "no row that teaches has this id", f"one of {', '.join(by_id)}")
        return
    plan = by_id[run].run.plan
    if recording.on_host:
        yield Fault(place, "no device was recorded", "ProfilerActivity.CUDA in the profiler")
    if plan.pp > 1:
        yield Fault(place, "a rank of a pipeline is one stage of it", "a trace of a run with pp = 1")
    if plan.recompute.mode != "none":
        problem = "its recomputed kernels cannot be told from the others"
        yield Fault(place, problem, "a trace of a run without recomputation")


def recorded(recording: Recording) -> dict[CoefficientName, float]:
    """Seconds of kernels by coefficient, communication left out."""
    found: dict[CoefficientName, float] = {}
    for op in recording.ops:
        if op.carried is None and op.category != "communication":
            name = _OWN.get(op.category, "elementwise")
            found[name] = found.get(name, 0.0) + op.duration_s
    return found


def predicted(breakdown: Mapping[str, float]) -> dict[CoefficientName, float]:
    """The same of a prediction."""
    found: dict[CoefficientName, float] = {}
    for category, seconds in breakdown.items():
        if category not in _NO_KERNELS and not category.startswith(("exposed", "wait")):
            name = _OWN.get(category, "elementwise")
            found[name] = found.get(name, 0.0) + seconds
    return found
