"""What interrupts a long run, and how often: rates a GPU, a host or the whole job, from published runs or a user's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from simulator.base.presets import facts
from simulator.base.schema import Strict, more_than_once, nearest
from simulator.base.units import Seconds
from simulator.spec.cluster import Cluster

HOUR_S: Final = 3600.0
DAY_S: Final = 24 * HOUR_S

Per = Literal["gpu", "nic", "host", "job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """Numbers of components of a job that can fail."""

    gpus: int
    nics: int
    hosts: int

    @classmethod
    def of(cls, cluster: Cluster, num_devices: int) -> Self:
        """So many devices of a cluster, in whole hosts."""
        hosts = -(-num_devices // cluster.gpus_per_node)
        return cls(gpus=num_devices, nics=hosts * cluster.inter.num_nics if cluster.inter else 0, hosts=hosts)


class Cause(Strict):
    """`[[run.failures.causes]]`: one kind of interruption, with exponential times between failures, of each `per` by itself."""

    name: str = Field(description="what the report calls it")
    per: Per = Field(description="what fails: each GPU, NIC or host by itself, or the job")
    mtbf_s: Seconds = Field(gt=0, description="mean time between failures of one of them")
    replaces: bool = Field(
        default=True,
        description="the host is taken out, and a spare or a repaired one takes its place; else the job restarts where it was",
    )
    notice_s: Seconds = Field(
        ge=0,
        default=0.0,
        description="warning before it strikes (spot preemption, planned maintenance); where it is long enough for a checkpoint, "
        "nothing is lost",
    )

    def rate_per_s(self, size: JobSize) -> float:
        """Interruptions a second of a job of this size."""
        count = {"gpu": size.gpus, "nic": size.nics, "host": size.hosts, "job": 1}[self.per]
        return count / self.mtbf_s


_PLANNED_NOTICE_S: Final = HOUR_S  # planned: the run is stopped behind a checkpoint


def _llama3() -> tuple[Cause, ...]:
    """Rates of Llama 3's pre-training (failures.toml)."""
    run = facts(__file__, "failures")["llama3"]
    return tuple(
        Cause(
            name=name,
            per=per,
            mtbf_s=run["parts"][per] * run["days"] * DAY_S / seen,
            replaces=replaces,
            notice_s=_PLANNED_NOTICE_S if name == "planned maintenance" else 0.0,
        )
        for name, per, seen, replaces in run["causes"]
    )


PRESETS: Final = {"llama3": _llama3, "none": tuple[Cause]}


class Failures(Strict):
    """`[run.failures]`: a preset's causes, and user-defined ones."""

    preset: str = Field(
        default="llama3",
        description="whose rates: `llama3`, of Llama 3's 16,384 H100 (arXiv 2407.21783, table 5), those of parts in proportion to "
        "parts, those of the job as they were; or `none`",
    )
    causes: tuple[Cause, ...] = Field(strict=False, default=(), description="causes of one's own, below")

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.preset not in PRESETS:
            msg = f"no preset of failures is called {self.preset!r}: {nearest(self.preset, PRESETS)}"
            raise ValueError(msg)
        if twice := sorted(more_than_once(cause.name for cause in self.all)):
            msg = f"causes have names of their own; twice: {', '.join(twice)}"
            raise ValueError(msg)
        return self

    @property
    def all(self) -> tuple[Cause, ...]:
        """Every cause, the preset's first."""
        return (*PRESETS[self.preset](), *self.causes)
