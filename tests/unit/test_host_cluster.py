"""A host as it was read becomes a cluster that can be priced, and its file reads back as the same cluster."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from simulator.base.errors import ClusterError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.readers.host_cluster import cluster_of
from simulator.formats.readers.nccl_xml import read_xml
from simulator.formats.readers.topology_source import host_of, read_source
from simulator.formats.writers.cluster_toml import cluster_toml
from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster, NicPlace, Pcie
from simulator.spec.cluster.host import Host, findings, nearest_nics
from simulator.work.collectives.ports import port_of

FILES = Path(__file__).resolve().parents[3] / "shared" / "data" / "topologies"
GB = 1e9


def host(name: str) -> Host:
    if not FILES.is_dir():
        pytest.skip("the published topologies are not on this machine")
    found = read_source(str(FILES / name))
    assert isinstance(found, Host)
    return found


def reached(cluster: Cluster, num_ranks: int, num_groups: int = 1, stride: int = 1) -> tuple[str, float]:
    shape = GroupShape(
        num_ranks=num_ranks,
        num_nodes=1,
        ranks_per_node=num_ranks,
        num_groups_per_node=num_groups,
        spans_domain=False,
        local_stride=stride,
    )
    port = port_of(cluster, shape)
    return port.link, pytest.approx(port.reached_bytes_per_s)


@pytest.mark.parametrize(
    ("name", "device", "shape", "rate"),
    [
        ("smi_dgx1v_8xV100_hybrid_cube_mesh.txt", "v100", "cube_mesh", 150),
        ("smi_8xV100-SXM2-32GB_1nic.txt", "v100", "cube_mesh", 150),
        ("smi_dell_c4140_4xV100_nv2mesh.txt", "v100", "mesh", 150),
        ("smi_polaris_4xA100.txt", "a100", "mesh", 300),
        ("smi_dgx_a100_8xA100_12nic.txt", "a100", "switch", 300),
        ("smi_dgx_h100_8xH100_12nic_gpu_rows.txt", "h100", "switch", 450),
        ("smi_gb200_tray_4gpu.txt", "gb200", "switch", 900),
        ("smi_azure_nc96ads_4xA100_nvlink_pairs.txt", "a100-pcie", "pairs", 300),
        ("smi_3xA6000_one_nvlink_pair.txt", "a6000", "pairs", 56.25),
        ("rccl_topo_8p_940.xml", "mi300x", "mesh", 336),
        ("smi_4xL40S_2socket.txt", "l40s", "pcie", 31),
        ("azure_ndv5-topo.xml", "h100", "switch", 450),
    ],
)
def test_links_become_shapes_at_data_sheet_speed(name: str, device: str, shape: str, rate: float) -> None:
    cluster = cluster_of(host(name), device)
    assert (cluster.intra.shape, cluster.intra.bytes_per_s) == (shape, rate * GB)


def test_what_was_read_is_what_is_priced() -> None:
    """A cube mesh's first pair has one link of 25 GB/s; the preset says the same."""
    cluster = cluster_of(host("smi_dgx1v_8xV100_hybrid_cube_mesh.txt"), "v100")
    assert reached(cluster, 2) == ("intra", 25 * GB)
    assert reached(cluster, 4) == ("intra", 100 * GB)
    assert reached(cluster, 8) == reached(Cluster.load("dgx1-v100-8"), 8)


def test_three_a6000_of_which_two_are_bridged() -> None:
    cluster = cluster_of(host("smi_3xA6000_one_nvlink_pair.txt"), "a6000")
    assert reached(cluster, 2) == ("intra", 56.25 * GB)
    assert reached(cluster, 3) == ("pcie", 31 * GB)


def test_geforce_boards_behind_two_switches_share_their_uplinks() -> None:
    """No peer access: each of eight hops goes up a switch and down one; four share each uplink of 31 GB/s."""
    cluster = cluster_of(host("smi_8xRTX4090_pix_two_socket.txt"), "rtx4090")
    assert reached(cluster, 8) == ("intra", 31 * GB / 4)


def test_cards_nearest_to_no_gpu_are_left_out() -> None:
    assert cluster_of(host("smi_dgx_a100_8xA100_12nic.txt"), "a100").inter.num_nics == 8  # type: ignore[union-attr]
    assert cluster_of(host("smi_hgx_h100_8xH100_10nic_gpu_rows.txt"), "h100").inter.num_nics == 8  # type: ignore[union-attr]


def test_a_tray_belongs_to_its_rack() -> None:
    assert cluster_of(host("smi_gb200_tray_4gpu.txt"), "gb200", 18).nvlink_domain_size == 72


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.glob("*")) if FILES.is_dir() else ["none"])
def test_every_published_host_saves_and_loads(name: str, tmp_path: Path) -> None:
    """Any GPU whose boards may carry direct links serves here; what matters is that the file says the same."""
    if name == "INDEX.md":
        return
    device = "mi300x" if name.startswith("rccl") else "a100"
    found = host(name)
    made = cluster_of(found, device)
    path = tmp_path / "node.toml"
    path.write_text(cluster_toml(made))
    assert Cluster.load(path) == made
    assert made.gpus_per_node == len(found.gpus)


