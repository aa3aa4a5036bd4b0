"""What a rank is asked to do: a plan, a way to play it, and how long. Plain data, written by the parent. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from simulator.base.schema import Strict
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

Mode = Literal["full", "solo", "cpu", "fake"]


class Task(Strict):
    """One run of one plan.

    device: cuda or cpu (solo and fake may be played on either). rank: which one a mode of one process plays. record: also write the allocator's events of a step.
    profile: also run a step under the profiler. memory_fraction: of what is free on a device, the most to take.
    """

    mode: Mode
    model: Model
    plan: Plan
    stack: Stack
    device: Literal["cuda", "cpu"] = "cpu"
    rank: int = Field(ge=0, default=0)
    num_steps: int = Field(ge=1, le=10_000, default=8)
    num_warm_up: int = Field(ge=1, le=1000, default=3)
    threads: int = Field(ge=1, le=4096, default=1)
    profile: bool = True
    record: bool = False
    memory_fraction: float = Field(gt=0, le=1, default=0.9)
    command: str = ""

    @property
    def num_processes(self) -> int:
        """Ranks that really run."""
        return self.plan.num_devices if self.mode in ("full", "cpu") else 1
