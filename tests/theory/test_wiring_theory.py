"""What groups find between the GPUs of a node, against counts of cables and hops done by hand."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.base.errors import ClusterError
from simulator.parallel.mesh import GroupShape, Mesh
from simulator.spec.cluster import Cluster, Edge, Host, Intra, Pcie
from simulator.spec.cluster.wiring import Wiring
from simulator.spec.plan import Plan
from simulator.work.collectives import LinkCurves, collective_cost, collective_s, link_capacities
from simulator.work.collectives.ports import local_groups, port_of

GB = 1e9
LINK = 25 * GB  # one NVLink 2
DGX1 = Cluster.load("dgx1-v100-8")
X16 = 31 * GB
EIGHT = tuple(range(8))
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


def box(**pcie: object) -> Cluster:
    """Eight GPUs behind PCIe 4 on two sockets."""
    data = {"sockets": HALVES, "socket_bytes_per_s": 40 * GB, "host_bytes_per_s": 1000 * GB} | pcie
    return Cluster(
        name="box",
        device="a40",
        gpus_per_node=8,
        intra=Intra(kind="pcie4", shape="pcie", bytes_per_s=X16),
        pcie=Pcie.model_validate(data),
    )


def group(num_ranks: int, num_groups: int = 1, stride: int = 1) -> GroupShape:
    return GroupShape(
        num_ranks=num_ranks,
        num_nodes=1,
        ranks_per_node=num_ranks,
        num_groups_per_node=num_groups,
        spans_domain=False,
        local_stride=stride,
    )


@pytest.mark.parametrize(
    ("members", "links"),
    [
        ((0, 1), 1),
        ((0, 3), 2),
        (EIGHT, 6),  # every link of every GPU can lie on a cycle: three undirected cycles of two links a GPU
        ((0, 1, 2, 3), 4),  # GPU 0 has 4 links in its quad, all of them on cycles: 0-1-2-3 and 0-2-1-3
        ((0, 2, 4, 6), 2),  # one cycle 0-2-6-4, of one link at its thinnest, both ways round
    ],
)
def test_rings_of_a_cube_mesh_use_the_links_that_close_cycles(members: tuple[int, ...], links: int) -> None:
    assert Wiring.of(DGX1).rings([members]).bytes_per_s == pytest.approx(links * LINK)


def test_gpus_that_no_cable_joins_meet_in_the_host_of_a_cube_mesh() -> None:
    """0 and 5 are two hops apart; NCCL relays through a member of the group only, and there is none."""
    found = Wiring.of(DGX1).rings([(0, 5)])
    assert found.on_pcie
    assert found.bytes_per_s == 15.75 * GB


def test_a_relay_of_the_group_beats_the_host() -> None:
    route = Wiring.of(DGX1).route(0, 5, EIGHT)
    assert route.word == "NVB"
    assert route.links == ("gpu0>gpu1", "gpu1>gpu5")  # 25 GB/s at its thinnest, as over 4: the first


def test_all_to_all_of_a_cube_mesh_is_bound_by_its_thinnest_loaded_cable() -> None:
    """A quad's pairs have 1 or 2 links; each GPU sends a third to each peer, so 3 × 25 GB/s."""
    assert Wiring.of(DGX1).all_pairs([(0, 1, 2, 3)]).bytes_per_s == pytest.approx(3 * LINK)


@given(st.integers(2, 8))
def test_a_full_mesh_uses_the_cables_to_its_peers(num_ranks: int) -> None:
    cluster = Cluster.load("mi300x-8")
    cable = cluster.intra.bytes_per_s / 7
    for found in (Wiring.of(cluster).rings([EIGHT[:num_ranks]]), Wiring.of(cluster).all_pairs([EIGHT[:num_ranks]])):
        assert found.bytes_per_s == pytest.approx((num_ranks - 1) * cable)


@given(st.integers(3, 6), st.data())
def test_no_ring_beats_what_leaves_a_gpu_and_some_ring_beats_each_cycle(num_gpus: int, data: st.DataObject) -> None:
    """Bounds by hand: at most the least sum of a GPU's cables, at least the best single cycle, both ways round."""
    counts = {pair: data.draw(st.integers(1, 4)) for pair in combinations(range(num_gpus), 2)}
    edges = tuple(Edge(src=a, dst=b, bytes_per_s=n * GB) for (a, b), n in counts.items())
    wiring = Wiring(Intra(kind="nvlink3", shape="mesh", bytes_per_s=99 * GB, edges=edges), None, None, num_gpus, 0.0)
    found = wiring.rings([tuple(range(num_gpus))]).bytes_per_s
    leaving = [sum(n for pair, n in counts.items() if gpu in pair) for gpu in range(num_gpus)]
    best = max(
        min(counts[min(a, b), max(a, b)] for a, b in zip(order, (*order[1:], order[0]), strict=True))
        for order in permutations(range(num_gpus))
    )
    assert 2 * best * GB <= found * (1 + 1e-9)
    assert found <= min(leaving) * GB * (1 + 1e-9)


def test_a_ring_over_two_sockets_crosses_once_each_way() -> None:
    assert Wiring.of(box(p2p="SYS")).rings([EIGHT]).bytes_per_s == X16
    assert Wiring.of(box(p2p="SYS", socket_bytes_per_s=10 * GB)).rings([EIGHT]).bytes_per_s == 10 * GB


