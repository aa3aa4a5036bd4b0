"""NCCL's topology XML: one test a published file, by what its index says, and files that must be refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from simulator.base.errors import ClusterError
from simulator.formats.readers.nccl_xml import read_xml
from simulator.spec.cluster.host import Host, cuts, findings, islands, nearest_nics, pcie_groups

FILES = Path(__file__).resolve().parents[3] / "shared/data/topologies"


def read(name: str) -> Host:
    path = FILES / f"{name}.xml"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return read_xml(path.read_bytes(), path.name)


def numa_sizes(host: Host) -> list[int]:
    return sorted(Counter(gpu.numa for gpu in host.gpus).values())


# GPUs, NICs, GPUs by NUMA node, XGMI entries (each link is told by both ends), as INDEX.md says
INDEX = {
    "aws_g5.48xl-topo": (8, 1, [4, 4], 0),
    "aws_p4d-24xl-topo": (8, 4, [4, 4], 0),
    "aws_p4de-24xl-topo": (8, 4, [4, 4], 0),
    "azure_ndv2-topo": (8, 1, [4, 4], 0),
    "azure_ndv4-topo": (8, 8, [2, 2, 2, 2], 0),
    "azure_ndv5-topo": (8, 8, [4, 4], 0),
    "oci_topo-flattened-b4": (8, 8, [2, 2, 2, 2], 0),
    "oci_topo-flattened": (8, 8, [2, 2, 2, 2], 0),
    "rccl_topo_3p_pcie": (3, 1, [1, 2], 0),
    "rccl_topo_4p3l": (4, 2, [4], 12),
    "rccl_topo_8p6l": (8, 1, [4, 4], 48),
    "rccl_topo_8p_90a": (8, 1, [8], 24),
    "rccl_topo_8p_940": (8, 8, [4, 4], 56),
    "rccl_topo_8p_pcie": (8, 1, [8], 0),
    "rccl_topo_8p_rome_n4": (8, 1, [1, 1, 1, 1, 2, 2], 16),
}


@pytest.mark.parametrize("name", INDEX)
def test_counts_are_those_of_the_index(name: str) -> None:
    host = read(name)
    links = sum(path.count for _, _, path in host.gpu_pairs() if path is not None and path.is_direct)
    assert (len(host.gpus), len(host.nics), numa_sizes(host), 2 * links) == INDEX[name]


def test_the_index_is_covered() -> None:
    if not FILES.is_dir():
        pytest.skip(f"{FILES} is not here")
    assert {path.stem for path in FILES.glob("*.xml")} == set(INDEX)


@pytest.mark.parametrize("name", [n for n in INDEX if n.startswith(("aws", "azure", "oci"))])
def test_clouds_do_not_list_nvlinks(name: str) -> None:
    host = read(name)
    assert {island.shape for island in islands(host)} == {"unlisted"}
    assert any(text.startswith("NVLinks") for text in host.missing)


def test_g5_has_bus_ids_only() -> None:
    host = read("aws_g5.48xl-topo")
    assert [gpu.pci[5:10] for gpu in host.gpus] == [f"00:{n:02x}" for n in range(0x16, 0x1E)]
    assert any("classes" in text for text in host.missing)


@pytest.mark.parametrize("name", ["aws_p4d-24xl-topo", "aws_p4de-24xl-topo"])
def test_p4d_has_two_gpus_and_a_card_behind_each_switch(name: str) -> None:
    near = nearest_nics(read(name))
    assert [(one.word, one.nics) for one in near] == [("PIX", (f"NIC{gpu // 2}",)) for gpu in range(8)]


@pytest.mark.parametrize("name", ["azure_ndv4-topo", "oci_topo-flattened", "oci_topo-flattened-b4"])
def test_two_gpus_and_two_cards_behind_each_switch(name: str) -> None:
    near = nearest_nics(read(name))
    assert [one.nics for one in near] == [tuple(f"NIC{n}" for n in (g // 2 * 2, g // 2 * 2 + 1)) for g in range(8)]


def test_ndv5_has_a_card_for_each_gpu() -> None:
    host = read("azure_ndv5-topo")
    assert [(one.word, one.nics) for one in nearest_nics(host)] == [("PIX", (f"NIC{g}",)) for g in range(8)]


def test_ndv2_card_is_on_the_first_socket() -> None:
    host = read("azure_ndv2-topo")
    assert host.nics[0].numa == "0"
    assert [one.word for one in nearest_nics(host)] == ["PHB"] * 4 + ["SYS"] * 4
    assert "cards_on_one_socket" in {f.kind for f in findings(host)}


@pytest.mark.parametrize(("name", "links"), [("rccl_topo_4p3l", 3), ("rccl_topo_8p_940", 7)])
def test_xgmi_full_meshes(name: str, links: int) -> None:
    (island,) = islands(read(name))
    assert (island.shape, set(island.links)) == ("mesh", {links})


@pytest.mark.parametrize(("name", "links"), [("rccl_topo_8p6l", 6), ("rccl_topo_8p_90a", 3)])
def test_xgmi_between_some_pairs(name: str, links: int) -> None:
    (island,) = islands(read(name))
    assert (island.shape, set(island.links)) == ("partial", {links})


def test_rome_has_two_rings_of_four() -> None:
    found = islands(read("rccl_topo_8p_rome_n4"))
    assert [(island.gpus, island.links) for island in found] == [((0, 2, 3, 5), (2,) * 4), ((1, 4, 6, 7), (2,) * 4)]


def test_mi300x_cards_and_order() -> None:
    host = read("rccl_topo_8p_940")
    assert [one.nics for one in nearest_nics(host)] == [(f"mlx5_{gpu}",) for gpu in range(8)]
    assert {card.bytes_per_s for card in host.nics} == {400e9 / 8}
    assert host.gpus[0].model == "gfx942"


def test_cuda_numbers_that_are_not_in_bus_order() -> None:
    assert "pci_order" in {f.kind for f in findings(read("rccl_topo_8p6l"))}
    assert "pci_order" not in {f.kind for f in findings(read("rccl_topo_8p_940"))}


def test_pcie_only() -> None:
    host = read("rccl_topo_8p_pcie")
    assert {island.shape for island in islands(host)} == {"alone"}
    assert pcie_groups(host, "PXB") == ((0, 1, 2, 3), (4, 5, 6, 7))
    # Gen3 x16 towards the CPU: 16 lanes × 60 / 80 GB/s
    assert [cut.bytes_per_s for cut in cuts(host)] == [12e9]


def gpu(bus: int, inner: str = "", dev: int = 0, pci: str = 'link_speed="16.0 GT/s PCIe" link_width="16"') -> str:
    name = f"0000:{bus:02x}:00.0"
    return f'<pci busid="{name}" class="0x030200" {pci}><gpu dev="{dev}" sm="90">{inner}</gpu></pci>'


def system(*parts: str) -> bytes:
    return ('<system version="1"><cpu numaid="0">' + "".join(parts) + "</cpu></system>").encode()


def link(bus: int, count: object = 4, tclass: str = "0x030200") -> str:
    return f'<nvlink target="0000:{bus:02x}:00.0" count="{count}" tclass="{tclass}"/>'


def test_links_to_a_switch_are_a_switch() -> None:
    host = read_xml(system(*(gpu(n, link(0xFF, 18, "0x068000"), n) for n in range(4))), "x")
    (island,) = islands(host)
    assert (island.shape, island.links) == ("switch", (18,) * 4)


def test_links_to_the_cpu_are_no_links_between_gpus() -> None:
    host = read_xml(system(gpu(1, link(0xEE, 3, "0x068001"))), "x")
    assert islands(host)[0].shape == "alone"


BILLION = b'<!DOCTYPE s [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><system>&b;</system>'
OUTSIDE = b'<!DOCTYPE s [<!ENTITY a SYSTEM "file:///etc/passwd">]><system>&a;</system>'


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (BILLION, "line 1: a document type"),
        (OUTSIDE, "line 1: a document type"),
        (b"<system>&x;</system>", "not XML"),
        (b"<system><cpu>", "not XML"),
        (b"", "not XML"),
        (b'<?xml version="1.0" encoding="foo"?><system/>', "unusable encoding"),
        (b'<?xml version="1.0" encoding="shift_jis"?><system/>', "unusable encoding"),
        (b"<html></html>", "the root is <html>"),
        (system(), "no GPU in it"),
        (b"<system>" + b"<pci>" * 40, "32 levels"),
        (system("<pci/>" * 600), "600 devices"),
        (system("<pci/>" * 20_001), "20000 elements"),
        (system(gpu(1, link(1))), "GPU0 is linked to itself (0000:01:00.0)"),
        (system(gpu(1, link(2), 0), gpu(2, "", 1)), "GPU0 has NV4 to GPU1, GPU1 has nothing to GPU0"),
        (system(gpu(1, link(2, 4), 0), gpu(2, link(1, 3), 1)), "GPU0 has NV4 to GPU1, GPU1 has NV3 to GPU0"),
        (system(gpu(1, link(2, 0), 0), gpu(2, "", 1)), "count '0': no link"),
        (system(gpu(1, link(2, "9" * 5000), 0), gpu(2, "", 1)), "no link"),
        (system(gpu(1, pci='link_speed="0 GT/s" link_width="16"')), "link_speed '0 GT/s': no bandwidth"),
        (system(gpu(1, pci='link_speed="16 GT/s" link_width="0"')), "link_width '0' at 16 GT/s: no bandwidth"),
        (system(gpu(1), '<nic><net name="a" speed="0"/></nic>'), "speed '0': no bandwidth"),
        (system(gpu(1), gpu(1, dev=1)), "'0000:01:00.0' appears on line 1 too"),
        (b"<system>" + gpu(1).encode() + b"</system>", "outside every <cpu>"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(data: bytes, told: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_xml(data, "topo.xml")
    assert told in str(caught.value)
    assert all(fault.place.startswith("topo.xml: line ") for fault in caught.value.faults)


def test_a_speed_that_was_not_recorded_is_ncclis_default() -> None:
    """NCCL writes an empty speed and a width of 0 where the system does not tell (virtual machines)."""
    parts = [gpu(n, dev=n, pci='link_speed="" link_width="0"') for n in range(2)]
    host = read_xml(system(*parts), "x")
    assert {cable.bytes_per_s for cable in host.cables} == {12e9}
    assert any("PCIe speeds" in text for text in host.missing)
