"""Collectives against their closed forms, exactly; the forms themselves against small players that count chunks."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration.collective_curves import Mode, fill_depth, in_flight, pipeline_fill_s
from simulator.spec.cluster import Cluster
from simulator.work.collectives import LinkCurves, collective_cost, collective_s, link_capacities, minimum, volume
from simulator.work.collectives.volumes import Kind, tree_edges, tree_nic

IDEAL = LinkCurves.ideal()
S = 2**30


def shape(num_ranks: int, num_nodes: int = 1, groups: int = 1) -> GroupShape:
    return GroupShape(
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        ranks_per_node=-(-num_ranks // num_nodes),
        num_groups_per_node=groups,
        spans_domain=num_nodes > 1,
    )


@pytest.mark.parametrize("n", [2, 4, 8])
def test_ideal_ring_of_one_node_is_the_textbook(n: int) -> None:
    """Patarasuk & Yuan 2009: all-reduce 2(n−1)/n·S/B, its two halves (n−1)/n·S/B each."""
    cluster = Cluster.load("hgx-h100-8")
    speed = Fraction(450 * 10**9)
    half = Fraction(n - 1, n) * S / speed
    assert collective_s("all_reduce", S, shape(n), cluster, IDEAL) == 2 * half
    assert collective_s("all_gather", S, shape(n), cluster, IDEAL) == half
    assert collective_s("reduce_scatter", S, shape(n), cluster, IDEAL) == half
    assert collective_s("all_to_all", S, shape(n), cluster, IDEAL) == half
    assert collective_s("broadcast", S, shape(n), cluster, IDEAL) == S / speed
    assert collective_s("send_recv", S, shape(n), cluster, IDEAL) == S / speed


@pytest.mark.parametrize("nodes", [2, 4, 64])
def test_ideal_ring_over_nodes_is_bound_by_the_cards(nodes: int) -> None:
    """A node's 8 × 50 GB/s carry what every hop of the flat ring carries: (n−1)/n·S for an all-gather."""
    cluster = Cluster.load("hgx-h100-8", nodes)
    n = 8 * nodes
    assert cluster.node_bytes_per_s == 400e9
    assert collective_s("all_gather", S, shape(n, nodes), cluster, IDEAL) == Fraction(n - 1, n) * S / (400 * 10**9)


def test_eight_groups_share_the_cards_of_a_node() -> None:
    """One group over all 8 GPUs of each node, or 8 groups with one GPU each: the same bytes cross each node's NICs."""
    cluster = Cluster.load("hgx-h100-8", 4)
    wide = collective_cost("all_gather", S, shape(32, 4), cluster, curves=IDEAL).link_bytes["inter"]
    narrow = collective_cost("all_gather", S, shape(4, 4, groups=8), cluster, curves=IDEAL).link_bytes["inter"]
    assert 8 * Fraction(wide) == Fraction(31, 32) * S
    assert Fraction(narrow) == Fraction(3, 4) * S
    assert link_capacities(cluster, IDEAL)["inter"] == 50 * 10**9


def test_a_group_alone_on_its_node_uses_the_cards_of_idle_gpus_only_as_far_as_it_reaches_them() -> None:
    """4 NICs for 8 GPUs (p4de): one busy GPU has a whole NIC, twice its even share; eight busy ones share."""
    cluster = Cluster.load("aws-p4de", 2)
    assert cluster.inter is not None
    assert (cluster.inter.num_nics, cluster.gpus_per_node) == (4, 8)
    alone = collective_cost("all_gather", S, shape(2, 2), cluster, curves=IDEAL).link_bytes["inter"]
    crowded = collective_cost("all_gather", S, shape(2, 2, groups=8), cluster, curves=IDEAL).link_bytes["inter"]
    assert crowded == Fraction(S, 2)
    assert alone == Fraction(S, 4)


