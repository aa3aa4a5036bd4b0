"""Plans on fake tensors: torch's modules are the simulator's model, and their memory is the published one to the byte."""

from __future__ import annotations

import csv
import functools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simulator.base.errors import InputError, ModelError, StackError
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.script import resident_bytes
from tests import warm
from validate.playable import unplayable
from validate.task import Task

pytest.importorskip("torch", reason="torch is not installed")

import torch

from validate import run_plan
from validate.compare import compare_run
from validate.compare.borders import borders
from validate.gpus import built_with_cuda
from validate.models import Decoder
from validate.parallel import style_of
from validate.playable import played_otherwise
from validate.players import fake, guard
from validate.report import RankReport
from validate.run_plan import play
from validate.torch_releases import release, release_faults, release_notes
from validate.tracker import Moment, TrackedMemory

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of which every version has others

NORM_BYTES = 512 if release(torch.__version__) > (2, 13) else 0  # RMSNorm's sums are freed in another order there
CPU = Stack.load("torch-2.13-cpu")
TINY = Model(name="tiny", num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, d_ff=128, vocab_size=256)
STATES = {"optimizer": "host", "parameters": "host"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"zero": 0},
    "ddp": {"zero": 0, "dp_replicate": 4},
    "zero1": {"zero": 1, "dp_shard": 4},
    "zero1 in groups": {"zero": 1, "dp_shard": 2, "dp_replicate": 2},
    "zero2": {"zero": 2, "dp_shard": 4},
    "fsdp2": {"dp_shard": 4},
    "hsdp": {"dp_shard": 2, "dp_replicate": 2},
}


def plan(**options: Any) -> Plan:
    return Plan(**{"seq_len": 64, "precision": "fp32", **options})