@pytest.mark.parametrize("name", ["gb200-nvl72", "dgx1-v100-8", "pcie-l40s-8", "selene"])
def test_presets_write_themselves(name: str, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(cluster_toml(Cluster.load(name)))
    assert Cluster.load(path) == Cluster.load(name)


MATRIX = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV18\t{0}\nGPU1\tNV18\t X \t{0}\nGPU2\t{0}\t{0}\t X \n"


def test_saving_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matrix, out = tmp_path / "m.txt", tmp_path / "node.toml"
    matrix.write_text(MATRIX.format("NV18"))
    assert main(["topo", str(matrix), "--device", "h100", "--save", str(out)]) == ExitCode.OK
    assert Cluster.load(out).intra.bytes_per_s == 450 * GB
    assert main(["topo", str(matrix), "--save", str(out)]) != ExitCode.OK
    assert "--device with the GPU's name" in capsys.readouterr().err
    assert main(["topo", "hgx-h100-8", "--device", "h100", "--save", str(out)]) != ExitCode.OK
    assert "is a cluster file already" in capsys.readouterr().err
    assert main(["predict", "--cluster", str(matrix)]) != ExitCode.OK
    assert "--save node.toml" in capsys.readouterr().err


def test_a_saved_host_s_network_is_none_that_somebody_measured(tmp_path: Path) -> None:
    """Of the usual machine's network sweeps were published; what joins this host's cards nobody knows."""
    matrix = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tNV12\tPXB\nGPU1\tNV12\t X \tPXB\nNIC0\tPXB\tPXB\t X \n"
    (tmp_path / "topo.txt").write_text(matrix)
    assert Cluster.load("dgx-a100-80-8").fabric.confirmed
    found = read_source(str(tmp_path / "topo.txt"))
    assert isinstance(found, Host)
    assert not cluster_of(found, "a100-sxm4-80gb").fabric.confirmed


def test_a_switch_that_leaves_a_gpu_out_is_no_cluster(tmp_path: Path) -> None:
    matrix = tmp_path / "m.txt"
    matrix.write_text(MATRIX.format("SYS"))
    found = read_source(str(matrix))
    assert isinstance(found, Host)
    with pytest.raises(ClusterError, match="not GPU2"):
        cluster_of(found, "h100")
    with pytest.raises(ClusterError, match="l40s has none"):
        cluster_of(found, "l40s")


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(ClusterError, match="no nvidia-smi"):
        read_source("here")


def test_this_machine_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncat <<'END'\n" + MATRIX.format("NV18") + "END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = read_source("here")
    assert isinstance(found, Host)
    assert len(found.gpus) == 3


XML = """<system version="1">
  <cpu numaid="0" affinity="ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="106">
    <pci busid="0000:10:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="8">
      <pci busid="0000:11:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16"/>
      <pci busid="0000:12:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16"/>
      <pci busid="0000:13:00.0" class="0x020700" link_speed="8.0 GT/s PCIe" link_width="8">
        <nic><net name="mlx5_0" dev="0" speed="200000" port="1"/></nic>
      </pci>
    </pci>
    <pci busid="0000:20:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="8">
      <pci busid="0000:21:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="8"/>
      <pci busid="0000:22:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16"/>
    </pci>
  </cpu>
</system>"""


def test_pcie_links_of_an_xml_are_the_files() -> None:
    """A GPU at eight lanes of generation 4, uplinks of eight, a 200 Gb/s NIC in eight lanes of generation 3."""
    found = read_xml(XML.encode(), "box.xml")
    cluster = cluster_of(found, "l40s")
    assert (cluster.intra.kind, cluster.intra.bytes_per_s) == ("pcie4", 31 * GB / 2)
    assert cluster.pcie is not None
    assert cluster.inter is not None
    assert cluster.pcie.switch_bytes_per_s == 31 * GB / 2
    assert cluster.inter.nic_bytes_per_s == 15.75 * GB / 2
    assert cluster.inter.cards == (NicPlace(gpus=(0, 1)),)
    assert [finding.kind for finding in findings(found)] == ["narrow_link"]
    assert Cluster.parse(tomllib.loads(cluster_toml(cluster)), "x", ClusterError, from_file=True) == cluster


@pytest.mark.parametrize(
    ("name", "device", "places"),
    [
        ("smi_8xA100_nics_one_socket.txt", "a100", [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ("smi_dgx_h100_8xH100_12nic_gpu_rows.txt", "h100", [(gpu,) for gpu in range(8)]),
        ("aws_p4d-24xl-topo.xml", "a100-40gb", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("smi_8xV100-SXM2-32GB_1nic.txt", "v100", [()]),
    ],
)
def test_cards_sit_where_the_source_shows_them(name: str, device: str, places: list[tuple[int, ...]]) -> None:
    cluster = cluster_of(host(name), device)
    assert cluster.inter is not None
    assert [card.gpus for card in cluster.inter.cards] == places


def test_a_virtual_machine_that_hides_its_cards_says_nothing_of_them() -> None:
    cluster = cluster_of(host("smi_8xA100_vm_phb_excerpt.txt"), "a100")
    assert cluster.inter is None or cluster.inter.cards == ()


def test_cards_of_a_grace_are_near_by_c2c() -> None:
    """GPUDirect RDMA reaches them over the link to the CPU, and `topo` says so."""
    tray = Cluster.load("gb200-nvl72")
    assert tray.inter is not None
    inter = tray.inter.model_copy(update={"cards": (NicPlace(socket=0),) * 2 + (NicPlace(socket=1),) * 2})
    box = tray.model_copy(update={"inter": inter, "pcie": Pcie(sockets=((0, 1), (2, 3)))})
    assert [(one.word, one.gpudirect) for one in nearest_nics(host_of(box))] == [("P2C", True)] * 4


def test_a_cluster_file_says_how_large_its_domain_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A tray's matrix leaves it open; a preset of 72 on C2C hosts does not."""
    main(["topo", "gb200-nvl72", "--plain"])
    out = capsys.readouterr().out
    assert "larger than its trays show" not in out
    assert "one NVLink switch joins 72 GPUs" in out
    assert "host: C2C, 450 GB/s a GPU" in out
