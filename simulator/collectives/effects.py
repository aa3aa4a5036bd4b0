"""What a collective does to its surroundings: the compute it slows, and how sure its time is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from simulator.collective_curves import LinkCurves, Quality, default_curves
from simulator.collectives.cost import Links, Placement, calibrated, checked_kind, choose
from simulator.collectives.volumes import Kind, volume

if TYPE_CHECKING:
    from simulator.mesh import GroupShape
    from simulator.topology import Cluster

# Bytes read plus written in a GPU's memory per byte that leaves its port. A hop writes what arrives and reads what it
# sends or adds; NCCL's staging buffers add up to one more of each where they fall out of the L2 cache. So 2 to 4; prior 2.
MEMORY_PASSES = 2.0
# One CTA a channel, of up to 640 threads whose registers fill an SM (NCCL, src/include/device.h).
SMS_PER_CHANNEL = 1
_PAIR = 2
_MID_BYTES, _LARGE_BYTES = 64 * 2**10, 64 * 2**20
_PRIOR_SIGMA = 0.10  # added where no sweep shows the mode: spread of efficiency over modes of a network
_HOST_SIGMA = 0.7  # added for more than two GPUs behind PCIe: published groups of four run at 5 to 24 GB/s of 31.5
_SCALED_SIGMA = 0.15  # added where a relative's curves were scaled by data-sheet speed: spread of efficiency over ports


def interference(
    kind: str,
    shape: GroupShape,
    cluster: Cluster,
    curves: LinkCurves | None = None,
    *,
    size_bytes: int = 2**28,
    memory_weight: float = 1.0,
) -> float:
    """Share of compute speed (0..0.9) lost while the collective runs: SMs of its channels, memory traffic of its bytes.

    Both are physics, not a fit: channels × SMs a channel over the device's SMs, plus the bytes that a call of
    `size_bytes` (large, where rates are steady) reads and writes a second over the memory's speed. memory_weight: what
    compute loses of a second in which somebody else has all of the memory's speed (calibration.interference.hbm_weight).
    """
    curves = curves or default_curves()
    if curves.ideal_links or shape.num_ranks == 1:
        return 0.0
    if curves.compute_share is not None:
        return curves.compute_share
    channels, wire_bytes_per_s = _traffic(checked_kind(kind), size_bytes, shape, cluster, curves)
    memory = memory_weight * MEMORY_PASSES * wire_bytes_per_s / cluster.device.memory_bytes_per_s
    return min(0.9, SMS_PER_CHANNEL * channels / cluster.device.num_sms + memory)


def _traffic(kind: Kind, size_bytes: int, shape: GroupShape, cluster: Cluster, curves: LinkCurves) -> tuple[int, float]:
    """Channels of the call, and the bytes a second that leave a GPU through its port and its part of the NICs."""
    links = Links.of(cluster, shape, kind)
    choice = choose(kind, size_bytes, shape, cluster, curves)
    port = curves.port(links.port_kind, links.port_bytes_per_s)
    place = Placement.of(shape, links)
    form = volume(kind, choice.algorithm, place.num_ranks, place.num_domains)
    channels = port.num_nvls_channels if choice.algorithm.startswith("nvls") else port.num_channels
    wire_bytes = float(form.port + form.nic / place.ranks_per_domain) * size_bytes
    return channels, wire_bytes / float(choice.time_s)


def sigma(kind: str, size_bytes: int, shape: GroupShape, cluster: Cluster, curves: LinkCurves | None = None) -> float:
    """Standard deviation of log(true / predicted) time: the fit's residuals and the spread between machines."""
    curves = curves or default_curves()
    if curves.ideal_links:
        return 0.0
    links = Links.of(cluster, shape, kind)
    place = Placement.of(shape, links)
    port = curves.port(links.port_kind, links.port_bytes_per_s)
    measured = curves.network(links.network_kind) if place.num_domains > 1 else port
    scaled = 0.0 if calibrated(links, curves) else _SCALED_SIGMA
    through_host = _HOST_SIGMA if _behind_host(port.family, links, place) else 0.0
    choice = choose(kind, size_bytes, shape, cluster, curves)
    unseen = _PRIOR_SIGMA if f"{choice.algorithm}/{choice.protocol}" in measured.priors else 0.0
    return math.hypot(
        _band(measured.quality, size_bytes), measured.quality.between_machines, scaled, unseen, through_host
    )


def _behind_host(family: str, links: Links, place: Placement) -> bool:
    """More than two ranks whose traffic meets in the host; the loopback of one machine is measured as it is."""
    return family != "nvlink" and links.port_kind != "loopback" and place.ranks_per_domain > _PAIR


def _band(quality: Quality, size_bytes: int) -> float:
    """Half of the residuals' 95th percentile: a standard deviation that does not mind the shape of the tail."""
    if size_bytes < _MID_BYTES:
        return quality.small_p95 / 2
    return (quality.mid_p95 if size_bytes < _LARGE_BYTES else quality.large_p95) / 2


def source(cluster: Cluster, curves: LinkCurves | None = None) -> str:
    """What calibrates this cluster's links, in words."""
    curves = curves or default_curves()
    if curves.ideal_links:
        return "ideal links: data-sheet speed, no latency"
    links = Links.of(cluster)
    port = curves.port(links.port_kind, links.port_bytes_per_s)
    ratio = links.port_bytes_per_s / port.bytes_per_s
    parts = [f"{port.name}: {port.source}"]
    if not calibrated(links, curves):
        parts[0] += f" (assumed for {links.port_kind}, scaled × {ratio:.2f})"
    if links.num_nics:
        network = curves.network(links.network_kind)
        named = links.network_kind.lower() in network.kinds
        parts.append(f"{network.name}: {network.source}" + ("" if named else f" (assumed for {links.network_kind})"))
    return "; ".join(parts)
