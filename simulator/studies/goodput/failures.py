"""What interrupts a long run, and how often: rates a GPU, a host or the whole job, from published runs or a user's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from simulator.base.schema import Strict, nearest
from simulator.base.units import Seconds
from simulator.spec.cluster import Cluster

HOUR_S: Final = 3600.0
DAY_S: Final = 24 * HOUR_S

Per = Literal["gpu", "nic", "host", "job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """What of a job can fail."""

    gpus: int
    nics: int
    hosts: int

    @classmethod
    def of(cls, cluster: Cluster, num_devices: int) -> Self:
        """So many devices of a cluster, in whole hosts."""
        hosts = -(-num_devices // cluster.gpus_per_node)
        return cls(gpus=num_devices, nics=hosts * cluster.inter.num_nics if cluster.inter else 0, hosts=hosts)


class Cause(Strict):
    """One kind of interruption: exponential times between failures, of each `per` by itself.

    mtbf_s: mean time between failures of one GPU, NIC, host, or of the job. replaces: the host is taken out and a spare, or a
    repaired one, takes its place; else the job restarts where it was. notice_s: warning before it strikes (spot
    preemption, planned maintenance): long enough for a checkpoint, nothing is lost.
    """

    name: str
    per: Per
    mtbf_s: Seconds = Field(gt=0)
    replaces: bool = True
    notice_s: Seconds = Field(ge=0, default=0.0)

    def rate_per_s(self, size: JobSize) -> float:
        """Interruptions a second of a job of this size."""
        count = {"gpu": size.gpus, "nic": size.nics, "host": size.hosts, "job": 1}[self.per]
        return count / self.mtbf_s


# Table 5 of arXiv 2407.21783 (read again on 2026-11-22): root causes of the 419 unexpected interruptions in 54 days of pre-training Llama 3 405B on
# 16,384 H100 (2,048 hosts), and section 3.3.4: 47 planned ones (firmware, upgrades). (name, per, count, replaces)
LLAMA3_DAYS: Final = 54
LLAMA3_GPUS: Final = 16_384
LLAMA3_HOSTS: Final = 2_048
LLAMA3_NICS: Final = 16_384  # taken as one 400 Gb/s endpoint a GPU (section 3.3.1)
_LLAMA3: Final[tuple[tuple[str, Per, int, bool], ...]] = (
    ("faulty GPU", "gpu", 148, True),
    ("GPU HBM3 memory", "gpu", 72, True),
    ("GPU SRAM memory", "gpu", 19, True),
    ("GPU system processor", "gpu", 17, True),
    ("GPU thermal interface and sensor", "gpu", 6, True),
    ("silent data corruption", "gpu", 6, True),
    ("software bug", "job", 54, False),
    ("network switch or cable", "host", 35, True),
    ("unplanned host maintenance", "host", 32, True),
    ("NIC", "nic", 7, True),
    ("NCCL watchdog timeouts", "host", 7, False),
    ("SSD", "host", 3, True),
    ("power supply", "host", 3, True),
    ("server chassis", "host", 2, True),
    ("IO expansion board", "host", 2, True),
    ("dependency", "job", 2, False),
    ("CPU", "host", 2, True),
    ("system memory", "host", 2, True),
    ("planned maintenance", "job", 47, False),
)
_PLANNED_NOTICE_S: Final = HOUR_S  # planned: the run is stopped behind a checkpoint


def _llama3() -> tuple[Cause, ...]:
    counts = {"gpu": LLAMA3_GPUS, "nic": LLAMA3_NICS, "host": LLAMA3_HOSTS, "job": 1}
    return tuple(
        Cause(
            name=name,
            per=per,
            mtbf_s=counts[per] * LLAMA3_DAYS * DAY_S / seen,
            replaces=replaces,
            notice_s=_PLANNED_NOTICE_S if name == "planned maintenance" else 0.0,
        )
        for name, per, seen, replaces in _LLAMA3
    )


PRESETS: Final = {"llama3": _llama3, "none": tuple[Cause]}


class Failures(Strict):
    """What interrupts: a preset's causes, and causes of one's own beside them.

    preset: "llama3": rates of Llama 3's 16,384 H100 (arXiv 2407.21783, table 5), those of parts in proportion to parts,
    those of the job as they were; "none".
    """

    preset: str = "llama3"
    causes: tuple[Cause, ...] = Field(strict=False, default=())

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.preset not in PRESETS:
            msg = f"no preset of failures is called {self.preset!r}: {nearest(self.preset, PRESETS)}"
            raise ValueError(msg)
        names = [cause.name for cause in self.all]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            msg = f"causes have names of their own; twice: {', '.join(twice)}"
            raise ValueError(msg)
        return self

    @property
    def all(self) -> tuple[Cause, ...]:
        """Every cause, the preset's first."""
        return (*PRESETS[self.preset](), *self.causes)
