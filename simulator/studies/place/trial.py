"""Steps played on candidates: what decides between placements, and whether a plan still fits on each kind of GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulator.base.errors import InputError
from simulator.play.lower import Lowering, lower
from simulator.predict import Prediction, memory_of, prediction_of
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.rank_mapping import RankMapping
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

Score = tuple[float, float]  # bytes that are too many, seconds of a step; the lower the better
WORST: Score = (float("inf"), float("inf"))
OnProgress = Callable[[str, int], None]  # what was done, and how often so far
_BETTER = 1 - 1e-6  # of a step: less is no gain


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan with a rank mapping."""

    plan: Plan
    rank_mapping: RankMapping


@dataclass(slots=True, kw_only=True)
class Trials:
    """The inputs that all candidates share, and the scores of those that were played."""

    model: Model
    cluster: Cluster  # without seats
    stack: Stack
    calibration: Calibration
    on_progress: OnProgress = lambda _, __: None
    scores: dict[tuple[str, RankMapping], Score] = field(default_factory=dict)

    @property
    def curves(self) -> LinkCurves:
        return self.calibration.links or default_curves()

    def lowering(self, choice: Choice) -> Lowering:
        """Raises InputError as `predict` does."""
        cluster = self.cluster.with_rank_mapping(choice.rank_mapping)
        return lower(self.model, choice.plan, cluster, self.stack, self.calibration, self.curves)

    def score(self, choice: Choice) -> Score:
        """The score of one simulated step; the worst score if the plan cannot run like this."""
        key = (_changes(choice.plan), choice.rank_mapping)
        if key not in self.scores:
            self.scores[key] = self._played(choice)
            self.on_progress("played", len(self.scores))
        return self.scores[key]

    def _played(self, choice: Choice) -> Score:
        try:
            lowering = self.lowering(choice)
            return _excess_bytes(lowering), float(play(lowering).step_s)
        except InputError:
            return WORST

    def prediction(self, choice: Choice) -> Prediction:
        """All of it. Raises InputError as `predict` does."""
        lowering = self.lowering(choice)
        return prediction_of(lowering, memory_of(lowering))


def _excess_bytes(lowering: Lowering) -> float:
    """Bytes by which the fullest device exceeds its memory; a mapping alone does not change what equal GPUs hold."""
    if lowering.rank_classes is None:
        return 0.0
    usage = memory_of(lowering, quick=True)
    memory = usage.memory
    return 0.0 if usage.verdict.runs else max(1.0, float(memory.used_bytes - memory.capacity_bytes))


def is_better(one: Score, other: Score) -> bool:
    """By more than rounding."""
    return one[0] < other[0] or (one[0] == other[0] and one[1] < other[1] * _BETTER)


def _changes(plan: Plan) -> str:
    changed: dict[str, Any] = plan.model_dump(mode="json", exclude_defaults=True)
    return repr(sorted(changed.items(), key=str))
