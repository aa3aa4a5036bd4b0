"""LongRun: what turns a step into a run of weeks: how much to train, when to save, what fails, how it comes back."""

from __future__ import annotations

from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from simulator.base.schema import Strict
from simulator.base.units import Count, Seconds
from simulator.studies.goodput.failures import Cause, Failures
from simulator.studies.goodput.spreads import Shares, Times

SPOT: Final = "spot preemption"


def _interval(value: object) -> Any:  # noqa: ANN401  text of a time goes on to Seconds
    return None if value == "optimal" else value


class LongRun(Strict):
    """The `[run]` table of a study.

    tokens, steps: how much to train; one of them. checkpoint_interval_s: training between two checkpoints; None, or
    "optimal": Daly's. detect_s: until somebody notices that the job stands. reschedule_s: until its processes run again.
    load_s: reading the state back; None: at the rate at which storage reads. warmup_s: until steps run at speed.
    spare_hosts: stand by, and take the place of one that fails; repair_s: until that one is back, or another found; 0: hosts
    are never short. spot_mtbf_s: until one host is taken away by who lent it; None: none is; spot_notice_s: its warning.
    straggler_mtbf_s: of a host, until it becomes slow; None: none do. straggler_slowdown: what the job then loses;
    straggler_detect_s: until its host is exchanged, behind a checkpoint: each always the same, or a distribution.
    jitter: what one host's step takes longer than predicted, as a share of it; all wait for the slowest of them.
    price_per_gpu_hour: dollars; None: no cost is told.
    replicas: runs played, each with failures of its own, from `seed`.
    """

    tokens: Count | None = Field(gt=0, le=10**18, default=None)
    steps: Count | None = Field(gt=0, le=10**12, default=None)
    checkpoint_interval_s: Annotated[Seconds | None, BeforeValidator(_interval)] = Field(gt=0, default=None)
    failures: Failures = Failures()
    detect_s: Seconds = Field(ge=0, default=180.0)
    reschedule_s: Seconds = Field(ge=0, default=120.0)
    load_s: Seconds | None = Field(ge=0, default=None)
    warmup_s: Seconds = Field(ge=0, default=60.0)
    spare_hosts: int = Field(ge=0, le=10**6, default=0)
    repair_s: Seconds = Field(ge=0, default=0.0)
    straggler_mtbf_s: Seconds | None = Field(gt=0, default=None)
    straggler_slowdown: Shares = 0.1
    straggler_detect_s: Times = 3600.0
    spot_mtbf_s: Seconds | None = Field(gt=0, default=None)
    spot_notice_s: Seconds = Field(ge=0, default=0.0)
    jitter: Shares = 0.0
    price_per_gpu_hour: float | None = Field(gt=0, le=10**6, default=None)
    replicas: int = Field(ge=1, le=100_000, default=400)
    seed: int = Field(ge=0, le=2**63, default=0)

    @model_validator(mode="after")
    def _one_goal(self) -> Self:
        if (self.tokens is None) == (self.steps is None):
            msg = "give either tokens or steps: how much the run trains"
            raise ValueError(msg)
        return self

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Everything that interrupts."""
        if self.spot_mtbf_s is None:
            return self.failures.all
        spot = Cause(name=SPOT, per="host", mtbf_s=self.spot_mtbf_s, notice_s=self.spot_notice_s)
        return (*self.failures.all, spot)


# What is assumed where the study does not say it; the report lists them
ASSUMED: Final = ("detect_s", "reschedule_s", "warmup_s", "repair_s")
