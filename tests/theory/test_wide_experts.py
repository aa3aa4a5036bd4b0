"""Attention over each GPU's own sequences, experts dealt over all of them: what a GPU holds, computes and sends."""

from __future__ import annotations

from math import prod

import pytest

from simulator.base.errors import PlanError
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving import Batch, Chunk, InferencePlan, StepCosts, check
from simulator.studies.serving.batch import busiest_rank
from simulator.studies.serving.decoding import batch_of, decode_step
from simulator.studies.serving.deployment import Deployment
from simulator.studies.serving.shards import kv_bytes_per_token, stage_shards, weight_bytes

MODEL, CLUSTER, STACK = Model.load("deepseek-v3"), Cluster.load("hgx-h200-8"), Stack.load("vllm-2025")
WIDE = InferencePlan(tp=8, experts="dealt", attention_dp=True, weights="fp8")


def test_a_gpu_holds_its_experts_and_all_else_whole() -> None:
    (whole,) = stage_shards(MODEL, InferencePlan())
    (shard,) = stage_shards(MODEL, WIDE)
    plain = InferencePlan(weights="fp8")
    assert MODEL.experts is not None
    mixed = MODEL.layer_kinds.count("layer")
    routed = sum(
        prod(shape) for name, shape in whole.part.parameter_shapes("layer") if name.startswith("experts.")
    )  # of a layer, one byte each
    assert weight_bytes(whole, plain) - weight_bytes(shard, WIDE) == mixed * routed * 7 // 8
    assert kv_bytes_per_token(shard, WIDE) == kv_bytes_per_token(whole, WIDE)


def test_an_engine_caches_what_its_gpus_do_and_not_the_same_eight_times() -> None:
    calibration = Calibration.ideal()
    curves = LinkCurves.ideal()
    wide, split = (
        Deployment.of(MODEL, plan, CLUSTER, STACK, calibration, curves)
        for plan in (WIDE, WIDE.model_copy(update={"attention_dp": False}))
    )
    assert wide.limits.num_blocks == 8 * wide.memory.num_blocks
    assert split.limits.num_blocks == split.memory.num_blocks  # latents are the same on every GPU
    assert wide.limits.num_blocks > 4 * split.limits.num_blocks


def test_sequences_are_dealt_evenly_and_prompts_to_whom_has_least() -> None:
    chunks = tuple(Chunk(new=new, cached=0) for new in (700, 100, 300, 200, 400))
    found = busiest_rank(Batch(decodes=9, keys=(9000,), chunks=chunks), 3)
    assert (found.decodes, found.keys) == (3, (3000,))
    assert [chunk.new for chunk in found.chunks] == [700]  # 700 | 400 100 | 300 200
    assert busiest_rank(Batch(decodes=9, keys=(9000,), chunks=chunks), 1).chunks == chunks


def test_eight_sequences_take_as_long_as_one_of_each_gpu() -> None:
    """And on a machine without losses, reading what is not expert takes at least its bytes over the bandwidth."""
    costs = StepCosts(MODEL, WIDE, CLUSTER, STACK, Calibration.ideal(), LinkCurves.ideal())
    one, eight = (sum(costs.stages_s(batch_of(costs, count, 1000))) for count in (1, 8))
    assert one == eight
    (shard,) = stage_shards(MODEL, WIDE)
    (none,) = stage_shards(MODEL, WIDE.model_copy(update={"tp": 256}))
    dense = weight_bytes(none, WIDE) - 2 * MODEL.vocab_size * MODEL.d_model * 2  # with one expert a layer
    assert one > dense / CLUSTER.device.memory_bytes_per_s
    assert weight_bytes(shard, WIDE) > dense


def test_tokens_travel_there_and_back() -> None:
    """Two all-to-alls a layer with experts; a GPU alone would send nothing, and nothing is reduced."""
    calibration = Calibration.for_device(CLUSTER.device)
    costs = StepCosts(MODEL, WIDE, CLUSTER, STACK, calibration, default_curves())
    (few,), (many,) = (costs.costs(batch_of(costs, count, 1000)) for count in (8, 1024))
    assert 0 < few.exchange_s < many.exchange_s
    kinds = {
        line.single.kind  # type: ignore[union-attr]  # of exchanges
        for *_, lines in costs._forward["layer"].ops
        for line in lines
    }
    assert kinds == {"all_to_all"}


def test_contradictions_are_told_together() -> None:
    plan = InferencePlan(tp=3, pp=2, experts="dealt", attention_dp=True, replicate=("head",))
    with pytest.raises(PlanError) as caught:
        check(plan, MODEL, CLUSTER)
    places = {fault.place.removeprefix("inference: ") for fault in caught.value.faults}
    assert {"tp", "attention_dp", "replicate"} <= places
    with pytest.raises(PlanError, match="one GPU has all sequences"):
        check(WIDE.model_copy(update={"tp": 1}), MODEL, CLUSTER)
    with pytest.raises(PlanError, match="none are dealt"):
        check(InferencePlan(tp=2, attention_dp=True), Model.load("llama3-8b"), CLUSTER)


def test_a_gpu_reads_the_caches_of_its_own_sequences() -> None:
    """On a machine without losses no GPU reads more than its memory gives in a step, but for whole experts of those reached."""
    calibration, curves = Calibration.ideal(), LinkCurves.ideal()
    costs = StepCosts(MODEL, WIDE, CLUSTER, STACK, calibration, curves)
    steps = [decode_step(costs, count, 4000, calibration, curves) for count in (8, 1024)]
    assert all(0.5 < step.bandwidth_share < 1.01 for step in steps)
