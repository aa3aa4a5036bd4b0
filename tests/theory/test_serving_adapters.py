"""LoRA adapters that are served, and caches of preempted sequences in the host's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.base.errors import PlanError
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving import Batch, InferencePlan, Request, StepCosts, check
from simulator.studies.serving.decoding import batch_of
from simulator.studies.serving.deployment import Deployment
from simulator.studies.serving.engine import Engine
from simulator.studies.serving.limits import Limits
from simulator.studies.serving.lora import adapters_reached, lora_bytes
from simulator.studies.serving.memory import serving_memory
from simulator.studies.serving.remedies import remedies
from simulator.studies.serving.shards import kv_bytes_per_token, stage_shards

MODEL, CLUSTER, STACK = Model.load("llama3-8b"), Cluster.load("hgx-h100-8"), Stack.load("vllm-2025")


def ideal(**plan: object) -> StepCosts:
    made = InferencePlan.parse(plan, "plan", PlanError)
    return StepCosts(MODEL, made, CLUSTER, STACK, Calibration.ideal(), LinkCurves.ideal())


def test_adapters_have_rank_times_the_sides_of_each_matrix() -> None:
    """Of Llama 3 8B: q and out 4096 + 4096, k and v 4096 + 1024, gate, up and down 4096 + 14336, in 32 layers."""
    sides = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    plan = InferencePlan(lora_rank=16, lora_adapters=10)
    (shard,) = stage_shards(MODEL, plan)
    assert lora_bytes(shard, plan) == 10 * 16 * sides * 32 * 2
    held, none = (serving_memory(MODEL, one, CLUSTER.device, STACK) for one in (plan, InferencePlan()))
    assert held.weight_bytes - none.weight_bytes == lora_bytes(shard, plan)


def test_adapters_that_a_step_reaches_are_read_once() -> None:
    """Decoding is bound by memory: one sequence reads one adapter more, and n sequences the n that they reach."""
    assert adapters_reached(10, 1) == pytest.approx(1)
    assert adapters_reached(2, 2) == pytest.approx(1.5)  # both ask for the same one half the time
    plain, tuned = (ideal(lora_rank=rank, lora_adapters=1) for rank in (0, 64))
    (shard,) = stage_shards(MODEL, tuned.plan)
    more_s = lora_bytes(shard, tuned.plan) / CLUSTER.device.memory_bytes_per_s
    one, with_one = (sum(costs.stages_s(batch_of(costs, 1, 100))) for costs in (plain, tuned))
    assert with_one - one == pytest.approx(more_s, rel=0.05)  # and its rows
    many = ideal(lora_rank=64, lora_adapters=1000)
    grown = sum(many.stages_s(batch_of(many, 64, 100))) - sum(plain.stages_s(batch_of(plain, 64, 100)))
    assert grown == pytest.approx(adapters_reached(1000, 64) * more_s, rel=0.05)


def test_what_goes_to_the_host_is_not_computed_again() -> None:
    requests = [Request(arrival_s=0.0, prompt_tokens=64, output_tokens=200) for _ in range(4)]
    costs = StepCosts(
        Model.load("llama3.2-1b"), InferencePlan(), CLUSTER, STACK, Calibration.load("h100-sxm"), default_curves()
    )
    limits = Limits(num_blocks=40, block_size=16, max_sequences=8, max_tokens=512, chunked=True)
    anew, kept, some = (
        Engine(costs, replace(limits, host_blocks=blocks), requests, (0.0, float("inf"))).run()
        for blocks in (0, 1000, 13)
    )
    assert anew.preemptions
    assert anew.recomputed > some.recomputed > 0
    assert (kept.recomputed, kept.prefilled, kept.decoded) == (0, 4 * 64, 4 * 199)
    assert kept.leftover_blocks == 0


def test_queues_of_a_pipeline_share_the_hosts_memory() -> None:
    plan = InferencePlan(pp=2, host_cache=2**30)
    found = Deployment.of(MODEL, plan, CLUSTER, STACK)
    assert found.memory.num_schedulers * found.limits.host_blocks == 2**30 // found.memory.block_bytes


def test_blocks_travel_over_each_gpus_own_link() -> None:
    costs = ideal(tp=2)
    tier = CLUSTER.host_tier
    assert tier is not None
    (shard,) = stage_shards(MODEL, costs.plan)
    block = 16 * kv_bytes_per_token(shard, costs.plan)
    moved = Batch(decodes=1, keys=(10,), out=5, back=3)
    assert costs.moved_s(moved) == pytest.approx(block * (5 / tier.d2h_bytes_per_s + 3 / tier.h2d_bytes_per_s))
    assert costs.moved_s(replace(moved, out=0, back=0)) == 0


def test_what_does_not_go_together_is_told() -> None:
    with pytest.raises(PlanError) as caught:
        check(InferencePlan(lora_adapters=3, host_cache=2**45), MODEL, CLUSTER)
    assert {fault.place for fault in caught.value.faults} == {"inference: lora_adapters", "inference: host_cache"}


def test_adapters_beyond_memory_are_told_how_many_fit() -> None:
    plan = InferencePlan(lora_rank=64, lora_adapters=1000)
    fewer = [one for one in remedies(MODEL, plan, CLUSTER, STACK, serving_memory(MODEL, plan, CLUSTER.device, STACK))
             if "lora_adapters" in one.plan]  # fmt: skip
    (count,) = (one.plan["lora_adapters"] for one in fewer)
    fits = [
        serving_memory(MODEL, plan.model_copy(update={"lora_adapters": n}), CLUSTER.device, STACK)
        for n in (count, count + 2)
    ]
    assert [memory.fit.runs for memory in fits] == [True, False]
