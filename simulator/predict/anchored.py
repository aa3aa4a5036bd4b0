"""A program's step from the measured step of another one, with captures of both.

What the other's prediction was off by says how far this one's is off, as far as both err alike. Of the logarithms of measured
over predicted, whose parts are those of the two intervals (`Prediction.spread`), the most probable one here is

    k × the other's,    k = Σ ρ_c a_c b_c / Σ b_c²

with a_c and b_c one sigma of part c here and there, ρ_c the correlation of the two. What is left of this one's variance is
Σ a_c² − (Σ ρ_c a_c b_c)² / Σ b_c². With k = 1 this is the measured time × the ratio
of the two predictions: so it is for the same program. A step that waits for its host says little of one that does not.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Final

from simulator.base.units import format_seconds
from simulator.predict.confidence import OF_ALL_STEPS, SLOWER, reaches, upward
from simulator.predict.difference import COMMON
from simulator.predict.prediction import Prediction, Source
from simulator.spec.calibration.timer import Timer
from simulator.work.captured.capture import Capture, Kind
from simulator.work.captured.kernels import priced
from simulator.work.captured.tensors import parsed

_ALIKE: Final = OF_ALL_STEPS**2  # correlation of what a curve, a link or a stack errs by in other kernels and messages
_NOT_SHARED: Final = "parts not measured"


def shared_kernels(one: Capture, other: Capture, timer: Timer) -> float:
    """Of the seconds of a program's kernels in a step, the share of those that another runs at the same shapes."""
    mine, theirs = _kernel_s(one, timer), _kernel_s(other, timer)
    return sum(s for name, s in mine.items() if name in theirs) / (sum(mine.values()) or 1)


def anchored(found: Prediction, other: Prediction, measured_s: float, shared: float, name: str = "") -> Prediction:
    """The prediction, given that another program's step took `measured_s` on the same kind of machine.

    shared: of `shared_kernels`; 0 on another device. name: of the other program, for the report.
    """
    error = math.log(measured_s / other.step_s)
    known = _learnt(found, other, shared, up=error > 0)[0]
    below, above = (_learnt(found, other, shared, up=up)[1] for up in (False, True))
    parts = {_NOT_SHARED: math.sqrt(below), SLOWER + _NOT_SHARED: math.sqrt(max(0.0, above - below))}
    times = math.exp(known * error)
    step_s, (down, up) = times * found.step_s, reaches(0.0, parts)
    before = f"{format_seconds(measured_s)} measured, {format_seconds(other.step_s)} predicted"
    alone = format_seconds(found.step_s)
    detail = f"{before}: {known:.0%} of it taken over ({alone} without), {shared:.0%} in kernels of both; {name}"
    return replace(
        found, step_s=step_s, low_s=max(step_s * math.exp(-down), min(step_s, found.floor_s)), high_s=step_s * math.exp(up),
        lower_s=times * found.lower_s, upper_s=times * found.upper_s, spread=parts, stack_sigma=0.0,
        breakdown={part: times * s for part, s in found.breakdown.items()},
        communication={kind: (times * a, times * b) for kind, (a, b) in found.communication.items()},
        remedies=tuple(replace(one, step_s=times * one.step_s) for one in found.remedies),
        sources=(Source(what="step", kind="measured", detail=detail), *found.sources),
    )  # fmt: skip


def _learnt(found: Prediction, other: Prediction, shared: float, *, up: bool) -> tuple[float, float]:
    """(k, what is left of this one's variance); up: of the side on which steps are longer."""
    mine, theirs = ({"stack": one.stack_sigma, **one.spread} for one in (found, other))
    names = [name for name in mine | theirs if up or not upward(name)]
    both = [(mine.get(name, 0.0), theirs.get(name, 0.0), _alike(name, shared)) for name in names]
    common, seen = sum(a * b * alike for a, b, alike in both), sum(b * b for _, b, _ in both)
    left = sum(a * a for a, _, _ in both) - (common * common / seen if seen else 0.0)
    return common / seen if seen else 1.0, max(0.0, left)


def _alike(name: str, shared: float) -> float:
    """The correlation of a part's errors in both: of the host and the data, all; of the same kernels, all."""
    return 1.0 if name.removeprefix(SLOWER).startswith(COMMON) else shared + (1 - shared) * _ALIKE


def _kernel_s(one: Capture, timer: Timer) -> dict[str, float]:
    """Kernels of an operator -> seconds in the recorded step."""
    found = defaultdict[str, float](float)
    calls = Counter(event[1] for event in one.events[one.steady :] if event[0] == Kind.OPERATOR)
    for signature, times in calls.items():
        name, args, results = one.signatures[signature]
        kernels = priced(name, parsed(args), parsed(results), one.costs.get(signature)).kernels
        found[repr(kernels)] += times * sum(map(timer.kernel_s, kernels))
    return found
