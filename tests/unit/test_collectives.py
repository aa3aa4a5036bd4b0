"""The choice NCCL makes, the calibration file, faults, and how near the shipped curves come to published sweeps."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import median

import pytest

from simulator.base.errors import CalibrationError, ClusterError, PlanError
from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration.collective_curves import DEFAULT_FILE, DOUBLING_SIGMA
from simulator.spec.cluster import Cluster
from simulator.spec.software.nccl import Nccl
from simulator.work.collectives import (
    LinkCurves,
    choose,
    collective_cost,
    interference,
    link_capacities,
    renamed,
    sigma,
    source,
)
from simulator.work.collectives.tuning import Group, NcclFabric, pick

GIB = 2**30
H100 = NcclFabric("nvlink", "hopper", 450.0, 0.0)


def shape(num_ranks: int, num_nodes: int = 1) -> GroupShape:
    return GroupShape(
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        ranks_per_node=num_ranks // num_nodes,
        num_groups_per_node=1,
        spans_domain=num_nodes > 1,
    )


@pytest.mark.parametrize(
    ("size", "ranks", "expected"),
    [
        (64 * 2**10, 8, ("ring", "ll")),  # logs quoted in nccl-tests issue 309: LL up to 1 MiB
        (4 * 2**20, 8, ("nvls", "simple")),  # and NVLS from 2 MiB
        (GIB, 8, ("nvls", "simple")),  # 3972.6 us against 5275.6 us for the ring, by NCCL's own formula
        (GIB, 4, ("ring", "simple")),  # four GPUs: 356 GB/s measured is the forced ring's, not the forced NVLS's 372
        (GIB, 2, ("ring", "simple")),  # NVLS is not set up for two
    ],
)
def test_all_reduce_on_h100_picks_what_logs_show(size: int, ranks: int, expected: tuple[str, str]) -> None:
    chosen = pick("all_reduce", size, Group(ranks, 1), H100, Nccl())
    assert (chosen.algorithm, chosen.protocol) == expected


def test_steps_of_waiting_chunks_hide_behind_the_transfer_and_those_of_lines_do_not() -> None:
    """t = launch + max(T, steps, fills): Slingshot's whole chunks; t = launch + steps + max(T, fills): its lines."""
    curves = LinkCurves.load(DEFAULT_FILE)
    waits = curves.network("slingshot")
    mode = waits.modes["ring/simple"].model_copy(update={"fill_s": 1e-5, "fill_half_s": 1e-12})

    def start_s(protocol: str, transfer_s: float, steps_s: float = 1e-3) -> float:
        return waits.start_s(mode, 1e-4, 11, steps_s, protocol, transfer_s, ring=True)

    assert start_s("simple", 1.0) == pytest.approx(1e-4)
    assert start_s("simple", 4e-4) == pytest.approx(1e-4 + 6e-4)
    assert start_s("simple", 4e-5, steps_s=0.0) == pytest.approx(1e-4 + 10 * 1e-5 - 4e-5)  # 11 steps, two in flight
    assert start_s("ll", 1.0) == pytest.approx(1e-4 + 1e-3)


def test_groups_beyond_those_measured_have_wider_intervals() -> None:
    cluster = Cluster.load("hgx-h100-8", 256)
    most = LinkCurves.load(DEFAULT_FILE).network("infiniband").max_nodes
    assert most == 10
    widths = [sigma("all_reduce", GIB, shape(8 * nodes, nodes), cluster) for nodes in (2, most, 16, 64, 256)]
    assert widths[0] == widths[1]
    assert widths[1] < widths[2] < widths[3] < widths[4]
    assert widths[3] ** 2 - widths[1] ** 2 == pytest.approx((DOUBLING_SIGMA * 2.678) ** 2, rel=1e-3)  # log2 6.4


