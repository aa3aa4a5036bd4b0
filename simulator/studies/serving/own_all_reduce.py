"""An engine's own all-reduce of small messages: one kernel that reads and writes its peers' memory, two-shot."""

from __future__ import annotations

from math import inf

from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster
from simulator.spec.software.stack import Stack
from simulator.work.ops import Exchange


def own_all_reduce_s(exchange: Exchange, shape: GroupShape, cluster: Cluster, stack: Stack) -> float:
    """Seconds, or inf where the engine has no such kernel for the message and the GPUs' links."""
    own = stack.engine.all_reduce if stack.engine else None
    n, near = shape.num_ranks, shape.num_nodes == 1 and not shape.spans_domain
    if own is None or exchange.kind != "all_reduce" or not near or "pcie" in cluster.intra.kind:
        return inf
    if exchange.num_bytes > own.largest:
        return inf
    moved_s = 2 * (n - 1) / n * exchange.num_bytes / (own.link_share * cluster.intra.bytes_per_s)
    return own.latency_s + own.rank_s * n + moved_s
