"""Hybrids served: what their mixers keep of a sequence, read and write, and how many sequences that leaves room for."""

from __future__ import annotations

import pytest

from simulator.base.errors import PlanError
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving import (
    Batch,
    Chunk,
    Deployment,
    InferencePlan,
    Request,
    StepCosts,
    check,
    serve,
    with_defaults,
)
from simulator.studies.serving.decoding import batch_of
from simulator.studies.serving.legal import legal_tp
from simulator.studies.serving.memory import serving_memory
from simulator.studies.serving.mixers import state_bytes
from simulator.studies.serving.shards import kv_bytes_per_token, stage_shards

MODEL, CLUSTER, STACK = Model.load("nemotron-h-8b"), Cluster.load("hgx-h100-8"), Stack.load("vllm-2025")
MIXERS, HEADS, CHANNELS, STATES, GROUPS = 24, 128, 64, 128, 8
STATE = 4 * HEADS * CHANNELS * STATES  # fp32
CONVOLVED = HEADS * CHANNELS + 2 * GROUPS * STATES
KEPT = MIXERS * (STATE + 2 * 3 * CONVOLVED)  # and all but one of four taps, in bf16


def costs_of(**plan: object) -> StepCosts:
    """On a machine without losses."""
    made = InferencePlan.parse(plan, "plan", PlanError)
    return StepCosts(MODEL, made, CLUSTER, STACK, Calibration.ideal(), LinkCurves.ideal())


def seconds(costs: StepCosts, count: int, context: int = 1000) -> float:
    return sum(costs.stages_s(batch_of(costs, count, context)))


def test_a_sequence_keeps_a_state_a_mixer_and_keys_of_attention_alone() -> None:
    plan = InferencePlan()
    (shard,) = stage_shards(MODEL, plan)
    assert state_bytes(shard, plan) == KEPT
    attention = MODEL.pattern.count("*") if MODEL.pattern else 0
    assert kv_bytes_per_token(shard, plan) == attention * 2 * 8 * 128 * 2
    shards = stage_shards(MODEL, InferencePlan(tp=8))
    assert state_bytes(shards[0], InferencePlan(tp=8)) == KEPT / 8
    assert sum(state_bytes(one, InferencePlan(pp=4)) for one in stage_shards(MODEL, InferencePlan(pp=4))) == KEPT


def test_one_more_sequence_reads_and_writes_one_more_state() -> None:
    """Beyond the tokens' own activations, which are less than a tenth of that."""
    costs = costs_of()
    more_s = (seconds(costs, 64) - seconds(costs, 32)) / 32
    cached = 1000 * kv_bytes_per_token(costs.shards[0], costs.plan)
    moved_s = (2 * KEPT + cached) / CLUSTER.device.memory_bytes_per_s
    assert moved_s < more_s < 1.1 * moved_s


def test_graphs_and_single_launches_move_the_same_bytes() -> None:
    assert seconds(costs_of(), 8) == pytest.approx(seconds(costs_of(cuda_graphs=False), 8), rel=1e-9)


def test_prompts_are_scanned_in_whole_pieces_of_their_own() -> None:
    """129 tokens of one prompt are two pieces of 128, as 128 and 1 of two prompts are."""
    costs = costs_of()
    scanned = [
        costs._mixers.of(0, Batch(decodes=0, keys=(0,), chunks=tuple(Chunk(new=n, cached=0) for n in lengths)))
        for lengths in ((128,), (129,), (128, 1), (256,))
    ]
    one, *two = (cost.stream_s for cost in scanned)
    assert two == pytest.approx([2 * one] * 3)


def test_the_cache_holds_as_many_sequences_as_its_states_leave() -> None:
    """All at once, a short answer each: no more decode together than have room."""
    plan = InferencePlan(gpu_memory_utilization=0.23, max_model_len=512, max_batched_tokens=512)
    memory = serving_memory(MODEL, plan, CLUSTER.device, STACK)
    each = -(-KEPT // memory.block_bytes) + -(-(64 + 32) // 16)
    room = memory.num_blocks // each
    assert 0 < room < 32
    requests = [Request(arrival_s=0.0, prompt_tokens=64, output_tokens=32) for _ in range(64)]
    served = serve(MODEL, plan, CLUSTER, requests, warmup=0)
    assert served.load is not None
    assert served.load.sequences <= room
    assert served.load.sequences > 0.6 * room
    assert any("states of mixers" in note for note in served.assumptions)


def test_groups_are_split_or_held_by_several_gpus() -> None:
    """128 heads in 8 groups, 32 heads of attention, of which 8 have keys."""
    assert legal_tp(MODEL) == (1, 2, 4, 8, 16, 32)
    assert stage_shards(MODEL, InferencePlan(tp=16))[0].part.mamba == MODEL.mamba.model_copy(  # type: ignore[union-attr]
        update={"num_heads": 8, "num_groups": 1}
    )


def test_what_is_not_modelled_of_states_is_refused_together() -> None:
    plan = InferencePlan(speculative="ngram", acceptance=0.5, lora_rank=8, prefill_dp=1)
    with pytest.raises(PlanError) as caught:
        check(plan, MODEL, CLUSTER)
    assert [fault.place for fault in caught.value.faults] == [
        f"inference: {key}" for key in ("prefill_dp", "speculative", "lora_rank")
    ]


def test_a_pool_of_states_limits_what_runs_at_once() -> None:
    """SGLang: states have 0.9 of what the cache has, a third of them runs (one each without a radix cache), and none is in blocks."""
    stack = Stack.load("sglang-2025")
    found = {
        reuse: serving_memory(
            MODEL, with_defaults(InferencePlan(stack=stack.name, prefix_caching=reuse), stack), CLUSTER.device, stack
        )
        for reuse in (True, False)
    }
    kept, alone = found[True], found[False]
    assert kept.states_bytes == pytest.approx(0.9 * kept.kv_bytes, abs=2 * KEPT)
    assert kept.most_states == kept.states_bytes // (3 * KEPT)
    assert alone.most_states == alone.states_bytes // KEPT == kept.states_bytes // KEPT < 2048
    assert (kept.state_blocks, kept.fit.runs) == (0, True)
    fixed = kept.weight_bytes + kept.activation_bytes + kept.outside_torch_bytes
    assert kept.used_bytes == fixed + kept.kv_bytes + kept.states_bytes
    plan = with_defaults(InferencePlan(stack=stack.name), stack)
    deployed = Deployment.of(MODEL, plan, CLUSTER, stack)
    assert deployed.limits.max_sequences == kept.most_states
    large = serving_memory(MODEL, plan.model_copy(update={"state_part": 1e-6}), CLUSTER.device, stack)
    assert (large.most_states, large.fit.runs) == (0, False)