def test_slow_cards_make_two_nodes_a_tree() -> None:
    """2 × p4de (4 × 100 Gb/s): 79 GB/s of bus bandwidth were measured, a ring could not pass 50.

    Over more nodes a tree's inner nodes take in 2S, as much as a ring's, and the ring comes nearer to its NICs.
    """
    slow = NcclFabric("nvlink", "ampere", 300.0, 50.0)
    assert pick("all_reduce", GIB, Group(16, 2), slow, Nccl()).algorithm == "tree"
    assert pick("all_reduce", GIB, Group(32, 4), slow, Nccl()).algorithm == "ring"


def test_restrictions_and_old_releases_are_heard() -> None:
    cluster = Cluster.load("hgx-h100-8")
    assert choose("all_reduce", GIB, shape(8), cluster).algorithm == "nvls"
    assert choose("all_reduce", GIB, shape(8), cluster, nccl=Nccl.of("", {"NCCL_ALGO": "Ring"})).algorithm == "ring"
    assert choose("all_reduce", GIB, shape(8), cluster, nccl=Nccl.of("2.12.12")).algorithm == "ring"


def test_without_nvlink_there_is_no_ll128() -> None:
    cluster = Cluster.load("pcie-rtx4090-4")
    chosen = {choose("all_gather", 2**power, shape(4), cluster).protocol for power in range(10, 34)}
    assert chosen == {"ll", "simple"}


def test_an_unknown_kind_is_one_fault_with_the_legal_ones() -> None:
    with pytest.raises(PlanError, match="all_gather") as caught:
        collective_cost("allgather", GIB, shape(8), Cluster.load("hgx-h100-8"))
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize("curves", [None, LinkCurves.ideal()])
def test_nodes_without_a_network_are_a_fault(curves: LinkCurves | None) -> None:
    lonely = Cluster.load("hgx-h100-8").model_copy(update={"inter": None})
    with pytest.raises(ClusterError, match="no network"):
        collective_cost("all_gather", GIB, shape(16, 2), lonely, curves=curves)


def test_a_missing_curve_names_the_recipe(tmp_path: Path) -> None:
    data = json.loads(DEFAULT_FILE.read_text())
    for port in data["ports"]:
        del port["modes"]["p2p/simple"]
    broken = tmp_path / "links.json"
    broken.write_text(json.dumps(data))
    with pytest.raises(CalibrationError, match=r"p2p/simple.*fit_collectives"):
        collective_cost("all_to_all", GIB, shape(8), Cluster.load("hgx-h100-8"), curves=LinkCurves.load(broken))


def test_a_bad_file_lists_every_fault(tmp_path: Path) -> None:
    data = json.loads(DEFAULT_FILE.read_text())
    data["ports"][0]["bytes_per_s"] = -1
    data["networks"][1]["quality"]["mid_p50"] = "low"
    data["colour"] = "blue"
    broken = tmp_path / "links.json"
    broken.write_text(json.dumps(data))
    with pytest.raises(CalibrationError) as caught:
        LinkCurves.load(broken)
    places = " ".join(fault.place for fault in caught.value.faults)
    assert "ports[0].bytes_per_s" in places
    assert "networks[1].quality.mid_p50" in places
    assert "colour" in places


def test_a_relative_is_scaled_marked_and_less_certain() -> None:
    """A800: an A100 whose NVLink carries 200 GB/s instead of 300."""
    full, less = Cluster.load("hgx-a100-80-8"), Cluster.load("hgx-a800-80-8")
    ratio = less.intra.bytes_per_s / full.intra.bytes_per_s
    assert float(link_capacities(less)["intra"]) == pytest.approx(float(link_capacities(full)["intra"]) * ratio)
    assert "assumed" in source(less)
    assert "assumed" not in source(full).split(";")[0]
    assert sigma("all_gather", GIB, shape(8), less) > sigma("all_gather", GIB, shape(8), full)


