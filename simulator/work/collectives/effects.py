"""What a collective does to its surroundings: the compute it slows, and how sure its time is."""

from __future__ import annotations

import math
from functools import lru_cache

from simulator.base.remembered import Same
from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration.collective_curves import LinkCurves, Quality, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.software.nccl import Nccl
from simulator.spec.software.nccl.environment import DEFAULT_BUFFER_BYTES
from simulator.work.collectives.call import Call, Links, network_of
from simulator.work.collectives.cost import (
    algorithm_of,
    calibrated,
    call_of,
    call_s,
    choice_of,
    follows,
    form_of,
    network_curves,
    port_curves,
)
from simulator.work.collectives.ports import PCIE
from simulator.work.collectives.settings import channels_of

# Bytes read plus written in a GPU's memory per byte that leaves its port. A hop writes what arrives and reads what it sends or adds;
# NCCL's staging buffers add up to one more of each where they fall out of the L2 cache. So 2 to 4; prior 2.
MEMORY_PASSES = 2.0
# One CTA a channel, of up to 640 threads whose registers fill an SM (NCCL, src/include/device.h).
SMS_PER_CHANNEL = 1
_MID_BYTES, _LARGE_BYTES = 64 * 2**10, 64 * 2**20
_PRIOR_SIGMA = 0.10  # added where no sweep shows the mode: spread of efficiency over modes of a network
# Added where bytes go through a host's memory and the machine is not the one that was measured: one was, and published
# PCIe groups of four run at 5 to 24 GB/s of 31.5
_HOST_SIGMA = 0.7
_SET_SIGMA = 0.15  # added where channels or buffers were set: their effect is physics that no sweep has shown
# Added where a relative's curves were scaled by data-sheet speed: median errors of H100 and B200 from their neighbours in
# docs/accuracy.md (8 to 14 % from 64 MiB on, 32 to 40 % below)
_SCALED_SIGMA, _SCALED_SMALL_SIGMA = 0.15, 0.4
_MOST = 4096  # remembered, with their clusters


def interference(
    kind: str,
    shape: GroupShape,
    cluster: Cluster,
    curves: LinkCurves | None = None,
    *,
    size_bytes: int = 2**28,
    memory_weight: float = 1.0,
    nccl: Nccl | None = None,
) -> float:
    """Share of compute speed (0..0.9) lost while the collective runs: SMs of its channels, memory traffic of its bytes.

    Physics, not a fit: channels × SMs a channel over the device's SMs, plus the bytes that a call of `size_bytes` reads and writes a
    second over the memory's speed. memory_weight: what compute loses of a second in which somebody else has all of that speed.
    """
    curves = curves or default_curves()
    if curves.ideal_links or shape.num_ranks == 1:
        return 0.0
    return _interference(kind, shape, Same(cluster), Same(curves), size_bytes, memory_weight, nccl)


@lru_cache(_MOST)
def _interference(
    kind: str, shape: GroupShape, on: Same, by: Same, size_bytes: int, memory_weight: float, nccl: Nccl | None
) -> float:
    cluster: Cluster = on.one
    curves: LinkCurves = by.one
    more = curves.learned.compute_share if curves.learned else 0.0
    if curves.compute_share is not None:
        return min(0.9, max(0.0, curves.compute_share + more))
    call = call_of(kind, size_bytes, shape, cluster, nccl)
    memory = memory_weight * MEMORY_PASSES * _wire_bytes_per_s(call, curves) / cluster.device.memory_bytes_per_s
    by_nics = cluster.fabric.nic_collectives and call.place.num_domains > 1 and call.place.ranks_per_domain == 1
    channels = 0 if by_nics else channels_of(call, choice_of(call, curves), curves) or 0
    return min(0.9, max(0.0, SMS_PER_CHANNEL * channels / cluster.device.num_sms + memory + more))


def _wire_bytes_per_s(call: Call, curves: LinkCurves) -> float:
    """Bytes a second that leave a GPU through its port and its part of the NICs."""
    form = form_of(call, algorithm_of(call, curves)[0])
    wire_bytes = float(form.port + form.nic / call.place.ranks_per_domain) * call.size_bytes
    return wire_bytes / float(call_s(call, curves))


