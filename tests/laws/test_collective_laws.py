"""Laws of bills: nobody beats the links, more bytes are never free, exact scaling where links are ideal."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster
from simulator.work.collectives import (
    KINDS,
    LinkCurves,
    choose,
    collective_cost,
    collective_s,
    interference,
    minimum,
    sigma,
)

CLUSTERS = tuple(
    Cluster.load(name, 64)
    for name in ("hgx-h100-8", "hgx-a100-80-8", "dgx-b200-8", "aws-p4de", "aws-p5", "dgx1-v100-8")
)
IDEAL = LinkCurves.ideal()
clusters = st.sampled_from(CLUSTERS)
kinds = st.sampled_from(KINDS)
sizes = st.integers(min_value=1, max_value=2**36)


@st.composite
def shapes(draw: st.DrawFn) -> GroupShape:
    nodes, ranks = draw(st.sampled_from([1, 2, 3, 4, 16, 64])), draw(st.sampled_from([1, 2, 4, 8]))
    if nodes * ranks == 1:
        ranks = 8
    groups = draw(st.sampled_from([1, 8 // ranks]))
    return GroupShape(
        num_ranks=nodes * ranks,
        num_nodes=nodes,
        ranks_per_node=ranks,
        num_groups_per_node=groups,
        spans_domain=nodes > 1,
    )


@given(kinds, sizes, shapes(), clusters)
def test_no_call_beats_the_data_sheet(kind: str, size: int, shape: GroupShape, cluster: Cluster) -> None:
    least = minimum(kind, shape.num_ranks, shape.num_nodes)  # type: ignore[arg-type]
    assert cluster.inter is not None
    busy = min(8, shape.ranks_per_node * shape.num_groups_per_node)
    port_s = float(least.port) * size / cluster.intra.bytes_per_s
    nic_s = (
        float(least.nic) * size * busy / shape.ranks_per_node / cluster.node_bytes_per_s if shape.num_nodes > 1 else 0
    )
    assert collective_s(kind, size, shape, cluster) >= max(port_s, nic_s)


@given(kinds, sizes, shapes(), clusters, st.integers(min_value=2, max_value=64))
def test_ideal_links_scale_exactly(kind: str, size: int, shape: GroupShape, cluster: Cluster, factor: int) -> None:
    once = collective_s(kind, size, shape, cluster, IDEAL)
    assert isinstance(once, Fraction)
    assert collective_s(kind, factor * size, shape, cluster, IDEAL) == factor * once


@given(kinds, sizes, shapes(), clusters)
def test_same_mode_more_bytes_more_time(kind: str, size: int, shape: GroupShape, cluster: Cluster) -> None:
    one, two = (choose(kind, s, shape, cluster) for s in (size, 2 * size))
    if (one.algorithm, one.protocol) == (two.algorithm, two.protocol):
        assert two.time_s > one.time_s


@given(kinds, sizes, shapes(), clusters)
def test_neighbours_on_the_cards_never_help(kind: str, size: int, shape: GroupShape, cluster: Cluster) -> None:
    crowd = GroupShape(
        num_ranks=shape.num_ranks,
        num_nodes=shape.num_nodes,
        ranks_per_node=shape.ranks_per_node,
        num_groups_per_node=8 // shape.ranks_per_node,
        spans_domain=shape.spans_domain,
    )
    assert collective_s(kind, size, crowd, cluster) >= collective_s(kind, size, shape, cluster)


@given(kinds, sizes, shapes(), clusters)
def test_bills_are_made_of_named_links_and_finite_delays(
    kind: str, size: int, shape: GroupShape, cluster: Cluster
) -> None:
    found = collective_cost(kind, size, shape, cluster)
    assert set(found.link_bytes) <= {"intra", "inter"}
    assert found.link_bytes
    assert all(value > 0 for value in found.link_bytes.values())
    assert ("inter" in found.link_bytes) == (shape.num_nodes > 1)
    assert 0 < found.latency_s < 10
    assert 0 < sigma(kind, size, shape, cluster) < 2
    assert 0 < interference(kind, shape, cluster) < 0.9
    assert collective_cost(kind, size, shape, cluster) == found
