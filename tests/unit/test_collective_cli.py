"""`shardwise collective`: the table, its bandwidths, where the choice changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.cli.collective import sizes_of
from simulator.formats.writers.cluster_toml import cluster_toml
from simulator.formats.writers.collective_table import bus_factor
from simulator.spec.cluster import Cluster
from simulator.work.collectives import KINDS


def swept(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["collective", *arguments.split(), "--json"]) == ExitCode.OK
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_31_sizes_from_8_bytes_to_8_gigabytes() -> None:
    sizes = sizes_of("8B:8GB", 2)
    assert (len(sizes), sizes[0], sizes[-2], sizes[-1]) == (31, 8, 2**32, 8 * 10**9)
    assert sizes_of("8B:8GiB", 2) == tuple(2**k for k in range(3, 34))
    assert sizes_of("1MiB", 2) == (2**20,)


@pytest.mark.parametrize("text", ["8:9", "0B:8B", "8GB:8B", "1B:9PB", "", "a:b:c"])
def test_sizes_that_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        sizes_of(text, 2)


def test_too_many_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="a larger factor"):
        sizes_of("1kB:1TB", 1.01)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", 2 * 7 / 8),
        ("all_gather", 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_to_all", 7 / 8),
        ("broadcast", 1),
        ("reduce", 1),
        ("send_recv", 1),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(kind: str, factor: float) -> None:
    assert bus_factor(kind, 8) == factor


def test_ideal_ring_reaches_the_port(capsys: pytest.CaptureFixture[str]) -> None:
    """2(n−1)/n·S over 450 GB/s a port is a bus bandwidth of 450 GB/s at every size."""
    data = swept("all_reduce --calibration ideal --size 1MB:1GB", capsys)
    assert {row["algorithm"] for row in data["rows"]} == {"ring"}
    assert all(row["bus_bytes_per_s"] == pytest.approx(450e9) for row in data["rows"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_over_two_nodes(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = swept(f"{kind} --nodes 2 --size 1KiB:1GiB --factor 1024", capsys)
    times = [row["time_s"] for row in data["rows"]]
    assert data["num_ranks"] == 16
    assert 0 < times[0] < times[-1]


def test_crossovers_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    first = swept("all_reduce", capsys)["crossovers"][0]
    size = first["size_bytes"]
    for at, name in ((size - 1, first["before"]), (size, first["after"])):
        (row,) = swept(f"all_reduce --size {at}B", capsys)["rows"]
        assert f"{row['algorithm']}/{row['protocol']}" == name


def test_a_row_of_a_new_choice_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", "allreduce", "--plain"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    marked = [line for line in lines if line.startswith(">")]
    assert marked
    assert len(marked) == 2 * sum(" below" in line for line in marked)


def test_a_group_lies_on_the_first_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert swept("all_gather --nodes 4 --group 4 --size 1MiB", capsys)["num_nodes"] == 1
    assert swept("all_gather --nodes 4 --group 9 --size 1MiB", capsys)["num_nodes"] == 2


def test_a_plot(tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    assert main(["collective", "all_reduce", "--size", "1MiB:4MiB", "--plot", str(picture)]) == ExitCode.OK
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert (
        main(["collective", "all_reduce", "--size", "1MiB", "--plot", str(tmp_path / "x.nope")]) == ExitCode.BAD_INPUT
    )


@pytest.mark.parametrize(
    "arguments", ["all_rduce", "all_reduce --group 9", "all_reduce --cluster nope", "all_reduce --size 3"]
)
def test_bad_input(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", *arguments.split()]) == ExitCode.BAD_INPUT
    assert not capsys.readouterr().out


def test_groups_side_by_side_share_what_the_cards_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank a node: two NICs for eight groups, a fourth of a NIC each; the table says by what path."""
    file = tmp_path / "box.toml"
    text = cluster_toml(Cluster.load("dgx-a100-80-8"))
    cards = "cards = [{ gpus = [0] }, { gpus = [1] }]\n"
    file.write_text(text.replace("num_nics = 8\n", f"num_nics = 2\n{cards}"), encoding="utf-8")
    args = ["collective", "all_gather", "--cluster", str(file), "--nodes", "2", "--size", "1GB"]
    assert main([*args, "--per-node", "1", "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["cards"] == {"bytes_per_s": 25e9 / 4, "word": "PHB", "in_memory": 0.75, "off_rail": 0}
    assert main([*args, "--per-node", "1", "--plain"]) == ExitCode.OK
    assert "75% of it through host memory" in capsys.readouterr().out
    assert main([*args, "--per-node", "9"]) == ExitCode.BAD_INPUT
    assert "--per-node" in capsys.readouterr().err


LOG = """# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid   6899 on node-a device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   6900 on node-b device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
        1024           256     float     sum      -1    12.00    0.09    0.09      0    11.00    0.09    0.09      0
     1048576        262144     float     sum      -1    20.00   52.43   52.43      0    20.00   52.43   52.43      0
"""


def test_a_log_of_nccl_tests_stands_beside_the_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    log.write_text(LOG, encoding="utf-8")
    data = swept(f"all_reduce --cluster dgx-h100-8 --compare {log}", capsys)
    assert (data["num_ranks"], data["num_nodes"]) == (2, 2)
    assert [row["size_bytes"] for row in data["rows"]] == [1024, 2**20]
    assert [row["measured_time_s"] for row in data["rows"]] == pytest.approx([12e-6, 20e-6])
    for row in data["rows"]:
        assert row["error"] == pytest.approx(row["time_s"] / row["measured_time_s"] - 1)
    assert (
        main(["collective", "all_reduce", "--cluster", "dgx-h100-8", "--compare", str(log), "--plain"]) == ExitCode.OK
    )
    assert "against the log: median error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("all_gather --compare LOG", "no row of all_gather"),
        ("all_reduce --nodes 1 --compare LOG", "2 ranks on 2 nodes"),
        ("all_reduce --compare LOG --group 4", "cannot be combined"),
        ("all_reduce --compare nothing.txt", "cannot be read"),
    ],
)
def test_logs_that_do_not_fit_are_refused(
    arguments: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.txt"
    log.write_text(LOG, encoding="utf-8")
    assert main(["collective", *arguments.replace("LOG", str(log)).split()]) == ExitCode.BAD_INPUT
    assert words in capsys.readouterr().err


def test_leaves_of_the_cluster_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    line = "all_gather --nodes 2 --size 1GiB"
    whole = swept(line, capsys)["rows"][0]["time_s"]
    half = swept(f"{line} --set cluster.inter.nic_bytes_per_s=x0.5", capsys)["rows"][0]["time_s"]
    assert 1.9 < half / whole < 2.1
