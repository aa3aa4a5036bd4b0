"""Reinforcement learning as a plan of plans: its parts are those of serving and of training, and what they hold adds up."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from simulator import Cluster, InferencePlan, Model, Plan, Prediction, Workload, predict, serve
from simulator.base.errors import InputError
from simulator.cli import main
from simulator.studies.rollout import Iteration, Rollout, iteration_of, read_rollout

MODEL, CLUSTER = Model.load("gpt2"), Cluster.synthesise("a100-80gb", 2)
ASKED: dict[str, Any] = {
    "prompts": 8,
    "samples": 4,
    "prompt_tokens": 64,
    "output_tokens": 64,
    "inference": {"dp": 2, "gpu_memory_utilization": 0.3},
}
DDP = Plan(zero=0, dp_replicate=2, seq_len=128, micro_batch_size=4)


@cache
def trained(plan: Plan) -> Prediction:
    return predict(MODEL, plan, CLUSTER)


def iteration(plan: Plan = DDP, **changes: Any) -> Iteration:
    return iteration_of(Rollout.model_validate({**ASKED, **changes}), trained(plan), MODEL, plan, CLUSTER)


def test_its_parts_are_those_of_serving_and_training() -> None:
    found, step = iteration(), trained(DDP)
    requests = Workload(rate=0, num_requests=32, prompt_tokens=64, output_tokens=64, warmup=0)
    served = serve(MODEL, InferencePlan(**ASKED["inference"], max_model_len=128), CLUSTER, requests)
    assert served.latencies is not None
    assert found.generate_s == served.latencies.latency.max_s
    assert (found.sequences, found.steps, found.output_tokens) == (32, 4, 32 * 64)
    assert found.train_s == pytest.approx(4 * step.step_s)  # all sequences have the plan's length
    assert (found.reference_s, found.sync_s) == (0, 0)  # every GPU has all weights
    assert 0 < found.log_probs_s < found.train_s / 2
    assert found.iteration_s == pytest.approx(found.generate_s + found.log_probs_s + found.train_s)
    assert found.training_bytes == step.memory.used_bytes
    assert found.generating_bytes == served.memory.used_bytes + step.memory.resident_bytes


def test_the_engine_has_its_own_defaults() -> None:
    """vLLM runs 1,024 sequences at once on Hopper, and 256 before."""
    cluster = Cluster.synthesise("h100-sxm5-80gb", 2)
    asked = ASKED | {"prompts": 200, "inference": {}}
    found = iteration_of(Rollout.model_validate(asked), predict(MODEL, DDP, cluster), MODEL, DDP, cluster)
    requests = Workload(rate=0, num_requests=800, prompt_tokens=64, output_tokens=64, warmup=0)
    all_at_once, fewer = (
        serve(MODEL, InferencePlan(max_model_len=128, **own), cluster, requests).latencies
        for own in ({"max_sequences": 1024}, {"max_sequences": 256})
    )
    assert all_at_once is not None
    assert fewer is not None
    assert found.generate_s == all_at_once.latency.max_s < fewer.latency.max_s


def test_what_changes_a_part() -> None:
    plain = iteration()
    beside = iteration(reference="model")
    assert beside.reference_s == plain.log_probs_s
    assert beside.training_bytes - plain.training_bytes == 2 * MODEL.num_parameters
    scored = iteration(reference="model", reward="model")
    assert (scored.reward_s, scored.iteration_s) == (
        beside.reference_s,
        pytest.approx(beside.iteration_s + beside.reference_s),
    )
    assert scored.training_bytes - beside.training_bytes == 2 * MODEL.num_parameters
    critic = iteration(critic=True)
    assert critic.train_s == pytest.approx(2 * plain.train_s)
    assert critic.log_probs_s == pytest.approx(2 * plain.log_probs_s)
    assert iteration(engine="stays").training_bytes > plain.training_bytes
    assert iteration(epochs=2).train_s == pytest.approx(2 * plain.train_s)
    assert iteration(epochs=2).log_probs_s == pytest.approx(plain.log_probs_s)
    large = DDP.copy_with(micro_batch_size=16)
    assert iteration(large).log_probs_s == 0  # one step: the policy is the one that answered


def test_an_engine_apart_works_meanwhile() -> None:
    apart = iteration(engine="apart", cluster="hgx-a100-40-4", inference={"dp": 4})
    ahead = iteration(engine="apart", cluster="hgx-a100-40-4", inference={"dp": 4}, ahead=True)
    rest = apart.log_probs_s + apart.train_s
    assert apart.sync_s > 0
    assert apart.iteration_s == pytest.approx(apart.generate_s + rest + apart.sync_s)
    assert ahead.iteration_s == pytest.approx(max(apart.generate_s, rest) + apart.sync_s)
    larger = iteration(engine="apart", cluster="4xh200", inference={"dp": 4})  # its engine takes more than an A100 has
    assert larger.fits
    assert larger.generating_bytes == trained(DDP).memory.resident_bytes


def test_sharded_weights_are_gathered_for_the_engine() -> None:
    sharded = Plan(zero=3, dp_shard=2, seq_len=128, micro_batch_size=4)
    assert iteration(sharded).sync_s > 0
    assert iteration(sharded).iteration_s > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": 3}, ("12 sequences are not whole steps of 8", "a global batch of 4")),
        ({"output_tokens": 100}, ("a prompt with its answer has 164 tokens", "seq_len = 164")),
        ({"engine": "apart"}, ("cluster", 'engine = "apart" with a cluster')),
        ({"ahead": True}, ("the GPUs either answer or train",)),
        ({"reference": "base"}, ("the plan has none",)),
    ],
)
def test_what_cannot_be_is_told(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        iteration(**changes)
    assert all(word in str(caught.value) for word in words)


def test_the_command_line_reads_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grpo.toml"
    file.write_text(
        "prompts = 4\nsamples = 2\nprompt_tokens = 64\noutput_tokens = 64\n[inference]\ngpu_memory_utilization = 0.3\n"
    )
    command = [
        "predict",
        "--model",
        "gpt2",
        "--gpus",
        "1xa100",
        "--zero",
        "0",
        "--seq-len",
        "128",
        "--rollout",
        str(file),
    ]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["rollout"]
    assert (told["sequences"], told["steps"], told["fits"]) == (8, 8, True)
    assert main(command) == 0
    assert "One iteration of reinforcement learning" in capsys.readouterr().out
    file.write_text("prompts = 0\nsample = 2\n")
    assert main(command) == 3
    assert "did you mean samples" in capsys.readouterr().err


def test_a_file_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    file = tmp_path / "grpo.toml"
    file.write_text("prompts = \n")
    with pytest.raises(InputError, match="not TOML"):
        read_rollout(file)


def test_a_reference_below_adapters_runs_without_them() -> None:
    adapters = DDP.copy_with(peft="lora")
    base, own = (iteration(adapters, reference=way) for way in ("base", "model"))
    assert 0 < base.reference_s < own.reference_s
    assert own.training_bytes - base.training_bytes == 2 * MODEL.num_parameters


def test_an_engine_holds_what_it_is_asked_for_and_no_more() -> None:
    """trl and verl tell vLLM how long prompts with answers are, where it would make room for the model's longest sequence."""
    model, cluster = Model.load("llama3.2-1b"), Cluster.synthesise("rtx-3090", 1)
    plan = Plan.model_validate({"peft": "lora", "seq_len": 128, "micro_batch_size": 4, "recompute": "full", "zero": 0})
    asked = Rollout.model_validate({**ASKED, "inference": {"gpu_memory_utilization": 0.2}})
    step = predict(model, plan, cluster)
    assert iteration_of(asked, step, model, plan, cluster).generate_s > 0
    longest = asked.model_copy(update={"inference": asked.inference.model_copy(update={"max_model_len": 131072})})
    with pytest.raises(InputError, match=r"max_model_len = 131072"):
        iteration_of(longest, step, model, plan, cluster)
