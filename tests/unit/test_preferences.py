"""A reference model beside the one that is trained: one more forward of each micro-batch, and its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator import Cluster, Model, Plan, predict
from simulator.base.errors import InputError
from simulator.cli import main
from simulator.predict.reference import check_forwards, check_reference, reference_bytes, with_reference

LLAMA, CLUSTER = Model.load("llama3.2-1b"), Cluster.synthesise("a100-80gb", 1)
ALONE: dict[str, Any] = {
    "zero": 0,
    "data_parallel": "ddp",
    "seq_len": 1024,
    "micro_batch_size": 2,
    "num_micro_batches": 2,
}


def test_a_model_of_its_own_costs_a_forward_and_its_weights() -> None:
    plan = Plan(**{**ALONE, "master_dtype": "bf16", "optimizer_dtype": "bf16"})
    policy = predict(LLAMA, plan, CLUSTER)
    found = with_reference(policy, LLAMA, plan, CLUSTER, kind="model")
    assert found.memory.resident_bytes - policy.memory.resident_bytes == 2 * LLAMA.num_parameters
    # a forward is a third of forward and backward, which are nearly all of this step
    assert (found.step_s - policy.step_s) / policy.step_s == pytest.approx(1 / 3, abs=0.06)
    assert sum(found.breakdown.values()) == pytest.approx(found.step_s)
    assert found.low_s < found.step_s < found.high_s
    assert found.lower_s <= found.step_s <= found.upper_s


def test_the_base_below_adapters_takes_no_memory_and_has_no_pairs() -> None:
    plan = Plan(**{**ALONE, "peft": "lora", "recompute": "full"})
    policy = predict(LLAMA, plan, CLUSTER)
    found = with_reference(policy, LLAMA, plan, CLUSTER, kind="base")
    assert found.memory == policy.memory
    whole = with_reference(policy, LLAMA, plan, CLUSTER, kind="model")
    assert policy.step_s < found.step_s < whole.step_s  # the policy's own forward has the pairs' kernels


@pytest.mark.parametrize("whose", ["ddp", "fsdp1", "fsdp2", "deepspeed"])
@pytest.mark.parametrize("method", ["lora", "qlora", "dora"])
def test_a_base_is_what_its_adapters_stand_on_however_it_is_stored_and_sharded(method: str, whose: str) -> None:
    """Adapters that are switched off leave quantised weights quantised, and each implementation its own."""
    way = {"zero": 0, "dp_replicate": 2} if whose == "ddp" else {"zero": 3, "dp_shard": 2}
    plan = Plan(**{**ALONE, **way, "data_parallel": whose, "peft": method, "recompute": "full"})
    both = Cluster.synthesise("a100-80gb", 2)
    policy = predict(LLAMA, plan, both)
    found = with_reference(policy, LLAMA, plan, both, kind="base")
    whole = with_reference(policy, LLAMA, plan, both, kind="model")
    assert policy.step_s < found.step_s < whole.step_s


def test_kto_has_three_forwards() -> None:
    plan = Plan(**{**ALONE, "peft": "lora"})
    assert check_forwards("base:3", plan) == ("base", 3)
    policy = predict(LLAMA, plan, CLUSTER)
    one, three = (with_reference(policy, LLAMA, plan, CLUSTER, kind="base", forwards=count) for count in (1, 3))
    assert three.step_s - policy.step_s == pytest.approx(3 * (one.step_s - policy.step_s))
    for asked in ("base:", "base:0", "model:x", "model:99999"):
        with pytest.raises(InputError, match="no number of forwards"):
            check_forwards(asked, plan)


def test_weights_are_sharded_as_the_plan_shards() -> None:
    whole = LLAMA.num_parameters
    assert reference_bytes(LLAMA, Plan(zero=3, dp_shard=8), "model") == -(-whole // 8) * 2
    assert (
        reference_bytes(LLAMA, Plan(zero=1, data_parallel="megatron", dp_shard=8, tp=2), "model") == -(-whole // 2) * 2
    )
    assert reference_bytes(LLAMA, Plan.model_validate({"peft": "lora"}), "base") == 0


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("models", {}, "did you mean model"),
        ("base", {}, "the plan has none"),
        ("model", {"pp": 2}, "pipeline"),
    ],
)
def test_what_cannot_be_is_told(kind: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_reference(kind, Plan(**fields))


def test_the_command_line_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", "--model", "gpt2", "--gpus", "1xa100", "--zero", "0", "--seq-len", "256", "--reference"]
    assert main([*command, "model"]) == 0
    assert "reference" in capsys.readouterr().out
    assert main([*command, "base"]) == 3


def test_a_trainer_s_file_brings_its_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """trl: the base below adapters, else a copy of the model; none where log-probabilities were computed before."""
    file = tmp_path / "dpo.json"
    given = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "beta": 0.1, "bf16": True, "max_length": 256, "use_peft": True,
             "per_device_train_batch_size": 1, "learning_rate": 1e-5, "output_dir": "out"}  # fmt: skip
    found: dict[str, float] = {}
    for name, more, flags in (
        ("base", {}, ()),
        ("none", {}, ("--reference", "none")),
        ("before", {"precompute_ref_log_probs": True}, ()),
    ):
        file.write_text(json.dumps({**given, **more}))
        assert main(["predict", "--plan", str(file), "--gpus", "1xa100", "--json", *flags]) == 0
        found[name] = json.loads(capsys.readouterr().out)["breakdown_s"].get("reference", 0.0)
    assert found["base"] > 0
    assert found["none"] == found["before"] == 0
