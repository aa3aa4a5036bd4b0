"""A plan in another framework's words. What is written here is read back and compared by `simulator.formats.exchange`."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a launch needs: the plan, its model, the software, and how many GPUs one node has."""

    plan: Plan
    model: Model
    stack: Stack
    gpus_per_node: int

    @property
    def nodes(self) -> tuple[int, int]:
        """(nodes, processes a node): as full as they come out even."""
        each = gcd(self.plan.num_devices, self.gpus_per_node)
        if self.plan.num_devices <= self.gpus_per_node:
            each = self.plan.num_devices
        return self.plan.num_devices // each, each
