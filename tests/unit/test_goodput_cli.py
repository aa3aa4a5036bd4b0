"""`shardwise goodput`: what people and programs read, and what bad input is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator import Cluster, Model, Plan, predict
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.studies.goodput import Failures, LongRun, answer, daly_s, goodput
from simulator.work.checkpoint import Saving

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
    played_s = sum(part["seconds"] for part in document["parts"])
    assert document["expected_days"] == pytest.approx(played_s / 86400)


def test_no_interval_is_played_that_is_shorter_than_a_step(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(study).write_text(STUDY.replace("2GB/s", "1000TB/s").replace("seq_len", "num_micro_batches = 16\nseq_len"))
    document = json.loads(told(capsys, study, "--json", "--checkpoint-interval", "1ms")[1])
    assert document["saving"]["blocking_s"] < document["step_s"] / 2
    assert min(one["interval_s"] for one in document["intervals"]) >= document["step_s"]


def test_days_spread_to_either_side_as_the_step_s_own_interval_does() -> None:
    """Without failures and checkpoints a run is its steps: nine in ten take from the one end of a step's interval to the other."""
    cluster = Cluster.load("hgx-h100-8")
    step = predict(Model.load("llama3-8b"), Plan(dp_shard=8, zero=3, seq_len=8192), cluster)
    step = replace(step, low_s=0.9 * step.step_s, high_s=2.5 * step.step_s)
    free = Saving(**dict.fromkeys(("state_bytes", "extra_hbm_bytes", "host_bytes"), 0),
                  **dict.fromkeys(("gather_s", "copy_s", "write_s", "blocking_s"), 0.0), mode="free")  # fmt: skip
    run = LongRun(steps=10**6, failures=Failures(preset="none"), replicas=10_000, checkpoint_interval_s=1e9)
    days = goodput(step, run, free, 0.0, cluster=cluster).days
    alone = 1e6 * step.step_s / 86_400
    found = [one / alone for one in (days.p5, days.p50, days.p95)]
    assert found == pytest.approx([0.9, 1.0, 2.5], rel=0.03)


