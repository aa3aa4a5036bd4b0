"""How the groups of an engine lie on the nodes, and its own all-reduce in them.

Engines stand one after another, in each the stages, in each pcp's tp groups.
"""

from __future__ import annotations

from itertools import combinations
from math import inf

from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster
from simulator.spec.software.stack import Stack
from simulator.studies.serving.plan import InferencePlan
from simulator.work.ops import Exchange


def tensor_shape(plan: InferencePlan, cluster: Cluster, ranks: int | None = None) -> GroupShape:
    """The groups of tp, or of so many ranks of one: neighbours. All groups of a node communicate at once."""
    ranks = ranks or plan.tp
    return GroupShape.of_neighbours(cluster, ranks, max(1, min(cluster.gpus_per_node, plan.num_devices) // ranks))


def context_shape(plan: InferencePlan, cluster: Cluster) -> GroupShape:
    """The groups of pcp: ranks of the same place in tp groups that stand side by side."""
    gpus, ranks = cluster.gpus_per_node, plan.tp * plan.pcp
    nodes = min(plan.pcp, max(1, ranks // gpus))
    return GroupShape(
        num_ranks=plan.pcp,
        num_nodes=nodes,
        ranks_per_node=plan.pcp // nodes,
        num_groups_per_node=max(1, min(gpus, plan.num_devices) * nodes // plan.pcp),
        spans_domain=ranks > cluster.nvlink_domain_size,
    )


def pipeline_shape(plan: InferencePlan, cluster: Cluster, stage: int) -> GroupShape:
    """The pairs of a stage and the next, of the engine where they lie farthest apart; those of one engine send at once."""
    gpus, domain = cluster.gpus_per_node, cluster.nvlink_domain_size
    ranks = plan.tp * plan.pcp
    starts = [engine * plan.engine_devices + stage * ranks for engine in range(plan.dp)]
    pairs = [(start + rank, start + rank + ranks) for start in starts for rank in range(ranks)]
    apart = any(a // gpus != b // gpus for a, b in pairs)
    return GroupShape(
        num_ranks=2,
        num_nodes=2 if apart else 1,
        ranks_per_node=1 if apart else 2,
        num_groups_per_node=min(ranks, gpus),
        spans_domain=any(a // domain != b // domain for a, b in pairs),
    )


def own_all_reduce_s(exchange: Exchange, shape: GroupShape, cluster: Cluster, stack: Stack) -> float:
    """Seconds of its one kernel for small messages, which reads and writes its peers' memory (two-shot).

    inf: the engine has no such kernel for the message and the GPUs' links.
    """
    own = stack.engine.all_reduce if stack.engine else None
    n, near = shape.num_ranks, shape.num_nodes == 1 and not shape.spans_domain
    if own is None or exchange.kind != "all_reduce" or exchange.num_bytes > own.largest:
        return inf
    if not near or "pcie" in cluster.intra.kind or not _all_joined(cluster, n):
        return inf
    moved_s = 2 * (n - 1) / n * exchange.num_bytes / (own.link_share * cluster.intra.bytes_per_s)
    return own.latency_s + own.rank_s * n + moved_s


def _all_joined(cluster: Cluster, ranks: int) -> bool:
    """Each of so many neighbours reaches each other over a link of its own or a switch (vLLM's custom_all_reduce.py asks for it)."""
    edges = {frozenset((edge.src, edge.dst)) for edge in cluster.intra.edges}
    return not edges or all(frozenset(pair) in edges for pair in combinations(range(ranks), 2))
