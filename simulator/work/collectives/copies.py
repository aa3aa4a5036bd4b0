"""Copies between GPUs of one NVLink domain by their copy engines: how tensor parallelism in pieces moves its parts.

Each rank reads the parts of its peers one after another (torch 2.13, distributed/_symmetric_memory: `copy_` out of a peer's
buffer; Transformer Engine, ring_exchange with copy engines), so no SM is taken, and a collective of n parts is n - 1 copies.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.work.collectives.cost import call_of, follows, link_capacities
from simulator.work.collectives.effects import MEMORY_PASSES
from simulator.work.program import CollectiveCost, Number

# What copy engines reach of a port's data sheet, one way: nvbandwidth's device_to_device_memcpy_read_ce on H100 371 and
# 398 of 450 GB/s, A100 276 of 300, A800 172 of 200, GB200 798 of 900 (published outputs of azurehpc-health-checks, NVIDIA's
# blog on nvbandwidth, and its users): the median of 0.82 to 0.92.
ENGINE_EFFICIENCY: Final = 0.88
# Starting a copy and agreeing with a peer that its part is there: two small kernels' launch latencies. A prior.
STEP_S: Final = 5e-6


def copies(
    kind: str,
    size_bytes: int,
    shape: GroupShape,
    cluster: Cluster,
    curves: LinkCurves | None = None,
    *,
    memory_weight: float = 1.0,
) -> tuple[CollectiveCost, float]:
    """(cost, share of compute it takes meanwhile) of a group's `kind`, each rank fetching its n - 1 missing parts.

    size_bytes: of the full tensor. The sums of a reduce-scatter are not among them.
    """
    curves = curves or default_curves()
    call = call_of(kind, size_bytes, shape, cluster)
    num_bytes = Fraction(shape.num_ranks - 1, shape.num_ranks) * size_bytes * call.links.detour
    if curves.ideal_links:
        return CollectiveCost(latency_s=Fraction(0), link_bytes={call.links.port_link: num_bytes}), 0.0
    followed = follows(call, curves)
    # links that slow NCCL slow copies; its speed says nothing of theirs
    slow = max(1.0, followed.flow) if followed else 1.0
    seconds = slow * float(num_bytes) / (ENGINE_EFFICIENCY * call.port.bytes_per_s)
    capacity: Number = link_capacities(cluster, curves)[call.links.port_link]
    cost = CollectiveCost(
        latency_s=(shape.num_ranks - 1) * STEP_S, link_bytes={call.links.port_link: seconds * float(capacity)}
    )
    read_bytes_per_s = ENGINE_EFFICIENCY * call.port.bytes_per_s / float(call.links.detour) / slow
    return cost, min(0.9, memory_weight * MEMORY_PASSES * read_bytes_per_s / cluster.device.memory_bytes_per_s)
