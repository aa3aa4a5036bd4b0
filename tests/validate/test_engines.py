"""Plans played by DeepSpeed's and Megatron-Core's own engines, with gloo, where the packages are installed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from simulator.base.errors import PlanError
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate import engines, run_plan
from validate.command import nearest_stack
from validate.compare.borders import borders
from validate.playable import engine_faults
from validate.task import Task

TINY = Model(name="tiny", num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, d_ff=128, vocab_size=256)
CPU = Stack.load("torch-2.13-cpu")
SCALARS = 128  # bytes of an engine's own counters, norms and flags
# bytes that the backward of the head's norm makes, in fp32: the bucket is there by then, and is predicted from the layer on
HEAD_NORM = 6 * 64 * TINY.d_model * 4
BORDERS = ("start_bytes", "after_forward_bytes")


def task(mode: str = "cpu", model: Model = TINY, **options: Any) -> Task:
    plan = Plan(**{"seq_len": 64, "precision": "bf16", "stack": "torch-2.13-cpu", **options})
    return Task(mode=mode, model=model, plan=plan, stack=Stack.of(plan), num_steps=2, num_warm_up=1)  # type: ignore[arg-type]


def played(asked: Task) -> tuple[dict[str, Any], Any]:
    """The record of a run, and what is predicted at its borders."""
    record = run_plan.play(asked)
    assert record["verdict"] == "ok", record["trouble"]
    engine = engines.ENGINES[asked.plan.implementation]
    assert record["machine"]["packages"] == {engine.package: engine.installed}
    assert record["time"]["median_s"] > 0
    return record, borders(asked.model, asked.plan, asked.stack, granularity_bytes=1, library="gloo")


def needs(name: str) -> pytest.MarkDecorator:
    engine = engines.ENGINES[name]
    return pytest.mark.skipif(
        not engine.installed, reason=f"{engine.package} is not installed: pip install 'shardwise[programs]'"
    )


DEEPSPEED = {"data_parallel": "deepspeed", "dp_shard": 2, "reduce_bucket_numel": 30_000}


@needs("deepspeed")
@pytest.mark.parametrize(
    "options",
    [
        {"zero": 0, "dp_shard": 1, "dp_replicate": 2},
        {"zero": 2},
        {"zero": 2, "num_micro_batches": 2, "recompute": "full", "reduce_bucket_numel": 200_000},
    ],
    ids=["stage-0", "stage-2", "stage-2-recomputed"],
)
def test_deepspeed_holds_what_is_predicted(options: dict[str, Any]) -> None:
    record, predicted = played(task(**{**DEEPSPEED, **options}))
    memory = record["memory"]
    for name in BORDERS:
        assert memory[name] == pytest.approx(getattr(predicted, name), abs=SCALARS), name
    for name in ("forward", "optimizer"):
        found, ours = memory["peak_by_phase_bytes"][name], predicted.peak_by_phase_bytes[name]
        assert found == pytest.approx(ours, abs=SCALARS), name
    assert memory["peak_bytes"] == pytest.approx(predicted.peak_bytes, abs=HEAD_NORM)


@needs("deepspeed")
@pytest.mark.parametrize("options", [{}, {"num_micro_batches": 3, "reduce_bucket_numel": 200_000}])
def test_stage_1_holds_what_is_predicted_beside_its_bucket(options: dict[str, Any]) -> None:
    """It is predicted as releases before 0.19 have it, which make none."""
    asked = task(**{**DEEPSPEED, "zero": 1, **options})
    record, predicted = played(asked)
    memory, bucket = record["memory"], 2 * asked.plan.deepspeed.reduce_bucket_numel
    assert memory["start_bytes"] == pytest.approx(predicted.start_bytes, abs=SCALARS)
    assert memory["after_forward_bytes"] == pytest.approx(predicted.after_forward_bytes, abs=bucket + SCALARS)
    assert memory["peak_bytes"] == pytest.approx(predicted.peak_bytes, abs=2 * bucket)
    assert any(note.startswith("DeepSpeed's stage 1") for note in record["notes"])


@needs("deepspeed")
def test_stage_3_holds_what_is_predicted_but_what_it_gathers_ahead() -> None:
    """It gathers tensor by tensor, as many ahead as fit its bucket."""
    asked = task(**{**DEEPSPEED, "zero": 3, "param_persistence_numel": 0, "prefetch_bucket_numel": 1})
    record, predicted = played(asked)
    memory = record["memory"]
    assert memory["start_bytes"] == pytest.approx(predicted.start_bytes, abs=SCALARS)
    optimizer = predicted.peak_by_phase_bytes["optimizer"]
    assert memory["peak_by_phase_bytes"]["optimizer"] == pytest.approx(optimizer, abs=SCALARS)
    layers = 2 * 2 * TINY.num_parameters_of("layer")
    assert memory["peak_bytes"] == pytest.approx(predicted.peak_bytes, abs=layers)


def test_a_missing_package_is_refused_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "version", lambda _: (_ for _ in ()).throw(engines.PackageNotFoundError))
    with pytest.raises(PlanError, match="pip install deepspeed==") as found:
        run_plan.check(task(**DEEPSPEED, zero=2, offload={"optimizer": "host"}))
    assert {fault.place for fault in found.value.faults} >= {"plan: data_parallel", "plan: offload"}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"zero": 2, "tp": 2}, "tp"),
        ({"zero": 1, "pp": 2}, "pp"),
        ({"zero": 2, "precision": "fp16"}, "precision"),
        ({"zero": 0, "dp_shard": 1, "precision": "fp32"}, "precision"),
        ({"zero": 2, "reduce_dtype": "fp32"}, "reduce_dtype"),
        ({"zero": 3, "zeropp": {"quantized_weights": True}}, "deepspeed"),
        ({"zero": 2, "stack": "torch-2.11-compiled"}, "stack"),
    ],
)
def test_what_deepspeed_does_not_play_is_refused(options: dict[str, Any], field: str) -> None:
    asked = task(**{**DEEPSPEED, **options})
    faults = list(engine_faults(asked.model, asked.plan, asked.stack, asked.mode))
    assert f"plan: {field}" in [fault.place for fault in faults]
    assert all(fault.problem and fault.remedy for fault in faults)
    assert not list(engine_faults(asked.model, Plan(seq_len=64), asked.stack, asked.mode)), "torch's own"


def test_an_engine_is_not_played_on_fake_tensors() -> None:
    asked = task(**DEEPSPEED, zero=2)
    faults = list(engine_faults(asked.model, asked.plan, asked.stack, "fake"))
    assert "--mode cpu or full" in [fault.remedy for fault in faults]


def test_another_release_is_noted() -> None:
    plan = task(**DEEPSPEED, zero=2).plan
    assert list(engines.package_notes(plan, {"deepspeed": "0.1"}))
    assert not list(engines.package_notes(plan, {"deepspeed": engines.ENGINES["deepspeed"].tried}))


MEGATRON = {"data_parallel": "megatron", "zero": 1, "dp_shard": 2, "stack": "megatron-core-0.16-local-cpu"}
SPLIT = {"dp_shard": 1, "tp": 2, "sequence_parallel": True, "vocab_parallel": True}
PADDED = (
    64 * (2 + 2 + 12) + 4 * 32
)  # the distributed optimizer's buffers are multiples of 128 elements; a counter a tensor


@needs("megatron")
@pytest.mark.parametrize(
    "options",
    [{}, {"zero": 0, "dp_shard": 1, "dp_replicate": 2}, {"num_micro_batches": 2, "reduce_dtype": "fp32"}, SPLIT],
    ids=["distributed-optimizer", "replicas", "accumulated", "tensor-and-sequence-parallel"],
)
def test_megatron_core_holds_what_is_predicted_beside_what_is_noted(options: dict[str, Any]) -> None:
    asked = task(**{**MEGATRON, **options})
    record, predicted = played(asked)
    plan, memory = asked.plan, record["memory"]
    tokens, rotary = plan.micro_batch_size * plan.seq_len, plan.seq_len * TINY.head_dim
    scores = plan.micro_batch_size * TINY.num_heads // plan.tp * plan.seq_len**2 * 2
    # its buffer of scores, the mask of booleans, one table of angles where we have two
    start = predicted.start_bytes + scores + plan.seq_len**2 - 4 * rotary
    assert memory["start_bytes"] == pytest.approx(start, abs=PADDED)
    a_layer = 2 * tokens * TINY.d_ff // plan.tp + 2 * 2 * rotary
    forward = predicted.after_forward_bytes - predicted.start_bytes + TINY.num_layers * a_layer
    assert memory["after_forward_bytes"] - memory["start_bytes"] == pytest.approx(forward, abs=16 * tokens), (
        "but for numbers a row"
    )
    assert memory["peak_bytes"] == pytest.approx(predicted.peak_bytes, rel=0.12), "with gloo's copies and oneDNN's"


@needs("megatron")
def test_megatron_core_recomputes() -> None:
    record, predicted = played(task(**MEGATRON, recompute="full"))
    assert record["memory"]["peak_bytes"] == pytest.approx(predicted.peak_bytes, rel=0.12)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"pp": 2}, "pp"),
        ({"zero": 3}, "zero"),
        ({"precision": "fp32"}, "precision"),
        ({"recompute": "selective"}, "recompute"),
        ({"stack": "torch-2.13-cpu"}, "stack"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({**SPLIT, "vocab_parallel": False}, "vocab_parallel"),
    ],
)
def test_what_megatron_core_does_not_play_is_refused(options: dict[str, Any], field: str) -> None:
    asked = task(**{**MEGATRON, **options})
    faults = list(engine_faults(asked.model, asked.plan, asked.stack, asked.mode))
    assert f"plan: {field}" in [fault.place for fault in faults]


def test_a_model_that_megatron_core_has_otherwise_is_refused() -> None:
    asked = task(model=TINY.model_copy(update={"qk_norm": True}), **MEGATRON)
    faults = list(engine_faults(asked.model, asked.plan, asked.stack, asked.mode))
    assert any("pre-norm layers" in fault.problem for fault in faults)


def test_a_plan_without_a_stack_gets_the_packages_own() -> None:
    assert nearest_stack("0.16.1", "local-cpu", "megatron-core") == "megatron-core-0.16-local-cpu"
    assert nearest_stack("0.17.0", "local", "megatron-core") == "megatron-core-0.16-local"
