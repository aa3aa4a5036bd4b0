"""What a collective puts on the links that offload uses: a GPU's PCIe link each way, and its node's host memory.

NICs hang on the PCIe switch beside their GPU, so all that enters or leaves a node crosses the GPU's own PCIe link, as copies
to and from the host do. NICs without RDMA, and GPUs without peer access, pass host memory as well: written, then read.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.software.nccl import Nccl
from simulator.work.collectives.call import nic_share
from simulator.work.collectives.cost import algorithm_of, call_of, form_of
from simulator.work.collectives.ports import PCIE, through_memory


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """Bytes of one rank, one way: over its PCIe link (as many up as down), and through its node's memory.

    fastest_bytes_per_s: what the collective could put on the PCIe link at most, data sheet. port_bytes, network_bytes: what
    it puts on the GPU's port into the node and on its part of the NICs.
    """

    pcie_bytes: Fraction
    memory_bytes: Fraction
    fastest_bytes_per_s: float
    port_bytes: Fraction
    network_bytes: Fraction


def host_traffic(
    kind: str,
    size_bytes: int,
    shape: GroupShape,
    cluster: Cluster,
    curves: LinkCurves | None = None,
    *,
    nccl: Nccl | None = None,
) -> HostTraffic:
    """What one collective of a group loads there; see `collective_cost` for size_bytes. Raises as `collective_cost` does."""
    call, curves = call_of(kind, size_bytes, shape, cluster, nccl), curves or default_curves()
    links, place = call.links, call.place
    form = form_of(call, algorithm_of(call, curves)[0])
    network = form.nic * size_bytes / place.ranks_per_domain
    by_pcie = links.port_link == PCIE or cluster.intra.shape == "pcie"
    own = form.port * size_bytes
    port = own if by_pcie else Fraction(0)
    memory = port * through_memory(cluster, shape, kind)
    if links.nics is not None:
        memory += network * Fraction(links.nics.in_memory).limit_denominator(1024)
    elif cluster.inter is not None and not cluster.inter.rdma:
        memory += network
    fastest = max(links.port_bytes_per_s if port else 0.0, float(nic_share(links)) if network else 0.0)
    return HostTraffic(port + network, memory, fastest, own, network)
