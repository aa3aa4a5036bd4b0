"""The answer: what each input explains, how often the decision flips, and what happens at the ends of each range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from simulator.studies.sensitivity.design import Design, Points
from simulator.studies.sensitivity.ranges import Input

SCHEMA_VERSION: Final = 1
_RESAMPLES: Final = 200  # of the points, for the intervals of the indices
_LEVELS: Final = (5.0, 50.0, 95.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Sobol's indices of one input for one figure, each with a 90 % interval by resampling the points.

    first: share of the figure's variance that goes when the input is known; total: that is left when all others are.
    """

    first: float
    first_low: float
    first_high: float
    total: float
    total_low: float
    total_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """One input at both ends of its range (an error at its 5 and 95 %), all else as it is: figures of all alternatives."""

    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Alternatives, what varies, and the results.

    figure: what is compared, less is better; infinite if an alternative does not fit. pays: the present price of each, in
    words; empty if money is not compared. now: without any change.
    spread: 5, 50 and 95 % of each alternative's figure over the points. wins: share of the points at which each is best.
    flips: share at which another than today's best is. indices: of each alternative's figure; of the margin (logarithm of
    the best other's figure over that of today's best); of the decision (1 where today's best wins). Empty where a figure
    is the same everywhere, or where some point does not fit (not_fitting counts them).
    """

    alternatives: tuple[str, ...]
    figure: str
    pays: tuple[str, ...]
    inputs: tuple[Input, ...]
    num_points: int
    num_evaluated: int
    seed: int
    now: tuple[float, ...]
    best: int
    spread: tuple[tuple[float, float, float], ...]
    wins: tuple[float, ...]
    flips: float
    not_fitting: tuple[int, ...]
    indices: dict[str, tuple[Index, ...]]
    ends: tuple[Ends, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data; docs/reference/json-output.md describes every key."""
        inputs = [{"key": one.key, "range": one.words} for one in self.inputs]
        data: dict[str, Any] = _finite(asdict(self) | {"inputs": inputs, "best": self.alternatives[self.best]})
        return {"schema_version": SCHEMA_VERSION, **data}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The figure of every alternative: at every point of the design ([alternatives, points]), now, and at the ends.

    pays: the price of each, in words. num_evaluated: how many predictions it took.
    """

    figure: str
    pays: Sequence[str]
    values: Points
    now: Sequence[float]
    ends: Sequence[Ends]
    num_evaluated: int


def analysed(
    alternatives: Sequence[str], inputs: Sequence[Input], design: Design, found: Evaluated, *, seed: int
) -> Sensitivity:
    """The analysis of the figures."""
    values, now = found.values, found.now
    best = min(range(len(now)), key=lambda one: (now[one], one))
    sample = np.concatenate(design.parts(values)[:2], axis=1)  # A and B: independent points
    winners = np.argmin(sample, axis=0)
    wins = tuple(float(np.mean(winners == one)) for one in range(len(now)))
    return Sensitivity(
        alternatives=tuple(alternatives),
        figure=found.figure,
        pays=tuple(found.pays),
        inputs=tuple(inputs),
        num_points=sample.shape[1],
        num_evaluated=found.num_evaluated,
        seed=seed,
        now=tuple(now),
        best=best,
        spread=tuple(_spread(row) for row in sample),
        wins=wins,
        flips=1 - wins[best],
        not_fitting=tuple(int(np.sum(~np.isfinite(row))) for row in sample),
        indices=_indices(alternatives, best, design, values, seed),
        ends=tuple(found.ends),
    )


def _spread(row: Points) -> tuple[float, float, float]:
    low, middle, high = (float(each) for each in np.percentile(row, _LEVELS, method="nearest"))
    return low, middle, high


def _indices(
    alternatives: Sequence[str], best: int, design: Design, values: Points, seed: int
) -> dict[str, tuple[Index, ...]]:
    figures = dict(zip(alternatives, values, strict=True))
    if len(alternatives) > 1:
        others = np.min(np.delete(values, best, axis=0), axis=0)
        with np.errstate(all="ignore"):
            figures["margin"] = np.log(others / values[best])
        figures["decision"] = (np.argmin(values, axis=0) == best).astype(float)
    known = {name: row for name, row in figures.items() if np.all(np.isfinite(row)) and np.ptp(row) > 0}
    if not known:
        return {}
    parts = design.parts(np.stack(list(known.values())))
    found = _sobol(parts)
    draws = np.random.default_rng((seed, 1)).integers(0, len(design.a), size=(_RESAMPLES, len(design.a)))
    again = np.stack([_sobol((parts[0][:, d], parts[1][:, d], parts[2][:, :, d])) for d in draws])
    # Shares: of numpy's logarithms and sums the last digits hang on the processor
    found, low, high = (np.round(one, 12) + 0.0 for one in (found, *np.percentile(again, (5.0, 95.0), axis=0)))
    return {
        name: tuple(
            Index(
                first=float(found[0, row, column]),
                first_low=float(low[0, row, column]),
                first_high=float(high[0, row, column]),
                total=float(found[1, row, column]),
                total_low=float(low[1, row, column]),
                total_high=float(high[1, row, column]),
            )
            for column in range(found.shape[2])
        )
        for row, name in enumerate(known)
    }


def _sobol(parts: tuple[Points, Points, Points]) -> Points:
    """First and total indices, [2, figures, inputs]; 0 where a resample does not vary."""
    from scipy.stats import sobol_indices

    f_a, f_b = (np.concatenate([part, part[:1]]) for part in parts[:2])  # scipy fails on one figure of one input
    f_ab = np.concatenate([parts[2], parts[2][:, :1]], axis=1)
    found = sobol_indices(func={"f_A": f_a, "f_B": f_b, "f_AB": f_ab}, n=f_a.shape[1])
    return np.stack([found.first_order, found.total_order]).reshape(2, f_a.shape[0], -1)[:, :-1]


def _finite(value: Any) -> Any:  # noqa: ANN401  plain data of any depth
    """JSON has no infinity and no nan: null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
