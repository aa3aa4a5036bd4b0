"""A step's memory against three witnesses: its own arithmetic, torch's tracker, and steps measured on an H200."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from runs_table.meaning import resolve

from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.memory import (
    MemoryUse,
    moment_of,
    outside_torch_bytes,
    simulate_memory,
    step_live_bytes,
    write_history,
)
from simulator.memory.allocator import AllocatorSettings
from simulator.parallel.model_shard import shard_of
from simulator.spec.cluster.device import Device, PeakFlop
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import AttentionBackend, Stack
from simulator.work.ops import ModelBlocks, build_blocks
from simulator.work.script import gradient_tensors, resident_bytes, resident_tensors, units
from validate.compare.borders import step_events

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "experiments" / "measured" / "runs.csv.gz"
TRACKED = ROOT / ".." / "shared" / "data" / "memory.csv"
MEASURED = ROOT / "experiments" / "measured" / "h200-2026-11-20" / "plans.jsonl"
Row = dict[str, Any]

H200 = Device(
    name="H200",
    architecture="hopper",
    memory_bytes=150_109_880_320,
    memory_bytes_per_s=4.8e12,
    peak_flop_per_s=PeakFlop(fp32=67e12, bf16=989e12),
    num_sms=132,
    power_w=700,
)
SMALL = Model(name="small", num_layers=3, d_model=256, num_heads=4, d_ff=704, vocab_size=1024)


def eager(**fields: object) -> Stack:
    """Plain PyTorch: F.scaled_dot_product_attention on repeated heads, every operator a kernel, the loss in fp32."""
    attention = AttentionBackend(kernel="flash2", expand_kv_heads=True)
    base: Row = {"name": "plain", "framework": "PyTorch", "date": "2026-01", "attention": attention, "blocks": "eager"}
    return Stack.model_validate({**base, **fields})


# --- torch's own tracker (FakeTensorMode): memory.csv


def tracked_rows() -> list[Row]:
    if not TRACKED.exists():
        return []
    with TRACKED.open() as file:
        return [row for row in csv.DictReader(file) if row["tp"] == "1"]


def tracked_model(row: Row) -> Model:
    heads = {"num_heads": int(row["n_heads"]), "num_kv_heads": int(row["n_kv_heads"])}
    sizes = {"num_layers": int(row["n_layers"]), "d_model": int(row["d_model"]), "d_ff": int(row["d_ff"])}
    return Model.model_validate({"name": row["model"], "vocab_size": int(row["vocab"]), **heads, **sizes})


def tracked_plan(row: Row) -> Plan:
    world, replicas = int(row["world"]), int(row["replicate"])
    fields: Row = {
        "seq_len": int(row["seq_len"]),
        "micro_batch_size": int(row["micro_batch"]),
        "master_dtype": row["store_dtype"],
        "precision": row["param_dtype"] if row["amp"] == "none" else row["amp"],
        "optimizer_dtype": row["opt_dtype"],
        "optimizer_impl": row["opt_impl"].removeprefix("adamw_"),
        "recompute": row["ac"],
        "gradient_as_bucket_view": row["ddp_bucket_view"] == "True",
    }
    if row["strategy"] in ("single", "ddp"):
        return Plan.model_validate({**fields, "zero": 0, "dp_replicate": world})
    fields |= {
        "dp_shard": world // replicas if row["strategy"] == "hsdp" else world,
        "reduce_dtype": row["reduce_dtype"],
    }
    fields |= {"dp_replicate": replicas if row["strategy"] == "hsdp" else 1, "data_parallel": "fsdp2", "zero": 3}
    return Plan.model_validate({**fields, "reshard_after_forward": False if "noreshard" in row["strategy"] else None})


def tracked_blocks(row: Row, model: Model, plan: Plan) -> ModelBlocks:
    """What the tracker ran: RMSNorm as composed operators and, where it pretends to be CUDA without CUDA's kernels,
    SiLU's backward as its composed formula σ(1 + x(1 − σ)) dy, whose five intermediate results die with the expression.
    """
    expand = row["attn"] != "flash_gqa"
    attention = AttentionBackend(kernel="flash2", expand_kv_heads=expand)
    blocks = build_blocks(model, eager(norm="eager", attention=attention, autocast=row["amp"] != "none"), plan)
    if row["device"] == "cpu":
        return blocks
    size = plan.micro_batch_size * plan.seq_len * model.d_ff * (4 if plan.compute_dtype == "fp32" else 2)
    ops = tuple(
        replace(op, backward_temporary_bytes=5 * size) if op.name == "activation" else op for op in blocks.layer.ops
    )
    return replace(blocks, body=(replace(blocks.layer, ops=ops), *blocks.body[1:]))


def steps_on_host(row: Row, model: Model, plan: Plan) -> int:
    """Adam's step counters stay on the CPU unless it is fused; the tracker of a CPU run counts them too."""
    if row["device"] != "cpu" or plan.optimizer.impl == "fused":
        return 0
    return 4 * sum(len(unit.shapes) for unit in units(model, plan))


