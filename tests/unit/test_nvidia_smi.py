"""`nvidia-smi topo -m`: one test a published matrix, by what its index says, and pastes that must be refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.base.errors import ClusterError
from simulator.formats.readers.nvidia_smi import read_matrix
from simulator.spec.cluster.host import Host, cuts, findings, idle_nics, islands, nearest_nics, pcie_groups, rated

FILES = Path(__file__).resolve().parents[3] / "shared/data/topologies"
NV_PAIR = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-7\nGPU1\tNV4\t X \t0-7\n"


def read(name: str) -> Host:
    path = FILES / f"smi_{name}.txt"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return read_matrix(path.read_text(), path.name)


def shapes(host: Host) -> list[tuple[str, tuple[int, ...]]]:
    return [(island.shape, island.gpus) for island in islands(host)]


def nearest(host: Host) -> dict[int, tuple[str, ...]]:
    return {one.gpu: one.nics for one in nearest_nics(host)}


def kinds(host: Host) -> set[str]:
    return {finding.kind for finding in findings(host)}


def alone(num_gpus: int) -> list[tuple[str, tuple[int, ...]]]:
    return [("alone", (gpu,)) for gpu in range(num_gpus)]


def is_truncated(host: Host) -> bool:
    return any("ends" in text for text in host.missing)


EIGHT = tuple(range(8))
FOUR = tuple(range(4))
# What INDEX.md says of each file's islands, and whether its paste lacks rows
INDEX = {
    "2gpu_nv1_pair": ([("pair", (0, 1))], False),
    "2x3090_nvlink_nv3": ([("pair", (0, 1))], False),
    "2xRTX5090_phb": (alone(2), False),
    "3xA6000_one_nvlink_pair": ([("pair", (0, 1)), ("alone", (2,))], False),
    "4gpu_nvlink_pairs_spr8470": ([("pair", (0, 1)), ("pair", (2, 3))], False),
    "4gpu_phb_pairs": (alone(4), False),
    "4xA100_delta": ([("mesh", FOUR)], True),
    "4xL40S_2socket": (alone(4), False),
    "5gpu_consumer_mixed": (alone(5), False),
    "8gpu_pix_phb_sys": (alone(8), False),
    "8gpu_pix_pxb_sys_2018": (alone(8), False),
    "8xA100_nics_one_socket": ([("switch", EIGHT)], False),
    "8xA100_vm_phb_excerpt": ([("switch", EIGHT)], False),
    "8xRTX4090_pix_two_socket": (alone(8), False),
    "8xV100-SXM2-32GB_1nic": ([("cube_mesh", EIGHT)], False),
    "aws_p4d_8xA100": ([("switch", EIGHT)], False),
    "azure_nc96ads_4xA100_nvlink_pairs": ([("pair", (0, 1)), ("pair", (2, 3))], False),
    "dell_c4140_4xV100_nv2mesh": ([("mesh", FOUR)], False),
    "dgx1v_8xV100_hybrid_cube_mesh": ([("cube_mesh", EIGHT)], False),
    "dgx_a100_8xA100_12nic": ([("switch", EIGHT)], False),
    "dgx_h100_8xH100_12nic_gpu_rows": ([("switch", EIGHT)], True),
    "gb200_tray_4gpu": ([("switch", FOUR)], False),
    "hgx_h100_8xH100_10nic_gpu_rows": ([("switch", EIGHT)], True),
    "polaris_4xA100": ([("mesh", FOUR)], False),
    "power9_4xV100_nvlink_pairs": ([("pair", (0, 1)), ("pair", (2, 3))], False),
}


@pytest.mark.parametrize("name", INDEX)
def test_islands_are_those_of_the_index(name: str) -> None:
    host = read(name)
    assert (shapes(host), is_truncated(host)) == INDEX[name]


def test_the_index_is_covered() -> None:
    if not FILES.is_dir():
        pytest.skip(f"{FILES} is not here")
    assert {path.stem.removeprefix("smi_") for path in FILES.glob("smi_*.txt")} == set(INDEX)


def test_a_bridge_with_three_links_is_missing_one() -> None:
    host = read("2x3090_nvlink_nv3")
    assert islands(host)[0].links == (3, 3)
    assert kinds(host) == {"nvlink_down"}


def test_a6000_pair_and_the_third_gpu_near_the_cards() -> None:
    one = nearest_nics(read("3xA6000_one_nvlink_pair"))[2]
    assert (one.word, one.nics) == ("PHB", ("NIC0", "NIC1"))


@pytest.mark.parametrize(
    ("name", "reach", "groups"),
    [
        ("8gpu_pix_phb_sys", "PIX", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("8gpu_pix_phb_sys", "PHB", (FOUR, (4, 5, 6, 7))),
        ("8gpu_pix_pxb_sys_2018", "PXB", (FOUR, (4, 5, 6, 7))),
        ("8xRTX4090_pix_two_socket", "PIX", (FOUR, (4, 5, 6, 7))),
        ("4gpu_phb_pairs", "PHB", ((0, 1), (2, 3))),
        ("4xL40S_2socket", "NODE", ((0, 1), (2, 3))),
        ("5gpu_consumer_mixed", "NODE", ((0,), (1, 2, 3, 4))),
    ],
)
def test_groups_on_pcie(name: str, reach: str, groups: tuple[tuple[int, ...], ...]) -> None:
    host = read(name)
    assert pcie_groups(host, reach) == groups
    assert {str(cut.closest) for cut in cuts(host)} >= {"SYS"}


def test_gpus_on_numa_nodes() -> None:
    assert [gpu.numa for gpu in read("5gpu_consumer_mixed").gpus] == ["1", "0", "0", "0", "0"]
    assert [gpu.numa for gpu in read("azure_nc96ads_4xA100_nvlink_pairs").gpus] == ["0", "1", "2", "3"]
    assert [gpu.numa for gpu in read("dgx_a100_8xA100_12nic").gpus] == list("33117755")


def test_cards_on_one_socket_are_reached_by_pxn() -> None:
    host = read("8xA100_nics_one_socket")
    near = nearest_nics(host)
    assert [one.word for one in near] == ["PXB"] * 4 + ["PXN"] * 4
    assert {one.via for one in near[4:]} <= set(FOUR)
    assert "cards_on_one_socket" in kinds(host)


def test_reversed_numa_order() -> None:
    for name in ("4xA100_delta", "polaris_4xA100"):
        host = read(name)
        assert [gpu.numa for gpu in host.gpus] == ["3", "2", "1", "0"]
        assert "reversed_order" in kinds(host)


def test_polaris_has_twelve_links_and_two_near_cards() -> None:
    host = read("polaris_4xA100")
    assert islands(host)[0].links == (12,) * 4
    assert {gpu: cards for gpu, cards in nearest(host).items() if gpu in (1, 3)} == {1: ("mlx5_1",), 3: ("mlx5_0",)}


def test_dell_has_six_links_a_gpu() -> None:
    assert islands(read("dell_c4140_4xV100_nv2mesh"))[0].links == (6,) * 4


def test_dgx1_cube_mesh_and_cards_by_name() -> None:
    host = read("dgx1v_8xV100_hybrid_cube_mesh")
    island = islands(host)[0]
    assert island.links == (6,) * 8
    assert {b: path.count for (a, b), path in island.pairs.items() if a == 0} == {1: 1, 2: 1, 3: 2, 4: 2}
    assert [island.pairs[a, a + 4].count for a in FOUR] == [2, 2, 1, 1]
    assert island.narrowest_split == 2 + 2 + 1 + 1  # between the quads
    assert nearest(host) == {gpu: (f"mlx5_{gpu // 2}",) for gpu in EIGHT}
    assert "pci_order" in kinds(host)  # the header's order is 0, 2, 1, 3


def test_v100_with_one_card() -> None:
    host = read("8xV100-SXM2-32GB_1nic")
    assert [one.word for one in nearest_nics(host)] == ["NODE"] * 4 + ["SYS"] * 4
    assert "cards_on_one_socket" in kinds(host)


def test_dgx_a100_compute_and_storage_cards() -> None:
    host = read("dgx_a100_8xA100_12nic")
    pairs = ((0, 1), (2, 3), (6, 7), (8, 9))
    assert nearest(host) == {gpu: tuple(f"mlx5_{n}" for n in pairs[gpu // 2]) for gpu in EIGHT}
    assert idle_nics(host) == ("mlx5_4", "mlx5_5", "mlx5_10", "mlx5_11")


def test_dgx_h100_nearest_cards_and_missing_rows() -> None:
    host = read("dgx_h100_8xH100_12nic_gpu_rows")
    assert nearest(host) == {gpu: (f"NIC{nic}",) for gpu, nic in enumerate((0, 3, 4, 5, 6, 9, 10, 11))}
    assert idle_nics(host) == ("NIC1", "NIC2", "NIC7", "NIC8")
    assert all(f"NIC{nic}" in host.missing[0] for nic in range(6, 12))


def test_hgx_h100_nearest_cards_and_missing_rows() -> None:
    host = read("hgx_h100_8xH100_10nic_gpu_rows")
    assert nearest(host) == {gpu: (f"NIC{nic}",) for gpu, nic in enumerate((0, 1, 2, 5, 6, 7, 8, 9))}
    assert {one.word for one in nearest_nics(host)} == {"PIX"}
    assert "NIC9" in host.missing[0]


def test_a_tray_hides_its_rack_and_a_virtual_machine_its_numa_nodes() -> None:
    assert "hidden" in kinds(read("gb200_tray_4gpu"))
    assert "hidden" in kinds(read("8xA100_vm_phb_excerpt"))


def test_cards_that_are_not_shown_are_missing() -> None:
    assert any(text.startswith("network cards") for text in read("aws_p4d_8xA100").missing)


def test_power9_cards_by_socket() -> None:
    near = nearest(read("power9_4xV100_nvlink_pairs"))
    assert (near[0], near[3]) == (("mlx5_0", "mlx5_1"), ("mlx5_2", "mlx5_3"))


def test_escape_codes_blanks_for_tabs_a_prompt_and_the_legends() -> None:
    text = (
        "$ nvidia-smi topo -m\n"
        "        \x1b[4mGPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity   GPU NUMA ID\x1b[0m\r\n"
        "GPU0     X      NV18    PIX     0-55,112-167    0               N/A\n"
        "GPU1    NV18     X      NODE    0-55,112-167    0               N/A\n"
        "NIC0    PIX     NODE     X\n\n"
        "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
        "  NV#  = Connection traversing a bonded set of # NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_7\n"
    )
    host = read_matrix(text, "paste")
    assert [(gpu.numa, gpu.cpus) for gpu in host.gpus] == [("0", "0-55,112-167")] * 2
    assert host.nics[0].alias == "mlx5_7"
    assert nearest(host) == {0: ("NIC0",), 1: ("NIC0",)}
    assert not host.missing


def test_a_paste_that_ends_anywhere_is_completed_by_symmetry() -> None:
    """The first row tells every path of GPU0, each further one what is still open; a cut may fall inside a word."""
    header = "\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\n"
    rows = [
        "GPU0\t X \tNV12\tNV12\tPXB\t0-7\t0\n",
        "GPU1\tNV12\t X \tNV12\tPXB\t0-7\t0\n",
        "GPU2\tNV12\tNV12\t X \tSYS\t8-15\t1\n",
        "NIC0\tPXB\tPXB\tSYS\t X \t\t\n",
    ]
    whole = header + "".join(rows)
    full = read_matrix(whole, "paste")
    assert not full.missing
    for end in range(len(header) + len(rows[0]), len(whole) - len(rows[-1]) + 1):
        host = read_matrix(whole[:end], "paste")
        assert host.missing
        assert all(full.path(*pair) == path for pair, path in host.paths.items())
    last = read_matrix(header + "".join(rows[:2]) + "GPU2\tNV12\tNV1", "paste")
    assert shapes(last) == [("switch", (0, 1, 2))]
    assert "row GPU2 ends after 1 of 4 columns" in last.missing
    assert "paths of 1 pairs that neither side tells: GPU2–NIC0" in last.missing


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("SYS", "GPU3 has no NVLink up while the others meet in a switch"),
        ("NV16", "GPU3 has 16 links up, its island's best has 18"),
    ],
)
def test_a_gpu_that_lost_links_is_found(word: str, text: str) -> None:
    names = [f"GPU{i}" for i in range(8)]
    cells = [["X" if i == j else word if 3 in (i, j) else "NV18" for j in range(8)] for i in range(8)]
    rows = ["\t".join([name, *row]) for name, row in zip(names, cells, strict=True)]
    found = findings(read_matrix("\n".join(["\t" + "\t".join(names), *rows]), "paste"))
    assert [(f.kind, f.text) for f in found] == [("nvlink_down", text)]


def test_speeds_of_a_device_bound_the_cuts() -> None:
    """Two GPUs behind each of two switches: what leaves a pair crosses one PCIe link."""
    word = {True: "PIX", False: "SYS"}
    rows = [f"GPU{i}\t" + "\t".join("X" if i == j else word[i // 2 == j // 2] for j in range(4)) for i in range(4)]
    host = rated(read_matrix("\n".join(["\tGPU0\tGPU1\tGPU2\tGPU3", *rows]), "x"), 0.0, 24e9, "test")
    assert [(cut.a, cut.b, cut.bytes_per_s) for cut in cuts(host)] == [(0, 1, 24e9)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no header line"),
        ("GPU0\tX\tNV4\nGPU1\tNV4\tX", "no header line"),
        (NV_PAIR.replace("GPU1\tNV4", "GPU1\tSYS"), "line 2: row GPU0, column GPU1: NV4, but row GPU1 says SYS"),
        (NV_PAIR.replace("NV4", "NVX"), "line 2: row GPU0, column GPU1: unknown word 'NVX'"),
        (NV_PAIR.replace("NV4", "NV0"), "line 3: row GPU1, column GPU0: NV0: no link"),
        (NV_PAIR.replace("NV4", "N/A"), "nothing joins the two"),
        (NV_PAIR.replace(" X \tNV4", "NV4\tNV4"), "row GPU0, column GPU0: is joined to itself by 'NV4'"),
        (NV_PAIR.replace("NV4", "X"), "is marked X"),
        (NV_PAIR + NV_PAIR.split("\n", 1)[1], "row GPU0 appears on line 2 too"),
        (NV_PAIR + "GPU7\tNV4\tX\t0-7\n", "row 'GPU7' has no column"),
        (NV_PAIR.replace("GPU1\tCPU", "GPU0\tCPU"), "column GPU0 appears twice"),
        ("\t" + "\t".join(f"GPU{i}" for i in range(300)), "300 devices"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(text: str, told: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_matrix(text, "paste")
    assert told in str(caught.value)
    assert all(fault.place.startswith("paste") for fault in caught.value.faults)
