import tomllib
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from simulator.base.errors import ClusterError, Fault
from simulator.base.presets import TOPOLOGIES
from simulator.formats.readers.topology_source import host_of
from simulator.spec.cluster import Cluster, Host, Inter, cluster_names
from simulator.spec.cluster.device import Device, device_names
from tests.machines import fat_tree, from_edges, island, rail

HDR = Inter(kind="infiniband", num_nics=8, nic_bytes_per_s=25e9, latency_s=1e-6)


def faults(file: Path) -> dict[str, Fault]:
    with pytest.raises(ClusterError) as caught:
        Cluster.load(file)
    return {fault.place.removeprefix(f"{file}: "): fault for fault in caught.value.faults}


def hops(cluster: Cluster, src: int, dst: int) -> list[str]:
    return [link.dst for link in cluster.route(src, dst)]


@pytest.mark.parametrize("name", cluster_names())
def test_every_preset_loads_is_connected_and_says_where_its_numbers_stand(name: str) -> None:
    cluster = Cluster.load(name, num_nodes=2)
    assert cluster.name == name
    gpus = cluster.gpus_per_node
    for src, dst in [*combinations(range(gpus), 2), (0, gpus), (2 * gpus - 1, 0)]:
        route = cluster.route(src, dst)
        assert (route[0].src, route[-1].dst) == (
            f"node{src // gpus}.gpu{src % gpus}",
            f"node{dst // gpus}.gpu{dst % gpus}",
        )
        assert all(a.dst == b.src for a, b in pairwise(route))
        assert min(link.bytes_per_s for link in route) > 0
    assert {"intra", "inter", "latency", "fabric"} <= set(cluster.sources)
    assert sorted(rank for part in cluster.islands() for rank in part) == list(range(cluster.num_devices))


@pytest.mark.parametrize(
    ("name", "gigabits"),
    [
        ("dgx-a100-80-8", 8 * 200),
        ("dgx-h100-8", 8 * 400),
        ("dgx1-v100-8", 4 * 100),
        ("aws-p4d", 400),
        ("aws-p5", 3200),
        ("aws-p6-b200", 3200),
        ("aws-p5e", 3200),
        ("gcp-a2-high", 100),
        ("gcp-a2-ultra", 100),
        ("gcp-a3-ultra", 3200),
        ("gcp-a4", 3200),
        ("azure-nd-h200-v5", 3200),
        ("oci-bm-gpu-h100", 3200),
        ("oci-bm-gpu-h200", 3200),
        ("gcp-a3-high", 800),
        ("gcp-a3-mega", 1600),
        ("azure-nd-h100-v5", 3200),
        ("hgx-a100-80-8-roce-4x100", 400),
        ("hgx-a100-80-8-roce-8x200", 1600),
    ],
)
def test_published_network_of_a_node(name: str, gigabits: int) -> None:
    assert Cluster.load(name).node_bytes_per_s == gigabits * 1e9 / 8


def test_cube_mesh_of_the_dgx1() -> None:
    """Six links of 25 GB/s a GPU; quads fully meshed; across, only 0–4, 1–5, 2–6, 3–7. One NVLink island of eight."""
    dgx1 = Cluster.load("dgx1-v100-8")
    assert [list(part) for part in dgx1.islands()] == [list(range(8))]
    direct = {
        (a, b): dgx1.route(a, b)[0].bytes_per_s for a, b in combinations(range(8), 2) if len(dgx1.route(a, b)) == 1
    }
    assert set(direct) == {*combinations(range(4), 2), *combinations(range(4, 8), 2), (0, 4), (1, 5), (2, 6), (3, 7)}
    for gpu in range(8):
        assert sum(rate for pair, rate in direct.items() if gpu in pair) == 6 * 25e9
    # 0 → 5 over GPU 1 (25 then 50 GB/s) or over GPU 4 (50 then 25): NVLink all the way, never the host
    route = dgx1.route(0, 5)
    assert [link.kind for link in route] == ["nvlink2", "nvlink2"]
    assert min(link.bytes_per_s for link in route) == 25e9


def test_a_rack_is_one_nvlink_domain() -> None:
    """18 trays of four: ranks 0 and 71 meet on the rack's switch, rank 72 is behind the network."""
    racks = Cluster.load("gb200-nvl72", num_nodes=36)
    assert racks.islands() == (range(72), range(72, 144))
    assert hops(racks, 0, 71) == ["domain0.nvswitch", "node17.gpu3"]
    assert "nvlink5" not in {link.kind for link in racks.route(0, 72)}
    assert Cluster.load("gb200-nvl72").islands() == (range(4),)


