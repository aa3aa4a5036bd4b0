"""ASTRA-sim's closed form of a ring and ours are one formula where neither has latency."""

from __future__ import annotations

import pytest

from experiments.astra_sim import GIB, SENDS, astra_s
from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster
from simulator.work.collectives import LinkCurves, choose


@pytest.mark.parametrize("kind", SENDS)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_rings_without_latency_take_the_same_time(kind: str, num_ranks: int) -> None:
    """All that is left of the difference is that ASTRA-sim cuts each send to whole nanoseconds."""
    cluster, size = Cluster.load("hgx-h100-8"), 2**30
    shape = GroupShape(
        num_ranks=num_ranks, num_nodes=1, ranks_per_node=num_ranks, num_groups_per_node=1, spans_domain=False
    )
    ours = float(choose(kind, size, shape, cluster, LinkCurves.ideal()).time_s)
    theirs = astra_s(kind, size, num_ranks, float(cluster.intra.bytes_per_s) / GIB, latency_ns=0)
    assert ours - SENDS[kind] * (num_ranks - 1) * 1e-9 <= theirs <= ours * (1 + 1e-12)