def test_the_report_says_days_and_what_interrupts(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = told(capsys, study, "--plain")
    assert code == ExitCode.OK
    assert err == ""
    for words in ("days", "goodput", "Interruptions", "one every", "Daly", "arXiv 2407.21783"):
        assert words in out


def test_time_between_interruptions_is_said_to_leave_out_slow_hosts(
    study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """These are counted among the run's interruptions, and have no rate: they depend on when they are seen."""
    words = (study, "--straggler-mtbf", "100h", "--straggler-slowdown", "0.01", "--plain")
    shown = told(capsys, *words)[1]
    assert "slow host  " in shown
    assert "one every, slow hosts apart  " in shown
    assert "slow hosts apart" not in told(capsys, study, "--plain")[1]


def test_every_fault_is_told_at_its_flag_or_key(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = told(
        capsys, study, "--model", "nope", "--tokens", "1Q", "--detect", "5", "--failures", "lama3", "--replicas", "0"
    )
    assert (code, out) == (ExitCode.BAD_INPUT, "")
    for place in ("model", "--tokens", "--detect", "--failures", "--replicas"):
        assert place in err


def test_leaves_of_the_run_are_set_as_any_other(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--steps", "5000", "--replicas", "3", "--failures", "none", "--json"
    settings = [part for pair in ("steps=5000", "replicas=3", "failures=none") for part in ("--set", f"run.{pair}")]
    by_flag, by_setting = told(capsys, study, *flags), told(capsys, study, *settings, "--json")
    assert by_flag == by_setting
    assert json.loads(by_setting[1])["inputs"]["run"]["steps"] == 5000
    code, out, err = told(capsys, study, "--set", "run.tokns=1B", "--set", "run.replicas=x", "--set", "plan.tpp=2")
    assert (code, out) == (ExitCode.BAD_INPUT, "")
    for line in (
        "--set run.tokns: unknown key (did you mean tokens?)",
        '--set run.replicas: must be a whole number; it is the text "x"',
        "plan.tpp",
    ):
        assert line in err


def test_a_goal_is_needed_and_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "either tokens or steps" in told(capsys)[2]
    assert "either tokens or steps" in told(capsys, "--tokens", "1B", "--steps", "5")[2]


def test_a_step_that_does_not_fit_is_the_answer(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = told(capsys, study, "--model", "llama3-70b", "--recompute", "none", "--micro-batch-size", "8")
    assert (code, out) == (ExitCode.DOES_NOT_FIT, "")
    assert "does not fit" in err
    code, out, _ = told(
        capsys, study, "--model", "llama3-70b", "--recompute", "none", "--micro-batch-size", "8", "--json"
    )
    assert code == ExitCode.DOES_NOT_FIT
    assert json.loads(out)["verdict"] == "does not fit"
    assert "too much" in json.loads(out)["cause"]


PRICES = """
currency = "EUR"
[[price]]
cluster = "hgx-h100-8"
kind = "spot"
per_gpu_hour = 1.5
date = "2026-11-01"
source = "made up"
"""


def test_money_comes_from_the_price_file(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES, encoding="utf-8")
    document = json.loads(told(capsys, study, "--json", "--prices", str(prices))[1])
    (cost,) = document["costs"]
    assert (cost["kind"], cost["currency"]) == ("spot", "EUR")
    for level in ("p5", "p50", "p95"):
        assert cost["cost"][level] == pytest.approx(document["days"][level] * 24 * 32 * 1.5)
    assert "EUR" in told(capsys, study, "--plain", "--prices", str(prices))[1]
    code, _, err = told(capsys, study, "--prices", str(prices), "--cluster", "dgx-a100-80-8", "--detect", "5")
    assert code == ExitCode.BAD_INPUT
    assert "no price of dgx-a100-80-8" in err
    assert "--detect" in err


def test_hosts_that_stand_by_are_paid_for(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing fails, two of them beside the job's four cost half as much again, and change no day."""
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES, encoding="utf-8")
    words = (study, "--failures", "none", "--json", "--prices", str(prices), "--price-per-gpu-hour", "2.5")
    none, two = (json.loads(told(capsys, *words, "--spare-hosts", count)[1]) for count in ("0", "2"))
    assert none["days"] == two["days"]
    assert two["dollars"]["p50"] == pytest.approx(1.5 * none["dollars"]["p50"])
    assert two["costs"][0]["cost"]["p95"] == pytest.approx(1.5 * none["costs"][0]["cost"]["p95"])


def test_spot_hosts_that_are_announced_lose_no_work(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    """4 hosts, each taken away every 2 h; one is found within 10 min. With notice for a checkpoint no work is lost."""
    spot = ["--json", "--failures", "none", "--spot-mtbf", "2h", "--repair", "10min"]
    at_once, announced = (json.loads(told(capsys, study, *spot, *more)[1]) for more in ([], ["--spot-notice", "1h"]))
    for document in (at_once, announced):
        assert document["mtbf_s"] == pytest.approx(1800)
        assert list(document["interruptions"]) == ["spot preemption"]
    parts = [{part["part"] for part in document["parts"]} for document in (at_once, announced)]
    assert "lost work" in parts[0]
    assert "lost work" not in parts[1]
    assert "waiting for hosts" in parts[1]


def test_cards_fail_apart_from_hosts(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the 4 hosts' 32 NICs, one every 320 h each: one every 10 h; half as many with 4 NICs a host."""
    causes = '{preset = "none", causes = [{name = "NIC", per = "nic", mtbf_s = "320h"}]}'
    text = Path(study).read_text(encoding="utf-8")
    Path(study).write_text(text + f"failures = {causes}\n", encoding="utf-8")
    eight = json.loads(told(capsys, study, "--json")[1])
    four = json.loads(told(capsys, study, "--json", "--set", "cluster.inter.num_nics=4")[1])
    assert eight["mtbf_s"] == pytest.approx(10 * 3600)
    assert four["mtbf_s"] == pytest.approx(20 * 3600)


def test_jitter_is_told_apart_from_training(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every host adds 5 % to every step: training is 1 / 1.05 of what trains."""
    calm, late = (
        json.loads(told(capsys, study, "--json", "--failures", "none", *more)[1]) for more in ([], ["--jitter", "0.05"])
    )
    parts = {part["part"]: part["seconds"] for part in late["parts"]}
    assert parts["jitter"] == pytest.approx(0.05 * parts["training"])
    assert parts["training"] == pytest.approx(calm["steps"] * calm["step_s"])
    drawn = json.loads(
        told(capsys, study, "--json", "--jitter", '{distribution="lognormal", median=0.01, sigma=1.0}')[1]
    )
    assert drawn["goodput"]["p50"] < calm["goodput"]["p50"]
    code, _, err = told(capsys, study, "--jitter", '{distribution="normal", mean=1}')
    assert code == ExitCode.BAD_INPUT
    assert "lognormal" in err


def test_what_a_plans_file_states_in_vain_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, plan = tmp_path / "study.toml", tmp_path / "ds.json"
    study.write_text(STUDY[: STUDY.index("[plan]")] + STUDY[STUDY.index("[checkpoint]") :])
    plan.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "no_such_setting": 1})
    )
    flags = ("--seq-len", "2048", "--recompute", "full")
    code, _, err = told(capsys, str(study), "--plan", str(plan), *flags)
    assert code == ExitCode.OK, err
    assert "unknown, and ignored: " in err
    assert "no_such_setting" in err


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_the_interval_is_dalys_for_the_whole_write(
    asynchronous: str, study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside training too: √(2 δ M) of the copy alone would save every step. No interval that is tried is below a write."""
    _, out, _ = told(capsys, study, "--json", "--set", f"checkpoint.asynchronous={asynchronous}")
    document = json.loads(out)
    written_s = sum(document["saving"][part] for part in ("gather_s", "copy_s", "write_s"))
    assert document["interval_s"] == pytest.approx(daly_s(document["mtbf_s"], written_s))
    slow = ("--set", "checkpoint.storage_bytes_per_s=0.5MB/s")
    _, out, _ = told(capsys, study, "--json", *slow, "--set", f"checkpoint.asynchronous={asynchronous}")
    document = json.loads(out)
    assert all(tried["interval_s"] >= document["saving"]["write_s"] for tried in document["intervals"])


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--spot-mtbf", "10s"], "longer time between failures"),
        (["--spot-mtbf", "1ms"], "longer time between failures"),
        (["--straggler-mtbf", "1s"], "longer time between failures"),
        (["--replicas", "100000", "--tokens", "1000T"], "fewer --replicas"),
    ],
)
def test_a_run_without_headway_is_refused_at_once(
    arguments: list[str], remedy: str, study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = told(capsys, study, *arguments)
    assert (code, out) == (ExitCode.BAD_INPUT, "")
    assert "a run would be interrupted" in err
    assert remedy in err


def test_of_runs_that_are_interrupted_often_few_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody says how many: 400 of 50,000 interruptions each would take a minute."""
    conditions: Any = None
    monkeypatch.setattr(answer, "expected_interruptions", lambda _: 50_000.0)
    assert answer._in_seconds(conditions, LongRun(steps=5)).replicas == 40
    assert answer._in_seconds(conditions, LongRun(steps=5, replicas=400)).replicas == 400
    monkeypatch.setattr(answer, "expected_interruptions", lambda _: 500.0)
    assert answer._in_seconds(conditions, LongRun(steps=5)).replicas == 400


@pytest.mark.parametrize("command", ["predict", "goodput"])
def test_unknown_keys_of_run_are_named_by_every_verb_once(
    command: str, study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(study)
    file.write_text(f"{STUDY}tokns = 3\n[run.failures]\nmtbf = 4\n")
    assert main([command, study]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"  {file}: run: failures.mtbf: unknown key (known: causes, preset)",
        f"  {file}: run: tokns: unknown key (did you mean tokens?)",
    ]


def test_values_of_run_are_left_to_goodput(study: str) -> None:
    Path(study).write_text(STUDY.replace('tokens = "100B"', 'tokens = "-1"'))
    assert main(["predict", study, "--brief"]) == ExitCode.OK
    assert main(["goodput", study]) == ExitCode.BAD_INPUT