def play_ring(kind: str, num_nodes: int, per_node: int) -> tuple[Counter[int], Counter[int], list[set[int]]]:
    """Pass chunks around a ring, one a step: bytes (in chunks) that leave each rank, that enter each node, what ends where."""
    n = num_nodes * per_node
    out: Counter[int] = Counter()
    into: Counter[int] = Counter()
    held = [{rank} for rank in range(n)]
    for step in range((n - 1) * (2 if kind == "all_reduce" else 1)):
        for rank in range(n):
            chunk, peer = (rank - step) % n, (rank + 1) % n
            out[rank] += 1
            if peer // per_node != rank // per_node:
                into[peer // per_node] += 1
            held[peer].add(chunk)
    return out, into, held


@pytest.mark.parametrize(("num_nodes", "per_node"), [(1, 4), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_ring_volume_is_what_a_player_counts(kind: Kind, num_nodes: int, per_node: int) -> None:
    n = num_nodes * per_node
    form = volume(kind, "ring", n, num_nodes)
    out, into, held = play_ring(kind, num_nodes, per_node)
    assert all(chunks == set(range(n)) for chunks in held)
    assert set(out.values()) == {form.local_steps + form.network_steps}
    if num_nodes == 1:
        assert Fraction(out[0], n) == form.port
        return
    assert {Fraction(count, n) for count in into.values()} == {form.nic}
    # with the border rotating over channels, a port carries its share of the hops inside: (r−1) of r
    assert Fraction(out[0], n) * Fraction(per_node - 1, per_node) == form.port


@pytest.mark.parametrize("num_nodes", range(2, 40))
def test_both_trees_span_are_binary_and_use_other_inner_nodes(num_nodes: int) -> None:
    edges = tree_edges(num_nodes)
    first, second = edges[: num_nodes - 1], edges[num_nodes - 1 :]
    inner = []
    for tree in (first, second):
        parent = dict(tree)
        assert len(parent) == num_nodes - 1
        root = next(node for node in range(num_nodes) if node not in parent)
        for start in parent:
            node = start
            for _ in range(num_nodes):
                node = parent.get(node, node)
            assert node == root
        children = Counter(parent.values())
        assert max(children.values()) <= 2
        inner.append({node for node, count in children.items() if count == 2})
    assert not inner[0] & inner[1]


@pytest.mark.parametrize(
    ("num_nodes", "busiest"), [(1, 0), (2, 1), (3, Fraction(3, 2)), (4, 2), (8, 2), (31, 2), (512, 2)]
)
def test_busiest_node_of_the_double_tree(num_nodes: int, busiest: Fraction) -> None:
    """Half of S per tree: an inner node takes in two children's halves and its parent's, as a leaf its parent's: 2S."""
    assert tree_nic(num_nodes) == busiest


def test_nvls_counts_reads_and_multicasts() -> None:
    """8 GPUs, S in 8 parts: each port sends its copy of all 8 parts to the switch, then the sum of its own part."""
    sent = [sum(1 for _part in range(8)) + 1 for _gpu in range(8)]
    assert {Fraction(parts, 8) for parts in sent} == {volume("all_reduce", "nvls", 8, 1).port}


@pytest.mark.parametrize(("n", "nodes"), [(8, 1), (16, 2), (32, 8)])
def test_all_to_all_counts_pairs(n: int, nodes: int) -> None:
    r = n // nodes
    form = volume("all_to_all", "p2p", n, nodes)
    inside = sum(1 for peer in range(1, r))
    entering = sum(1 for source in range(n) for target in range(r) if source // r != 0)
    assert form.port == Fraction(inside, n)
    assert form.nic == Fraction(entering, n)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 16, 33])
def test_pat_doubles_what_a_rank_holds(n: int) -> None:
    """Bruck: in round k a rank gets up to 2^k parts from the rank 2^k before it; n−1 parts in ceil(log2 n) rounds."""
    held, received, rounds = 1, 0, 0
    while held < n:
        more = min(held, n - held)
        received, held, rounds = received + more, held + more, rounds + 1
    form = volume("all_gather", "pat", n, n)
    assert (form.nic, form.network_steps) == (Fraction(received, n), rounds)
    assert form == volume("reduce_scatter", "pat", n, n)


@pytest.mark.parametrize(("nodes", "r"), [(2, 8), (4, 8), (8, 2), (4, 1)])
def test_pat_brings_a_part_into_each_node_once(nodes: int, r: int) -> None:
    """Far first: whoever holds part 0 sends it n/2 ranks on, then n/4, … 1; edges between nodes are counted."""
    n = nodes * r
    holders, distance, between, inside = [0], n // 2, 0, 0
    while distance:
        for holder in tuple(holders):
            holders.append(holder + distance)
            between += holder // r != (holder + distance) // r
            inside += holder // r == (holder + distance) // r
        distance //= 2
    assert sorted(holders) == list(range(n))
    form = volume("all_gather", "pat", n, nodes)
    assert form.nic * nodes == between  # n parts of S/n have such a tree each, over all nodes
    assert form.port * n == inside
    assert form.local_steps + form.network_steps == (n - 1).bit_length()


@pytest.mark.parametrize(("nodes", "r"), [(2, 8), (4, 8), (3, 4)])
def test_switches_that_reduce_let_s_out_and_in_once(nodes: int, r: int) -> None:
    """Head h of a node gathers part h of its r−1 peers, sends the sum, gets the total, gives it to the r−1 peers."""
    out, into = [0] * r, 0
    for head in range(r):
        for peer in range(r):
            if peer != head:
                out[peer] += 1  # its share of part `head`
                out[head] += 1  # the total, to that peer
        into += 1
    direct = volume("all_reduce", "collnetdirect", nodes * r, nodes)
    assert {Fraction(parts, r) for parts in out} == {direct.port}
    assert Fraction(into, r) == direct.nic == volume("all_reduce", "collnetchain", nodes * r, nodes).nic
    assert volume("all_reduce", "nvls", nodes * r, nodes).nic == 1


@pytest.mark.parametrize(("nodes", "r"), [(2, 4), (4, 2), (4, 4), (3, 2)])
@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_two_levels_are_what_players_of_each_count(kind: Kind, nodes: int, r: int) -> None:
    """Inside a node a ring over r parts, over nodes r rings with S/r each; both counted by the same player."""
    form = volume(kind, "hierarchical", nodes * r, nodes)
    inside, _, held = play_ring(kind, 1, r)
    assert all(parts == set(range(r)) for parts in held)
    assert {Fraction(count, r) for count in inside.values()} == {form.port}
    _, over, _ = play_ring(kind, nodes, 1)
    assert {r * Fraction(count, nodes) / r for count in over.values()} == {form.nic}


@pytest.mark.parametrize(("n", "nodes"), [(8, 1), (16, 2), (32, 4), (4, 4)])
def test_nobody_beats_what_is_missing(n: int, nodes: int) -> None:
    """A node holds r of n shards before an all-gather and all of S after: N−1 of N parts must enter."""
    r = n // nodes
    least = minimum("all_gather", n, nodes)
    assert least.nic == (1 - Fraction(r, n) if nodes > 1 else 0)
    for algorithm in ("ring",):
        form = volume("all_gather", algorithm, n, nodes)
        assert form.nic >= least.nic
    for algorithm in ("ring", "tree", "nvlstree", "hierarchical"):
        form = volume("all_reduce", algorithm, n, nodes)
        assert form.port >= minimum("all_reduce", n, nodes).port or nodes > 1
        assert form.nic >= minimum("all_reduce", n, nodes).nic


def test_oversubscribed_spine_slows_an_all_to_all_by_what_crosses_it() -> None:
    """16 nodes on leaves of 4, 4:1: 12 of 15 peer nodes lie behind a quarter of the speed; a ring leaves a leaf once."""
    plain = Cluster.load("hgx-h100-8", 16)
    fabric = plain.fabric.model_copy(update={"oversubscription": 4.0, "nodes_per_leaf": 4})
    tapered = plain.model_copy(update={"fabric": fabric})
    group = shape(128, 16)
    slow = collective_s("all_to_all", S, group, tapered, IDEAL) / collective_s("all_to_all", S, group, plain, IDEAL)
    assert slow == 4 * Fraction(12, 15)
    ring = [collective_s("all_gather", S, group, cluster, IDEAL) for cluster in (plain, tapered)]
    assert ring[0] == ring[1]


def test_a_rack_wide_nvlink_domain_is_one_place() -> None:
    """32 GPUs on 8 trays of one NVL72 rack ring over NVLink alone: 31/32·S/(900 GB/s)."""
    cluster = Cluster.load("gb200-nvl72", 18)
    group = GroupShape(num_ranks=32, num_nodes=8, ranks_per_node=4, num_groups_per_node=1, spans_domain=False)
    assert collective_s("all_gather", S, group, cluster, IDEAL) == Fraction(31, 32) * S / (900 * 10**9)


def test_a_pipelines_fill_grows_with_the_root_of_its_steps() -> None:
    """k chunks over h hops take (k + h)(a + T/k): the best k gives T + h·a + 2·sqrt(h·a·T), twice the fill for four times h."""
    a, transfer_s = 2e-6, 1e-3

    def best(h: int) -> float:
        return min((k + h) * (a + transfer_s / k) for k in range(1, 5000)) - transfer_s - h * a

    mode = Mode(efficiency=1.0, fill_s=1e-4, fill_half_s=1.0)
    for h in (2, 8, 18):
        growth = pipeline_fill_s(mode, transfer_s, fill_depth(4 * h, 0)) / pipeline_fill_s(
            mode, transfer_s, fill_depth(h, 0)
        )
        assert growth == pytest.approx(best(4 * h) / best(h), rel=0.02)


def test_messages_beyond_those_in_flight_wait_one_by_one() -> None:
    """Eight buffers: the first eight of m messages leave at once, each later one when one has arrived, a gap after another."""
    gap_s = 3e-6

    def last(m: int) -> float:
        done: list[float] = []
        for k in range(m):
            done.append(gap_s if k < 8 else done[-1] + gap_s)
        return done[-1]

    assert (in_flight("ll"), in_flight("simple")) == (8, 2)
    for m in (1, 7, 8, 9, 31, 62):
        assert fill_depth(m, in_flight("ll")) * gap_s == pytest.approx(last(m))
