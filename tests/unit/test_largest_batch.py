"""The largest micro-batch that fits: predicted in full it fits, and one sequence more does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.base.fit import Fit
from simulator.cli import main
from simulator.predict import predict
from simulator.predict.largest_batch import LargestBatch, _largest, largest_batch
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan

MODEL = Model.load("llama3.2-1b")
NODE = Cluster.load("hgx-h100-8")
FLAGS = ("predict", "--largest-batch", "--plain")
ASKED = (*FLAGS, "--model", "llama2-13b", "--cluster", "dgx-a100-80-8", "--nodes", "2", "--zero", "3")


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_shard=8, zero=3, seq_len=8192),
        Plan(dp_shard=8, zero=3, seq_len=4096, num_micro_batches=4).copy_with(recompute="full"),
        Plan(tp=2, pp=2, dp_replicate=2, num_micro_batches=4, seq_len=8192, zero=0),
    ],
)
def test_what_is_found_fits_and_one_sequence_more_does_not(plan: Plan) -> None:
    found = largest_batch(MODEL, plan, NODE)

    def verdict(size: int) -> Fit:
        return predict(MODEL, plan.copy_with(micro_batch_size=size), NODE).verdict

    assert found.micro_batch_size is not None
    assert found.plan == plan.copy_with(micro_batch_size=found.micro_batch_size)
    assert verdict(found.micro_batch_size) is Fit.FITS
    if found.tight is not None:
        assert verdict(found.micro_batch_size + 1) is Fit.TIGHT
        assert verdict(found.tight) is Fit.TIGHT
    last = found.tight or found.micro_batch_size
    assert verdict(last + 1) is Fit.DOES_NOT_FIT
    assert found == largest_batch(MODEL, plan.copy_with(micro_batch_size=3), NODE)  # its own size is not looked at


@pytest.mark.parametrize("known", [0, 1, 5])
@pytest.mark.parametrize("largest", [5, 6, 7, 8, 31, 32, 1000])
def test_bisection_finds_the_border_in_few_looks(known: int, largest: int) -> None:
    looks: list[int] = []

    def good(size: int) -> bool:
        looks.append(size)
        return size <= largest

    assert _largest(good, known) == largest
    assert len(looks) <= 2 * (largest - known + 1).bit_length() + 1


@pytest.mark.parametrize(
    ("sure", "tight", "words"),
    [
        (6, 7, "largest micro_batch_size that surely fits: 6 (global batch 96 sequences); 7 is tight, 8 does not fit"),
        (6, None, "largest micro_batch_size that surely fits: 6 (global batch 96 sequences); 7 does not fit"),
        (None, 2, "no micro_batch_size surely fits; 2 is tight, 3 does not fit"),
        (None, None, "not even micro_batch_size 1 fits"),
    ],
)
def test_it_is_told_in_one_line(sure: int | None, tight: int | None, words: str) -> None:
    plan = Plan(dp_shard=16, zero=3, micro_batch_size=sure or 1)
    assert LargestBatch(plan=plan, micro_batch_size=sure, tight=tight).words == words


def test_the_report_is_that_of_the_winner_and_json_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--json"]) == ExitCode.OK
    out, err = capsys.readouterr()
    document = json.loads(out)
    largest = document.pop("largest_batch")
    size = largest["micro_batch_size"]
    assert document["verdict"] == Fit.FITS
    assert document["inputs"]["plan"]["micro_batch_size"] == size
    assert largest["global_batch_size"] == 16 * size
    assert err.startswith(f"shardwise: largest micro_batch_size that surely fits: {size} (global batch {16 * size} ")
    without = [one for one in ASKED if one != "--largest-batch"]
    assert main([*without, "--micro-batch-size", str(size), "--json"]) == ExitCode.OK
    usual = json.loads(capsys.readouterr().out)
    document.pop("sources"), usual.pop("sources")
    assert document == usual


def test_where_none_fits_the_report_is_of_one_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--set", "device.memory_bytes=8GiB"]) == ExitCode.DOES_NOT_FIT
    out, err = capsys.readouterr()
    assert err == "shardwise: not even micro_batch_size 1 fits\n"
    assert out.startswith("DOES NOT FIT")
    assert "micro_batch_size = 1 (--largest-batch)" in out


def test_the_size_that_a_plan_file_leaves_open_is_not_said_to_be_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "zero3.json"
    file.write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    assert main([*FLAGS, "--plan", str(file), "--model", "llama3.2-1b", "--seq-len", "4096", "--json"]) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    said = [one["detail"] for one in document["sources"] if "micro_batch_size" in one["what"] + one["detail"]]
    assert said == [f"micro_batch_size = {document['largest_batch']['micro_batch_size']} (--largest-batch)"]


def test_a_size_that_is_given_is_a_fault_told_with_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--micro-batch-size", "3", "--set", "plan.micro_batch_size=4", "--memory", "out.txt")
    assert main([*FLAGS, *given]) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert not out
    assert "--micro-batch-size 3: --largest-batch finds the size itself" in err
    assert "--set plan.micro_batch_size=4: --largest-batch finds" in err
    assert "--memory out.txt" in err


def test_a_captured_program_has_its_own_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--program", f"{tmp_path}/run.capture.gz"]) == ExitCode.BAD_INPUT
    assert "--largest-batch: a captured program has its own" in capsys.readouterr().err
