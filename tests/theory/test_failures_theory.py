"""One part slowed or lost: what a step can lose at most and at least, by the parts of the step that hang on it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simulator.cli import main

MODEL = ["--model", "llama3.2-1b", "--set", "plan.seq_len=1024"]


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, *MODEL, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def swept(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    found = answered(capsys, "sensitivity", "--failures", *words)["failures"]
    lost = [one["lost"] for one in found if one["step_s"] is not None]
    assert lost == sorted(lost, reverse=True)
    return {one["what"]: one for one in found}


def test_a_slow_gpu_costs_its_compute_over_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """All ranks wait for it: compute / speed, and at most all the communication that was there before beside it."""
    found = swept(capsys, "--left", "0.8")["a GPU at 80% of its speed"]
    step = answered(capsys, "predict")
    communication = sum(one["exposed_s"] + one["hidden_s"] for one in step["communication"].values())
    waits = sum(s for name, s in step["breakdown_s"].items() if name.startswith(("exposed:", "wait:", "host")))
    compute = step["step_s"] - waits - step["breakdown_s"].get("interference", 0.0)
    spread = step["breakdown_s"]["stragglers"]  # the slow one is not also the slowest of eight equal ones
    assert (compute - spread) / 0.8 <= found["step_s"] <= compute / 0.8 + communication
    assert found["lost"] == pytest.approx(1 - step["step_s"] / found["step_s"])


def test_slow_nics_cost_at_most_the_bytes_again(capsys: pytest.CaptureFixture[str]) -> None:
    found = swept(capsys, "--nodes", "2")
    step = answered(capsys, "predict", "--nodes", "2", "--telemetry")
    uses = {use["name"]: use for use in step["telemetry"]["programs"][0]["utilisation"]}
    again_s = uses["nic"]["amount"] / uses["nic"]["capacity_per_s"]  # at half the rate
    links_reach = 0.9  # of the data sheet; the calibration of InfiniBand has 0.96 (docs/background/collectives.md)
    for what in ("the NICs of a node at 50%", "a NIC of a node lost"):
        assert step["step_s"] <= found[what]["step_s"] <= step["step_s"] + again_s / links_reach
    assert found["a NIC of a node lost"]["lost"] < found["the NICs of a node at 50%"]["lost"]


def test_what_is_said_by_set_is_what_was_played(capsys: pytest.CaptureFixture[str]) -> None:
    """Predicted one by one: `predict` on the cluster as the settings have it, a lost node on those that are left."""
    for what, one in swept(capsys, "--nodes", "3").items():
        words = [word for setting in one["settings"] for word in ("--set", setting)]
        if "host" in what or "rail" in what or one["nodes"]:
            nodes = str(one["nodes"] or 3)
            step = answered(capsys, "predict", "--nodes", nodes, *words)
            assert one["step_s"] == pytest.approx(step["step_s"])
            ranks = 8 * int(nodes)
            before = swept_tokens(capsys)
            assert one["lost"] == pytest.approx(1 - ranks * 1024 / step["step_s"] / before)


def swept_tokens(capsys: pytest.CaptureFixture[str]) -> float:
    return float(answered(capsys, "predict", "--nodes", "3")["tokens_per_s"])


def test_a_pipeline_without_spare_replicas_stops(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["pp=2", "tp=8", "dp_shard=1", "zero=1", "data_parallel=megatron", "num_micro_batches=4"]
    found = swept(capsys, "--nodes", "2", *(word for one in plan for word in ("--set", f"plan.{one}")))
    node = next(one for one in found.values() if one["part"] == "node")
    assert (node["step_s"], node["lost"]) == (None, 1.0)
    assert {what for what in found if "stage 1" in what} >= {"a GPU of stage 1 at 50% of its speed"}


def test_what_cannot_be_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sensitivity", "--failures", "--vary", "kernels.gemm=x0.9..x1.1", "--by", "time"]) == 2
    assert "without --vary, --by" in capsys.readouterr().err
    assert main(["sensitivity", "--failures", "--set", 'cluster.exceptions=[{nodes="0", speed=0.9}]']) == 3
    assert "there are some already" in capsys.readouterr().err
    assert main(["sensitivity", "--failures", "--left", "2"]) == 2
    capsys.readouterr()