def test_what_no_sweep_shows_is_less_certain() -> None:
    """TCPXO sweeps are all-reduces and all-gathers of two nodes: an all-to-all stands on a prior."""
    cluster = Cluster.load("gcp-a3-mega", 2)
    assert sigma("all_to_all", GIB, shape(16, 2), cluster) > sigma("all_reduce", GIB, shape(16, 2), cluster)


def test_renamed_moves_a_bill_to_links_of_its_own() -> None:
    cluster = Cluster.load("hgx-h100-8", 2)
    found = collective_cost("all_gather", GIB, shape(16, 2), cluster)
    moved = renamed(found, "@7")
    assert set(moved.link_bytes) == set(link_capacities(cluster, suffix="@7"))
    assert moved.latency_s == found.latency_s


def test_ideal_links_disturb_nobody_and_are_certain() -> None:
    cluster, ideal = Cluster.load("hgx-h100-8"), LinkCurves.ideal()
    assert interference("all_gather", shape(8), cluster, ideal) == 0
    assert sigma("all_gather", GIB, shape(8), cluster, ideal) == 0


def test_interference_is_sms_and_memory() -> None:
    """A ring on 8 × H100: 24 of 132 SMs; 350 GB/s on the wire read and written once each of 3.35 TB/s: 0.18 + 0.21."""
    assert interference("all_gather", shape(8), Cluster.load("hgx-h100-8")) == pytest.approx(0.39, abs=0.04)


PUBLISHED = [  # collective, cluster, nodes, largest median error at 64 MiB and up
    ("all_gather", "H100-SXM5-80GB", "hgx-h100-8", 8, 1, 0.06),
    ("reduce_scatter", "H100-SXM5-80GB", "hgx-h100-8", 8, 1, 0.06),
    ("all_reduce", "H100-SXM5-80GB", "hgx-h100-8", 8, 1, 0.06),
    ("all_reduce", "A100-SXM4-80GB", "hgx-a100-80-8", 8, 1, 0.06),
    ("all_gather", "B200", "dgx-b200-8", 8, 1, 0.06),
]


@pytest.mark.parametrize(("kind", "gpu", "preset", "ranks", "nodes", "limit"), PUBLISHED)
def test_large_messages_are_near_published_sweeps(
    reference_data: Path, kind: str, gpu: str, preset: str, ranks: int, nodes: int, limit: float
) -> None:
    cluster = Cluster.load(preset, nodes)
    with (reference_data / "collectives.csv").open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["collective"], row["gpu"], row["n_gpus"], row["n_nodes"]) == (kind, gpu, str(ranks), str(nodes))
            and int(row["size_bytes"]) >= 64 * 2**20
            and not row["algo_env"]
            and "vidur" not in row["source"]
        ]
    assert len(rows) >= 4
    errors = [
        abs(
            float(choose(kind, int(row["size_bytes"]), shape(ranks, nodes), cluster).time_s)
            * 1e6
            / float(row["time_us"])
            - 1
        )
        for row in rows
    ]
    assert median(errors) <= limit


def _choices(version: str, group: Group, fabric: NcclFabric) -> dict[int, str]:
    """KiB -> algorithm/protocol."""
    nccl = Nccl.of(version)
    found = {2**p: pick("all_reduce", 2 ** (p + 10), group, fabric, nccl) for p in range(6, 16)}
    return {size: f"{chosen.algorithm}/{chosen.protocol}" for size, chosen in found.items()}