def shrunk(preset: str, **changes: Any) -> Model:
    """A preset's family at a size that plays in a second."""
    fields = Model.load(preset).model_dump(exclude_unset=True)
    for name in ("head_dim", "num_kv_heads", "sources"):
        fields.pop(name, None)
    sizes = {"num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 128, "vocab_size": 256, "max_positions": 64}
    return Model.parse({**fields, **sizes, **changes}, preset, ModelError)


# --- the modules are the model


@pytest.mark.parametrize(
    "preset",
    [
        "llama3-8b",
        "gpt2",
        "mpt-1b",
        "falcon-7b",
        "pythia-1b",
        "gemma2-2b",
        "qwen3-0.6b",
        "qwen2-0.5b",
        "gpt3-175b",
        "bloom-560m",
        "opt-125m",
    ],
)
def test_modules_have_the_models_parameters_in_its_order(preset: str) -> None:
    model = shrunk(preset)
    with torch.device("meta"):
        module = Decoder(model, style_of(model, plan(), CPU))
    built = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    layer = model.parameter_shapes("layer")
    asked = [
        *model.parameter_shapes("embedding"),
        *((f"layers.{i}.{name}", shape) for i in range(model.num_layers) for name, shape in layer),
        *model.parameter_shapes("head"),
    ]
    assert built == asked
    assert sum(parameter.numel() for parameter in module.parameters()) == model.num_parameters


@functools.cache
def start_of(strategy: str, preset: str) -> Moment:
    return fake.play(shrunk(preset), plan(**STRATEGIES[strategy]), CPU).start


@pytest.mark.parametrize("preset", ["llama3-8b", "gpt2"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_resident_is_what_the_stage_leaves_there(strategy: str, preset: str) -> None:
    model, asked = shrunk(preset), plan(**STRATEGIES[strategy])
    start = start_of(strategy, preset)
    held = resident_bytes(model, asked)
    inputs = 2 * 8 * asked.micro_batch_size * asked.seq_len  # token ids and labels, int64
    assert start.by_category.get("buckets", 0) == held["buckets"]
    assert start.by_category["inputs"] == inputs
    rank_0_is_not_fullest = asked.zero == 1
    if rank_0_is_not_fullest:
        assert start.by_category["optimizer_state"] <= held["optimizer_state"]
    else:
        assert start.total_bytes == sum(held.values()) + inputs


# --- published bytes


def reference_rows() -> list[dict[str, str]]:
    file = Path(__file__).resolve().parents[3] / "shared" / "data" / "memory.csv"
    if not file.is_file():
        return []
    with file.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def as_plan(row: dict[str, str]) -> tuple[Model, Plan, Stack]:
    """A row of the table as a plan: `strategy` and its neighbours in Plan's words."""
    sizes = {"num_layers": "n_layers", "d_model": "d_model", "num_heads": "n_heads", "num_kv_heads": "n_kv_heads"}
    sizes |= {"d_ff": "d_ff", "vocab_size": "vocab"}
    model = Model(name=row["model"], **{ours: int(row[theirs]) for ours, theirs in sizes.items()})
    world, tp, strategy = int(row["world"]), int(row["tp"]), row["strategy"]
    options: dict[str, Any] = {
        "tp": tp,
        "vocab_parallel": tp == 1,
        "seq_len": int(row["seq_len"]),
        "micro_batch_size": int(row["micro_batch"]),
        "recompute": row["ac"],
        "optimizer_impl": row["opt_impl"].removeprefix("adamw_"),
        "master_dtype": row["store_dtype"],
        "optimizer_dtype": row["store_dtype"],
        "precision": row["param_dtype"],
        "gradient_as_bucket_view": row["ddp_bucket_view"] == "True",
    }
    if strategy in ("single", "ddp", "tp"):
        options |= {"zero": 0, "dp_replicate": world // tp}
    else:
        replicate = int(row["replicate"]) if strategy == "hsdp" else 1
        options |= {
            "dp_replicate": replicate,
            "dp_shard": world // tp // replicate,
            "reduce_dtype": row["reduce_dtype"],
        }
        options |= {"reshard_after_forward": False} if strategy == "fsdp2_noreshard" else {}
    stack = CPU.model_dump(mode="json", exclude_unset=True)
    stack["attention"]["expand_kv_heads"] = row["attn"] != "flash_gqa"
    stack["norm"] = "eager" if row["device"] == "cpu" else "fused"
    return model, Plan(**options), Stack.parse(stack, "row", StackError)


QUICK_ROWS = ("1", "6", "8", "9", "10", "12", "26", "27", "98", "101", "102")
ROWS = {row["row"]: row for row in reference_rows()}
MOMENTS = {
    "peak": "peak_bytes",
    "start": "start_bytes",
    "after_forward": "after_fwd_bytes",
    "after_backward": "after_bwd_bytes",
}


@pytest.mark.parametrize("number", QUICK_ROWS)
def test_rows_measured_on_a_cpu_to_the_byte(number: str) -> None:
    if number not in ROWS:
        pytest.skip("the table of measured memory is not on this machine")
    row = ROWS[number]
    tracked = fake.play(*as_plan(row))
    found = {name: getattr(tracked, name).total_bytes for name in MOMENTS}
    assert found == pytest.approx({name: int(row[column]) for name, column in MOMENTS.items()}, rel=0, abs=NORM_BYTES)
    phases = {"forward": "peak_fwd", "backward": "peak_bwd", "optimizer": "peak_opt"}
    known = {name: int(row[column]) for name, column in phases.items()}
    seen = tracked.peak_by_phase_bytes
    if NORM_BYTES:  # there a norm's forward holds less, too
        assert seen.pop("forward") <= known.pop("forward")
    assert seen == pytest.approx(known, rel=0, abs=NORM_BYTES)


@pytest.mark.usefixtures("warm_captures")
@pytest.mark.parametrize("number", ["85"])  # every other one has been checked by hand, and takes as long
def test_rows_measured_for_cuda_to_the_byte(number: str) -> None:
    if number not in ROWS:
        pytest.skip("the table of measured memory is not on this machine")
    if built_with_cuda():
        pytest.skip("the row was taken where torch has no CUDA, and so no fused norm")
    model, asked, stack = as_plan(ROWS[number])
    record = play(Task(mode="fake", device="cuda", model=model, plan=asked, stack=stack))
    assert record["verdict"] == "ok", record["trouble"]
    found = {name: record["memory"][f"{name}_bytes"] for name in MOMENTS}
    assert found == {name: int(ROWS[number][column]) for name, column in MOMENTS.items()}


# --- the simulator's own account of the same plans


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "all kept": {"reshard_after_forward": False},
    "all resharded": {"reshard_after_forward": True},
    "no prefetch": {"backward_prefetch": 0},
    "two ahead": {"backward_prefetch": 2},
    "accumulated": {"num_micro_batches": 2},
    "accumulated without reductions": {"num_micro_batches": 3, "sync_every_micro_batch": False, "precision": "bf16"},
    "checkpointed": {"recompute": "full"},
    "checkpointed selectively": {"recompute": "selective"},
    "each second block": {"recompute": "every_k", "recompute_every": 2},
    "momentum": {"optimizer": "sgd", "optimizer_impl": "foreach"},
    "16-bit master": {"precision": "bf16", "master_dtype": "bf16", "optimizer_dtype": "bf16", "reduce_dtype": "bf16"},
}


@functools.cache
def played(option: str) -> TrackedMemory:
    return fake.play(TINY, plan(dp_shard=4, **OPTIONS[option]), CPU)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_a_plan_reaches_torch(option: str) -> None:
    """The simulator derives the same step from PyTorch's rules; random states of attention (24 B a layer) apart."""
    tracked, asked = played(option), plan(dp_shard=4, **OPTIONS[option])
    predicted = borders(TINY, asked, CPU, granularity_bytes=1)
    for name in ("start", "after_forward", "after_backward", "peak"):
        difference = getattr(predicted, f"{name}_bytes") - getattr(tracked, name).total_bytes
        assert -NORM_BYTES <= difference <= 24 * TINY.num_layers + NORM_BYTES, name


OTHERS: dict[str, dict[str, Any]] = {
    "replicas that sum in 16 bits": {**STRATEGIES["hsdp"], "precision": "bf16", "reduce_dtype": "bf16"},
    "replicas that accumulate": {**STRATEGIES["hsdp"], "num_micro_batches": 2},
    "resharded to a smaller group": {"dp_shard": 4, "reshard_after_forward": 2, "precision": "bf16"},
    "gathered ahead": {"dp_shard": 4, "forward_prefetch": 2, "recompute": "full"},
    "views of buckets, accumulated": {**STRATEGIES["ddp"], "gradient_as_bucket_view": True, "num_micro_batches": 3},
    "small buckets, 16 bits": {**STRATEGIES["ddp"], "bucket_bytes": 65536, "precision": "bf16"},
    "zero1 one by one": {**STRATEGIES["zero1"], "optimizer_impl": "loop"},
}


@pytest.mark.parametrize("option", OTHERS)
def test_other_implementations_hold_what_is_predicted(option: str) -> None:
    model, asked = TINY.model_copy(update={"num_layers": 4}), plan(**OTHERS[option])
    tracked, predicted = fake.play(model, asked, CPU), borders(model, asked, CPU, granularity_bytes=1)
    for name in ("start", "after_forward", "after_backward", "peak"):
        difference = getattr(predicted, f"{name}_bytes") - getattr(tracked, name).total_bytes
        assert 0 <= difference <= 24 * model.num_layers, name
    for phase, size in tracked.peak_by_phase_bytes.items():
        assert -NORM_BYTES <= predicted.peak_by_phase_bytes[phase] - size <= 24 * model.num_layers, phase


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a tied table, few tokens": ({"tied_embeddings": True, "vocab_size": 8192}, {"seq_len": 16, "precision": "bf16"}),
    "a tied table, accumulated": (
        {"tied_embeddings": True, "vocab_size": 8192},
        {"seq_len": 16, "precision": "bf16", "num_micro_batches": 2},
    ),
    "half of the channels turn": ({"rotary_fraction": 0.5, "num_kv_heads": 4}, {"seq_len": 512, "precision": "bf16"}),
    "all turn": ({"num_kv_heads": 4}, {"seq_len": 512, "precision": "bf16"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_sums_of_tied_tables_and_copies_of_joined_heads(name: str) -> None:
    """Where the peak is the table's sum, and where attention's result lies by heads, in every phase."""
    changes, options = LAYOUTS[name]
    model, asked = Model.model_validate(TINY.model_dump() | changes), plan(dp_shard=4, **options)
    tracked, predicted = fake.play(model, asked, CPU), borders(model, asked, CPU, granularity_bytes=1)
    for phase, size in tracked.peak_by_phase_bytes.items():
        assert -NORM_BYTES <= predicted.peak_by_phase_bytes[phase] - size <= 24 * model.num_layers, phase


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tied_heads_gradient_waits_for_the_embeddings_in_every_micro_batch(precision: str) -> None:
    """Beside the sum of those before; with a cast between, autograd adds one to the other in place."""
    model = Model.model_validate(TINY.model_dump() | {"tied_embeddings": True, "vocab_size": 8192})
    asked = plan(
        **STRATEGIES["ddp"], seq_len=16, precision=precision, num_micro_batches=3, sync_every_micro_batch=False
    )
    tracked, predicted = fake.play(model, asked, CPU), borders(model, asked, CPU, granularity_bytes=1)
    norm = 4 * model.d_model  # the head's, which is added at once
    assert 0 <= predicted.peak_bytes - tracked.peak.total_bytes <= 24 * model.num_layers + norm


def test_on_a_cpu_offloaded_states_are_counted_with_the_rest() -> None:
    asked = plan(dp_shard=4, offload=STATES)
    assert fake.play(TINY, asked, CPU) == fake.play(TINY, plan(dp_shard=4), CPU)
    notes = played_otherwise(TINY, asked, CPU, "cpu", "cpu")
    assert [note.split(":")[0] for note in notes] == ["offload", "offload.pinned"]
    assert not played_otherwise(TINY, plan(dp_shard=4), CPU, "cpu", "cpu")
    assert not played_otherwise(TINY, asked, CPU, "solo", "cuda")


def test_a_stack_with_a_fused_norm_is_told_that_operators_were_played() -> None:
    fused = Stack.load("torch-2.6-eager")
    (note,) = played_otherwise(TINY, plan(dp_shard=4), fused, "fake", "cpu")
    assert "torch-2.13-fake-cpu" in note
    notes = played_otherwise(TINY, plan(dp_shard=4), fused, "fake", "cuda")
    assert ["torch-2.13-fake-cuda" in note for note in notes] == ([] if built_with_cuda() else [True])
    assert not played_otherwise(TINY, plan(dp_shard=4), fused, "solo", "cuda")
    layer = TINY.model_copy(update={"norm": "layer"})
    assert not played_otherwise(layer, plan(dp_shard=4), fused, "fake", "cpu")


@pytest.mark.parametrize(
    "options",
    [{"dp_shard": 2, "dp_replicate": 2}, {"dp_shard": 4, "precision": "fp32", "num_micro_batches": 2}],
    ids=["replicas", "fp32, accumulated"],
)
def test_offloaded_states_leave_the_gpu_to_the_byte(options: dict[str, Any], guarded_server: warm.Server) -> None:
    model = TINY.model_copy(update={"num_layers": 4, "d_model": 128, "head_dim": 32})
    asked, stack = plan(**{"precision": "bf16", **options, "offload": STATES}), without_gpu()
    with warm.forked_ranks(guarded_server):
        record = play(Task(mode="fake", device="cuda", model=model, plan=asked, stack=stack))
    assert record["verdict"] == "ok", record["trouble"]
    assert (record["device"], len(record["notes"])) == ("cuda", 1)
    predicted = borders(model, asked, stack, granularity_bytes=512)
    # with CUDA's own kernels, seen in torch 2.15, up to two streams less are alive at the peak of the backward
    early = 2 * 4 * asked.seq_len * model.d_model if built_with_cuda() else 0
    for name in MOMENTS:
        difference = getattr(predicted, f"{name}_bytes") - record["memory"][f"{name}_bytes"]
        assert 0 <= difference <= (early if name == "peak" else 0), name
    compared = {row["name"]: row["error"] for row in compare_run(record)["memory"]}
    assert all(0 <= error <= early for error in compared.values())


@pytest.mark.skipif(guard.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("zero", [0, 1])
def test_autocast_on_a_gpu_that_is_none_multiplies_in_bf16(zero: int, guarded_server: warm.Server) -> None:
    """Without CUDA torch switches autocast off, and every activation would be one of fp32."""
    degree = {"dp_replicate": 4} if zero == 0 else {"dp_shard": 4}
    stack = Stack.load("torch-2.13-fake-cuda")
    asked = plan(zero=zero, **degree, seq_len=256, micro_batch_size=4, precision="bf16")
    with warm.forked_ranks(guarded_server):
        record = play(Task(mode="fake", device="cuda", model=TINY, plan=asked, stack=stack))
    assert record["verdict"] == "ok", record["trouble"]
    predicted = borders(TINY, asked, stack, granularity_bytes=512)
    assert record["memory"]["after_forward_bytes"] == predicted.after_forward_bytes


@pytest.mark.skipif(guard.compiler() is None, reason="no C++ compiler")
def test_a_ring_joins_parts_that_fill_no_block_of_the_memory_efficient_kernel(guarded_server: warm.Server) -> None:
    """In fp32 CUDA's kernel makes log-sum-exps of 32 rows for a part of 16."""
    asked, stack = plan(cp=2), without_gpu()
    with warm.forked_ranks(guarded_server):
        record = play(Task(mode="fake", device="cuda", model=TINY, plan=asked, stack=stack))
    assert record["verdict"] == "ok", record["trouble"]
    predicted = borders(TINY, asked, stack, granularity_bytes=512)
    tables = 2 * 4 * TINY.head_dim * asked.seq_len // 2  # positions, which the prediction counts whole
    assert record["memory"]["start_bytes"] == predicted.start_bytes - tables
    assert record["memory"]["after_forward_bytes"] == predicted.after_forward_bytes - tables


def without_gpu() -> Stack:
    """What runs on fake CUDA tensors: a build with CUDA has norms and activations' backwards in one kernel each."""
    stack = Stack.load("torch-2.13-fake-cuda")
    if not built_with_cuda():
        return stack
    one_each = {"norm": "fused", "activation_backward": "kernel"}
    return Stack.parse(stack.model_dump(mode="json", exclude_unset=True) | one_each, "stack", StackError)


def test_a_build_with_cuda_needs_the_guard_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node's torch: its own guard would ask a driver that is not there."""
    monkeypatch.setattr(guard, "built_with_cuda", lambda: True)
    monkeypatch.setattr(guard.ctypes, "CDLL", lambda _: SimpleNamespace(cuInit=lambda _: 100))  # CUDA_ERROR_NO_DEVICE
    assert guard.needs_guard()
    monkeypatch.setattr(guard.ctypes, "CDLL", lambda _: SimpleNamespace(cuInit=lambda _: 0))
    assert not guard.needs_guard()
    monkeypatch.setattr(guard, "built_with_cuda", lambda: False)
    assert guard.needs_guard()


DUALPIPE: dict[str, Any] = {
    "pp": 2, "zero": 0, "num_micro_batches": 4, "schedule": "dualpipe_v", "virtual_stages": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("torch_here", "options", "place"),
    [
        ("2.6.0+cu124", {}, "older than 2.8"),
        ("2.9.1", {"tp": 2}, "does not play tp = 2 as 2.11"),
        ("2.8.0", {"cp": 2}, "does not play cp = 2 as 2.9"),
        ("2.9.1", {"cp": 2}, ""),
        ("2.11.0", {"tp": 2, "dp_shard": 2}, ""),
        ("2.11.0", DUALPIPE, "a rank would send to itself"),
        ("2.13.0", DUALPIPE, ""),
        ("", {"tp": 2}, ""),
    ],
)
def test_releases_that_do_not_play_a_plan_are_refused(
    torch_here: str, options: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_plan, "installed", lambda: torch_here)
    asked = plan(**options)
    mode = "cpu" if asked.pp > 1 else "fake"
    task = Task(mode=mode, model=TINY.model_copy(update={"num_layers": 4}), plan=asked, stack=CPU)
    if not place:
        run_plan.check(task)
        return
    with pytest.raises(InputError, match=place) as raised:
        run_plan.check(task)
    assert all("pip install 'torch>=" in fault.remedy for fault in raised.value.faults)


def test_a_release_that_holds_less_says_so() -> None:
    pipelined = plan(pp=2, zero=0, num_micro_batches=2)
    assert not [*release_notes(pipelined, "2.13.0+cpu"), *release_notes(plan(), "2.15.0")]
    (note,) = release_notes(pipelined, "2.15.0+cu132")
    assert "when they are needed" in note
    (note,) = release_notes(plan(), "2.8.0")
    assert "RMSNorm" in note
    (note,) = release_notes(pipelined, "2.11.0")
    assert "16 bytes more" in note


def test_a_release_that_does_not_scale_by_row_on_a_cpu_is_refused_there() -> None:
    narrow = plan(precision="fp8", fp8_recipe="rowwise", dp_shard=2)
    (fault,) = release_faults(narrow, "2.11.0", "cpu")
    assert 'fp8_recipe = "tensorwise"' in fault.remedy
    assert not [*release_faults(narrow, "2.11.0", "fake"), *release_faults(narrow, "2.13.0", "cpu")]


def test_options_make_a_difference() -> None:
    """Otherwise the test above would hold of a player that ignores them."""
    courses = map(played, OPTIONS)
    totals = {(c.peak.total_bytes, c.after_forward.total_bytes, c.start.total_bytes) for c in courses}
    usual = {"all resharded"}  # a root alone that is kept or not does not change these moments of two small layers
    assert len(totals) >= len(OPTIONS) - len(usual)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_shrinks_with_the_stage_only_where_the_stage_says(strategy: str) -> None:
    start = start_of(strategy, "llama3-8b").by_category
    whole = 4 * shrunk("llama3-8b").num_parameters
    shards = {"fsdp2": 4, "zero2": 4, "hsdp": 2}.get(strategy, 1)
    assert start["parameters"] == whole // shards
    assert ("buckets" in start) == (strategy in ("ddp", "zero1", "zero1 in groups"))


# --- refusals


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"pp": 2}, "plan: sync_every_micro_batch"),
        ({"dp_replicate": 2, "rank_order": "dp_replicate-dp_shard"}, "plan: rank_order"),
        ({"precision": "nvfp4"}, "plan: precision"),
        ({"optimizer": "adam8bit"}, "plan: optimizer"),
        ({"optimizer_dtype": "bf16"}, "plan: optimizer_dtype"),
        ({"optimizer": "sgd", "optimizer_impl": "fused"}, "plan: optimizer_impl"),
        ({"data_parallel": "fsdp1"}, "plan: data_parallel"),
        ({"tp": 3}, "plan: tp"),
        ({"offload": {**STATES, "prefetch": 0}}, "plan: offload.prefetch"),
        ({"offload": {**STATES, "migration": "fault"}}, "plan: offload.migration"),
        ({"offload": {"activations": "host"}}, "plan: offload.activations"),
        ({"zero": 0, "dp_shard": 1, "dp_replicate": 2, "num_micro_batches": 2, "sync_every_micro_batch": True},
         "plan: sync_every_micro_batch"),
        ({"zero": 0, "dp_shard": 1, "dp_replicate": 2, "tp": 2}, "plan: tp"),
        ({"zero": 0, "dp_shard": 1, "dp_replicate": 2, "master_dtype": "bf16", "optimizer_dtype": "bf16",
          "reduce_dtype": "fp32"}, "plan: reduce_dtype"),
    ],
)  # fmt: skip
def test_what_torch_cannot_play_is_refused(changes: dict[str, Any], place: str) -> None:
    faults = unplayable(TINY, plan(**{"dp_shard": 2, **changes}), CPU, "fake")
    assert place in {fault.place for fault in faults}
    assert all(fault.remedy for fault in faults)


@pytest.mark.parametrize("stack", ["megatron-2021", "torch-2.11-compiled"])
def test_stacks_that_are_not_plain_torch_are_refused_on_fake_tensors(stack: str) -> None:
    assert unplayable(TINY, plan(dp_shard=2), Stack.load(stack), "fake")


def test_a_task_survives_its_file() -> None:
    task = Task(mode="fake", model=shrunk("gpt2"), plan=plan(dp_shard=2), stack=CPU)
    assert Task.model_validate_json(task.model_dump_json(exclude_unset=True)) == task


@pytest.mark.skipif(not os.environ.get("SHARDWISE_SLOW"), reason="takes half a minute: set SHARDWISE_SLOW=1")
def test_llama3_70b_on_512_ranks_at_all() -> None:
    asked = Plan(dp_shard=512, seq_len=8192, recompute="full")
    tracked = fake.play(Model.load("llama3-70b"), asked, Stack.load("torch-2.6-eager"))
    held = resident_bytes(Model.load("llama3-70b"), asked)
    assert tracked.start.total_bytes == sum(held.values()) + 2 * 8 * 8192


def test_a_long_play_says_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once an eighth of the first forward is through; its phase then takes as long as was said before it is overdue."""
    told = list[tuple[str, float | None]]()

    class Report(RankReport):
        def phase(self, name: str, seconds: float | None = None) -> None:
            told.append((name, seconds))

    asked = plan(dp_shard=4, num_micro_batches=2)
    quiet = fake.play(TINY, asked, CPU, report=Report())
    assert told == []
    monkeypatch.setattr(fake, "_LONG_S", 0.0)
    assert fake.play(TINY, asked, CPU, report=Report()) == quiet
    ((name, seconds),) = told
    assert name.startswith("memory of 2 layers, some ")
    assert seconds is not None
    assert seconds > 0
