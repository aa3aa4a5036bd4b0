"""Comparisons share errors, and ablations take away one limit each."""

import json
from pathlib import Path

import pytest

from simulator.calibration import Calibration
from simulator.cli import main
from simulator.compare import ABLATIONS, Subject, compare, render
from simulator.model import Model
from simulator.plan import Plan
from simulator.topology import Cluster
from simulator.writers.text import to_text

MODEL = Model(name="small", num_layers=4, d_model=1024, num_heads=8, d_ff=2816, vocab_size=8192)
CLUSTER = Cluster.load("hgx-h100-8", 2)


def _subject(name: str, **fields: object) -> Subject:
    plan = Plan(seq_len=512, num_micro_batches=4, **fields)  # type: ignore[arg-type]
    return Subject(name=name, model=MODEL, plan=plan, cluster=CLUSTER)


def test_a_plan_beside_itself_differs_in_nothing() -> None:
    one = _subject("one", dp_shard=16)
    first, second = compare([one, one]).rows
    assert first.against_first is None
    assert second.against_first is not None
    assert second.against_first.ratio == 1
    assert not second.against_first.distinguishable
    assert "B and A are not distinguishable at 90 %" in to_text(render(compare([one, one], ablate=False)))


def test_what_is_compared_is_seconds_a_token() -> None:
    """Twice the micro-batches take about twice the step, and about as long a token."""
    more = Subject(name="more", model=MODEL, plan=Plan(dp_shard=16, seq_len=512, num_micro_batches=8), cluster=CLUSTER)
    _, second = compare([_subject("one", dp_shard=16), more], ablate=False).rows
    assert second.against_first is not None
    assert 0.8 < second.against_first.ratio <= 1


@pytest.mark.parametrize(
    "fields",
    [{"dp_shard": 16}, {"dp_shard": 4, "tp": 4}, {"dp_shard": 8, "pp": 2, "zero": 1, "data_parallel": "megatron"}],
)
def test_no_limit_ever_helps(fields: dict[str, object]) -> None:
    row = compare([_subject("one", **fields)]).rows[0]
    assert {gain.name for gain in row.gains} == set(ABLATIONS)
    for gain in row.gains:
        assert 0 <= gain.step_s <= row.prediction.step_s
        assert gain.gain == pytest.approx(1 - gain.step_s / row.prediction.step_s)
    assert [gain.gain for gain in row.gains] == sorted((gain.gain for gain in row.gains), reverse=True)


def test_where_there_is_nothing_but_compute_nothing_is_gained() -> None:
    alone = Subject(
        name="one GPU",
        model=MODEL,
        plan=Plan(seq_len=512, micro_batch_size=8),
        cluster=Cluster.load("hgx-h100-8", 1).model_copy(update={"gpus_per_node": 1}),
        calibration=Calibration.ideal(),
    )
    gains = {gain.name: gain.gain for gain in compare([alone]).rows[0].gains}
    assert gains["infinite links"] == pytest.approx(0, abs=1e-12)
    assert gains["no bubble"] == 0


def test_the_bubble_is_what_a_deeper_pipeline_costs() -> None:
    plan = {"dp_shard": 4, "pp": 4, "zero": 1, "data_parallel": "megatron"}
    gains = {gain.name: gain.gain for gain in compare([_subject("deep", **plan)]).rows[0].gains}
    # (p - 1) / (m + p - 1) of equal stages is idle, here 3 / 7; uneven ends and waiting move it a little
    assert gains["no bubble"] == pytest.approx(3 / 7, rel=0.35)


def test_the_command_compares_files_and_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "one.toml"
    study.write_text('model = "gpt2"\ncluster = "hgx-h100-8"\nnodes = 1\n[plan]\nseq_len = 512\n', encoding="utf-8")
    variant = "plan.micro_batch_size=2,device.memory_bytes=40GiB"
    assert main(["compare", str(study), "--what-if", variant, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["subjects"]
    assert (first["name"], second["name"]) == ("one", variant)
    assert second["tokens_per_step"] == 2 * first["tokens_per_step"]
    assert second["capacity_bytes"] < first["capacity_bytes"]
    assert main(["compare", str(study), "--what-if", variant, "--plain"]) == 0
    assert "B  plan.micro_batch_size=2" in capsys.readouterr().out


PRICES = """
currency = "EUR"
[[price]]
cluster = "hgx-h100-8"
kind = "reserved"
per_gpu_hour = 2.0
date = "2026-11-01"
source = "an offer"
"""


def test_costs_follow_from_prices_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES, encoding="utf-8")
    options = ["--model", "gpt2", "--set", "plan.seq_len=512", "--no-ablations", "--prices", str(path)]
    options += ["--what-if", "plan.micro_batch_size=4", "--run-tokens", "1e10"]
    assert main(["compare", *options, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["subjects"]
    (price,) = first["costs"]
    assert price["step"] == pytest.approx(2.0 * 8 * first["step_s"] / 3600)
    assert price["run"] == pytest.approx(10 * price["billion_tokens"])
    assert price["run_days"] == pytest.approx(1e10 / first["tokens_per_s"] / 86400)
    assert (first["on_front"], second["on_front"]) == (False, True)
    assert main(["compare", *options, "--plain"]) == 0
    assert "reserved, 2.00 EUR/GPU h, 2026-11-01" in capsys.readouterr().out
    assert main(["compare", *options, "--cluster", "dgx-a100-80-8"]) == 3
    assert "no price of dgx-a100-80-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to compare with"),
        (["--what-if", "plan.tpp=2"], "tpp"),
        (["--what-if", "tp=2"], "a key begins with"),
    ],
)
def test_bad_input_is_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *arguments]) == 3
    assert message in capsys.readouterr().err