@pytest.mark.parametrize("row", tracked_rows() or [None], ids=lambda row: f"row{row['row']}" if row else "absent")
def test_resident_bytes_equal_the_tracker(row: Row | None) -> None:
    if row is None:
        pytest.skip("../shared/data/memory.csv is absent")
    model, plan = tracked_model(row), tracked_plan(row)
    grain = 1 if row["device"] == "cpu" else 512
    inputs = -(-plan.micro_batch_size * plan.seq_len * 8 // grain) * grain
    start = (
        sum(resident_bytes(model, plan, granularity_bytes=grain).values())
        + 2 * inputs
        + steps_on_host(row, model, plan)
    )
    assert start == int(row["start_bytes"])
    gradients = sum(-(-size // grain) * grain for size in gradient_tensors(model, plan))
    assert start + gradients == int(row["after_bwd_bytes"])


@pytest.mark.parametrize("row", tracked_rows() or [None], ids=lambda row: f"row{row['row']}" if row else "absent")
def test_peaks_equal_the_tracker_up_to_scalars(row: Row | None) -> None:
    """To a scalar (512 B on CUDA), or on the CPU the random state of attention, which it does not keep on the device."""
    if row is None:
        pytest.skip("../shared/data/memory.csv is absent")
    model, plan = tracked_model(row), tracked_plan(row)
    history = write_history(model, plan, eager(), tracked_blocks(row, model, plan), (), steps=1)
    course = step_live_bytes(history, 1 if row["device"] == "cpu" else 512)
    peaks: dict[str, int] = {}
    for live, index in course.most:
        phase = moment_of(history, index)[0]
        peaks[phase] = max(live, peaks.get(phase, 0))
    scalars = 512 if row["device"] == "cuda" else 24 * model.num_layers + 20
    extra = steps_on_host(row, model, plan)
    assert course.peak[0] + extra == pytest.approx(int(row["peak_bytes"]), abs=scalars)
    assert peaks["backward"] + extra == pytest.approx(int(row["peak_bwd"]), abs=scalars)
    assert peaks["forward"] + extra == pytest.approx(int(row["peak_fwd"]), rel=2e-3)
    assert peaks["optimizer"] + extra == pytest.approx(int(row["peak_opt"]), abs=scalars)


# --- steps measured on one H200

SIZES = {  # layers, d_model, heads, kv heads, d_ff, vocabulary
    "l1B": (16, 2048, 32, 8, 8192, 128_256),
    "l3B": (28, 3072, 24, 8, 8192, 128_256),
    "l8B": (32, 4096, 32, 8, 14_336, 128_256),
    "l8B_v1k": (32, 4096, 32, 8, 14_336, 1024),
    "l13B_v32k": (40, 5120, 40, 40, 13_824, 32_000),
    "l70B_8L": (8, 8192, 64, 8, 28_672, 128_256),
}


def measured_rows() -> list[Row]:
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    return [row for row in rows if "error" not in row]


def measured_use(row: Row) -> MemoryUse:
    names = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "vocab_size")
    model = Model.model_validate({"name": row["model"], **dict(zip(names, SIZES[row["model"]], strict=True))})
    assert model.num_parameters == row["num_parameters"]
    plan = measured_plan(row)
    blocks = "compiled" if row["compile"] else "eager"
    stack = eager(blocks=blocks, norm="fused")
    settings = AllocatorSettings(expandable_segments="expandable_segments:True" in row["conf"])
    use, _ = simulate_memory(model, plan, stack, build_blocks(model, stack, plan), H200, settings)
    return use


def measured_plan(row: Row) -> Plan:
    fields: Row = {
        "seq_len": row["seq"],
        "micro_batch_size": row["mb"],
        "num_micro_batches": row["accum"],
        "recompute": row["ac"],
        "optimizer_impl": row["opt"],
    }
    if row["strategy"] in ("single", "ddp"):
        return Plan.model_validate({**fields, "zero": 0, "dp_replicate": row["world"]})
    shards = row["shards"] or row["world"]
    fields |= {"dp_shard": shards, "dp_replicate": row["world"] // shards, "reduce_dtype": row["reduce"]}
    return Plan.model_validate({**fields, "reshard_after_forward": None if row["reshard"] else False})


@pytest.mark.parametrize("row", measured_rows(), ids=lambda row: row["name"])
def test_peaks_agree_with_steps_measured_on_an_h200(row: Row) -> None:
    use = measured_use(row)
    # torch's peak of allocated counts whole blocks; what was asked for is the sum that we predict
    tolerance = 0.01 if row["compile"] else 1e-4
    assert use.peak_allocated_bytes == pytest.approx(row["peak_requested_bytes"], rel=tolerance)
    assert use.peak_reserved_bytes == pytest.approx(row["peak_reserved_bytes"], rel=0.01)
    assert use.low_reserved_bytes <= row["peak_reserved_bytes"] <= use.high_reserved_bytes
    outside = row["device_used_bytes"] - row["peak_reserved_bytes"]
    assert outside_torch_bytes(H200, measured_plan(row), 0) == pytest.approx(outside, rel=0.05)


# --- arithmetic of a small step


def simulate(**fields: object) -> MemoryUse:
    plan = Plan.model_validate({"seq_len": 128, "optimizer_impl": "loop", **fields})
    stack = eager()
    return simulate_memory(SMALL, plan, stack, build_blocks(SMALL, stack, plan), H200)[0]


def test_recomputation_trades_activations() -> None:
    kept = [simulate(recompute=policy, micro_batch_size=16).by_category["activations"] for policy in ("none", "full")]
    assert kept[1] < kept[0]


def test_a_third_micro_batch_changes_nothing() -> None:
    assert simulate(num_micro_batches=2) == simulate(num_micro_batches=5)


def test_keeping_parameters_gathered_costs_their_size() -> None:
    resharded, kept = (simulate(dp_shard=8, seq_len=1, reshard_after_forward=value) for value in (None, False))
    assert kept.by_category["unsharded_parameters"] > resharded.by_category.get("unsharded_parameters", 0)


def test_gradients_kept_without_synchronisation_are_whole() -> None:
    fields = {"dp_shard": 8, "num_micro_batches": 2}
    synced, kept = (simulate(**fields, sync_every_micro_batch=value).peak_allocated_bytes for value in (True, False))
    assert kept - synced > 2 * SMALL.num_parameters  # at least a 16-bit gradient of every parameter


def test_events_pair_up_and_name_their_moment() -> None:
    plan = Plan(dp_shard=4, seq_len=128, recompute="full")
    events = step_events(SMALL, plan, eager(), build_blocks(SMALL, eager(), plan))
    alive: set[int] = set()
    for event in events:
        assert (event.storage in alive) == (event.kind == "free")
        (alive.add if event.kind == "alloc" else alive.remove)(event.storage)
    assert {e.tag for e in events if e.storage in alive} == {"parameters", "optimizer_state", "buffers", "inputs"}
    assert {e.moment[0] for e in events} == {"start", "forward", "backward", "optimizer"}
    gathers = [e.moment[2] for e in events if e.tag == "unsharded_parameters" and e.kind == "alloc"]
    assert gathers.index("layer0") < gathers.index("layer1") < gathers.index("layer2")


def test_a_cpu_has_neither_context_nor_communicators() -> None:
    cpu = H200.model_copy(update={"architecture": "cpu"})
    assert outside_torch_bytes(cpu, Plan(dp_shard=8)) == 0
    assert outside_torch_bytes(H200, Plan(dp_shard=8, dp_replicate=2)) > outside_torch_bytes(H200, Plan(dp_shard=8))


def test_before_lazy_loading_the_context_holds_every_kernel() -> None:
    """CUDA 11.7 loads kernels as they are needed; PyTorch asks for it from 1.13 on."""
    old, today = (outside_torch_bytes(H200, Plan(), stack=Stack.load(n)) for n in ("megatron-2021", "torch-2.11-eager"))
    assert old > 2 * today == 2 * outside_torch_bytes(H200, Plan())


def test_deepspeeds_pipelines_add_bf16_gradients_up_in_fp32() -> None:
    """Between steps 2 + 4 + 12/N bytes a parameter; the 16-bit gradients of a micro-batch live until the next backward.

    In fp16 there are 2 + 12/N between steps, and 2 more from the first backward on. No bucket before the last backward ends.
    """
    stack = Stack.load("megatron-deepspeed-2022")
    bf16 = Plan(pp=2, dp_shard=2, zero=1, data_parallel="deepspeed", num_micro_batches=4, seq_len=64)
    plans = [bf16, bf16.copy_with(precision="fp16")]
    share = shard_of(SMALL, plans[0], 0)
    held = [resident_tensors(share, plan) for plan in plans]
    assert sum(held[0]["gradients"]) == pytest.approx(4 * share.num_parameters, rel=0.001)
    assert held[1]["gradients"] == []
    assert [plan.gradient_dtype for plan in plans] == ["fp32", "fp16"]
    for plan, stays in zip(plans, (4, 0), strict=True):
        events = step_events(SMALL, plan, stack, build_blocks(SMALL, stack, plan))
        before = [e for e in events if e.moment[0] != "optimizer"]
        assert not any(e.tag == "buckets" for e in before)
        live = sum(e.num_bytes if e.kind == "alloc" else -e.num_bytes for e in before if e.tag == "gradients")
        assert live == pytest.approx((stays + 2) * share.num_parameters, rel=0.001)


def test_megatron_casts_16_bit_gradients_for_the_optimizers_step_alone() -> None:
    """2 bytes a parameter between steps, and 4 of this rank's part while the optimizer runs."""
    stack, plan = Stack.load("megatron-core-2025"), Plan(zero=1, dp_shard=2, data_parallel="megatron", seq_len=64)
    numel = SMALL.num_parameters
    assert sum(resident_tensors(SMALL, plan)["gradients"]) == pytest.approx(2 * numel, rel=0.001)
    made = [e for e in step_events(SMALL, plan, stack, build_blocks(SMALL, stack, plan)) if e.tag == "gradients"]
    wide = [(e.kind, e.num_bytes, e.moment[0]) for e in made if e.moment[0] == "optimizer"]
    assert wide == [("alloc", 4 * numel // 2, "optimizer"), ("free", 4 * numel // 2, "optimizer")]


def test_transformer_engine_keeps_a_dummy_gradient_of_each_weight_shape() -> None:
    """Once for the head and once for all layers, made by the first backward, beside Megatron's own gradient buffer."""
    te = Stack.load("megatron-core-2025")
    d, f, vocab = SMALL.d_model, SMALL.d_ff, SMALL.vocab_size
    plans = [Plan(zero=1, dp_shard=2, data_parallel=name, seq_len=64) for name in ("megatron", "deepspeed")]
    uses = [simulate_memory(SMALL, p, te, build_blocks(SMALL, te, p), H200)[0] for p in plans]
    rope = 2 * 64 * (d // SMALL.num_heads) * 4  # cosines and sines
    dummies = 2 * (vocab * d + 3 * d * d + d * d + 2 * f * d + f * d)
    assert uses[0].by_category["buffers"] - dummies == uses[1].by_category["buffers"] == pytest.approx(rope, abs=1024)


def test_context_parallel_runs_agree_with_what_was_published(reference_data: Path) -> None:
    """Megatron-LM with Transformer Engine, cp 8 by all-to-all, at 4,096 and 16,384 tokens a rank."""
    rows = {row.id: row for row in read_runs(reference_data / "runs.csv") if isinstance(row, RunRow)}
    for name in ("simumax-b200-38", "simumax-b200-42"):
        run = resolve(rows[name])
        blocks = build_blocks(run.model, run.stack, run.plan)
        use, _ = simulate_memory(run.model, run.plan, run.stack, blocks, run.cluster.device)
        assert use.peak_allocated_bytes == pytest.approx((rows[name].mem_value or 0) * 2**30, rel=0.005)


def test_mixtures_agree_with_what_was_published() -> None:
    """DeepSeek-V2's layers on Megatron-LM: 8 ranks of experts, and 2 stages with 4; the fullest rank's peak."""
    rows = {row.id: row for row in read_runs(RUNS) if isinstance(row, RunRow)}
    for name in ("simumax-b200-05", "simumax-b200-06"):
        run = resolve(rows[name])
        blocks = build_blocks(run.model, run.stack, run.plan)
        use, _ = simulate_memory(run.model, run.plan, run.stack, blocks, run.cluster.device)
        assert use.peak_allocated_bytes == pytest.approx((rows[name].mem_value or 0) * 2**30, rel=0.005)


def test_gloo_holds_a_copy_of_what_it_gathers_and_scatters() -> None:
    """Of every unit, padded, for the time of the call (ProcessGroupGloo.cpp: a flat output; an all-reduce of a copy); NCCL none.

    The root stays gathered from the forward on; layers are gathered twice.
    """
    plan = Plan(dp_shard=2, seq_len=16, precision="fp32")
    blocks = build_blocks(SMALL, eager(), plan)
    nccl = step_events(SMALL, plan, eager(), blocks)
    gloo = step_events(SMALL, plan, eager(), blocks, library="gloo")
    made = [Counter(e.num_bytes for e in events if e.kind == "alloc") for events in (nccl, gloo)]
    root, *layers = units(SMALL, plan)
    assert made[1] - made[0] == Counter(4 * unit.padded_numel for unit in (root, root, *layers * 3))
    copies = [e for e in pairwise(gloo) if e[0].kind == "alloc" and e[0].storage == e[1].storage]
    assert len(copies) >= 2 + 3 * len(layers), "freed before anything else happens"
