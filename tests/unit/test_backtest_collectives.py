"""Backtest of tables of collectives: the hook, the rules, what is scored, the noise floor."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.readers.measured_table import COLLECTIVES, read_collectives, read_measured
from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster
from simulator.studies.backtest import BacktestReport, CollectivesReport, run
from simulator.studies.backtest.collective_rules import _LOGGED, degraded, resolve
from simulator.studies.backtest.collectives import evaluate_row
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.rows import CollectiveRow
from simulator.work.collectives import choose

PLAIN = Path(__file__).resolve().parents[2] / "experiments/measured/collectives-plain.csv.gz"
CARRIED = Path(__file__).resolve().parents[2] / "experiments/measured/collectives.csv.gz"
TABLE = Path(__file__).resolve().parents[3] / "shared/data/collectives.csv"


def row(**columns: Any) -> CollectiveRow:
    usual = {"collective": "all_reduce", "gpu": "H100-SXM5-80GB", "n_gpus": 8, "n_nodes": 1, "size_bytes": 2**30}
    return CollectiveRow(**({"line": 2, "time_us": 4000.0} | usual | columns))


def write(path: Path, *rows: dict[str, object]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, tuple(COLLECTIVES.parsers), restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


CELLS: dict[str, object] = {
    "source": "s",
    "collective": "all_reduce",
    "gpu": "H100-SXM5-80GB",
    "n_gpus": 8,
    "n_nodes": 1,
    "size_bytes": 2**20,
    "time_us": 50,
}


def test_a_row_is_predicted_as_the_cluster_is(tmp_path: Path) -> None:
    report = run(read_measured(write(tmp_path / "t.csv", CELLS)))
    assert isinstance(report, CollectivesReport)
    (outcome,) = report.outcomes
    shape = GroupShape(num_ranks=8, num_nodes=1, ranks_per_node=8, num_groups_per_node=1, spans_domain=False)
    choice = choose("all_reduce", 2**20, shape, Cluster.load("dgx-h100-8"))
    assert (outcome.predicted_time_s, outcome.algorithm, outcome.protocol) == (
        float(choice.time_s),
        choice.algorithm,
        choice.protocol,
    )
    assert outcome.error == pytest.approx(float(choice.time_s) / 50e-6 - 1)


def test_other_tables_go_the_usual_way(tmp_path: Path) -> None:
    table = TABLE.parent / "memory.csv"
    if not table.is_file():
        pytest.skip(f"{table} is not here")
    head = tmp_path / "head.csv"
    head.write_text("\n".join(table.read_text().splitlines()[:2]) + "\n")
    assert isinstance(run(read_measured(head)), BacktestReport)


def test_json_rows_stand_in_the_tables_order_with_bad_and_refused_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write(
        tmp_path / "t.csv",
        CELLS,
        CELLS | {"time_us": "fast"},
        CELLS | {"gpu": "Abacus 9000"},
        CELLS | {"n_gpus": ""},
        CELLS | {"size_bytes": ""},
        CELLS | {"collective": "all_rduce"},
        CELLS | {"size_bytes": 2**26},
    )
    assert main(["backtest", str(table), "--json"]) == ExitCode.OK
    data = json.loads(capsys.readouterr().out)
    assert [r["status"] for r in data["rows"]] == ["ok", "bad", "refused", "refused", "bad", "bad", "ok"]
    assert [r["line"] for r in data["rows"]] == list(range(2, 9))
    assert data["refused"] == {"unknown GPU": 1, "number of ranks": 1}
    assert "line 7: collective" in data["rows"][5]["reason"]
    wanted = {"predicted_time_s", "measured_time_s", "algorithm", "protocol", "status"}
    assert all(wanted <= set(r) for r in data["rows"])
    assert [g["size_class"] for g in data["groups"]] == ["64 KiB – 64 MiB", "≥ 64 MiB"]
    assert main(["backtest", str(table), "--plain"]) == ExitCode.OK
    assert "7 rows" in capsys.readouterr().out


def test_repeats_give_the_noise_floor_and_equal_lines_count_once(tmp_path: Path) -> None:
    """Times 100, 110, 100 us: each against the median of the other two: 100/105, 110/100, 100/105."""
    rows = [CELLS | {"time_us": t, "notes": f"repeat {n}"} for t, n in ((100, 1), (110, 2), (100, 3), (100, 3))]
    report = run(read_measured(write(tmp_path / "t.csv", *rows)))
    assert isinstance(report, CollectivesReport)
    assert [o.duplicate_of for o in report.outcomes] == [None, None, None, 4]
    assert [o.noise for o in report.outcomes] == [
        pytest.approx(100 / 105 - 1),
        pytest.approx(0.1),
        pytest.approx(100 / 105 - 1),
        None,
    ]
    (group,) = report.groups
    assert (group.score.n, group.noise_rows) == (3, 3)
    assert group.noise_floor == pytest.approx(1 - 100 / 105)


def test_degraded_runs_are_flagged_and_not_scored(tmp_path: Path) -> None:
    table = write(tmp_path / "t.csv", CELLS | {"n_gpus": 16, "n_nodes": 2, "notes": "reported as degraded"})
    report = run(read_measured(table))
    assert isinstance(report, CollectivesReport)
    (outcome,) = report.outcomes
    assert (outcome.status, outcome.scored, report.groups) == ("ok", False, ())
    assert outcome.degraded
    assert degraded(row(degraded="two hosts with 4 GPUs each")) == "two hosts with 4 GPUs each"
    assert not degraded(row(notes="2 DGX H100 hosts"))


@pytest.mark.parametrize(
    ("notes", "kind", "rdma"),
    [
        ("2x p4de.24xlarge EFA (4x100Gb/s)", "efa", True),
        ("HPE Slingshot 2 NICs/node; NCCL default (TCP over Slingshot)", "sockets", False),
        ("HPE Slingshot 2 NICs/node; GDR_LEVEL=PHB CROSS_NIC=1", "sockets", False),
        ("HPE Slingshot 2 NICs/node; AWS Libfabric(OFI CXI) plugin", "slingshot", True),
        ("HPE Slingshot 2 NICs/node; env4: env3 + FI_CXI tuning", "slingshot", True),
        ("GKE A3 High TCPX (4 data NICs x200Gb/s)", "tcpx", True),
        ("OCI BM.GPU.H100.8 RoCE", "roce", True),
        ("2x DGX A100, 8x200G CX-6 HDR", "infiniband", True),
    ],
)
def test_the_network_that_the_notes_name(notes: str, kind: str, rdma: bool) -> None:  # noqa: FBT001
    call = resolve(row(n_gpus=16, n_nodes=2, notes=notes, inter_link_gbps_per_node=800.0))
    assert call.cluster.inter is not None
    assert (call.network, call.cluster.node_bytes_per_s) == (kind, pytest.approx(100e9))
    if "TCPX" not in notes:  # the preset says how its NICs work
        assert call.cluster.inter.rdma is rdma
    assert call.assumed == ""


def test_what_the_row_leaves_open_is_said() -> None:
    assert "network and its speed" in resolve(row(n_gpus=16, n_nodes=2)).assumed
    assert resolve(row()).assumed == ""


def test_links_inside_a_node() -> None:
    mesh = resolve(
        row(gpu="NVIDIA A100-SXM4-40GB", n_gpus=4, intra_link="NVLink3 4-GPU full mesh (HGX A100-4)")
    ).cluster
    assert (mesh.intra.shape, mesh.gpus_per_node) == ("mesh", 4)
    pairs = resolve(row(gpu="A100-PCIe-80GB", n_gpus=4, intra_link="NVLink bridge pairs + PCIe")).cluster
    assert (pairs.intra.shape, pairs.islands()[0]) == ("pairs", (0, 1))
    dgx2 = resolve(row(gpu="V100-SXM3-32GB (DGX-2 class)", n_gpus=12, intra_link="NVSwitch/NVLink2")).cluster
    assert (dgx2.intra.shape, dgx2.gpus_per_node) == ("switch", 16)


def test_what_nccl_was_told_and_what_a_log_says() -> None:
    forced = resolve(row(algo_env="Ring", proto_env="LL")).nccl.environment
    assert forced.allows("all_reduce", "ring", "ll")
    assert not forced.allows("all_reduce", "ring", "simple")
    assert resolve(row(notes="NCCL_NVLS_ENABLE=0")).nccl.environment.nvls == 0
    assert resolve(row(notes="NCCL_NVLS_ENABLE=unset")).nccl == resolve(row()).nccl
    logged = resolve(row(algo_env="NVLS", notes="default algo as picked by NCCL"))
    assert (logged.nccl, logged.logged) == (resolve(row()).nccl, "nvls")
    software = resolve(row(notes="env5: env4 + FI_CXI_RX_MATCH_MODE=software, RDZV alt_read")).nccl.environment
    assert (software.transport, software.cross_nic) == ({"FI_CXI_RX_MATCH_MODE=software"}, 1)
    assert evaluate_row(row(algo_env="Ring")).algorithm == "ring"


def test_a_machines_total_may_count_its_hosts_card() -> None:
    notes = "GCP A3 Mega GPUDirect-TCPXO 1.8 Tbps"
    mega = resolve(row(n_gpus=16, n_nodes=2, notes=notes, inter_link_gbps_per_node=1800.0))
    assert (mega.network, mega.cluster.node_bytes_per_s) == ("tcpxo", pytest.approx(200e9))


def test_settings_that_nccl_could_not_read_are_refused() -> None:
    with pytest.raises(RefusedError, match="NCCL_ALGO"):
        resolve(row(algo_env="Star"))


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"gpu": "Intel Arc Pro B60"}, "unknown GPU"),
        ({"n_gpus": None}, "number of ranks"),
        ({"n_gpus": 7, "n_nodes": 2}, "uneven ranks"),
        ({"n_gpus": 1}, "one rank"),
        ({"n_gpus": 40, "n_nodes": 2}, "node of another size"),
    ],
)
def test_what_cannot_be_placed_is_refused(columns: dict[str, object], kind: str) -> None:
    with pytest.raises(RefusedError) as caught:
        resolve(row(**columns))
    assert caught.value.kind == kind
    assert evaluate_row(row(**columns)).status == "refused"


def test_the_published_table() -> None:
    if not TABLE.is_file():
        pytest.skip(f"{TABLE} is not here")
    table = read_measured(TABLE)
    report = run(table)
    assert isinstance(report, CollectivesReport)
    assert not isinstance(report, BacktestReport)
    assert [o.line for o in report.outcomes] == [r.line for r in table.rows]
    assert report.count("bad") == report.count("failed") == 0
    # 126 rows of a GPU without NCCL, 116 of an unnamed one, 10 without a number of ranks (README of the data)
    assert report.refused == {"unknown GPU": 242, "number of ranks": 10}
    # issue 290's 22 + 22 rows of two nodes; the carried table's own column knows 62 of a 2 × 4 file and 240 of one NCCL more
    assert sum(o.degraded is not None for o in report.outcomes) == 44
    assert sum(row.degraded != "" for row in read_collectives(PLAIN) if isinstance(row, CollectiveRow)) == 346
    assert all(o.predicted_time_s for o in report.outcomes if o.status == "ok")


def test_the_choice_is_the_logs_wherever_a_log_names_it(tmp_path: Path) -> None:
    """The carried table's rows whose source printed what NCCL picked."""
    with gzip.open(CARRIED, "rt", newline="", encoding="utf-8") as file:
        told = [one for one in csv.DictReader(file) if one["algo_env"] and _LOGGED.search(one["notes"])]
    assert len(told) >= 7
    report = run(
        read_measured(
            write(tmp_path / "told.csv", *({k: one[k] for k in tuple(COLLECTIVES.parsers) if k in one} for one in told))
        )
    )
    assert isinstance(report, CollectivesReport)
    rows, agree = report.logged
    assert rows == agree >= 7
