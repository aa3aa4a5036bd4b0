"""What placements cost: against sums by hand, and laws that every numbering of a machine obeys."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.play.lower import lower
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster, Edge, Intra, Pcie
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.place import place_node
from simulator.studies.place.cost import PlacementPricer
from simulator.studies.place.local import Problem
from tests.examples import examples
from tests.machines import bridged

GB = 1e9
SMALL = Model.load("llama3.2-1b")
MODULE = Plan(tp=2, dp_replicate=2, zero=0, seq_len=1024)


def pricer(plan: Plan, cluster: Cluster) -> PlacementPricer:
    """On ideal links: latency 0, rates those of the data sheets."""
    ideal = Calibration.ideal()
    return PlacementPricer.of(lower(SMALL, plan, cluster, Stack.load(plan.stack), ideal, LinkCurves.ideal()))


def test_prices_of_two_bridged_pairs() -> None:
    """An all-reduce of two sends its size once each way. Without a bridge all four hops of two rings share the host's path."""
    cluster = bridged(4, [(0, 3), (1, 2)], sockets=((0, 1), (2, 3)))
    priced = pricer(MODULE, cluster)
    sent = {
        axis: sum(call.count * call.size_bytes for call in priced.calls if call.where == axis)
        for axis in ("tp", "dp_cp")
    }
    assert {call.kind for call in priced.calls} == {"all_reduce"}
    host, bridge = 40 * GB / 4, 300 * GB
    # in order, tp has 0 with 1 and 2 with 3, dp 0 with 2 and 1 with 3: nobody has a bridge
    assert priced.price_s(range(4)) == pytest.approx((sent["tp"] + sent["dp_cp"]) / host)
    # tp on the bridges; dp is 0 with 1 and 3 with 2
    assert priced.price_s((0, 3, 1, 2)) == pytest.approx(sent["tp"] / bridge + sent["dp_cp"] / host)
    # dp on the bridges instead
    assert priced.price_s((0, 1, 3, 2)) == pytest.approx(sent["tp"] / host + sent["dp_cp"] / bridge)
    cheaper = max(sent, key=lambda axis: sent[axis])
    expected = sent[cheaper] / bridge + sum(size for axis, size in sent.items() if axis != cheaper) / host
    assert place_node(priced).price_s[0] == pytest.approx(expected)


def test_flows_are_what_groups_send() -> None:
    """Bytes of a group over its pairs: each of n ranks sends size / (n - 1) to each other."""
    priced = pricer(Plan(tp=2, dp_replicate=4, zero=0, seq_len=1024), bridged(8, [(0, 1), (2, 3), (4, 5), (6, 7)]))
    flows = Problem.of(priced).flows
    sent = {axis: sum(c.count * c.size_bytes for c in priced.calls if c.where == axis) for axis in ("tp", "dp_cp")}
    assert flows[0, 1] == pytest.approx(sent["tp"])
    assert flows[0, 2] == flows[0, 4] == flows[2, 6] == pytest.approx(sent["dp_cp"] / 3)
    assert flows[0, 3] == flows[1, 2] == 0
    assert (flows == flows.T).all()


def renumbered(cluster: Cluster, names: Sequence[int]) -> Cluster:
    """The same machine; its GPU g is called names[g]."""
    edges = tuple(Edge(src=names[e.src], dst=names[e.dst], bytes_per_s=e.bytes_per_s) for e in cluster.intra.edges)
    sets = {
        kind: tuple(tuple(sorted(names[gpu] for gpu in members)) for members in getattr(cluster.pcie, kind))
        for kind in ("sockets", "switches")
    }
    pcie = None if cluster.pcie is None else cluster.pcie.model_copy(update=sets)
    return cluster.model_copy(update={"intra": cluster.intra.model_copy(update={"edges": edges}), "pcie": pcie})


TREE = bridged(
    8, [(0, 1), (4, 6)], sockets=((0, 1, 2, 3), (4, 5, 6, 7)), switches=((0, 1), (2, 3), (4, 5), (6, 7)), p2p="PHB"
)


@examples(25)
@given(order=st.permutations(range(8)), names=st.permutations(range(8)))
def test_a_price_does_not_know_how_gpus_are_numbered(order: list[int], names: list[int]) -> None:
    plan = Plan(tp=2, pp=2, dp_replicate=2, zero=0, num_micro_batches=4, seq_len=512)
    other = pricer(plan, renumbered(TREE, names))
    assert other.price_s([names[gpu] for gpu in order]) == pytest.approx(pricer(plan, TREE).price_s(order))


@examples(5)
@given(names=st.permutations(range(8)))
def test_nor_does_the_best_placement(names: list[int]) -> None:
    plan = Plan(tp=4, dp_replicate=2, zero=0, seq_len=512)
    best, other = place_node(pricer(plan, TREE)), place_node(pricer(plan, renumbered(TREE, names)))
    assert other.price_s[0] == pytest.approx(best.price_s[0])


def test_sixteen_gpus_whose_switches_take_turns() -> None:
    """Four switches of four, GPU g on switch g mod 4: no tensor-parallel group can be cheaper than on one switch."""
    switches = tuple(tuple(range(first, 16, 4)) for first in range(4))
    sockets = (switches[0] + switches[1], switches[2] + switches[3])
    cluster = Cluster(
        name="turns",
        device="a40",
        gpus_per_node=16,
        intra=Intra(kind="pcie4", shape="pcie", bytes_per_s=31 * GB),
        pcie=Pcie(sockets=sockets, switches=switches, host_bytes_per_s=40 * GB),
    )
    priced = pricer(Plan(tp=4, dp_replicate=4, zero=0, micro_batch_size=4, seq_len=2048), cluster)
    by_hand = [switches[place // 4][place % 4] for place in range(16)]
    found = place_node(priced)
    assert not found.exact
    assert found.price_s[0] <= priced.price_s(by_hand) * (1 + 1e-9)
    assert found.price_s[0] < priced.price_s(range(16))
    assert priced.moved("tp", found.orders[0]) == (tuple(sorted(switches)),)