def test_pcie_boxes_have_no_nvlink() -> None:
    box = Cluster.load("pcie-l40s-8")
    assert box.islands() == tuple((gpu,) for gpu in range(8))
    assert hops(box, 0, 5) == ["node0.host", "node0.gpu5"]


@pytest.mark.parametrize(("gpu", "one_way"), [("mi250x", 50e9), ("mi300x", 64e9), ("mi325x", 64e9), ("mi355x", 76.5e9)])
def test_each_generation_of_xgmi_is_a_mesh_of_its_own_links(gpu: str, one_way: float) -> None:
    """Seven links, one to each peer, by the data sheets; of each some three quarters carry data."""
    cluster = Cluster.load(f"8x{gpu}")
    route = cluster.route(2, 6)
    assert [link.dst for link in route] == ["node0.gpu6"]
    assert 0.7 <= route[0].bytes_per_s / one_way <= 0.75
    assert {path.count for path in host_of(cluster).paths.values() if path.kind == "XGMI"} == {1}


def test_rails_and_spine() -> None:
    """Same pod: one leaf, on another rail too (the sender changes it). Another pod: through the spine."""
    cluster = rail(Cluster.load("dgx-a100-80-8"), 8, HDR, nodes_per_leaf=4, oversubscription=2.0)
    assert hops(cluster, 3, 8 + 3) == ["node0.nic3", "leaf0.3", "node1.nic3", "node1.gpu3"]
    beside = ["node0.nvswitch", "node0.gpu4"]
    assert hops(cluster, 3, 8 + 4) == [*beside, "node0.nic4", "leaf0.4", "node1.nic4", "node1.gpu4"]
    assert hops(cluster, 3, 5 * 8 + 3) == ["node0.nic3", "leaf0.3", "spine", "leaf1.3", "node5.nic3", "node5.gpu3"]
    up = next(link for link in cluster.route(3, 43) if link.dst == "spine")
    assert up.bytes_per_s == 4 * 25e9 / 2  # four NICs go down, half of that up
    assert sum(link.latency_s for link in cluster.route(3, 11)) == pytest.approx(1e-6)


def test_messages_change_rails_inside_the_sender_and_not_at_the_spine() -> None:
    """NCCL's PXN: by NVLink to the GPU on the receiver's rail, then its NIC. Without NVLink: across the spine."""
    cluster = Cluster.load("hgx-h100-8", num_nodes=2)
    names = [link.dst for link in cluster.route(0, 11)]
    assert names == ["node0.nvswitch", "node0.gpu3", "node0.nic3", "leaf0.3", "node1.nic3", "node1.gpu3"]
    box = Cluster.load("pcie-h100-8", num_nodes=2)
    inter = box.inter.model_copy(update={"num_nics": 8}) if box.inter else None
    railed = box.model_copy(update={"inter": inter, "fabric": cluster.fabric})
    assert "spine" in [link.dst for link in railed.route(0, 11)]
    cube = Cluster.load("dgx1-v100-8", num_nodes=2)  # four NICs, two GPUs each
    assert [link.dst for link in cube.route(0, 8 + 6)][:3] == ["node0.nic0", "leaf0.0", "spine"]  # 6, 7: two hops away
    assert [link.dst for link in cube.route(0, 8 + 3)][:2] == ["node0.gpu2", "node0.nic1"]


def test_fat_tree_and_oversubscription() -> None:
    cluster = fat_tree(Cluster.load("dgx-a100-80-8"), 8, HDR, nodes_per_leaf=4, oversubscription=2.0)
    assert hops(cluster, 3, 8 + 4) == ["node0.nic3", "leaf0", "node1.nic4", "node1.gpu4"]
    up = next(link for link in cluster.route(3, 43) if link.dst == "spine")
    assert up.bytes_per_s == 4 * 8 * 25e9 / 2
    assert cluster.network_bytes_per_s(4) == 200e9
    assert cluster.network_bytes_per_s(5) == 100e9


def test_cards_are_shared_or_bundled() -> None:
    """DGX-1: GPUs 0 and 1 share a NIC of 12.5 GB/s. AWS p5: four NICs of 12.5 GB/s serve one GPU."""
    assert hops(Cluster.load("dgx1-v100-8", 2), 1, 8)[0] == "node0.nic0"
    card = Cluster.load("aws-p5", 2).route(0, 8)[1]
    assert (card.src, card.bytes_per_s) == ("node0.nic0", 4 * 12.5e9)


