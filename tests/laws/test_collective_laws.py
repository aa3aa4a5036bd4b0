"""Laws of bills: nobody beats the links, more bytes are never free, exact scaling where links are ideal."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st

from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster
from simulator.spec.software.nccl import Nccl
from simulator.spec.software.nccl.environment import variable_groups
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
from tests.examples import examples

CLUSTERS = tuple(
    Cluster.load(name, 64)
    for name in ("hgx-h100-8", "hgx-a100-80-8", "dgx-b200-8", "aws-p4de", "aws-p5", "dgx1-v100-8")
)
HOSTED = tuple(Cluster.load(name, 64) for name in ("pcie-l40s-8", "pcie-h100-8", "gcp-a3-mega"))  # by the host, or TCP
IDEAL = LinkCurves.ideal()
clusters = st.sampled_from(CLUSTERS)
kinds = st.sampled_from(KINDS)
sizes = st.integers(min_value=1, max_value=2**36)


def whole(nodes: int) -> GroupShape:
    """All GPUs of so many nodes of eight."""
    return GroupShape(num_ranks=8 * nodes, num_nodes=nodes, ranks_per_node=8, num_groups_per_node=1, spans_domain=True)


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


def on_the_wire_s(kind: str, size: int, shape: GroupShape, cluster: Cluster, *, sums_in_switches: bool) -> float:
    """What the bytes that each rank and node lacks take at the data sheet's speed. Switches that reduce send each sum once."""
    least = minimum(kind, shape.num_ranks, shape.num_nodes)  # type: ignore[arg-type]
    assert cluster.inter is not None
    busy = min(8, shape.ranks_per_node * shape.num_groups_per_node)
    port_s = float(least.port) * size / cluster.intra.bytes_per_s
    nic = min(float(least.nic), 1.0) if sums_in_switches else float(least.nic)
    nic_s = nic * size * busy / shape.ranks_per_node / cluster.node_bytes_per_s if shape.num_nodes > 1 else 0
    return max(port_s, nic_s)


@given(kinds, sizes, shapes(), clusters)
def test_no_call_beats_the_data_sheet(kind: str, size: int, shape: GroupShape, cluster: Cluster) -> None:
    wire_s = on_the_wire_s(kind, size, shape, cluster, sums_in_switches=False)
    assert collective_s(kind, size, shape, cluster) >= wire_s


NUMBERS = {  # variable of NCCL -> values
    "NCCL_BUFFSIZE": st.integers(2**10, 2**30),
    "NCCL_MAX_CTAS": st.integers(9, 64),
    "NCCL_MIN_CTAS": st.integers(1, 8),
    "NCCL_NVLS_ENABLE": st.integers(0, 2),
    "NCCL_P2P_DISABLE": st.integers(0, 1),
    "NCCL_CROSS_NIC": st.integers(0, 2),
    "NCCL_PXN_DISABLE": st.integers(0, 1),
    "NCCL_COLLNET_ENABLE": st.integers(0, 1),
    "NCCL_PAT_ENABLE": st.integers(0, 2),
    "NCCL_IB_DISABLE": st.integers(0, 1),
    "NCCL_NET_GDR_READ": st.integers(0, 1),
    "NCCL_LL128_C2C": st.integers(0, 1),
}
WORDS = {
    "NCCL_ALGO": (
        "ring",
        "tree,ring",
        "^nvls",
        "collnetdirect,ring",
        "collnetchain,ring",
        "nvls,nvlstree,ring",
        "pat,ring",
    ),
    "NCCL_PROTO": ("simple", "ll,simple", "ll128,simple", "^ll"),
    "NCCL_P2P_LEVEL": ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS"),
    "NCCL_NET_GDR_LEVEL": ("LOC", "PIX", "PXB", "PHB", "SYS"),
    "NCCL_NET": ("Socket", "IB"),
    "NCCL_TUNER_PLUGIN": ("none",),
}
settings_of_nccl = st.fixed_dictionaries(
    {},
    optional={name: values.map(str) for name, values in NUMBERS.items()}
    | {name: st.sampled_from(words) for name, words in WORDS.items()},
)
versions = st.sampled_from(["", "2.10.3", "2.18.3", "2.22.3", "2.27.3", "2.29.2"])


def test_every_variable_that_is_modelled_is_drawn() -> None:
    """But older names, the tuner's file, and what belongs to Slingshot."""
    older = {"NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NRINGS", "NCCL_MAX_NRINGS"}
    known = {name for name in variable_groups()["modelled"] if not name.startswith("FI_CXI")}
    assert known - older - {"NCCL_TUNER_CONFIG_FILE"} == {*NUMBERS, *WORDS}


@examples(200)
@example("all_gather", 8 * 2**30, whole(16), CLUSTERS[0], "", {"NCCL_BUFFSIZE": str(2**26)})
@given(kinds, sizes, shapes(), st.sampled_from((*CLUSTERS, *HOSTED)), versions, settings_of_nccl)
def test_no_setting_beats_the_data_sheet(
    kind: str, size: int, shape: GroupShape, cluster: Cluster, version: str, variables: dict[str, str]
) -> None:
    """Whatever somebody sets: the slowest link still has to carry what it has to carry."""
    chosen = choose(kind, size, shape, cluster, nccl=Nccl.of(version, variables))
    sums = chosen.algorithm.startswith(("collnet", "nvls")) and "NCCL_COLLNET_ENABLE" in variables
    assert chosen.time_s >= on_the_wire_s(kind, size, shape, cluster, sums_in_switches=sums)


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
