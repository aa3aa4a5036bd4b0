"""The phases of a run under a compressing optimizer: plain sums, one-bit sums, no sums; their steps, and the mean step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from simulator.predict.prediction import Prediction
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.compression import OneBit
from simulator.spec.software.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Step kind -> how many steps of the run, and seconds of one. full: gradients are summed; one_bit: signs are; local: nothing."""

    counts: dict[str, int]
    seconds: dict[str, float]

    @property
    def mean_s(self) -> float:
        """Of a step of the run."""
        return sum(self.counts[name] * one_s for name, one_s in self.seconds.items()) / sum(self.counts.values())

    @property
    def speedup(self) -> float:
        """Of the run, over one whose every step sums gradients."""
        return self.seconds["full"] / self.mean_s

    def report(self) -> dict[str, Any]:
        """Plain data, as `--json` shows it."""
        return {**asdict(self), "mean_s": self.mean_s, "speedup": self.speedup}


def step_counts(one_bit: OneBit, steps: int) -> dict[str, int]:
    """Kinds of the first `steps` steps.

    Adam and LAMB sum gradients until freeze_step. 0/1 Adam sums them where it updates the variance, at intervals that double
    every variance_scaler updates, and else signs, until freeze_step; then signs at intervals that double every
    local_step_scaler steps up to local_step_clipper (DeepSpeed 0.18 runtime/fp16/onebit/zoadam.py).
    """
    if one_bit.kind != "zero_one":
        full = min(steps, one_bit.freeze_step)
        return {"full": full, "one_bit": steps - full, "local": 0}
    early = min(steps, one_bit.freeze_step)
    full = _num_variance_updates(one_bit, early)
    signs, begun, interval = early - full, early, 1
    while begun < steps:
        until = steps if interval == one_bit.local_step_clipper else min(steps, begun + one_bit.local_step_scaler)
        signs += until // interval - begun // interval
        begun, interval = until, min(one_bit.local_step_clipper, 2 * interval)
    return {"full": full, "one_bit": signs, "local": steps - full - signs}


def _num_variance_updates(one_bit: OneBit, steps: int) -> int:
    """How often 0/1 Adam updates the variance in the first `steps` steps."""
    full, at, interval, updates = 0, 1, 1, 0
    while at <= steps:
        full, updates = full + 1, updates + 1
        if updates == one_bit.variance_scaler:
            updates, interval = 0, 2 * interval
        at = (at // interval + 1) * interval
    return full


def phases_of(
    prediction: Prediction,
    model: Model,
    plan: Plan,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: Stack | None = None,
) -> Phases:
    """prediction: of the plan, a step of its last phase. The plan says how long the run is (`run_steps`)."""
    from simulator.predict import predict

    one_bit, inputs = plan.deepspeed.one_bit, (cluster, calibration, stack)
    kinds: Mapping[str, dict[str, Any]] = {
        "full": {"kind": "none"},
        "one_bit": {"interval": 1},
        "local": {"interval": _NEVER},
    }
    counts, seconds = step_counts(one_bit, one_bit.run_steps or 1), {}
    for name, fields in kinds.items():
        if name != "full" and not counts[name]:
            continue
        own = {"optimizer": "lamb", "optimizer_impl": "loop"} if (name, one_bit.kind) == ("full", "lamb") else {}
        changed = plan.copy_with(one_bit=one_bit.model_copy(update=fields), **own)
        seconds[name] = prediction.step_s if changed == plan else predict(model, changed, *inputs).step_s
    return Phases(counts=counts, seconds=seconds)


_NEVER: Final = 2**30