def test_graph_has_both_directions_of_every_cable() -> None:
    graph = Cluster.load("hgx-h100-8").graph()
    assert set(graph) == {
        "node0.nvswitch",
        "node0.host",
        *(f"node0.{kind}{i}" for kind in ("gpu", "nic") for i in range(8)),
    }
    assert graph.edges["node0.gpu3", "node0.nvswitch"]["bytes_per_s"] == 450e9
    assert all(graph.has_edge(dst, src) for src, dst in graph.edges)


def test_ranks_out_of_range_are_refused() -> None:
    with pytest.raises(ClusterError, match="0 to 7"):
        Cluster.load("hgx-h100-8").route(0, 8)
    assert Cluster.load("hgx-h100-8").route(3, 3) == ()


def test_builders() -> None:
    lonely = island("h100-sxm5-80gb", 4, 450e9)
    assert (lonely.num_devices, lonely.node_bytes_per_s) == (4, 0.0)
    ring = from_edges("a100-sxm4-80gb", [(0, 1, 1e9), (1, 2, 1e9), (2, 0, 1e9)])
    assert hops(ring, 0, 2) == ["node0.gpu1", "node0.gpu2"]  # one way round
    pair = from_edges("a40", [(0, 1, 1e9), (1, 0, 1e9)], 4, Host(kind="pcie4", bytes_per_s=3e9))
    assert [list(part) for part in pair.islands()] == [[0, 1], [2], [3]]
    assert hops(pair, 1, 2) == ["node0.host", "node0.gpu2"]


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(0, 0, 1e9), (0, 1, 1e9)], "to itself"),
        ([(0, 1, 1e9), (2, 3, 1e9)], "nothing joins the islands {0, 1}, {2, 3}"),
        ([(0, 1, 1e9), (0, 1, 1e9)], "a second time"),
    ],
)
def test_bad_edges_in_python(edges: list[tuple[int, int, float]], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        from_edges("a40", edges)


BAD = """
name = "bad"
device = "h100-smx5-80gb"
num_nodes = 2
gpus_per_node = 4
nvlink_domain_size = 6
colour = "red"
[intra]
kind = "nvlink3"
shape = "pairs"
bytes_per_s = 300
edges = [
  { src = 0, dst = 1, bytes_per_s = "0GB/s" },
  { src = 2, dst = 2, bytes_per_s = "25GB/s" },
  { src = 1, dst = 9, bytes_per_s = "25GiB" },
]
"""


def test_a_bad_file_lists_every_fault(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(BAD, encoding="utf-8")
    found = faults(file)
    assert set(found) == {
        "device",
        "nvlink_domain_size",
        "colour",
        "intra.bytes_per_s",
        "intra.edges[0].bytes_per_s",
        "intra.edges[1]",
        "intra.edges[2]",
        "intra.edges[2].bytes_per_s",
        "intra.edges",
        "inter",
    }
    assert "h100-sxm5-80gb" in str(found["device"])
    assert "{0, 1}, {2}, {3}" in found["intra.edges"].problem


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('shape = "switch"', 'shape = "cube_mesh"', "intra.edges"),
        ('shape = "switch"', 'shape = "swich"', "intra.shape"),
        ('device = "h100-sxm5-80gb"', 'device = ""', "device"),
        ("oversubscription = 1.0", "oversubscription = 0.5", "fabric.oversubscription"),
        ("num_nics = 8", "num_nics = true", "inter.num_nics"),
        ('kind = "rail_optimised"', 'kind = ["rail_optimised"]', "fabric.kind"),
        ("gpus_per_node = 8", 'gpus_per_node = "8"', "gpus_per_node"),
    ],
)
def test_single_faults_of_a_file(old: str, new: str, place: str, tmp_path: Path) -> None:
    preset = (Path(__file__).resolve().parents[2] / "topologies" / "hgx-h100-8.toml").read_text("utf-8")
    assert old in preset
    file = tmp_path / "one.toml"
    file.write_text(preset.replace(old, new), encoding="utf-8")
    assert place in faults(file)


def test_a_mesh_of_more_gpus_than_links_is_refused(tmp_path: Path) -> None:
    """Half a million pairs of cables, which took half a minute to say nothing of use."""
    preset = (Path(__file__).resolve().parents[2] / "topologies" / "hgx-h100-8.toml").read_text("utf-8")
    file = tmp_path / "mesh.toml"
    file.write_text(
        preset.replace('shape = "switch"', 'shape = "mesh"').replace("gpus_per_node = 8", "gpus_per_node = 1000")
    )
    assert "a cable to 999 others" in faults(file)["intra.shape"].problem


HUGE = 'gpus_per_node = 1000000000000\n[intra]\nedges = [{ src = 0, dst = 1, bytes_per_s = "1GB/s" }]\n'


