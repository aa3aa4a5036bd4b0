"""The posterior: coefficients whose steps are nearest to the measured ones, and nearest to what was known before.

    log y_i = log T_i(θ + η_i) + δ(x_i) + ε_i,    θ_k ~ N(0, σ_k²),    η_ik ~ N(0, ρ_k²),    δ ~ GP(0, s² exp(-distance / reach)),
    ε_i ~ N(0, τ² / w_i)

y: measured seconds, T: predicted ones, σ² + ρ²: variance of a coefficient before (what the intervals of predictions are made of);
ρ: the part of hosts and links that is each run's own. δ is what runs err by beyond all coefficients and share with runs like them
(`spec.calibration.likeness`), ε what each has of its own.
Described software stays as it was (θ and δ are 0) where what the others teach of a run is farther off than before (`_foretold`).
s and τ are the most probable ones beside what stacks say of scatter. Weights w are those of Student's t of what the other runs say
of one: a step that contradicts them counts less (Lange, Little and Taylor 1989, doi 10.1080/01621459.1989.10478852). Gauss-Newton
on exact predictions, with each coefficient's share of the step as its slope; the covariance is Laplace's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import t as student

from simulator.predict.confidence import OF_ALL_STEPS
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.calibration.learned import NAMES, Coefficient, CoefficientName, Learned, on_links
from simulator.spec.calibration.likeness import Likeness, Point, alike
from simulator.studies.learning.observed import Array, Observed, Step

FREEDOM: Final = 4.0  # of Student's t, and of the prior on the scatter: as sure as four runs would make it
# Before: what neighbours share is twice what stacks say that steps scatter by, within a factor e (one sigma): with six runs each
# of published sources neither much more nor much less. What each step has of its own: 0.7 of it, within 1.6
_SHARED: Final = (math.log(2.0), 1.0)
_OWN: Final = (-math.log(1.4), 0.5)
# Hosts and links are those of a run's nodes and moments: as much of their variance as a stack's is each run's own
_OF_EACH_RUN: Final = frozenset(("operators", "collectives", "node_links", "network", "growth", "latency", "overlap"))
_LEAST: Final = 1e-3  # of a scatter that nobody stated
_MOST_ROUNDS: Final = 8
_SMALL: Final = 0.02  # of a sigma: a step of Gauss-Newton below which nothing moves any more
_HALVINGS: Final = 3
_FEWEST: Final = 3  # runs of which one can be left out
_WEIGHINGS: Final = 6


@dataclass(frozen=True, slots=True)
class Scatter:
    """What runs differ by beyond coefficients that all share.

    own: τ; shared: s; correlation: of what two runs share; weights: of the runs; each: variance by each run's hosts and links.
    """

    own: float
    shared: float
    correlation: Array
    weights: Array
    each: Array

    @property
    def covariance(self) -> Array:
        """Of the runs' errors beside the coefficients'. A run of little weight is as if it scattered more, in all that it does."""
        return self.shared**2 * self.correlation + np.diag(self.own**2 + self.each + self.added)

    @property
    def added(self) -> Array:
        """What little weight adds to a run's own variance."""
        found: Array = (self.own**2 + self.shared**2) * (1 / self.weights - 1)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """theta: values in the order of `names`. covariance: of them. steps: the runs under them, each as `Observed.step`.

    slopes: of each run (rows), for each name. prior: one sigma of each name before; each: of what each run's own adds to it.
    residuals: measured over predicted by theta, in logs; solved: what all coefficients are to explain, times the inverse of its covariance.
    """

    names: tuple[CoefficientName, ...]
    theta: Array
    covariance: Array
    prior: Array
    each: Array
    found: Scatter
    points: tuple[Point, ...]
    steps: tuple[Step, ...]
    slopes: Array
    residuals: Array
    inverse: Array
    solved: Array
    nodes: float

    @property
    def scatter(self) -> float:
        """One sigma of what a run has of its own."""
        return self.found.own

    @property
    def apart(self) -> float:
        """The same of one that is like none of these."""
        return math.hypot(self.found.own, self.found.shared)

    def beside(self, slopes: Array) -> Array:
        """The variance of such runs (rows of slopes), with that of their own hosts and links."""
        found: Array = self.apart**2 + slopes**2 @ self.each**2
        return found

    @property
    def held(self) -> bool:
        """The runs move nothing, as `_held` says."""
        return not self.solved.any()

    @property
    def reach(self) -> float:
        """90 % quantile of what scatters as runs are weighed: some lie far off, and count little for how far most do."""
        return float(student.ppf(0.95, FREEDOM))

    @property
    def shared(self) -> Array:
        """What each run errs by as those like it do, in logs."""
        found: Array = self.found.shared**2 * self.found.correlation @ self.solved
        return found

    def as_file(self, name: str, runs: Sequence[str]) -> Learned:
        """The part that predictions need, rounded to six digits (the inverse: twelve)."""
        sigmas = np.sqrt(np.diag(self.covariance))
        cross = (self.prior**2)[:, None] * self.slopes.T @ self.inverse
        return Learned(
            name=name,
            runs=tuple(runs),
            coefficients=tuple(
                Coefficient(name=n, value=_rounded(v), prior_sigma=_rounded(p), sigma=_rounded(s))
                for n, v, p, s in zip(self.names, self.theta, self.prior, sigmas, strict=True)
            ),
            covariance=_rows(self.covariance, 6),
            scatter=_rounded(self.scatter),
            reach=_rounded(self.reach),
            nodes=self.nodes,
            likeness=Likeness(
                points=_rows(np.array(self.points), 6),
                sigma=_rounded(self.found.shared),
                inverse=_rows(self.inverse, 12),
                errors=_rows(self.solved[None], 6)[0],
                cross=_rows(cross, 6),
            ),
        )


