"""The posterior: coefficients whose steps are nearest to the measured ones, and nearest to what was known before.

    minimise over θ   Σ_i w_i (log y_i - log T_i(θ))² / τ²  +  Σ_k θ_k² / σ_k²

y: measured seconds, T: predicted ones, σ: one sigma of a coefficient before (what the intervals of predictions are made of),
τ: how much single steps scatter, estimated with θ (expectation-maximisation over an inverse-gamma prior). Weights w are those of
Student's t: a step that contradicts the others counts less (Lange, Little and Taylor 1989, doi 10.1080/01621459.1989.10478852).
Gauss-Newton on exact predictions, with each coefficient's share of the step as its slope; the covariance is Laplace's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy.stats import t as student

from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.calibration.learned import NAMES, Coefficient, CoefficientName, Learned, on_links
from simulator.studies.learning.observed import Array, Observed, Step

FREEDOM: Final = 4.0  # of Student's t, and of the prior on the scatter: as sure as four runs would make it
CLEARLY: Final = 0.8  # nearer by less than a fifth is what a few runs do by chance
_MOST_ROUNDS: Final = 8
_SMALL: Final = 0.02  # of a sigma: a step of Gauss-Newton below which nothing moves any more
_HALVINGS: Final = 3
_Z90: Final = 1.6449


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """theta: values in the order of `names`. covariance: of them. steps: the runs under them, each as `Observed.step`.

    slopes: of each run (rows), for each name. prior: one sigma of each name before. weights: of the runs.
    """

    names: tuple[CoefficientName, ...]
    theta: Array
    covariance: Array
    prior: Array
    scatter: float
    steps: tuple[Step, ...]
    slopes: Array
    residuals: Array
    weights: Array
    nodes: float

    @property
    def values(self) -> dict[CoefficientName, float]:
        return dict(zip(self.names, map(float, self.theta), strict=True))

    @property
    def reach(self) -> float:
        """90 % quantile of what scatters as a few runs said."""
        return float(student.ppf(0.95, FREEDOM + len(self.steps)))

    def as_file(self, name: str, runs: Sequence[str]) -> Learned:
        """What a prediction needs of it; digits beyond the sixth say nothing."""
        sigmas = np.sqrt(np.diag(self.covariance))
        return Learned(
            name=name,
            runs=tuple(runs),
            coefficients=tuple(
                Coefficient(name=n, value=_rounded(v), prior_sigma=_rounded(p), sigma=_rounded(s))
                for n, v, p, s in zip(self.names, self.theta, self.prior, sigmas, strict=True)
            ),
            covariance=tuple(tuple(_rounded(c) for c in row) for row in self.covariance),
            scatter=_rounded(self.scatter),
            reach=_rounded(self.reach),
            nodes=self.nodes,
        )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def posterior(observed: Sequence[Observed]) -> Posterior:
    """What the runs teach. At least one."""
    nodes = float(max(2, min((o.run.cluster.num_nodes for o in observed if o.run.cluster.num_nodes > 1), default=2)))

    def steps_at(names: Sequence[CoefficientName], theta: Array) -> tuple[Step, ...]:
        values = dict(zip(names, map(float, theta), strict=True))
        links: dict[int, LinkCurves] = {}
        found = []
        for one in observed:
            base = one.calibration.links or default_curves()
            curves = links.setdefault(id(base), on_links(values, base, nodes))
            found.append(one.step(values, curves))
        return tuple(found)

    measured = np.log([o.measured_s for o in observed])
    first = tuple(one.step({}) for one in observed)
    prior = np.max([s.prior for s in first], axis=0)
    taught = np.max([np.abs(s.slopes) for s in first], axis=0) * prior > 0
    kept = [i for i in range(len(NAMES)) if taught[i]]
    names, prior = tuple(NAMES[i] for i in kept), prior[kept]
    scatter = float(np.median([s.scatter for s in first]))
    return _descended(
        names=names, prior=prior, scatter=scatter, nodes=nodes, measured=measured, first=first, kept=kept,
        steps_at=lambda theta: steps_at(names, theta),
    )  # fmt: skip


def _descended(
    *, names: tuple[CoefficientName, ...], prior: Array, scatter: float, nodes: float, measured: Array,
    first: tuple[Step, ...], kept: list[int], steps_at: Callable[[Array], tuple[Step, ...]],
) -> Posterior:  # fmt: skip
    """Gauss-Newton from where nothing was learned; τ and the weights follow in each round."""
    theta, steps, tau = np.zeros(len(names)), first, scatter
    positive = np.array([name == "overhead" for name in names])  # no step has less than none
    for _ in range(_MOST_ROUNDS):
        j, residuals = _linear(steps, kept, measured)
        weights = _weights(residuals, tau)
        covariance, target = _solved(j, residuals + j @ theta, weights, prior, tau)
        tau = _scatter(weights * residuals**2, j, covariance, scatter)
        move = np.where(positive, np.maximum(target, 0.0), target) - theta
        if float(np.max(np.abs(move) / prior)) < _SMALL:
            break
        before, (theta, steps) = steps, _moved(theta, move, steps, measured, prior, tau, steps_at)
        if steps is before:
            break

    def at(theta: Array, steps: tuple[Step, ...], tau: float) -> Posterior:
        j, residuals = _linear(steps, kept, measured)
        weights = _weights(residuals, tau)
        covariance, _ = _solved(j, residuals + j @ theta, weights, prior, tau)
        return Posterior(
            names=names, theta=theta, covariance=covariance, prior=prior, scatter=_scatter(weights * residuals**2, j, covariance, scatter),
            steps=steps, slopes=j, residuals=residuals, weights=weights, nodes=nodes,
        )  # fmt: skip

    found, unmoved = at(theta, steps, tau), at(np.zeros(len(names)), first, tau)
    if _predicts(found, unmoved):
        return found
    return replace(unmoved, covariance=found.covariance + np.outer(theta, theta))  # around where nothing was moved


def _predicts(found: Posterior, unmoved: Posterior) -> bool:
    """Whether the runs move anything. Of software that nobody described always.

    Stacks hold coefficients that measurements taught: there, left out one by one, the runs must be clearly nearer to what the
    others teach than to what was known before.
    """
    if len(found.steps) == 1 or not all(step.described for step in found.steps):
        return True
    left_out = [abs(without(found, i)[0]) for i in range(len(found.steps))]
    return float(np.mean(left_out)) < CLEARLY * float(np.mean(np.abs(unmoved.residuals)))


def _linear(steps: Sequence[Step], kept: list[int], measured: Array) -> tuple[Array, Array]:
    """(slopes, measured over predicted in logarithms)."""
    return np.array([s.slopes[kept] for s in steps]), measured - np.log([s.seconds for s in steps])


def _weights(residuals: Array, tau: float) -> Array:
    weights: Array = (FREEDOM + 1) / (FREEDOM + (residuals / tau) ** 2)
    return np.minimum(weights, 1.0)


def _solved(j: Array, target: Array, weights: Array, prior: Array, tau: float) -> tuple[Array, Array]:
    """(covariance, values) of the linear problem."""
    weighted = j * (weights / tau**2)[:, None]
    covariance: Array = np.asarray(np.linalg.inv(j.T @ weighted + np.diag(prior**-2)), dtype=np.float64)
    return covariance, covariance @ (weighted.T @ target)


def _scatter(squares: Array, j: Array, covariance: Array, before: float) -> float:
    """τ: the runs' weighted squared residuals and what the coefficients leave of them, beside the prior's."""
    left = squares + np.einsum("ik,kl,il->i", j, covariance, j)
    return math.sqrt((FREEDOM * before**2 + float(left.sum())) / (FREEDOM + len(squares)))


def _moved(
    theta: Array, move: Array, steps: tuple[Step, ...], measured: Array, prior: Array, tau: float,
    steps_at: Callable[[Array], tuple[Step, ...]],
) -> tuple[Array, tuple[Step, ...]]:  # fmt: skip
    """A step of Gauss-Newton, halved while it makes things worse: slopes are shares, which end where waits begin."""
    before = _cost(theta, steps, measured, prior, tau)
    for halving in range(_HALVINGS):
        trial = theta + move / 2**halving
        tried = steps_at(trial)
        if _cost(trial, tried, measured, prior, tau) <= before:
            return trial, tried
    return theta, steps


def _cost(theta: Array, steps: Sequence[Step], measured: Array, prior: Array, tau: float) -> float:
    residuals = measured - np.log([s.seconds for s in steps])
    data = (FREEDOM + 1) * np.log1p((residuals / tau) ** 2 / FREEDOM)
    return float(data.sum() + ((theta / prior) ** 2).sum())


def without(found: Posterior, index: int) -> tuple[float, float, Array]:
    """Of a run that the others have not seen: (log of predicted over measured, one sigma of it, the covariance then).

    By the slopes at the posterior: no prediction is made anew.
    """
    rest = [i for i in range(len(found.steps)) if i != index]
    j, target = found.slopes, found.residuals + found.slopes @ found.theta
    covariance, theta = _solved(j[rest], target[rest], found.weights[rest], found.prior, found.scatter)
    error = float(j[index] @ theta - target[index])
    return error, math.hypot(found.scatter, math.sqrt(float(j[index] @ covariance @ j[index]))), covariance
