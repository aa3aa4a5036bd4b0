"""What to measure next: the plan whose time would narrow the intervals of all given plans most.

A measured step of slopes j takes (jᵗ Σ t)² / (jᵗ Σ j + what is its own) off the variance of a step of slopes t, whatever it will turn out to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from simulator.base.errors import InputError
from simulator.spec.calibration.learned import NAMES, CoefficientName
from simulator.studies.backtest.resolve import Run
from simulator.studies.learning.observed import Array, Observed, as_run
from simulator.studies.learning.posterior import Posterior

_Candidate = tuple[Observed, str, Array, Observed]  # whose neighbour, what differs, its slopes, itself
_BASES: Final = 3  # runs whose plans are varied: the surest, the middle and the least sure


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRun:
    """A run to measure: a measured one with changes.

    half: of its interval, in log time. mean_before, mean_after: the same of all plans at hand. teaches: the coefficient that it
    narrows most, from one sigma to the other.
    """

    like: str
    changes: str
    half: float
    mean_before: float
    mean_after: float
    teaches: CoefficientName
    sigma_before: float
    sigma_after: float


def next_run(found: Posterior, observed: Sequence[Observed]) -> NextRun | None:
    """The best of the measured plans' neighbours; None where none can be predicted."""
    indices = [NAMES.index(name) for name in found.names]
    widths = np.einsum("ik,kl,il->i", found.slopes, found.covariance, found.slopes)
    order = np.argsort(widths, kind="stable")
    bases = dict.fromkeys(int(order[i]) for i in np.linspace(0, len(order) - 1, min(_BASES, len(order))).astype(int))
    candidates = list[_Candidate]()
    for base in bases:
        for changes, run in _neighbours(observed[base].run):
            try:
                one = as_run(run)
                candidates.append((observed[base], changes, one.step({}).slopes[indices], one))
            except InputError:
                continue
    every = np.vstack([found.slopes, *(one[2] for one in candidates)])
    ranked = sorted(candidates, key=lambda one: -_taken_off(found, one[2], every))
    best = next((one for one in ranked if one[3].fits), None)  # memory is looked at last: it costs most
    return None if best is None else _as_next_run(found, best, every)


def _taken_off(found: Posterior, j: Array, every: Array) -> float:
    """Sum over the plans of what their variance loses."""
    gain = every @ found.covariance @ j
    return float((gain**2).sum()) / (float(found.beside(j)) + float(j @ found.covariance @ j))


def _as_next_run(found: Posterior, best: _Candidate, every: Array) -> NextRun:
    base, changes, j, _ = best
    then = found.covariance @ j
    variance = float(found.beside(j)) + float(j @ then)
    after = found.covariance - np.outer(then, then) / variance
    narrowed = np.sqrt(np.diag(after) / np.diag(found.covariance))
    most = int(np.argmin(narrowed))

    def mean(covariance: Array) -> float:
        of_each = np.sqrt(found.beside(every) + np.einsum("ik,kl,il->i", every, covariance, every))
        return found.reach * float(of_each.mean())

    return NextRun(
        like=base.id,
        changes=changes,
        half=found.reach * math.sqrt(variance),
        mean_before=mean(found.covariance),
        mean_after=mean(after),
        teaches=found.names[most],
        sigma_before=float(np.sqrt(found.covariance[most, most])),
        sigma_after=float(np.sqrt(after[most, most])),
    )


def _neighbours(run: Run) -> Iterator[tuple[str, Run]]:
    """Variants of the run with one setting changed by a factor of two or four."""
    plan, ranks = run.plan, "dp_shard" if run.plan.dp_shard > 1 else "dp_replicate"
    changes: list[dict[str, Any]] = [{"micro_batch_size": plan.micro_batch_size * 2}, {"seq_len": plan.seq_len * 2}]
    changes += [{"micro_batch_size": plan.micro_batch_size // 2}] if plan.micro_batch_size > 1 else []
    changes += [{"recompute": "none" if plan.recompute.mode == "full" else "full"}]
    changes += [{"tp": plan.tp * 2, ranks: getattr(plan, ranks) // 2}] if getattr(plan, ranks) % 2 == 0 else []
    for change in changes:
        words = ", ".join(f"{name} {value}" for name, value in change.items())
        yield from _changed(run, words, change, run.cluster.num_nodes)
    if run.cluster.num_nodes * run.cluster.gpus_per_node == plan.num_devices:
        for factor in (2, 4):
            nodes = run.cluster.num_nodes * factor
            yield from _changed(run, f"{nodes} nodes", {ranks: getattr(plan, ranks) * factor}, nodes)


def _changed(run: Run, words: str, change: dict[str, Any], nodes: int) -> Iterator[tuple[str, Run]]:
    try:
        cluster = run.cluster if nodes == run.cluster.num_nodes else run.cluster.with_nodes(nodes)
        yield words, replace(run, plan=run.plan.copy_with(**change), cluster=cluster)
    except InputError:
        return
