"""LongRun: a training run of weeks: its length, checkpoints, failures and restarts."""

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
    """`[run]`: what `shardwise goodput` plays; the other verbs refuse unknown keys and leave the rest alone."""

    tokens: Count | None = Field(
        gt=0, le=10**18, default=None, description='tokens to train, also as `"15T"`; this or `steps`'
    )
    steps: Count | None = Field(gt=0, le=10**12, default=None, description="steps to train; this or `tokens`")
    checkpoint_interval_s: Annotated[Seconds | None, BeforeValidator(_interval)] = Field(
        gt=0,
        default=None,
        description='training between two checkpoints, at most one a step, and none before the last one is written; `"optimal"` (the default): Daly\'s for the time that writing one takes',
    )
    failures: Failures = Field(default=Failures(), description="what interrupts")
    detect_s: Seconds = Field(ge=0, default=180.0, description="until somebody notices that the job stands")
    reschedule_s: Seconds = Field(ge=0, default=120.0, description="until its processes run again")
    load_s: Seconds | None = Field(
        ge=0, default=None, description="reading the state back; not set: at the rate at which storage reads"
    )
    warmup_s: Seconds = Field(ge=0, default=60.0, description="until steps run at speed")
    spare_hosts: int = Field(
        ge=0, le=10**6, default=0, description="hosts that stand by, and take the place of one that fails"
    )
    repair_s: Seconds = Field(
        ge=0, default=0.0, description="until a host that failed is back, or another found; 0: hosts are never short"
    )
    straggler_mtbf_s: Seconds | None = Field(
        gt=0, default=None, description="of a host, until it becomes slow; not set: none does"
    )
    straggler_slowdown: Shares = Field(
        default=0.1, description="what the whole job then loses: a share, or a distribution of it"
    )
    straggler_detect_s: Times = Field(
        default=3600.0, description="until that host is exchanged, behind a checkpoint: a time, or a distribution of it"
    )
    spot_mtbf_s: Seconds | None = Field(
        gt=0, default=None, description="of a host, until who lent it takes it back; not set: never"
    )
    spot_notice_s: Seconds = Field(ge=0, default=0.0, description="the warning before")
    jitter: Shares = Field(
        default=0.0,
        description="what one host's step takes longer than predicted, as a share of it, or a distribution; all wait for the slowest",
    )
    price_per_gpu_hour: float | None = Field(
        gt=0, le=10**6, default=None, description="dollars; not set: no cost is given"
    )
    replicas: int = Field(
        ge=1, le=100_000, default=400, description="runs played; by default fewer where those would take minutes"
    )
    seed: int = Field(ge=0, le=2**63, default=0, description="of what is drawn")

    @model_validator(mode="after")
    def _one_goal(self) -> Self:
        if (self.tokens is None) == (self.steps is None):
            msg = 'give either tokens or steps, how much the run trains: for example tokens = "15T" (--tokens 15T)'
            raise ValueError(msg)
        return self

    @property
    def causes(self) -> tuple[Cause, ...]:
        """All causes of interruption."""
        if self.spot_mtbf_s is None:
            return self.failures.all
        spot = Cause(name=SPOT, per="host", mtbf_s=self.spot_mtbf_s, notice_s=self.spot_notice_s)
        return (*self.failures.all, spot)


# What is assumed where the study does not say it; the report lists them
ASSUMED: Final = ("detect_s", "reschedule_s", "warmup_s", "repair_s")