def test_releases_choose_as_the_jumps_of_published_sweeps_show() -> None:
    """Polaris, 4 A100 and two NICs a node: which sizes are quick and slow there changes from NCCL 2.18 to 2.21.

    On 2 nodes 2.18 leaves rings at 256 KiB (374 to 123 us) for trees, and both releases run rings from 8 MiB; 2.21, which
    thinks a tree's step takes 28 us, keeps LL rings until 2 MiB (1056, then 914 us). On 8 nodes 2.18 runs trees from 256
    KiB to 8 MiB, and 2.21 at 8 MiB alone (2297, 1295, 3941 us at 4, 8, 16 MiB).
    """
    polaris = NcclFabric(
        "nvlink", "ampere", 300.0, 50.0, far_nics=True, num_nics=2, host_gb_per_s=31.0, amd=True
    )  # fmt: skip
    two, eight = Group(8, 2), Group(32, 8)
    old, new = _choices("2.18.3", two, polaris), _choices("2.21.5", two, polaris)
    assert [old[size] for size in (64, 128, 256, 4096, 8192)] == [
        "tree/ll", "ring/ll", "tree/simple", "tree/simple", "ring/simple",
    ]  # fmt: skip
    assert [new[size] for size in (64, 128, 2048, 4096, 8192)] == [
        "tree/ll", "ring/ll", "ring/ll", "ring/simple", "ring/simple",
    ]  # fmt: skip
    old, new = _choices("2.18.3", eight, polaris), _choices("2.21.5", eight, polaris)
    assert [old[size] for size in (128, 256, 8192, 16384)] == ["tree/ll", "tree/simple", "tree/simple", "ring/simple"]
    assert [new[size] for size in (128, 256, 4096, 8192, 16384)] == [
        "tree/ll", "ring/ll", "ring/ll", "tree/simple", "ring/simple",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "port", "nic", "nodes", "expected"),
    [
        ("ampere", 300.0, 0.0, 1, (12, 20.0, 20.0)),  # as NCCL_DEBUG prints them: NVIDIA/nccl issue 1197
        ("hopper", 450.0, 0.0, 1, (12, 30.0, 30.0)),
        ("ampere", 300.0, 200.0, 2, (8, 30.0, 24.0)),  # a NIC a channel; more inside while eight fit into 240 GB/s
        ("hopper", 450.0, 400.0, 4, (8, 45.0, 45.0)),  # 7 × 48 is less than 8 × 45
    ],
)
def test_channels_are_those_that_the_search_finds(
    architecture: str, port: float, nic: float, nodes: int, expected: tuple[int, float, float]
) -> None:
    fabric = NcclFabric("nvlink", architecture, port, nic, host_gb_per_s=63.0)
    found = fabric.channels("tree", Group(8 * nodes, nodes), (2, 30))
    assert (found.count, found.near, found.far) == expected


def test_one_rank_a_node_sees_no_more_than_its_own_pcie_link() -> None:
    """Eight NICs of 50 GB/s, one GPU: a PCIe 5 link is 48 in NCCL's table."""
    fabric = NcclFabric("nvlink", "hopper", 450.0, 400.0, host_gb_per_s=63.0)
    assert fabric.channels("ring", Group(4, 4), (2, 30)).bus(4) == pytest.approx(48.0)


def _slingshot() -> Cluster:
    """Eight nodes of Polaris."""
    cluster = Cluster.load("hgx-a100-40-4", 8)
    inter = cluster.inter
    assert inter is not None
    cards = {"kind": "slingshot", "rdma": True, "num_nics": 2, "nic_bytes_per_s": 25e9}
    return cluster.model_copy(update={"inter": inter.model_copy(update=cards)})


def test_a_host_copies_tiny_messages_out_of_gpu_memory_over_slingshot() -> None:
    """Polaris, all-to-all: 36 us at 2 KiB and 86 us at 1 KiB on two nodes, by twelve microseconds for each of four peers."""
    cluster = _slingshot()

    def extra_s(nodes: int, nccl: Nccl) -> float:
        ranks = 4 * nodes
        small, larger = (
            choose("all_to_all", ranks * size, shape(ranks, nodes), cluster, nccl=nccl) for size in (128, 256)
        )
        return float(small.time_s) - float(larger.time_s)

    assert extra_s(8, Nccl()) == pytest.approx(7 * extra_s(2, Nccl()), rel=0.02)  # 28 peers, and 4
    assert extra_s(2, Nccl()) > 40e-6
    forbidden = Nccl.of("", {"FI_CXI_DISABLE_NON_INJECT_MSG_IDC": "1"})
    assert extra_s(2, forbidden) < 0


