"""Transfers: what a copy between tiers, a swap or a CPU update loads, as bills on the node's links.

A GPU has its own link to the host; memory, cores and drives are the node's. One program stands for all equal ranks, so
what one rank moves counts once on its own link and `ranks_per_node` times on what they share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from simulator.plan import Offload
from simulator.program import Bill
from simulator.tiers import (
    ADAM_BYTES_PER_NUMEL,
    BOTH,
    CPU_ADAM,
    D2H,
    FAULTS,
    H2D,
    HOST_MEMORY,
    NVME_READ,
    NVME_WRITE,
    STAGING,
    HostTier,
)

# One-sigma relative uncertainty, priors from the spread of published measurements: copies on PCIe 5 46.8 to 55 GB/s,
# CPU Adam 1.4e9 to 1.8e9 parameters a second on machines that nobody described, NVMe by drive count.
SIGMA: Final = {"h2d": 0.08, "d2h": 0.08, "nvme_read": 0.25, "nvme_write": 0.25, "cpu_adam": 0.3, "cpu_add": 0.3}
KINDS: Final = tuple(SIGMA)
_OF_THE_NODE: Final = (HOST_MEMORY, CPU_ADAM, NVME_READ, NVME_WRITE)
_ADD_BYTES_PER_NUMEL = 12  # the CPU reads two fp32 gradients and writes one


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """The prices of one node's transfers under one way to offload."""

    tier: HostTier
    gpus_per_node: int
    num_ranks: int
    offload: Offload
    vectorised: bool = True  # CPU Adam: DeepSpeed's, or torch's fused one

    @property
    def ranks_per_node(self) -> int:
        return min(self.gpus_per_node, self.num_ranks)

    def links(self, rank: int | None = None) -> dict[str, float]:
        """Capacities of the links of the class of all ranks, or of one rank and its node."""
        capacities = self.tier.links(vectorised=self.vectorised)
        return {self._name(link, rank): capacity for link, capacity in capacities.items()}

    @property
    def exclusive(self) -> bool:
        """Nothing runs beside a copy: the host is busy staging it, or kernels stand still until their pages arrive."""
        return not self.offload.pinned or self.offload.migration == "fault"

    def bill(self, kind: str, amount: int, rank: int | None = None) -> Bill:
        """What one rank's transfer of `amount` bytes costs (cpu_adam, cpu_add: elements)."""
        latency_s, link_amounts = self._loads(kind, amount)
        node = self.ranks_per_node if rank is None else 1
        loads = {
            self._name(link, rank): size * (node if link in _OF_THE_NODE else 1) for link, size in link_amounts.items()
        }
        return Bill(latency_s=latency_s, link_bytes=loads, share_bytes=link_amounts[HOST_MEMORY])

    def _name(self, link: str, rank: int | None) -> str:
        if rank is None:
            return link
        return f"{link}:node{rank // self.gpus_per_node}" if link in _OF_THE_NODE else f"{link}:{rank}"

    def _loads(self, kind: str, amount: int) -> tuple[float, dict[str, int]]:
        """(latency, what one rank puts on each link)."""
        match kind:
            case "h2d" | "d2h":
                return self.tier.copy_latency_s, self._copy(H2D if kind == "h2d" else D2H, amount)
            case "nvme_read" | "nvme_write":
                return 0.0, {NVME_READ if kind == "nvme_read" else NVME_WRITE: amount, HOST_MEMORY: amount}
            case "cpu_add":
                return 0.0, {HOST_MEMORY: _ADD_BYTES_PER_NUMEL * amount}
            case _:
                return 0.0, {CPU_ADAM: amount, HOST_MEMORY: ADAM_BYTES_PER_NUMEL * amount}

    def _copy(self, direction: str, size: int) -> dict[str, int]:
        links = {direction: size, BOTH: size, HOST_MEMORY: size}
        if self.offload.migration == "fault":
            links[FAULTS] = size
        elif self.offload.migration == "copy" and not self.offload.pinned:
            links[STAGING] = size
        return links
