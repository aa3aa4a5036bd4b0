"""Outcome: what became of one row of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "refused", "bad", "failed", "calibration"]


class RefusedError(Exception):
    """The rules or the plan cannot express a row. reasons: (kind, detail); the kind is what the report counts."""

    def __init__(self, *reasons: tuple[str, str]) -> None:
        super().__init__("; ".join(f"{kind}: {detail}" if detail else kind for kind, detail in reasons))
        self.kind = reasons[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The four numbers that the stronger baseline knows about a step on one GPU, and the model's own FLOP over peak.

    gemm_flop and attention_flop are what the hardware computes, recomputation included; stream_bytes what elementwise
    kernels, norms and the loss read and write; communication_bytes what the GPU receives.
    ideal_s: the model's FLOP (causal attention half, no recomputation) at the device's peak.
    """

    gemm_flop: float
    attention_flop: float
    stream_bytes: float
    communication_bytes: float
    ideal_s: float

    @property
    def terms(self) -> tuple[float, float, float, float]:
        return self.gemm_flop, self.attention_flop, self.stream_bytes, self.communication_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Live bytes at one moment of a tracked step; None where unknown."""

    predicted_bytes: int | None = None
    measured_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutcome:
    """One row: its status, why if it is not ok, and predicted beside measured; None where unknown.

    kind: what a refusal is counted as. duplicate_of: id of an earlier row with the same run and the same figures.
    fits: the predicted verdict; None too where it hangs on what the row does not state. open: how blanks of the row were filled, where that leaves a choice. measured_oom: the table says that the run did not fit. moments: of a tracked step, by name.
    unmodelled: options that the row states and the prediction does not hold. unread: what it says in words that nobody knows.
    """

    id: str
    line: int
    status: Status
    reason: str | None = None
    kind: str = ""
    source: str = ""
    gpu: str = ""
    precision: str = ""
    predicted_step_s: float | None = None
    low_step_s: float | None = None
    high_step_s: float | None = None
    measured_step_s: float | None = None
    mem_metric: str = ""
    predicted_memory_bytes: int | None = None
    measured_memory_bytes: int | None = None
    measured_oom: bool = False
    fits: bool | None = None
    open: str = ""
    work: Work | None = None
    duplicate_of: str = ""
    moments: Mapping[str, Moment] = field(default_factory=dict)
    unmodelled: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def mfu_predicted(self) -> float | None:
        """Model FLOP utilisation, causal attention counted half."""
        return self.work.ideal_s / self.predicted_step_s if self.work and self.predicted_step_s else None

    @property
    def mfu_measured(self) -> float | None:
        """The same FLOP over the measured time."""
        return self.work.ideal_s / self.measured_step_s if self.work and self.measured_step_s else None

    @property
    def scored(self) -> bool:
        return self.status == "ok" and not self.duplicate_of

    @property
    def step_error(self) -> float | None:
        """Predicted over measured, minus 1."""
        return _error(self.predicted_step_s, self.measured_step_s)

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured, minus 1."""
        return _error(self.predicted_memory_bytes, self.measured_memory_bytes)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted and measured else None
