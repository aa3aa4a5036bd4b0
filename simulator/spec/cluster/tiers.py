"""Tiers below HBM: capacity and speed of a node's host memory and drives. The numbers are in topologies/tiers."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, Self

from pydantic import Field

from simulator.base.errors import ClusterError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import Strict, read_toml
from simulator.base.units import Bytes, BytesPerS, Seconds

TIERS: Final = TOPOLOGIES / "tiers"

ADAM_BYTES_PER_NUMEL = 30  # CPU Adam reads g, p, m, v in fp32, writes p, m, v, and a 16-bit copy of p
# Names of the links that transfers load; capacities by `HostTier.links`
H2D, D2H, BOTH, STAGING, FAULTS = "host:h2d", "host:d2h", "host:both", "host:staging", "host:faults"
SWITCH_UP, SWITCH_DOWN = "switch:up", "switch:down"  # between a PCIe switch and its CPU
# a GPU's own port into NVLink, shared with collectives; its part of the lenders'
PEER_PORT, LENT_PORTS = ("intra", "peer")
HOST_MEMORY, CPU_ADAM, NVME_READ, NVME_WRITE = "host:memory", "host:adam", "nvme:read", "nvme:write"


class HostTier(Strict):
    """One node's host and drives.

    Of one GPU's link, in pinned copies: h2d_, d2h_bytes_per_s one direction alone; both_bytes_per_s both directions
    together, added up. pageable_bytes_per_s: copies through the driver's staging buffer. copy_latency_s: of one copy.
    Of the node, shared by its GPUs: memory_, nvme_ and what follows. adam_numel_per_s: parameters a second of a
    vectorised CPU Adam. torch_adam_: of a process, torch.optim.Adam without `fused`. process_write_bytes_per_s: what one
    process writes with torch.save. fault_latency_s, fault_bytes: one round of page faults of unified memory, and what it moves.
    sources: where each number stands.
    """

    name: str = ""
    h2d_bytes_per_s: BytesPerS = Field(gt=0)
    d2h_bytes_per_s: BytesPerS = Field(gt=0)
    both_bytes_per_s: BytesPerS = Field(gt=0)
    pageable_bytes_per_s: BytesPerS = Field(gt=0)
    copy_latency_s: Seconds = Field(ge=0)
    memory_bytes: Bytes = Field(gt=0)
    memory_bytes_per_s: BytesPerS = Field(gt=0)
    adam_numel_per_s: float = Field(gt=0)
    torch_adam_numel_per_s: float = Field(gt=0)
    nvme_bytes: Bytes = Field(ge=0)
    nvme_read_bytes_per_s: BytesPerS = Field(gt=0)
    nvme_write_bytes_per_s: BytesPerS = Field(gt=0)
    process_write_bytes_per_s: BytesPerS = Field(gt=0)
    fault_latency_s: Seconds = Field(ge=0)
    fault_bytes: Bytes = Field(gt=0)
    sources: dict[str, str] = {}

    @classmethod
    @cache
    def of_kind(cls, kind: str) -> Self:
        """The usual host behind a link of this kind (pcie3, pcie4, pcie5, c2c). Raises ClusterError."""
        return cls.parse(usual_tier(kind), str(TIERS / f"{kind}.toml"), ClusterError, from_file=True)

    def capped(self, bytes_per_s: float) -> Self:
        """The same tier behind a link that carries at most `bytes_per_s` one way."""
        return self.model_copy(
            update={
                "h2d_bytes_per_s": min(self.h2d_bytes_per_s, bytes_per_s),
                "d2h_bytes_per_s": min(self.d2h_bytes_per_s, bytes_per_s),
            }
        )

    def fault_bytes_per_s(self) -> float:
        """What page faults migrate: rounds one after another, each a latency and its bytes over the link."""
        link = min(self.h2d_bytes_per_s, self.d2h_bytes_per_s)
        return self.fault_bytes / (self.fault_latency_s + self.fault_bytes / link)

    def links(self, *, vectorised: bool = True) -> dict[str, float]:
        """Capacity of every link: bytes/s; of host:adam parameters/s."""
        return {
            H2D: self.h2d_bytes_per_s,
            D2H: self.d2h_bytes_per_s,
            BOTH: self.both_bytes_per_s,
            STAGING: self.pageable_bytes_per_s,
            FAULTS: self.fault_bytes_per_s(),
            HOST_MEMORY: self.memory_bytes_per_s,
            CPU_ADAM: self.adam_numel_per_s if vectorised else self.torch_adam_numel_per_s,
            NVME_READ: self.nvme_read_bytes_per_s,
            NVME_WRITE: self.nvme_write_bytes_per_s,
        }


@cache
def usual_tier(kind: str) -> dict[str, Any]:
    """The usual host behind a link of this kind as its file has it, units and all. Raises ClusterError without one."""
    return read_toml(TIERS / f"{kind}.toml", ClusterError)
