"""`shardwise goodput`: what people and programs read, and what bad input is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.cli import ExitCode, main

STUDY = """
model = "llama3-8b"
cluster = "hgx-h100-8"
nodes = 4
[plan]
zero = 3
recompute = "full"
seq_len = 8192
[checkpoint]
storage_bytes_per_s = "2GB/s"
[run]
tokens = "100B"
replicas = 20
"""


@pytest.fixture
def study(tmp_path: Path) -> str:
    file = tmp_path / "study.toml"
    file.write_text(STUDY)
    return str(file)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["goodput", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_holds_the_run_and_the_same_input_gives_the_same_bytes(
    study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = told(capsys, study, "--json", "--price-per-gpu-hour", "2.5")
    again = told(capsys, study, "--json", "--price-per-gpu-hour", "2.5")[1]
    document = json.loads(out)
    assert (code, out) == (ExitCode.OK, again)
    assert document["tokens"] == 10**11
    assert document["steps"] == -(-(10**11) // (32 * 8192))
    assert document["days"]["p5"] <= document["days"]["p50"] <= document["days"]["p95"]
    dollars = document["days"]["p50"] * 24 * 32 * 2.5
    assert document["dollars"]["p50"] == pytest.approx(dollars)
    assert sum(part["share"] for part in document["parts"]) == pytest.approx(1)
    assert [i["interval_s"] for i in document["intervals"]] == sorted(i["interval_s"] for i in document["intervals"])


def test_another_seed_draws_other_failures(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (json.loads(told(capsys, study, "--json", "--seed", seed)[1]) for seed in ("1", "2"))
    assert first["interruptions"] != second["interruptions"]


def test_without_failures_all_of_the_time_trains_or_saves(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(told(capsys, study, "--json", "--failures", "none", "--checkpoint-interval", "30min")[1])
    assert document["mtbf_s"] is None
    assert {part["part"] for part in document["parts"]} == {"training", "checkpoints"}


def test_the_report_says_days_and_what_interrupts(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = told(capsys, study, "--plain")
    assert code == ExitCode.OK
    assert err == ""
    for words in ("days", "goodput", "Interruptions", "one every", "Daly", "arXiv 2407.21783"):
        assert words in out


def test_every_fault_is_told_at_its_flag_or_key(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = told(
        capsys, study, "--model", "nope", "--tokens", "1Q", "--detect", "5", "--failures", "lama3", "--replicas", "0"
    )
    assert (code, out) == (ExitCode.BAD_INPUT, "")
    for place in ("model", "--tokens", "--detect", "--failures", "--replicas"):
        assert place in err


def test_a_goal_is_needed_and_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "either tokens or steps" in told(capsys)[2]
    assert "either tokens or steps" in told(capsys, "--tokens", "1B", "--steps", "5")[2]


def test_a_step_that_does_not_fit_is_the_answer(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = told(capsys, study, "--model", "llama3-70b", "--recompute", "none", "--micro-batch-size", "8")
    assert (code, out) == (ExitCode.DOES_NOT_FIT, "")
    assert "does not fit" in err
