"""Measured runs, and their predictions under other coefficients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.base.errors import InputError
from simulator.play.lower import Lowering, lower
from simulator.predict import memory_of
from simulator.predict.confidence import OF_ALL_STEPS, priors
from simulator.predict.play import SimulatedStep, play
from simulator.predict.slopes import slopes
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.calibration.intervals import HOST_SIGMA
from simulator.spec.calibration.learned import NAMES, Values, on_links, on_stack, speeds
from simulator.spec.calibration.likeness import Point, point_of
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.blanks import filled_rows
from simulator.studies.backtest.measured import NoStepTimeError
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.resolve import Run, resolve, with_attention
from simulator.studies.backtest.rows import RunRow
from simulator.studies.backtest.work import measured_step_s

Array = NDArray[np.float64]
# One sigma of a step's own log time beside what a stack's sigma says, where nobody described the software: steps of one such
# program differ by more than a common factor
UNKNOWN_SCATTER: Final = 0.08


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that cannot be used, and the reason."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Step:
    """A run under some coefficients. slopes, prior: in the order of NAMES; prior: one sigma each before anything was measured.

    scatter: one sigma of what such steps differ by beside the coefficients, before anything was measured. described: its software is.
    """

    seconds: float
    slopes: Array
    prior: Array
    scatter: float
    described: bool = False


@dataclass(frozen=True, slots=True)
class Observed:
    """A run that can be predicted again under other coefficients, and its measured seconds (0: not measured)."""

    run: Run
    measured_s: float
    calibration: Calibration
    lowering: Lowering

    @property
    def fits(self) -> bool:
        """Whether the best estimate fits; the first variant of a row that does is used."""
        return memory_of(self.lowering, quick=True).verdict.runs

    @property
    def id(self) -> str:
        return self.run.row.id

    @property
    def point(self) -> Point:
        """Its point in the space of runs."""
        return point_of(self.run.model, self.run.plan, self.run.cluster)

    def step(self, values: Values, curves: LinkCurves | None = None, nodes: float = 1.0) -> Step:
        """The predicted step under these values. curves: link curves under them, if known."""
        run = self.run
        if not values:
            return self.taken(self.lowering, self.played)
        links = curves or on_links(values, self.calibration.links or default_curves(), nodes)
        calibration = self.calibration.with_speed(speeds(values))
        lowering = lower(run.model, run.plan, run.cluster, on_stack(values, run.stack), calibration, links)
        return self.taken(lowering, play(lowering))

    @property
    def played(self) -> SimulatedStep:
        """The step without learned coefficients."""
        return play(self.lowering)

    def taken(self, lowering: Lowering, played: SimulatedStep) -> Step:
        """The measured part of a predicted step."""
        return step_of(lowering, played, self.run.time_factor)


def step_of(lowering: Lowering, played: SimulatedStep, factor: float) -> Step:
    """A whole step. factor: of a run's time over its plan's."""
    j, before = slopes(lowering, played, HOST_SIGMA), priors(lowering, played)
    own = OF_ALL_STEPS * lowering.stack.fitted.sigma
    return Step(
        seconds=played.step_s * factor,
        slopes=np.array([j.get(name, 0.0) for name in NAMES]),
        prior=np.array([before[name] for name in NAMES]),
        scatter=math.hypot(own, UNKNOWN_SCATTER) if lowering.stack.known == "unknown" else own,
        described=lowering.stack.known == "described",
    )


def observed(rows: Iterable[RunRow]) -> tuple[list[Observed], list[Refused]]:
    """The usable rows, and the others with their reasons."""
    found, refused = list[Observed](), list[Refused]()
    for row in rows:
        try:
            found.append(_observed(row))
        except (RefusedError, NoStepTimeError) as exc:
            refused.append(Refused(row.id, str(exc)))
        except InputError as exc:
            refused.append(Refused(row.id, "; ".join(map(str, exc.faults))))
    return found, refused


def _observed(row: RunRow) -> Observed:
    """The row's first variant that fits the device. Raises RefusedError, or InputError."""
    first: InputError | RefusedError | None = None
    last: Observed | None = None
    rows = filled_rows(row)
    for filled in rows:
        try:
            run = resolve(filled)
            last = as_run(run, measured_step_s(run) or 0.0)
            if len(rows) == 1 or last.fits:
                break
        except (InputError, RefusedError) as exc:
            first = first or exc
    if last is None:
        raise first or RefusedError(("nothing to predict", ""))
    if not last.measured_s:
        raise RefusedError(("no step time", "the row has no metric that gives one"))
    return last


def on_one_stack(runs: Sequence[Observed]) -> list[Observed]:
    """Runs of undescribed software, all on the generic stack that most of them have: one program is one stack.

    Compiled runs and others are two. A plan that the stack cannot run keeps its own.
    """
    usual: dict[str | None, str] = {}
    for compiled in {one.run.row.compile for one in runs}:
        mine = [
            one.run.stack.name for one in runs if one.run.row.compile == compiled and one.run.stack.known == "unknown"
        ]
        usual |= {compiled: max(sorted(set(mine)), key=mine.count)} if mine else {}
    return [_moved_to(one, usual.get(one.run.row.compile)) for one in runs]


def _moved_to(one: Observed, name: str | None) -> Observed:
    run = one.run
    if name is None or run.stack.known != "unknown" or run.stack.name == name:
        return one
    stack = with_attention(Stack.load(name), flash=run.row.flash_attn, device=run.cluster.device).copy_with(
        known="unknown"
    )
    try:
        return as_run(replace(run, stack=stack, plan=run.plan.copy_with(stack=name)), one.measured_s)
    except InputError:
        return one


def as_run(run: Run, measured_s: float = 0.0) -> Observed:
    """A run made ready. Raises InputError."""
    calibration = Calibration.for_device(run.cluster.device)
    links = calibration.links or default_curves()
    lowering = lower(run.model, run.plan, run.cluster, run.stack, calibration, links)
    return Observed(run, measured_s, calibration, lowering)
