"""How good a machine's samples are, in a letter: how well the curves fit, and how much else the machine was doing."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Final, Literal

from simulator.spec.calibration import Calibration
from validate.samples import SampleFile

Letter = Literal["A", "B", "C", "F"]
# Upper bounds of A, B and C. The spread of repetitions (90th over 10th percentile, the median kind) was 1.02 on an idle
# H200, 1.27 to 1.29 on an idle virtual machine, 1.7 to 2.1 on one whose two cores had eight processes to run
# (experiments/measured; docs/guides/calibrate.md).
_BOUNDS: Final = {
    "residuals": (0.05, 0.10, 0.20),
    "repetitions": (1.10, 1.40, 1.65),
    "stolen": (0.005, 0.02, 0.10),
    "others": (0.05, 0.10, 0.25),
}
_LETTERS: Final[tuple[Letter, ...]] = ("A", "B", "C", "F")
_FEWEST_REPS: Final = 5


@dataclass(frozen=True, slots=True)
class Grade:
    """The worst of the letters, and what each is for."""

    letter: Letter
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"grade {self.letter}: {'; '.join(self.reasons)}" if self.reasons else f"grade {self.letter}"


def grade(found: SampleFile, calibration: Calibration) -> Grade:
    """A: idle and regular; B: usual of virtual machines; C: disturbed, wider intervals; F: something else was measured too."""
    grades: dict[str, tuple[float, str]] = {}
    qualities = [curve.quality for curve in calibration.gemms.values()]
    qualities += [curve.quality for curve in calibration.attention]
    qualities += [curve.quality for curve in calibration.streams]
    residuals = [one.p50 for one in qualities if one.p50 is not None and one.basis == "measured"]
    if residuals:
        middle = statistics.median(residuals)
        grades["residuals"] = middle, f"curves are off by {100 * middle:.1f} % in the median"
    ratios = [s.p90_s / s.p10_s for s in found.samples if s.p10_s and s.p90_s and s.reps >= _FEWEST_REPS]
    if ratios:
        middle = statistics.median(ratios)
        grades["repetitions"] = middle, f"repetitions spread by {middle:.2f} (90th over 10th percentile)"
    for name, key, words in (
        ("stolen", "steal_share", "other virtual machines took {:.1f} % of the cores"),
        ("others", "others_share", "other processes took {:.1f} % of the cores"),
    ):
        if shares := [float(row[key]) for row in found.sections if key in row]:
            grades[name] = statistics.fmean(shares), words.format(100 * statistics.fmean(shares))
    letters = {name: _letter(name, value) for name, (value, _) in grades.items()}
    worst: Letter = max(letters.values(), default="A", key=_LETTERS.index)
    return Grade(worst, tuple(f"{words} ({letters[name]})" for name, (_, words) in grades.items()))


def _letter(name: str, value: float) -> Letter:
    return _LETTERS[sum(value > bound for bound in _BOUNDS[name])]
