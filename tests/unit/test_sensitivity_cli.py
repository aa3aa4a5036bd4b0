"""`shardwise sensitivity`: the same bytes from the same seed, also resumed; faults at their flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator.cli import main

PRICES = """
currency = "USD"
[[price]]
cluster = "hgx-h100-8"
kind = "on-demand"
per_gpu_hour = 2.0
date = "2026-11-01"
source = "made up"
"""
BASE = ["sensitivity", "--model", "gpt2", "--set", "plan.seq_len=512", "--samples", "8", "--jobs", "1"]
TWO_NODES = ["--what-if", "cluster.num_nodes=2,plan.dp_shard=16"]


@pytest.fixture
def prices(tmp_path: Path) -> str:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES, encoding="utf-8")
    return str(path)


def _told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*BASE, *arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_same_seed_gives_the_same_bytes_resumed_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*BASE, "--vary", "link.intra.bytes_per_s=x0.5..x1.1", *TWO_NODES, "--json"]
    journal = ["--journal", str(tmp_path / "points.db")]
    outs = []
    for more in ([], journal, journal):
        assert main([*arguments, *more]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] == outs[2]
    answer = json.loads(outs[0])
    assert sum(answer["wins"]) == pytest.approx(1)
    assert answer["num_points"] == 16
    assert answer["inputs"][0]["key"] == "link.intra.bytes_per_s"
    # its column is drawn in A and in B; mixed matrices of other inputs repeat A: two alternatives, now, and two ends
    assert answer["num_evaluated"] == 2 * (16 + 1 + 2)
    assert main([*arguments, "--set", "plan.micro_batch_size=2", *journal]) == 3
    assert "another study" in capsys.readouterr().err


def test_a_price_alone_needs_no_simulation(prices: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Money follows the price: from half to twice of it, now at 2."""
    answer = _told(capsys, "--prices", prices, "--vary", "price.per_gpu_hour=x0.5..x2", "--no-errors")
    assert answer["num_evaluated"] == 1
    assert answer["figure"] == "USD a billion tokens"
    (now,), (ends,) = answer["now"], answer["ends"]
    assert ends["low"] == [pytest.approx(now / 2)]
    assert ends["high"] == [pytest.approx(now * 2)]
    assert answer["indices"][answer["alternatives"][0]][0]["total"] == pytest.approx(1, abs=0.4)


def test_a_multiple_is_of_what_the_alternative_has_set(prices: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prices", prices, "--what-if", "price.per_gpu_hour=4", "--vary", "price.per_gpu_hour=x0.5..x2"]
    answer = _told(capsys, *arguments, "--no-errors")
    a, b = answer["now"]
    assert b == pytest.approx(2 * a)
    assert answer["ends"][0]["low"] == [pytest.approx(a / 2), pytest.approx(b / 2)]
    assert answer["flips"] == 0  # both move together


def test_failures_lengthen_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Between failures half as long: more days; twice as long: fewer. run.* is the run's."""
    vary = ["--vary", "run.mtbf=x0.5..x2", "--vary", "run.detect_s=1min..10min"]
    answer = _told(capsys, "--by", "run-days", "--run-tokens", "1T", "--no-errors", *vary)
    assert answer["num_evaluated"] == 1
    (mtbf, detect), (now,) = answer["ends"], answer["now"]
    assert mtbf["low"][0] > now > mtbf["high"][0]
    assert detect["low"][0] < now < detect["high"][0]


def test_a_run_pays_for_the_hosts_that_stand_by(
    prices: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One beside the job's one: twice the cost, and no other number of days."""

    def now(figure: str, spare: int, *more: str) -> float:
        study = tmp_path / f"{spare}.toml"
        study.write_text(
            'model = "gpt2"\ncluster = "hgx-h100-8"\n[plan]\nseq_len = 512\ndp_shard = 8\n'
            f'[run]\ntokens = "1T"\nspare_hosts = {spare}\n',
            encoding="utf-8",
        )
        assert main(["sensitivity", str(study), "--samples", "8", "--jobs", "1", "--by", figure, *more, "--json"]) == 0
        return float(json.loads(capsys.readouterr().out)["now"][0])

    assert now("run-days", 1) == now("run-days", 0)
    assert now("run-cost", 1, "--prices", prices) == pytest.approx(2 * now("run-cost", 0, "--prices", prices))


def test_people_read_the_decision_first(prices: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, *TWO_NODES, "--prices", prices, "--vary", "B:price.per_gpu_hour=0.1..4", "--plain"]) == 0
    out = capsys.readouterr().out
    for words in (
        "The decision flips in",
        "best in",
        "Sobol indices",
        "B:price.per_gpu_hour",
        "A wins",
        "A pays 2.00 USD",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vary", "kernels.gemm"], "is not a range"),
        (["--vary", "kernels.gemm=2..1"], "not below"),
        (["--vary", "link.inter.bytes_per_s=200Gb/s..40GB/s"], "different units"),
        (["--vary", "kernels.gem=1..2"], "--vary kernels.gem: kernels has no 'gem' (did you mean gemm"),
        (["--vary", "price.per_gpu_hour=1..2"], "there are no prices"),
        (["--vary", "run.mtbf=x1..x2"], "does not change a step"),
        (["--vary", "B:kernels.gemm=1..2"], "no such alternative"),
        (["--vary", "kernels.gemm=1..2", "--vary", "kernels.gemm=1..3"], "varies twice"),
        (["--vary", "run.mtbf=x1..x2", "--by", "run-days"], "the length of the run is not given"),
        (["--by", "cost"], "costs need prices"),
        (["--price-kind", "spot"], "there are no prices"),
        (["--samples", "100"], "is not a power of two"),
        (["--no-errors"], "nothing varies"),
    ],
)
def test_faults_are_told_at_their_flags(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, *arguments]) == 3
    assert message in capsys.readouterr().err


def test_a_range_of_a_degree_is_told_what_takes_single_values(capsys: pytest.CaptureFixture[str]) -> None:
    """The ends of tp=1..4 are legal, and nothing between them but 2."""
    assert main([*BASE, "--vary", "plan.tp=1..4"]) == 3
    told = " ".join(capsys.readouterr().err.split())
    assert "must be a whole number" in told
    assert "`explore --vary KEY=V,V` takes single values" in told
