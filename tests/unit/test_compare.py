"""Comparisons share errors, and ablations take away one limit each."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.base.kernels import Gemm
from simulator.cli import main
from simulator.formats.writers.text import to_text
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.studies.compare import ABLATIONS, Comparison, Subject, compare, render

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


def test_another_number_of_devices_stands_beside_the_verdict() -> None:
    """Half of the GPUs take longer a token, which says nothing of each of them."""
    less = replace(_subject("half", dp_shard=8), cluster=CLUSTER.with_nodes(1))
    text = to_text(render(compare([_subject("whole", dp_shard=16), less], ablate=False)))
    assert "with 8 devices in B and 16 in A." in " ".join(text.split())


def test_many_times_are_no_per_cent() -> None:
    """A hundred tokens a step beside sixteen thousand: a token takes many times as long."""
    few = Subject(name="few", model=MODEL, plan=Plan(dp_shard=16, seq_len=8), cluster=CLUSTER)
    both = compare([_subject("one", dp_shard=16), few], ablate=False)
    assert (against := both.rows[1].against_first) is not None
    assert f"A token takes {against.ratio:,.3g} times as long in B as in A." in to_text(render(both))


def test_utilisation_stands_side_by_side() -> None:
    """The same bytes a step: a share of a capacity times the seconds is the same, whatever the column."""
    one, wide = _subject("one", dp_shard=16), _subject("wide", dp_shard=16)
    assert CLUSTER.inter is not None
    fast = {"inter": CLUSTER.inter.model_copy(update={"nic_bytes_per_s": 2 * CLUSTER.inter.nic_bytes_per_s})}
    rows = compare([one, replace(wide, cluster=CLUSTER.model_copy(update=fast))], ablate=False, count=True).rows
    counted = [row.counters.busiest["nic"][0] for row in rows if row.counters is not None]
    sent = [use.mean * use.capacity * row.prediction.step_s for use, row in zip(counted, rows, strict=True)]
    assert sent[0] == pytest.approx(sent[1])
    assert counted[1].mean < counted[0].mean
    text = to_text(render(Comparison(rows=rows)))
    assert f"{counted[0].mean:.1%} {counted[0].peak:7.1%}" in text
    shown = Comparison(rows=rows).as_json()["subjects"][0]["utilisation"]["nic"]
    assert shown == {"mean": counted[0].mean, "peak": counted[0].peak}
    assert "utilisation" not in compare([one], ablate=False).as_json()["subjects"][0]


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


def test_limits_are_found_where_nodes_differ() -> None:
    """A NIC at a twentieth: without links nothing is left of what it costs."""
    slow = CLUSTER.model_validate(
        CLUSTER.model_dump() | {"exceptions": [{"nodes": "1", "nic_bytes_per_s": 2.5e9}], "device": CLUSTER.device}
    )
    plan = Plan(seq_len=512, num_micro_batches=4, dp_shard=16)
    even, uneven = (
        compare([Subject(name="", model=MODEL, plan=plan, cluster=cluster)]).rows[0] for cluster in (CLUSTER, slow)
    )
    gains = [{gain.name: gain for gain in row.gains}["infinite links"] for row in (even, uneven)]
    assert uneven.prediction.step_s > 1.5 * even.prediction.step_s
    assert gains[1].step_s == pytest.approx(gains[0].step_s, rel=0.05)


def test_what_lies_below_the_memory_is_no_link_between_gpus() -> None:
    """CPU Adam takes most of this step: no link between GPUs would change that."""
    plan = Plan(seq_len=512, dp_shard=16, offload={"optimizer": "host", "parameters": "host"})  # type: ignore[arg-type]
    row = compare([Subject(name="", model=MODEL, plan=plan, cluster=CLUSTER)]).rows[0]
    gains = {gain.name: gain.gain for gain in row.gains}
    exposed = sum(
        v for k, v in row.prediction.breakdown.items() if k in ("exposed:cpu_adam", "exposed:h2d", "exposed:d2h")
    )
    share = exposed / row.prediction.step_s
    assert gains["instant offload"] == pytest.approx(share, rel=0.2)
    assert gains["infinite links"] < 1 - share
    without = Subject(name="", model=MODEL, plan=Plan(seq_len=512, dp_shard=16), cluster=CLUSTER)
    assert "instant offload" in to_text(render(compare([without, row.subject])), width=160)


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
    assert main(["compare", *options, "--what-if", "plan.micro_batch_size=4,device.memory_bytes=1GiB", "--json"]) == 0
    *_, small = json.loads(capsys.readouterr().out)["subjects"]
    assert (small["verdict"], small["on_front"]) == (
        "does not fit",
        False,
    )  # as quick and cheap as the second, and impossible
    assert main(["compare", *options, "--plain"]) == 0
    shown = capsys.readouterr().out
    assert "reserved, 2.00 EUR/GPU h, 2026-11-01" in shown
    for words, name in (("a step", "step"), ("a billion tokens", "billion_tokens")):
        amounts = next(line for line in shown.splitlines() if line.startswith(f"  {words} ")).removeprefix(f"  {words}")
        wanted = [one["costs"][0][name] for one in (first, second)]
        assert [float(amount) for amount in amounts.split()] == pytest.approx(
            wanted, rel=5e-3
        )  # a step of 0.00 is none
    assert main(["compare", *options, "--cluster", "dgx-a100-80-8"]) == 3
    assert "no price of dgx-a100-80-8" in capsys.readouterr().err

    picture = tmp_path / "front.svg"
    drawn = []
    for _ in range(2):
        assert main(["compare", *options, "--plot", str(picture), "--plain"]) == 0
        drawn.append(picture.read_bytes())
    assert drawn[0] == drawn[1]
    assert b"EUR a billion tokens" in drawn[0] or b"<svg" in drawn[0]
    capsys.readouterr()
    halved = [*options[:-4], "--what-if", "price.per_gpu_hour=x0.5", "--json"]
    assert main(["compare", *halved]) == 0
    first, second = json.loads(capsys.readouterr().out)["subjects"]
    assert second["costs"][0]["step"] == first["costs"][0]["step"] / 2


BASE = ["compare", "--model", "gpt2", "--nodes", "2", "--set", "plan.seq_len=512", "--no-ablations", "--json"]


def _what_if(capsys: pytest.CaptureFixture[str], *variants: str) -> list[dict[str, Any]]:
    assert main([*BASE, *(word for variant in variants for word in ("--what-if", variant))]) == 0
    subjects: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["subjects"]
    return [{key: value for key, value in one.items() if key != "name"} for one in subjects]


def test_short_words_say_the_same_as_long_ones(capsys: pytest.CaptureFixture[str]) -> None:
    host = 'cluster.intra={kind="pcie5", shape="pcie", bytes_per_s=63e9, latency_s=1e-6}'
    _, short, long, off, pcie, double, bytes_, ib, again = _what_if(
        capsys,
        "link.inter.bytes_per_s=800Gb/s",
        "cluster.inter.nic_bytes_per_s=100GB/s",
        "link.intra=off",
        host,
        "device.memory_bytes=x2",
        "device.memory_bytes=163118MiB",  # twice the driver's 81559 MiB
        "link.intra=nvlink5",
        "link.inter.bytes_per_s=400Gb/s,link.inter.bytes_per_s=x2",
    )
    assert short == long == again
    assert off == pcie
    assert double == bytes_
    assert ib["step_s"] < off["step_s"]


def test_nvlink_where_there_was_none_and_none_where_hosts_are_no_road(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "--model", "gpt2", "--set", "plan.seq_len=512", "--no-ablations", "--json"]
    assert main([*words, "--cluster", "pcie-l40s-8", "--what-if", "link.intra=nvlink4"]) == 0
    first, second = json.loads(capsys.readouterr().out)["subjects"]
    assert second["step_s"] < first["step_s"]
    assert main([*words, "--cluster", "gb200-nvl72", "--nodes", "2", "--what-if", "link.intra=off"]) == 3
    assert "do not meet over the c2c link" in capsys.readouterr().err


def test_one_slow_card_slows_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    slow = 'cluster.exceptions=[{nodes="1", nic_bytes_per_s="50Gb/s"}]'
    first, one, every = _what_if(capsys, slow, "link.inter.bytes_per_s=50Gb/s")
    assert first["step_s"] < one["step_s"] <= every["step_s"] * 1.001


def test_kernels_twice_as_fast_take_half_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    first, fast = _what_if(capsys, "kernels.gemm=x2")
    # of a kernel exactly half; of a step about that, as the power cap's mean moves with it
    assert fast["breakdown_s"]["gemm"] == pytest.approx(first["breakdown_s"]["gemm"] / 2, rel=0.05)
    assert fast["breakdown_s"]["elementwise"] == pytest.approx(first["breakdown_s"]["elementwise"], rel=0.05)
    calibration, device = Calibration.load("h100-sxm"), CLUSTER.device
    kernel = Gemm(m=4096, n=4096, k=4096, dtype="bf16")
    twice = calibration.with_speed({"gemm": 2.0})
    assert twice.kernel_s(kernel, device) == calibration.kernel_s(kernel, device) / 2


def test_what_a_plan_shares_with_itself_on_another_machine_cancels(capsys: pytest.CaptureFixture[str]) -> None:
    """No kernel and no link differs where the memory does, so nothing of the ratio is uncertain."""
    _, larger = _what_if(capsys, "device.memory_bytes=x2")
    assert larger["against_first"] == {"ratio": 1.0, "low": 1.0, "high": 1.0, "distinguishable": False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to compare with"),
        (["--what-if", "link.intra=nvlink9"], "no link is called 'nvlink9'"),
        (["--what-if", "cluster.intra.kind=x2"], "x2 multiplies a number"),
        (["--what-if", "kernels.gemm=0"], "greater than 0"),
        (["--what-if", "price.per_gpu_hour=2"], "there are no prices to change"),
        (["--what-if", "plan.tp=2", "--plot", "front.gif"], "is not a picture format"),
        (["--what-if", "plan.tpp=2"], "tpp"),
        (["--what-if", "tp=2"], "did you mean plan.tp?"),
        (["--what-if", "cluster"], "is a table"),
        (["--what-if", "cluster=8xh100,cluster=8xh200"], "twice"),
        (["--what-if", "cluster="], "no preset is called ''"),
    ],
)
def test_bad_input_is_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *arguments]) == 3
    assert message in capsys.readouterr().err


def test_a_what_if_may_name_another_cluster_or_model(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare", "--model", "llama3.2-1b", "--cluster", "8xh100", "--no-ablations", "--json"]
    assert main([*asked, "--what-if", "cluster=8xh200", "--what-if", "model=llama3.2-3b,nodes=2"]) == 0
    found = json.loads(capsys.readouterr().out)["subjects"]
    machines = [(one["cluster"], one["model"], one["num_devices"]) for one in found]
    assert machines == [
        ("dgx-h100-8", "llama3.2-1b", 8),
        ("hgx-h200-8", "llama3.2-1b", 8),
        ("dgx-h100-8", "llama3.2-3b", 16),
    ]


def test_a_fault_of_a_what_if_stands_at_the_what_if(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["compare", "--set", "plan.pp=x", "--what-if", "kernels.gem=2", "--what-if", "device.memory_bytes=9"]) == 3
    )
    told = capsys.readouterr().err
    assert "--what-if kernels.gem: " in told
    assert "--what-if device.memory_bytes: must be a size in bytes with its unit; it is 9" in told
    assert told.count("--set plan.pp") == 1


def test_a_placement_is_read_and_never_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "nope.tsv"
    assert main(["compare", "--what-if", "plan.tp=2", "--placement", str(missing)]) == 3
    assert f"{missing}: cannot be read" in capsys.readouterr().err
