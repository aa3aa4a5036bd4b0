"""Handing a prompt's cache from the engine that computed it to the one that decodes: where both lie, and what it takes.

Engines lie in cells: the smallest groups of engines of both pools in their ratio. A cell that fits a node lies in one, and
its caches pass the node's links; otherwise prompts and decoding lie on nodes of their own, and caches cross the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving.costs import StepCosts
from simulator.studies.serving.legal import store_bytes_per_s
from simulator.studies.serving.plan import InferencePlan
from simulator.studies.serving.shards import kv_bytes_per_token, stage_shards
from simulator.studies.serving.workload import Request
from simulator.work.collectives import collective_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """cells: groups of engines that hand caches over among themselves. near: each lies in one node."""

    cells: int
    near: bool


def placing(plan: InferencePlan, cluster: Cluster) -> Placing:
    """Where the pools of a plan lie: all in one node, cells in nodes, or apart."""
    gpus = cluster.gpus_per_node
    if plan.num_devices <= gpus:
        return Placing(cells=1, near=True)
    cells = gcd(plan.dp, plan.prefill_dp)
    a_node = gpus // (plan.num_devices // cells)
    near = a_node > 0 and cells <= a_node * cluster.num_nodes
    return Placing(cells=cells if near else 1, near=near)


def fetched_s(costs: StepCosts, request: Request) -> float:
    """Seconds of reading the beginning that a request finds in a store, all but what others share, into each GPU's cache."""
    tokens = request.cached_tokens - request.shared_tokens
    if not tokens or costs.plan.prefix_store == "gpu":
        return 0.0
    each = max(kv_bytes_per_token(shard, costs.plan) for shard in costs.shards)
    return costs.pace * tokens * each / store_bytes_per_s(costs.plan, costs.cluster)


class Transfers:
    """Seconds to transfer a prompt's cache between engines, by its tokens, on links without other traffic."""

    def __init__(
        self, model: Model, plan: InferencePlan, cluster: Cluster, stack: Stack, curves: LinkCurves, *, near: bool
    ) -> None:
        pool, receiver = plan.prefill_pool, plan.decode_pool
        assert pool is not None
        each = [kv_bytes_per_token(shard, receiver) for shard in stage_shards(model, receiver)]
        self.bytes_per_token = receiver.tp * sum(each)
        # A GPU sends its part of what all receive, and receives what its own stage keeps.
        self.port_bytes_per_token = max(*each, -(-self.bytes_per_token // pool.engine_devices))
        gpus = cluster.gpus_per_node
        reach = gpus if near else cluster.num_devices
        self._shape = GroupShape(
            num_ranks=2,
            num_nodes=1 if near else 2,
            ranks_per_node=2 if near else 1,
            num_groups_per_node=min(gpus, pool.engine_devices, receiver.engine_devices),
            spans_domain=reach > cluster.nvlink_domain_size,
        )
        self._cluster, self._curves, self._nccl = cluster, curves, stack.software()
        self._known: dict[int, float] = {}

    def seconds(self, tokens: int) -> float:
        """Of a prompt of so many tokens."""
        if tokens not in self._known:
            size = tokens * self.port_bytes_per_token
            spent = collective_s("send_recv", size, self._shape, self._cluster, curves=self._curves, nccl=self._nccl)
            self._known[tokens] = float(spent)
        return self._known[tokens]
