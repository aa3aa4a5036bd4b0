"""`shardwise topo`: every kind of source, as text and as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.spec.cluster.host import Host

MATRIX = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tNV18\tPIX\nGPU1\tNV18\t X \tNODE\nNIC0\tPIX\tNODE\t X \n"


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["topo", *arguments, "--json"]) == ExitCode.OK
    data: dict[str, object] = json.loads(capsys.readouterr().out)
    return data


def test_a_matrix_by_name_and_on_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.txt"
    file.write_text(MATRIX)
    by_name = told([str(file)], capsys)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(MATRIX.encode())))
    piped = told(["-"], capsys)
    assert by_name | {"source": "stdin"} == piped
    assert piped["islands"] == [
        {
            "gpus": [0, 1],
            "shape": "switch",
            "links_per_gpu": [18, 18],
            "narrowest_split_links": None,
            "pairs": [{"a": 0, "b": 1, "kind": "NV", "links": 18}],
        }
    ]


def test_presets_are_hosts_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(["hgx-h100-8"], capsys)["islands"][0]["links_per_gpu"] == [18] * 8  # type: ignore[index]
    cube = told(["dgx1-v100-8"], capsys)
    assert cube["islands"][0]["shape"] == "cube_mesh"  # type: ignore[index]
    assert [one["nics"] for one in cube["nearest_nic"]] == [[f"nic{g // 2}"] for g in range(8)]  # type: ignore[attr-defined]


def test_cuts_between_bridged_pairs_are_two_pcie_links(capsys: pytest.CaptureFixture[str]) -> None:
    cuts = told(["pcie-a40-8"], capsys)["min_cuts"]
    assert {cut["bytes_per_s"] for cut in cuts} == {2 * 31e9}  # type: ignore[attr-defined]


def test_a_device_gives_speeds_and_what_should_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.txt"
    file.write_text(MATRIX.replace("NV18", "NODE"))
    data = told([str(file), "--device", "h100"], capsys)
    assert data["min_cuts"] == [{"a": 0, "b": 1, "closest_path": "NODE", "bytes_per_s": 63e9}]
    assert "nvlink_down" in [f["kind"] for f in data["findings"]]  # type: ignore[attr-defined]
    assert main(["topo", str(file), "--device", "h1000x"]) == ExitCode.BAD_INPUT


def test_slurm_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "topology.conf"
    file.write_text("SwitchName=a Nodes=n[1-4]\nSwitchName=b Nodes=n[5-7]\n")
    data = told([str(file)], capsys)
    assert (data["num_nodes"], data["nodes_per_leaf"]) == (7, {"min": 3, "max": 4})
    assert [f["kind"] for f in data["findings"]] == ["several_roots", "unequal_leaves"]  # type: ignore[attr-defined]
    assert main(["topo", str(file)]) == ExitCode.OK
    assert "7 nodes, 1 levels" in capsys.readouterr().out


def test_text_tells_islands_cards_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.txt"
    file.write_text(MATRIX.rsplit("NIC0\tPIX", 1)[0])
    assert main(["topo", str(file), "--plain"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "island GPUs 0–1: NVSwitch, 18 links a GPU" in out
    assert "? not in the source: rows of NIC0" in out


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"hello", "not a topology"),
        (b"<!DOCTYPE a><system/>", "document type"),
        (b"x" * (8 * 2**20 + 1), "larger than"),
    ],
)
def test_what_is_no_topology_is_bad_input(
    content: bytes, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "what"
    file.write_bytes(content)
    assert main(["topo", str(file)]) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert not out
    assert problem in err
    assert main(["topo", str(tmp_path / "absent")]) == ExitCode.BAD_INPUT


CUBE_CORNER = "\tGPU0\tGPU1\tGPU2\tNIC0\nGPU0\t X \tNV1\tSYS\tPIX\nGPU1\tNV1\t X \tNV1\tSYS\nGPU2\tSYS\tNV1\t X \tSYS\nNIC0\tPIX\tSYS\tSYS\t X \n"


def test_roads_are_those_nccl_takes_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPU0 and GPU2 are both joined to GPU1. Without that cable they meet in host memory; below one switch, directly."""
    file = tmp_path / "m.txt"
    file.write_text(CUBE_CORNER)
    data = told([str(file)], capsys)
    assert data["roads"] == [
        {"a": 0, "b": 1, "road": "cable"},
        {"a": 0, "b": 2, "road": "relay"},
        {"a": 1, "b": 2, "road": "cable"},
    ]
    assert [one["gpudirect"] for one in data["nearest_nic"]] == [True, True, True]  # type: ignore[attr-defined]  # two by PXN
    file.write_text(CUBE_CORNER.replace("NV1", "PHB"))
    data = told([str(file)], capsys)
    assert {one["road"] for one in data["roads"]} == {"memory"}  # type: ignore[attr-defined]
    assert [one["gpudirect"] for one in data["nearest_nic"]] == [True, False, False]  # type: ignore[attr-defined]
    file.write_text(CUBE_CORNER.replace("NV1", "PXB"))
    assert [one["road"] for one in told([str(file)], capsys)["roads"]] == ["peer", "memory", "peer"]  # type: ignore[attr-defined]


def test_a_tree_of_a_cluster_file_is_shown_and_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """Two sockets of four GPUs at 31 GB/s each; 67.2 GB/s join them (PCIe 4's default)."""
    data = told(["pcie-a100-80-8"], capsys)
    assert data["domains"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert data["min_cuts"] == [{"a": 0, "b": 1, "closest_path": "SYS", "bytes_per_s": 67.2e9}]


def test_the_network_of_a_cluster_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Selene's leaves hold 20 nodes of 8 × 200 Gb/s without loss; halves of two nodes are one node's NICs."""
    network = told(["selene"], capsys)["network"]
    assert network["half_cuts"][0] == {"nodes": 2, "bytes_per_s": 200e9}  # type: ignore[index]
    assert main(["topo", "gb200-nvl72", "--plain"]) == ExitCode.OK
    assert "joins 72 GPUs of several nodes" in capsys.readouterr().out


def test_pairs_of_gpus_are_walked_once_whatever_is_asked_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node of 1,000 GPUs has half a million pairs; text, JSON and page walked them 20 times and more."""
    walks: list[Host] = []
    pairs = Host.gpu_pairs
    monkeypatch.setattr(Host, "gpu_pairs", lambda self: walks.append(self) or pairs(self))
    assert main(["topo", "hgx-h100-8", "--html", str(tmp_path / "page.html")]) == ExitCode.OK
    assert main(["topo", "hgx-h100-8", "--json"]) == ExitCode.OK
    assert "GPUs 0–7: NVSwitch" in capsys.readouterr().out
    assert len(walks) == len(set(map(id, walks))) <= 3  # a host for each command, and one of the page
