"""Transfers: what a copy between tiers, a swap or a CPU update loads, as costs on the node's links.

A GPU has its own link to the host; memory, cores and drives are the node's. One program stands for all equal ranks, so
what one rank moves counts once on its own link and `ranks_per_node` times on what they share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from simulator.spec.cluster.rank_mapping import gpu_at
from simulator.spec.cluster.tiers import (
    ADAM_BYTES_PER_NUMEL,
    BOTH,
    CPU_ADAM,
    D2H,
    FAULTS,
    H2D,
    HOST_MEMORY,
    LENT_PORTS,
    NVME_READ,
    NVME_WRITE,
    PEER_PORT,
    STAGING,
    SWITCH_DOWN,
    SWITCH_UP,
    HostTier,
)
from simulator.spec.plan import Offload
from simulator.work.program import CollectiveCost

# One-sigma relative uncertainty, priors from the spread of published measurements: copies on PCIe 5 46.8 to 55 GB/s,
# CPU Adam 1.4e9 to 1.8e9 parameters a second on machines that nobody described, NVMe by drive count.
# NVLink as its collectives.
SIGMA: Final = {
    "to_peer": 0.1,
    "from_peer": 0.1,
    "h2d": 0.08,
    "d2h": 0.08,
    "nvme_read": 0.25,
    "nvme_write": 0.25,
    "cpu_adam": 0.3,
    "cpu_add": 0.3,
}
KINDS: Final = tuple(SIGMA)
_OF_THE_NODE: Final = (HOST_MEMORY, CPU_ADAM, NVME_READ, NVME_WRITE)
_ADD_BYTES_PER_NUMEL = 12  # the CPU reads two fp32 gradients and writes one
# Elements that torch.optim's loop reads and writes on a CPU for each (adam.py, _single_tensor_adam): decay 2, lerp 3, mul 2,
# addcmul 3, sqrt 2, div 2, add 2, addcdiv 4. In bf16 they take 0.57 of the time (tiers: torch_adam_numel_per_s)
_TORCH_ADAM_PASSES, _IN_HALF = 20, 0.57


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """The prices of one node's transfers under one way to offload.

    switches: GPUs of a node that share a PCIe switch; uplink_bytes_per_s: what copies reach between it and its CPU.
    lent_bytes_per_s: one rank's part of the NVLink ports of idle GPUs.
    """

    tier: HostTier
    gpus_per_node: int
    num_ranks: int
    offload: Offload
    switches: tuple[tuple[int, ...], ...] = ()
    uplink_bytes_per_s: float = 0.0
    lent_bytes_per_s: float = 0.0
    rank_mapping: tuple[int, ...] = ()  # of ranks, as the cluster's
    vectorised: bool = True  # CPU Adam: DeepSpeed's, or torch's fused one
    state_bytes: int = 4  # of an element of weights and moments, which torch's own loop passes over

    @property
    def ranks_per_node(self) -> int:
        return min(self.gpus_per_node, self.num_ranks)

    def links(self, rank: int | None = None) -> dict[str, float]:
        """Capacities of the links of the class of all ranks, or of one rank and its node."""
        capacities = self.tier.links(vectorised=self.vectorised)
        if self.lent_bytes_per_s:
            capacities[LENT_PORTS] = self.lent_bytes_per_s
        if self.switches:
            capacities |= {SWITCH_UP: self.uplink_bytes_per_s, SWITCH_DOWN: self.uplink_bytes_per_s}
        return {self._name(link, rank): capacity for link, capacity in capacities.items()}

    @property
    def exclusive(self) -> bool:
        """Nothing runs beside a copy: the host is busy staging it, or kernels stand still until their pages arrive."""
        return not self.offload.pinned or self.offload.migration == "fault"

    def cost(self, kind: str, amount: int, rank: int | None = None) -> CollectiveCost:
        """What one rank's transfer of `amount` bytes costs (cpu_adam, cpu_add: elements)."""
        latency_s, link_amounts = self._loads(kind, amount)
        loads = {self._name(link, rank): size * self._sharing(link, rank) for link, size in link_amounts.items()}
        return CollectiveCost(latency_s=latency_s, link_bytes=loads, share_bytes=link_amounts.get(HOST_MEMORY, amount))

    def beside(
        self, cost: CollectiveCost, pcie_bytes: float, memory_bytes: float, fastest: float, rank: int | None = None
    ) -> CollectiveCost:
        """A collective's cost with what it puts on the links of transfers: pcie_bytes up and as many down.

        fastest: bytes/s of the collective at most. A copy reaches less of the PCIe link than the data sheet says; a
        collective that could go faster than copies is weighted, so that alone it is as fast as without offload.
        """
        node = self._sharing(HOST_MEMORY, rank)
        loads = {name: bytes_ for name, bytes_ in self._weighed(pcie_bytes, memory_bytes * node, fastest) if bytes_}
        named = {self._name(link, rank): amount for link, amount in loads.items()}
        share = cost.share_bytes or max(cost.link_bytes.values(), default=0)
        return CollectiveCost(latency_s=cost.latency_s, link_bytes={**cost.link_bytes, **named}, share_bytes=share)

    def _weighed(self, pcie_bytes: float, memory_bytes: float, fastest: float) -> Iterator[tuple[str, float]]:
        for link, rate in ((H2D, self.tier.h2d_bytes_per_s), (D2H, self.tier.d2h_bytes_per_s)):
            yield link, pcie_bytes * min(1.0, rate / fastest if fastest else 1.0)
        # written and read; the tier's rate counts both
        most = fastest * self.ranks_per_node
        yield HOST_MEMORY, 2 * memory_bytes * min(1.0, self.tier.memory_bytes_per_s / (2 * most) if most else 1.0)

    def _sharing(self, link: str, rank: int | None) -> int:
        """Equal ranks of one program that share a link."""
        if rank is not None:
            return 1
        if link in (SWITCH_UP, SWITCH_DOWN):
            return max(sum(gpu < self.ranks_per_node for gpu in switch) for switch in self.switches)
        return self.ranks_per_node if self._of_the_node(link) else 1

    def _of_the_node(self, link: str) -> bool:
        """A process runs torch's own Adam in its own thread (torchrun sets OMP_NUM_THREADS to 1)."""
        return link in _OF_THE_NODE and (self.vectorised or link != CPU_ADAM)

    def _name(self, link: str, rank: int | None) -> str:
        if rank is None:
            return link
        at = gpu_at(self.rank_mapping, rank)
        if link in (SWITCH_UP, SWITCH_DOWN):
            node, gpu = divmod(at, self.gpus_per_node)
            switch = next((i for i, gpus in enumerate(self.switches) if gpu in gpus), f"of {gpu}")
            return f"{link}:{node}.{switch}"
        return f"{link}:node{at // self.gpus_per_node}" if self._of_the_node(link) else f"{link}:{rank}"

    def _loads(self, kind: str, amount: int) -> tuple[float, dict[str, int]]:
        """(latency, what one rank puts on each link)."""
        match kind:
            case "h2d" | "d2h":
                return self.tier.copy_latency_s, self._copy(H2D if kind == "h2d" else D2H, amount)
            case "to_peer" | "from_peer":
                return self.tier.copy_latency_s, {PEER_PORT: amount, LENT_PORTS: amount}
            case "nvme_read" | "nvme_write":
                return 0.0, {NVME_READ if kind == "nvme_read" else NVME_WRITE: amount, HOST_MEMORY: amount}
            case "cpu_add":
                return 0.0, {HOST_MEMORY: _ADD_BYTES_PER_NUMEL * amount}
            case _:
                if self.vectorised:
                    return 0.0, {CPU_ADAM: amount, HOST_MEMORY: ADAM_BYTES_PER_NUMEL * amount}
                as_fp32 = amount if self.state_bytes == 4 else int(amount * _IN_HALF)
                return 0.0, {CPU_ADAM: as_fp32, HOST_MEMORY: _TORCH_ADAM_PASSES * self.state_bytes * amount}

    def _copy(self, direction: str, size: int) -> dict[str, int]:
        links = {direction: size, BOTH: size, HOST_MEMORY: size}
        if self.switches:
            links[SWITCH_DOWN if direction == H2D else SWITCH_UP] = size
        if self.offload.migration == "fault":
            links[FAULTS] = size
        elif self.offload.migration == "copy" and not self.offload.pinned:
            links[STAGING] = size
        return links
