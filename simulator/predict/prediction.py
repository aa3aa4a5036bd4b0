"""predict(): the path from (model, plan, cluster, calibration) to a Prediction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from simulator.memory import MemoryUse
from simulator.work.checkpoint import Saving
from simulator.work.trace import MemoryTrace, Timeline

Verdict = Literal["FITS", "TIGHT", "OOM"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one input came from: `kind` is measured, calibrated, datasheet, ideal, assumed or given."""

    what: str
    kind: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that makes the plan fit, and what it costs; both were predicted.

    change: in words, as on the command line. plan: the plan's fields that change. environment: a variable to set.
    step_s is not comparable where tokens_per_step differs; cost: device-seconds a token over those of the plan as it is.
    changes_numerics: the losses of a run will not be the same.
    """

    change: str
    plan: dict[str, object]
    environment: str
    num_devices: int
    tokens_per_step: int
    step_s: float
    cost: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    used_bytes: int
    changes_numerics: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KindUse:
    """What the GPUs of one kind do in a step, on a cluster whose GPUs differ. kind: in words, what differs.

    compute_s: of the busiest of them, with all that slows it; waiting_s: for others, a pipeline's bubble among it; the
    rest is communication and the host. memory, verdict, cause: of the fullest of them.
    """

    kind: str
    device: str
    num_devices: int
    compute_s: float
    waiting_s: float
    memory: MemoryUse
    verdict: Verdict
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How long a step takes, what it holds at its peak, how sure that is, and why.

    step_s lies in [low_s, high_s] with 90 % confidence, and lower_s ≤ step_s ≤ upper_s always (bounds, not confidence).
    breakdown: category -> seconds on the critical path; the values sum to step_s.
    spread: category -> what its one-sigma error makes of the step, relative to it; stack_sigma: the stack's own.
    communication: kind -> (exposed_s, hidden_s). remedies: what would make it fit, cheapest first, where it does not.
    kinds: where GPUs differ; memory and verdict are then those of the kind that fits least.
    """

    model: str
    cluster: str
    num_devices: int
    step_s: float
    low_s: float
    high_s: float
    lower_s: float
    upper_s: float
    tokens_per_step: int
    model_flop_per_step: int
    hardware_flop_per_step: int
    peak_flop_per_s: float  # of one device, in the plan's precision; their mean where devices differ
    breakdown: dict[str, float]
    communication: dict[str, tuple[float, float]]
    memory: MemoryUse
    verdict: Verdict
    cause: str
    suggestion: str
    extrapolated: tuple[str, ...]
    sources: tuple[Source, ...]
    timeline: Timeline = field(repr=False)
    memory_trace: MemoryTrace = field(repr=False)
    checkpoint: Saving | None = None  # of one checkpoint, where the study asks
    remedies: tuple[Remedy, ...] = ()
    spread: dict[str, float] = field(default_factory=dict)
    stack_sigma: float = 0.0
    kinds: tuple[KindUse, ...] = ()

    @property
    def fits(self) -> bool:
        return self.verdict != "OOM"

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: the model's own FLOP (causal attention counted half) over peak."""
        return self.model_flop_per_step / (self.step_s * self.num_devices * self.peak_flop_per_s)

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilisation: recomputation counted too."""
        return self.hardware_flop_per_step / (self.step_s * self.num_devices * self.peak_flop_per_s)
