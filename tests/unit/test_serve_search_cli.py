"""`shardwise serve --search` on the command line: the answer, JSON, journal, users, prices, exit codes, faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator import Cluster, InferencePlan, Model, Slo, Workload, search_serving
from simulator.base.errors import ArgumentError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.spec.prices import Prices

UNRATED = [
    *("serve", "--search", "--model", "llama3.2-1b", "--max-gpus", "2", "--requests", "30", "--output", "20"),
    *("--jobs", "1", "--fix", "pp=1"),
]
SMALL = [*UNRATED, "--rate", "30"]
LIMITS = ["--slo-ttft", "p95=100ms", "--slo-tpot", "p95=10ms"]

PRICES = """
currency = "USD"
[[price]]
cluster = "hgx-h100-8"
kind = "on-demand"
per_gpu_hour = 3.6
date = "2026-01-01"
source = "made up"
"""


def test_a_person_reads_how_many_gpus_and_which_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *LIMITS, "--plain"]) == ExitCode.OK
    told = capsys.readouterr().out
    for part in (
        "llama3.2-1b on 1 × hgx-h100-8 at 30 requests/s: 1 GPU (1 node), 1 × (tp 1)",
        "ttft p95",
        "tokens/s/user",
        "prompts 1 × (tp 1) → answers 1 × (tp 1)",
        "Equal engines are simulated once",
        "1 played whole",
        "The best, as flags of `shardwise serve`:",
    ):
        assert part in told


def test_json_prices_and_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    arguments = [*SMALL, *LIMITS, "--json", "--prices", str(prices)]
    assert main(arguments) == ExitCode.OK
    first = capsys.readouterr().out
    told = json.loads(first)
    assert told["schema_version"] == 1
    assert told["inputs"]["slo"][0] == {"name": "ttft", "percentile": 95.0, "limit_s": 0.1}
    assert told["gpus"] == told["plans"][0]["gpus"] == 1
    for row in told["plans"]:
        assert all(one["held"] for one in row["attainments"])
        assert row["tokens_per_s_gpu"] == pytest.approx(30 * 20 / row["gpus"])
        # 3.6 USD an hour are 0.001 a second
        assert row["million_output_tokens"] == pytest.approx(0.001 * row["gpus"] / (30 * 20) * 1e6)
    assert told["counts"]["met"] >= len(told["plans"])
    assert main([*arguments, "--jobs", "2"]) == ExitCode.OK
    assert capsys.readouterr().out == first


def test_a_journal_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = ["--journal", str(tmp_path / "journal"), "--json"]
    assert main([*SMALL, *LIMITS, *journal]) == ExitCode.OK
    first = capsys.readouterr().out
    assert main([*SMALL, *LIMITS, *journal]) == ExitCode.OK
    assert capsys.readouterr().out == first
    assert main([*SMALL, "--slo-ttft", "1s", *journal]) == ExitCode.BAD_INPUT
    assert "belongs to another study" in capsys.readouterr().err


def test_users_give_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*UNRATED, *LIMITS, "--json", "--users", "1800", "--every", "60s", "--top", "1"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["inputs"]["workload"]["rate"] == 30
    assert main([*SMALL, *LIMITS, "--users", "5", "--every", "0s"]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "--every: must be above zero" in told
    assert "--users: gives the rate, and so does --rate" in told
    assert main(["serve", "--users", "5"]) == ExitCode.BAD_INPUT
    assert "--users: says half of a rate (--every 60s)" in capsys.readouterr().err


def test_no_plan_meets_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--slo-tpot", "p90=0.1ms", "--plain"]) == ExitCode.DOES_NOT_FIT
    told = capsys.readouterr().out
    assert "no layout meets the limits" in told
    assert "Nearest: " in told
    assert "tpot p90: " in told
    assert "above 100 us; 0.0% of requests are within" in told
    assert "To try: narrower weights" in told


def test_more_than_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*UNRATED, "--rate", "90000", "--slo-ttft", "1s", "--plain"]) == ExitCode.DOES_NOT_FIT
    assert "The queue grows without end: no layout takes 90,000 requests/s on fewer than" in capsys.readouterr().out
    assert main(["serve", "--search", "--model", "llama3-405b", "--slo-ttft", "1s", "--plain"]) == ExitCode.DOES_NOT_FIT
    assert "No layout fits in memory" in capsys.readouterr().out


def test_every_fault_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        *("serve", "--search", "--rate", "-1", "--slo-ttft", "p0=1s", "--slo-tpot", "-5ms", "--interval"),
        *("--fix", "tpp=2", "--fix", "weights=int3,fp8", "--fix", "stack=a", "--fix", "tp", "--model", "nope"),
    ]
    assert main(wrong) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    for part in (
        "--rate: must be at least 0; it is -1",
        "--slo-ttft: p0 is no percentile",
        "--slo-tpot: a limit must be above zero; it is -5ms",
        "--interval: is of one plan",
        "--fix tpp: is no field of a serving plan",
        "--fix weights: must be",
        "--fix stack: cannot be searched",
        "--fix tp: has no value",
        "nope",
    ):
        assert part in told
    assert main(["serve", "--search", "--rate", "0"]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "a search needs a limit to meet" in told
    assert "no rate to find GPUs for" in told
    assert main(["serve", "--gpus-needed", "--top", "3"]) == ExitCode.BAD_INPUT
    assert "--gpus-needed: belongs to --search" in capsys.readouterr().err
    assert main(["serve", "--search", "--slo-ttft", "1s", "--tp", "2", "--fix", "tp=4"]) == ExitCode.BAD_INPUT
    assert "--fix tp: is given twice: 2 too" in capsys.readouterr().err
    assert main(["serve", "--search", "--slo-ttft", "1s", "--tp", "3"]) == ExitCode.BAD_INPUT
    assert "tp = 3 does not divide" in capsys.readouterr().err


def test_from_python(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    nouns = (
        Model.load("llama3.2-1b"),
        Cluster.load("hgx-h100-8"),
        Workload(rate=20, num_requests=30, output_tokens=20),
    )
    report = search_serving(
        *nouns,
        Slo(ttft_s={95: 0.1}),
        plan=InferencePlan(tp=2),
        fix={"pp": 1},
        disaggregated="no",
        prices=Prices.load(prices),
        max_gpus=4,
    )
    assert report.best is not None
    assert report.best.answer.plan.tp == 2
    assert [row.answer.num_devices for row in report.rows] == [2]
    assert report.best.million_output_tokens == pytest.approx(0.002 / 400 * 1e6)
    with pytest.raises(ArgumentError) as caught:
        search_serving(*nouns, Slo(ttft_s=1), fix={"tpp": 1, "weights": ["int3"]}, disaggregated="maybe")  # type: ignore[arg-type]
    assert len(caught.value.faults) == 3