def sigma(
    kind: str,
    size_bytes: int,
    shape: GroupShape,
    cluster: Cluster,
    curves: LinkCurves | None = None,
    *,
    nccl: Nccl | None = None,
) -> float:
    """Standard deviation of log(true / predicted) time: the fit's residuals and the spread between machines."""
    curves = curves or default_curves()
    return 0.0 if curves.ideal_links else _sigma(kind, size_bytes, shape, Same(cluster), Same(curves), nccl)


@lru_cache(_MOST)
def _sigma(kind: str, size_bytes: int, shape: GroupShape, on: Same, by: Same, nccl: Nccl | None) -> float:
    curves = by.one
    call = call_of(kind, size_bytes, shape, on.one, nccl)
    port = port_curves(call, curves)
    network = network_curves(call, curves) if call.place.num_domains > 1 else None
    measured = network or port
    followed = follows(call, curves)
    if followed is not None:
        small = _band(measured.quality, size_bytes) if size_bytes < followed.least_bytes else 0.0
        return math.hypot(followed.sigma, small)
    algorithm, protocol = algorithm_of(call, curves)
    environment = call.nccl.environment
    was_set = environment.max_channels is not None or environment.buffer_bytes != DEFAULT_BUFFER_BYTES
    added = (
        0.0 if calibrated(call.links, curves) else _SCALED_SIGMA if size_bytes >= _LARGE_BYTES else _SCALED_SMALL_SIGMA,
        _HOST_SIGMA if call.port.way != "direct" or call.links.port_link == PCIE else 0.0,
        _HOST_SIGMA if call.links.nics is not None and call.links.nics.in_memory and call.links.rdma else 0.0,
        _HOST_SIGMA if network and network.nic_bytes_per_s not in (0, call.links.nic_bytes_per_s) else 0.0,
        _PRIOR_SIGMA if f"{algorithm}/{protocol}" in measured.priors else 0.0,
        _SET_SIGMA if was_set else 0.0,
        network.beyond_sigma(call.kind, call.place.num_domains) if network else 0.0,
    )
    return math.hypot(_band(measured.quality, size_bytes), measured.quality.between_machines, *added)


def _band(quality: Quality, size_bytes: int) -> float:
    """Half of the residuals' 95th percentile: a standard deviation that does not mind the shape of the tail."""
    if size_bytes < _MID_BYTES:
        return quality.small_p95 / 2
    return (quality.mid_p95 if size_bytes < _LARGE_BYTES else quality.large_p95) / 2


def source(cluster: Cluster, curves: LinkCurves | None = None, *, nccl: Nccl | None = None) -> str:
    """The calibration source of this cluster's links, as text."""
    curves = curves or default_curves()
    if curves.ideal_links:
        return "ideal links: data-sheet speed, no latency"
    links = Links.of(cluster)
    port = curves.port(links.port_kind, links.port_bytes_per_s, architecture=links.architecture)
    ratio = links.port_bytes_per_s / port.bytes_per_s
    parts = [f"{port.name}: {port.source}"]
    if not calibrated(links, curves):
        parts[0] += f" (assumed for {links.port_kind}, scaled × {ratio:.2f})"
    if links.num_nics:
        software = nccl or Nccl()
        kind = "sockets" if software.environment.sockets else network_of(links)
        network = curves.network(kind, software.environment.transport, software.release)
        named = kind in network.kinds
        parts.append(f"{network.name}: {network.source}" + ("" if named else f" (assumed for {kind})"))
    return "; ".join([*_as_measured(cluster), *parts])


def _as_measured(cluster: Cluster) -> list[str]:
    """What the cluster states that it was seen to give."""
    nodes: dict[str, dict[int, None]] = {}
    for one in cluster.fabric.measured:
        nodes.setdefault(one.collective, {})[one.nodes] = None
    texts = [f"{kind} on {', '.join(map(str, counts))}" for kind, counts in nodes.items()]
    return [f"the fabric as measured: {', '.join(texts)} nodes"] if texts else []