def test_four_pairs_across_the_sockets_share_what_joins_them() -> None:
    """Replicas 0-4, 1-5, 2-6, 3-7: four flows each way over 40 GB/s. Neighbours do not cross."""
    cluster = box(p2p="SYS")
    across, beside = port_of(cluster, group(2, 4, 4)), port_of(cluster, group(2, 4, 1))
    assert across.reached_bytes_per_s == pytest.approx(10 * GB)
    assert beside.reached_bytes_per_s == pytest.approx(X16)


def test_gpus_of_one_switch_share_its_uplink_and_not_its_inside() -> None:
    """Below PXB peers meet in the switch. Two such pairs that talk to each other share 31 GB/s upwards."""
    switched = box(p2p="SYS", switches=((0, 1), (2, 3), (4, 5), (6, 7)), socket_bytes_per_s=1000 * GB)
    assert port_of(switched, group(2, 4, 1)).reached_bytes_per_s == pytest.approx(X16)
    assert port_of(switched, group(2, 4, 2)).reached_bytes_per_s == pytest.approx(X16 / 2)
    assert port_of(switched, group(8)).reached_bytes_per_s == pytest.approx(X16)  # a ring enters each switch once


def test_without_peer_access_all_hops_share_host_memory() -> None:
    """n hops of a ring of n, each through host memory: H / n. The collapse of PCIe boxes: 20, 5, 2.5 GB/s."""
    shared = box(host_bytes_per_s=X16)
    for n in (2, 4, 8):
        assert port_of(shared, group(n)).reached_bytes_per_s == pytest.approx(X16 / n)


def test_nccl_lets_two_gpus_of_an_amd_host_reach_each_other() -> None:
    shared = box(host_bytes_per_s=X16, cpu="amd")
    assert port_of(shared, group(2)).reached_bytes_per_s == X16
    assert port_of(shared, group(4)).reached_bytes_per_s == pytest.approx(X16 / 4)


def test_bridges_serve_their_pairs_and_the_host_everybody_else() -> None:
    cluster = Cluster.load("pcie-a40-8")
    pair, four = port_of(cluster, group(2, 4)), port_of(cluster, group(4))
    assert (pair.link, pair.reached_bytes_per_s) == ("intra", 56.25 * GB)
    assert (four.link, four.reached_bytes_per_s) == ("pcie", 31 * GB)
    assert port_of(cluster, group(2, 2, 2)).link == "pcie"  # 0-2 and 1-3: no bridge joins them


def test_groups_of_different_links_do_not_meet_on_them() -> None:
    """Pairs on bridges and fours over PCIe: two names, so that neither slows the other."""
    cluster, ideal = Cluster.load("pcie-a40-8"), LinkCurves.ideal()
    pair = collective_cost("all_gather", 2**30, group(2, 4), cluster, curves=ideal)
    four = collective_cost("all_gather", 2**30, group(4), cluster, curves=ideal)
    assert (set(pair.link_bytes), set(four.link_bytes)) == ({"intra"}, {"pcie"})
    assert set(pair.link_bytes) | set(four.link_bytes) <= set(link_capacities(cluster, ideal))
    # (n−1)/n of 1 GiB over what each reaches
    assert collective_s("all_gather", 2**30, group(4), cluster, ideal) == pytest.approx(0.75 * 2**30 / (31 * GB))


def test_the_groups_of_a_mesh_axis_are_those_of_its_stride() -> None:
    """dp 4 × cp 2 on 8 GPUs: data groups {0, 2, 4, 6} and {1, 3, 5, 7}, context groups of neighbours."""
    mesh = Mesh(Plan(dp_shard=4, cp=2, seq_len=4096), DGX1)
    assert local_groups(mesh.group_shape("dp_shard"), 8) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert local_groups(mesh.group_shape("cp"), 8) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert port_of(DGX1, mesh.group_shape("dp_shard")).reached_bytes_per_s == pytest.approx(2 * LINK)
    assert port_of(DGX1, mesh.group_shape("cp")).reached_bytes_per_s == pytest.approx(LINK)  # 0-1 have one link


def test_a_bad_tree_gets_every_fault() -> None:
    with pytest.raises(ClusterError) as caught:
        box(sockets=((0, 1, 2), (2, 3, 4, 9)), switches=((0, 3),))
    text = str(caught.value)
    for part in (
        "names GPU 9",
        "GPU 2 appears in two",
        "5, 6, 7 sit on none",
        "switches[0]: its GPUs sit on two sockets",
    ):
        assert part in text


def test_a_tree_needs_links_to_the_host() -> None:
    mesh = Intra(kind="nvlink3", shape="mesh", bytes_per_s=300 * GB)
    with pytest.raises(ClusterError, match="no GPU has a link to it"):
        Cluster(name="x", device="a40", gpus_per_node=4, intra=mesh, pcie=Pcie())
    host = Host(kind="pcie4", bytes_per_s=X16)
    assert Cluster(name="x", device="a40", gpus_per_node=4, intra=mesh, host=host, pcie=Pcie()).pcie is not None
