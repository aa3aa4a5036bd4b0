"""Memory of a plan below HBM, against a node's capacity."""

from __future__ import annotations

from dataclasses import replace

from simulator.memory import MemoryUse
from simulator.parallel.model_shard import shard_of
from simulator.play.lower import Lowering
from simulator.work.offload import tier_usage
from simulator.work.script import paged_bytes


def with_pages(memory: MemoryUse, lowering: Lowering) -> MemoryUse:
    """`memory` with a paged optimizer's pages in host memory; they are on the GPU while there is room."""
    size = paged_bytes(shard_of(lowering.model, lowering.plan), lowering.plan)
    if not size:
        return memory
    cluster = lowering.cluster
    room = memory.host_capacity_bytes or (cluster.host_tier.memory_bytes if cluster.host_tier else None)
    more = size * min(cluster.gpus_per_node, lowering.plan.num_devices)
    return replace(memory, host_bytes=memory.host_bytes + more, host_capacity_bytes=room)


def with_lower_tiers(memory: MemoryUse, lowering: Lowering) -> MemoryUse:
    """`memory` with the bytes of host and NVMe that the ranks of a node take together; unchanged without offload."""
    transfers, pool = lowering.transfers, lowering.pool_tiers
    if transfers is None:
        return memory
    if pool is not None:
        ranks, peaks = transfers.ranks_per_node, dict(pool.residency.peaks)
        peaks[pool.tiers[-1].name] = peaks.get(pool.tiers[-1].name, 0) + pool.residency.lost
        there = {one.name: ranks * one.num_bytes for one in pool.tiers if one.num_bytes}
        return replace(
            memory,
            peer_bytes=ranks * peaks.get("peer", 0),
            peer_capacity_bytes=there.get("peer"),
            host_bytes=ranks * peaks.get("host", 0),
            host_capacity_bytes=there.get("host"),
            nvme_bytes=ranks * peaks.get("nvme", 0),
            nvme_capacity_bytes=there.get("nvme"),
        )
    saved = sum(move.activation_bytes for move in lowering.step.moves.units.values())
    below = tier_usage(lowering.model, lowering.plan, saved)
    return replace(
        memory,
        host_bytes=transfers.ranks_per_node * below.host_bytes,
        host_capacity_bytes=transfers.tier.memory_bytes,
        peer_bytes=transfers.ranks_per_node * below.peer_bytes,
        peer_capacity_bytes=lowering.cluster.lent_bytes,
        nvme_bytes=transfers.ranks_per_node * below.nvme_bytes,
        nvme_capacity_bytes=transfers.tier.nvme_bytes,
    )