@pytest.mark.parametrize(
    "text", ["", "intra = 3\nfabric = []\n", "gpus_per_node = -1\n[intra]\nedges = 7\n", "a = \n", HUGE]
)
def test_hostile_files_are_refused_without_a_traceback(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(text, encoding="utf-8")
    assert faults(file)


def test_unknown_preset_and_missing_file() -> None:
    with pytest.raises(ClusterError, match=r"hgx-h100-8"):
        Cluster.load("hgx-h10-8")
    with pytest.raises(ClusterError, match="cannot be read"):
        Cluster.load("nowhere/cluster.toml")
    with pytest.raises(ClusterError, match="num_nodes"):
        Cluster.load("hgx-h100-8", num_nodes=0)


@pytest.mark.parametrize(
    ("device", "num_devices", "nodes", "gpus", "preset"),
    [
        ("A100-80GB", 64, 8, 8, "dgx-a100-80-8"),
        ("H100-96GB-HBM2e-SXM(500W)", 128, 16, 8, "hgx-h100-96-500w-8"),
        ("GB200", 128, 32, 4, "gb200-nvl72"),
        ("L40S", 2, 1, 2, "pcie-l40s-8"),
        ("V100", 4, 1, 4, "dgx1-v100-8"),
    ],
)
def test_synthesised_hosts(device: str, num_devices: int, nodes: int, gpus: int, preset: str) -> None:
    cluster = Cluster.synthesise(device, num_devices)
    assert (cluster.num_nodes, cluster.gpus_per_node, cluster.name) == (nodes, gpus, preset)
    assert cluster.route(0, num_devices - 1)


@pytest.mark.parametrize(("count", "nodes", "gpus"), [(2, 1, 2), (6, 1, 6), (8, 1, 8), (12, 2, 6), (16, 2, 8)])
def test_boards_in_pcie_slots_share_a_machine_up_to_eight(count: int, nodes: int, gpus: int) -> None:
    """Also where the preset has four, whose halves and missing peer access a larger machine keeps."""
    cluster = Cluster.synthesise("RTX 3090", count)
    assert (cluster.num_nodes, cluster.gpus_per_node, cluster.name) == (nodes, gpus, f"{count}xrtx-3090")
    assert cluster.pcie is not None
    assert cluster.pcie.p2p == "none"
    assert sorted(gpu for socket in cluster.pcie.sockets for gpu in socket) == list(range(gpus))
    assert Cluster.load(cluster.name) == cluster  # the name that reports and exported studies print


def test_synthesise_takes_the_stated_network_and_links() -> None:
    cluster = Cluster.synthesise("A100", 16, inter_bytes_per_s_per_node=50e9)
    assert cluster.node_bytes_per_s == pytest.approx(50e9)
    assert Cluster.synthesise("A100", 8, intra_kind="pcie4").islands() == tuple((gpu,) for gpu in range(8))
    # four of eight MI300X keep one 64 GB/s link to each of three peers
    assert Cluster.synthesise("MI300X", 4).route(0, 1)[0].bytes_per_s == pytest.approx(48e9)


def test_every_device_has_a_usual_host() -> None:
    for name in device_names():
        assert Cluster.synthesise(name, 16).device.name == name


def test_synthesise_refuses_ragged_nodes_and_unknown_links() -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.synthesise("H100", 12, intra_kind="nvlinq4")
    assert [fault.place for fault in caught.value.faults] == ["num_devices", "intra_kind"]
    assert "8 or 16" in caught.value.faults[0].remedy
    with pytest.raises(ClusterError, match="at most 8"):
        Cluster.synthesise("V100", 16, 16)


def test_a_count_of_any_device_by_any_of_its_names_is_its_usual_machine() -> None:
    """`1x4090` too, whose name begins with a digit."""
    for name in device_names():
        for alias in (name, *Device.load(name).aliases):
            if "/" not in alias:
                assert Cluster.load(f"1x{alias}").device.name == name


def test_a_machine_is_found_under_the_name_it_is_sold_under() -> None:
    assert Cluster.load("P5.48xlarge", 4) == Cluster.load("aws-p5", 4)
    assert Cluster.load("Standard_ND96isr_H100_v5") == Cluster.load("azure-nd-h100-v5")
    assert Cluster.load("DGX H100") == Cluster.load("dgx-h100-8")
    sold = tomllib.loads((TOPOLOGIES / "names" / "clusters.toml").read_text())["preset"]
    assert set(sold.values()) <= set(cluster_names())
    assert not sold.keys() & set(cluster_names())