def test_messages_that_wait_bound_a_ring_over_slingshot() -> None:
    """Seven steps or 31, whatever the size, until the bytes take longer: Polaris' all-gathers, 2 to 8 and 8 to 32 MiB."""
    cluster = _slingshot()
    for nodes, small, large in ((2, 2, 4), (8, 8, 16)):
        times = [
            float(choose("all_gather", size * 2**20, shape(4 * nodes, nodes), cluster).time_s)
            for size in (small, large)
        ]
        assert times[1] < 1.3 * times[0]
    on_two, on_eight = (
        float(choose("all_gather", 8 * 2**20, shape(4 * nodes, nodes), cluster).time_s) for nodes in (2, 8)
    )
    assert on_eight > 3 * on_two


def test_pairs_among_many_nodes_crowd() -> None:
    """Polaris, all-to-alls of 1 GiB: 21.5 GB/s of a node's NICs between two, 16 to 18 among eight."""
    cluster = _slingshot()

    def rate(nodes: int) -> float:
        ranks = 4 * nodes
        leaves = 4 * GIB * (ranks - 4) / ranks
        return leaves / float(choose("all_to_all", GIB, shape(ranks, nodes), cluster).time_s)

    assert 0.7 < rate(8) / rate(2) < 0.9


def test_blackwell_leaves_ll128_sooner_since_2_29() -> None:
    """B200, all-gather on 8: 51 us at 16 MiB with 2.27.5 and 53 with 2.28.9, 102 with 2.29.2 (aiconfigurator's sweeps)."""
    cluster = Cluster.load("dgx-b200-8")
    found = {
        version: choose("all_gather", 16 * 2**20, shape(8), cluster, nccl=Nccl.of(version)).protocol
        for version in ("2.27.5", "2.28.9", "2.29.2")
    }
    assert found == {"2.27.5": "ll128", "2.28.9": "ll128", "2.29.2": "simple"}


def test_a_rings_lines_pay_for_each_channel_that_the_size_adds() -> None:
    """Polaris over TCP, all-gathers on 8 nodes: 250 to 340 us up to 128 KiB, 570 at 256, 1040 at 512: 1, 2 and 4 channels."""
    cluster, sockets = _slingshot(), Nccl.of("2.21.5", {"NCCL_NET": "Socket"})
    times = [
        float(choose("all_gather", size * 1024, shape(32, 8), cluster, nccl=sockets).time_s)
        for size in (64, 128, 256, 512)
    ]
    assert times[1] < 1.25 * times[0]
    assert times[2] > 1.5 * times[1]
    assert times[3] > 1.5 * times[2]


def test_tcp_runs_at_the_pace_of_the_hosts_copies_up_to_the_wire() -> None:
    a2 = Cluster.load("gcp-a2-ultra", 2)

    def with_nics(bytes_per_s: float) -> Cluster:
        assert a2.inter is not None
        return a2.model_copy(update={"inter": a2.inter.model_copy(update={"nic_bytes_per_s": bytes_per_s})})

    def call_s(bytes_per_s: float) -> float:
        return float(choose("all_gather", GIB, shape(16, 2), with_nics(bytes_per_s)).time_s)

    assert call_s(12.5e9) == pytest.approx(call_s(25e9)) == pytest.approx(call_s(100e9))
    crossing_s = GIB * 15 / 16 / 1e8  # 100 MB/s: a wire slower than any host's copies
    assert crossing_s < call_s(1e8) < 1.1 * crossing_s
    measured, other = (sigma("all_gather", GIB, shape(16, 2), with_nics(rate)) for rate in (25e9, 12.5e9))
    assert other > 2 * measured
