"""Laws of a fabric as measured: what was stated comes back, nothing beats the wire, more bandwidth is never slower."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.measured import bus_factor, wire_bus_bytes_per_s
from simulator.work.collectives import KINDS, collective_s, minimum, sigma
from tests.examples import examples

MACHINES = tuple(Cluster.load(name, 64) for name in ("hgx-h100-8", "hgx-a100-80-8", "aws-p5", "pcie-l40s-8"))
machines = st.sampled_from(MACHINES)
kinds = st.sampled_from(KINDS)
nodes = st.sampled_from([1, 2, 4, 16])
shares = st.floats(min_value=0.05, max_value=0.95)  # of what the wire allows
sizes = st.integers(min_value=8, max_value=2**33)


def whole(count: int, ranks: int = 8) -> GroupShape:
    spans = count > 1
    return GroupShape(
        num_ranks=ranks * count,
        num_nodes=count,
        ranks_per_node=ranks,
        num_groups_per_node=8 // ranks,
        spans_domain=spans,
    )


def most(cluster: Cluster, kind: str, count: int) -> float:
    return wire_bus_bytes_per_s(kind, count, 8, cluster.intra.bytes_per_s, cluster.node_bytes_per_s)


def stating(cluster: Cluster, *numbers: tuple[str, int, int, float]) -> Cluster:
    """(collective, nodes, size, bus bytes/s) each."""
    keys = ("collective", "nodes", "size_bytes", "bus_bytes_per_s")
    return cluster.with_measured([dict(zip(keys, one, strict=True)) for one in numbers], "test")


def wire_s(cluster: Cluster, kind: str, size: int, shape: GroupShape) -> float:
    least = minimum(kind, shape.num_ranks, shape.num_nodes)  # type: ignore[arg-type]
    far = least.nic * size / cluster.node_bytes_per_s if shape.num_nodes > 1 else 0
    return max(float(least.port) * size / cluster.intra.bytes_per_s, float(far)) * 0.98


@given(machines, kinds, nodes, st.floats(min_value=0.05, max_value=0.5))
@examples(120, ci=40)
def test_a_stated_call_takes_its_stated_time(cluster: Cluster, kind: str, count: int, share: float) -> None:
    size, bus = 2**28, share * most(cluster, kind, count)
    time_s = float(bus_factor(kind, 8 * count)) * size / bus
    found = float(collective_s(kind, size, whole(count), stating(cluster, (kind, count, size, bus))))
    assert abs(found / time_s - 1) < 1e-6


@given(machines, kinds, kinds, nodes, nodes, shares, sizes, st.sampled_from([1, 2, 8]))
@examples(300, ci=60)
def test_nothing_beats_the_wire(
    cluster: Cluster, stated: str, kind: str, there: int, count: int, share: float, size: int, ranks: int
) -> None:
    shape = whole(count, ranks)
    if shape.num_ranks == 1:
        return
    follows = stating(cluster, (stated, there, 2**28, share * most(cluster, stated, there)))
    if shape.ranks_per_node == 8:
        assert float(collective_s(kind, size, shape, follows)) >= wire_s(cluster, kind, size, shape)


@given(machines, kinds, kinds, nodes, nodes, shares, shares, sizes)
@examples(300, ci=60)
def test_more_bandwidth_is_never_slower(
    cluster: Cluster, stated: str, kind: str, there: int, count: int, one: float, other: float, size: int
) -> None:
    low, high = sorted((one, other))
    times = [
        float(
            collective_s(
                kind, size, whole(count), stating(cluster, (stated, there, 2**28, share * most(cluster, stated, there)))
            )
        )
        for share in (low, high)
    ]
    assert times[1] <= times[0] * (1 + 1e-9)


@given(machines, kinds, nodes, st.lists(shares, min_size=2, max_size=6), sizes, sizes)
@examples(300, ci=60)
def test_a_larger_message_of_a_swept_group_is_never_quicker(
    cluster: Cluster, kind: str, count: int, swept: list[float], one: int, other: int
) -> None:
    numbers = [(kind, count, 2 ** (16 + 3 * k), share * most(cluster, kind, count)) for k, share in enumerate(swept)]
    within = [min(max(size, 2**16), 2 ** (13 + 3 * len(swept))) for size in sorted((one, other))]
    follows = stating(cluster, *numbers)
    small, large = (float(collective_s(kind, size, whole(count), follows)) for size in within)
    assert small <= large * (1 + 1e-9)


@given(machines, kinds, st.sampled_from([2, 3, 6, 8]), shares, shares)
@examples(120, ci=40)
def test_between_stated_counts_a_call_lies_between_what_each_would_make_of_it(
    cluster: Cluster, kind: str, count: int, one: float, other: float
) -> None:
    numbers = [(kind, 2, 2**28, one * most(cluster, kind, 2)), (kind, 8, 2**28, other * most(cluster, kind, 8))]
    alone = sorted(float(collective_s(kind, 2**27, whole(count), stating(cluster, each))) for each in numbers)
    both = float(collective_s(kind, 2**27, whole(count), stating(cluster, *numbers)))
    # one may blame the waits and the other the bytes: between them both are blamed in part
    assert alone[0] / 1.05 <= both <= alone[1] * 1.05


@given(machines, kinds, st.sampled_from([4, 8, 16]))
@examples(60, ci=20)
def test_the_interval_widens_away_from_what_was_stated(cluster: Cluster, kind: str, count: int) -> None:
    follows = stating(cluster, (kind, 2, 2**28, 0.4 * most(cluster, kind, 2)))
    widths = [sigma(kind, 2**28, whole(each), follows) for each in (2, count, 2 * count)]
    assert widths == sorted(widths)
    assert widths[0] < widths[1] < widths[2]
    assert sigma(kind, 2**28, whole(2), follows) < sigma(kind, 2**28, whole(2), cluster)
    assert sigma(kind, 2**20, whole(2), follows) > sigma(
        kind, 2**28, whole(2), follows
    )  # small calls: the model's word