def _rounded(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")


def _rows(values: Array, digits: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(_rounded(float(one), digits) for one in row) for row in values)


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

    first = tuple(one.step({}) for one in observed)
    prior = np.max([s.prior for s in first], axis=0)
    prior[NAMES.index("software")] = max(prior[NAMES.index("software")], _LEAST)
    moved_by_runs = np.max([np.abs(s.slopes) for s in first], axis=0) * prior > 0
    indices = [i for i in range(len(NAMES)) if moved_by_runs[i]]
    names = tuple(NAMES[i] for i in indices)
    of_all = np.array([OF_ALL_STEPS if name in _OF_EACH_RUN else 1.0 for name in names])
    problem = _Problem(
        names=names, indices=indices, prior=prior[indices] * of_all, each=prior[indices] * np.sqrt(1 - of_all**2),
        scatter=max(_LEAST, float(np.median([s.scatter for s in first]))), nodes=nodes,
        measured=np.log([o.measured_s for o in observed]), points=tuple(one.point for one in observed),
        steps_at=lambda theta: steps_at(names, theta),
    )  # fmt: skip
    return problem.answered(first)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """The problem: what was measured, what was known before, and the steps of any coefficients."""

    names: tuple[CoefficientName, ...]
    indices: list[int]
    prior: Array
    each: Array
    scatter: float
    nodes: float
    measured: Array
    points: tuple[Point, ...]
    steps_at: Callable[[Array], tuple[Step, ...]]

    def answered(self, first: tuple[Step, ...]) -> Posterior:
        """Gauss-Newton from where nothing was learned; the scatter and the weights follow in each round."""
        theta, steps = np.zeros(len(self.names)), first
        positive = np.array([name == "overhead" for name in self.names])  # no step has less than none
        for _ in range(_MOST_ROUNDS):
            target = self.at(theta, steps)
            aim = (self.prior**2) * (target.slopes.T @ target.solved)
            move = np.where(positive, np.maximum(aim, 0.0), aim) - theta
            if float(np.max(np.abs(move) / self.prior)) < _SMALL:
                break
            before, (theta, steps) = steps, self._moved(theta, move, steps, target.found)
            if steps is before:
                break
        found = self.at(theta, steps)
        if not all(step.described for step in first):
            return found
        return self._averaged(found, first) if self._foretold(found, first) else self._held(first)

    def _foretold(self, found: Posterior, first: tuple[Step, ...]) -> bool:
        """Whether what the others teach of runs is no farther off than what was known before, but for one sigma of its own noise.

        Of fewer than three runs none can be left out.
        """
        if len(first) < _FEWEST:
            return True
        before = self.measured - np.log([step.seconds for step in first])
        nearer = np.abs(before) - np.abs([without(found, i)[0] for i in range(len(first))])
        return float(nearer.mean()) >= -float(nearer.std(ddof=1)) / math.sqrt(len(first))

    def _held(self, first: tuple[Step, ...]) -> Posterior:
        """Nothing moved: the scatter alone, and so the widths, follow the runs."""
        found = self.at(np.zeros(len(self.names)), first)
        return replace(found, solved=0 * found.solved)

    def _averaged(self, found: Posterior, first: tuple[Step, ...]) -> Posterior:
        """Of described software: its stack's coefficients hold, or they move; before the runs as probable as each other.

        The mean over both, by how probable either makes the runs (Hoeting et al. 1999, doi 10.1214/ss/1009212519).
        """
        kept = self.measured - np.log([s.seconds for s in first])
        target = found.residuals + found.slopes @ found.theta
        known = found.slopes @ np.diag(self.prior**2) @ found.slopes.T
        moves, holds = (
            _most_probable(*one, found.found, self.scatter).fun for one in ((target, known), (kept, 0 * known))
        )
        share = float(expit((holds - moves) / 2))
        theta = share * found.theta
        mean = self.at(theta, self.steps_at(theta))
        return replace(mean, covariance=mean.covariance + share * (1 - share) * np.outer(found.theta, found.theta))

    def at(self, theta: Array, steps: tuple[Step, ...]) -> Posterior:
        """The linear problem around these coefficients."""
        j = np.array([s.slopes[self.indices] for s in steps])
        residuals = self.measured - np.log([s.seconds for s in steps])
        target, known = residuals + j @ theta, j @ np.diag(self.prior**2) @ j.T
        found = _scattered(target, known, alike(self.points, self.points), self.scatter, j**2 @ self.each**2)
        inverse = _inverse(known + found.covariance)
        cross = (self.prior**2)[:, None] * j.T
        return Posterior(
            names=self.names, theta=theta, covariance=np.diag(self.prior**2) - cross @ inverse @ cross.T, prior=self.prior, each=self.each,
            found=found, points=self.points, steps=steps, slopes=j, residuals=residuals, inverse=inverse, solved=inverse @ target, nodes=self.nodes,
        )  # fmt: skip

    def _moved(
        self, theta: Array, move: Array, steps: tuple[Step, ...], found: Scatter
    ) -> tuple[Array, tuple[Step, ...]]:
        """A step of Gauss-Newton, halved while it makes things worse: slopes are shares, which end where waits begin."""
        inverse = _inverse(found.covariance)

        def cost(theta: Array, steps: Sequence[Step]) -> float:
            residuals = self.measured - np.log([s.seconds for s in steps])
            return float(residuals @ inverse @ residuals + ((theta / self.prior) ** 2).sum())

        before = cost(theta, steps)
        for halving in range(_HALVINGS):
            trial = theta + move / 2**halving
            tried = self.steps_at(trial)
            if cost(trial, tried) <= before:
                return trial, tried
        return theta, steps


def _inverse(covariance: Array) -> Array:
    found = np.linalg.inv(covariance)
    return np.asarray((found + found.T) / 2, dtype=np.float64)


def _most_probable(target: Array, known: Array, found: Scatter, before: float) -> Any:  # noqa: ANN401  scipy's result
    """The most probable scatter (logs of own and shared) under the weights of `found`, and -2 log of its probability."""

    def cost(logs: Array) -> float:
        own, shared = logs
        covariance = known + replace(found, own=math.exp(own), shared=math.exp(shared)).covariance
        fits = float(target @ _inverse(covariance) @ target) + float(np.linalg.slogdet(covariance)[1])
        off = ((own - math.log(before) - _OWN[0]) / _OWN[1], (shared - math.log(before) - _SHARED[0]) / _SHARED[1])
        return float(fits + off[0] ** 2 + off[1] ** 2)

    start = [math.log(found.own), math.log(found.shared)]
    return minimize(cost, start, method="Nelder-Mead", options={"maxiter": 200})


def _scattered(target: Array, known: Array, correlation: Array, before: float, each: Array) -> Scatter:
    """The most probable scatter under the runs' weights, and their weights under it, in turn (Student's t by iterated weighing)."""
    found = Scatter(math.exp(_OWN[0]) * before, math.exp(_SHARED[0]) * before, correlation, np.ones(len(target)), each)
    for _ in range(_WEIGHINGS):
        own, shared = _most_probable(target, known, found, before).x
        found = replace(found, own=math.exp(own), shared=math.exp(shared))
        if len(target) == 1:  # nothing else says anything of it
            break
        inverse = _inverse(known + found.covariance)
        variances = np.maximum(found.own**2 + each, 1 / np.diag(inverse) - found.added)
        odd = (inverse @ target / np.diag(inverse)) ** 2 / variances  # squared, in sigmas of what the others say
        found = replace(found, weights=np.minimum(1.0, (FREEDOM + 1) / (FREEDOM + odd)))
    return found


def without(found: Posterior, index: int) -> tuple[float, float, Array]:
    """Of a run that the others have not seen: (log of predicted over measured, one sigma of it, the covariance then).

    By the slopes at the posterior: no prediction is made anew.
    """
    precision = found.inverse[index, index]
    least = found.found.own**2 + found.found.each[index]
    sigma = math.sqrt(max(least, 1 / precision - found.found.added[index]))
    rest = [i for i in range(len(found.steps)) if i != index]
    j = found.slopes[rest]
    cross = (found.prior**2)[:, None] * j.T
    known = j @ np.diag(found.prior**2) @ j.T + found.found.covariance[np.ix_(rest, rest)]
    covariance = np.diag(found.prior**2) - cross @ _inverse(known) @ cross.T if rest else np.diag(found.prior**2)
    error = found.residuals[index] if found.held else found.solved[index] / precision
    return -float(error), sigma, covariance
