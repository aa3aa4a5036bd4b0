"""Decode context parallelism: bytes of the cache, of what a step reads, and of what GPUs exchange."""

from __future__ import annotations

import math

import pytest

from simulator.base.errors import PlanError
from simulator.base.kernels import Gemm, Stream
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving import Batch, Chunk, Deployment, InferencePlan, Request, StepCosts, check
from simulator.studies.serving.cost import Cost
from simulator.studies.serving.decoding import batch_of
from simulator.studies.serving.report import tpot_s, ttft_s
from simulator.studies.serving.shards import kv_bytes_per_token, stage_shards, weight_bytes

# one domain of NVLink, so that every exchange has one speed
CLUSTER = Cluster.load("gb200-nvl72")


def costs_of(model: Model, plan: InferencePlan) -> StepCosts:
    """On a machine without losses."""
    return StepCosts(model, plan, CLUSTER, Stack.load(plan.stack), Calibration.ideal(), LinkCurves.ideal())


def widths(model: Model) -> tuple[int, int]:
    """Channels of a head's query, and of its result; latents are attended to as they are."""
    latent = model.latent
    if latent is None:
        return model.head_dim, model.head_dim
    return latent.kv_lora_rank + latent.qk_rope_head_dim, latent.kv_lora_rank


@pytest.mark.parametrize(("name", "tp", "dcp"), [("deepseek-v3", 8, 8), ("llama3-70b", 16, 2)])
def test_gpus_that_would_cache_the_same_have_a_part_of_the_tokens_each(name: str, tp: int, dcp: int) -> None:
    """A step reads a dcp-th of the cache, and exchanges queries, sums of exponents in fp32, and results of every layer."""
    model = Model.load(name)
    plans = [InferencePlan(tp=tp, dcp=each) for each in (1, dcp)]
    whole, part = (kv_bytes_per_token(stage_shards(model, plan)[0], plan) for plan in plans)
    assert whole == pytest.approx(dcp * part, rel=1e-3)
    alone, dealt = (costs_of(model, plan) for plan in plans)
    one, other = (costs.costs(batch_of(costs, 64, 8000))[0] for costs in (alone, dealt))
    query, result = widths(model)
    heads = 64 * model.num_heads // tp * dcp
    cached = 64 * 8000 * whole / dcp
    read = cached + model.num_layers * heads * 2 * (query + result)
    assert other.attention_s == pytest.approx(read / CLUSTER.device.memory_bytes_per_s, rel=0.02)
    assert one.attention_s > 0.7 * dcp * other.attention_s
    sent = model.num_layers * heads * (2 * query + 4 * dcp + 2 * result) * (dcp - 1) / dcp
    assert other.exchange_s - one.exchange_s == pytest.approx(sent / CLUSTER.intra.bytes_per_s, rel=0.01)


def test_pieces_of_prompts_gather_what_is_cached_before_them() -> None:
    """Of latents the cached ones, 576 channels in 16 bits; a first piece needs nothing of the others."""
    model = Model.load("deepseek-v3")
    costs = costs_of(model, InferencePlan(tp=8, dcp=8))
    first, later = (
        costs._context.of(0, Batch(decodes=0, keys=(0,), chunks=(Chunk(new=512, cached=cached),)))
        for cached in (0, 4096)
    )
    assert first == Cost()
    assert later.exchange_s == pytest.approx(61 * 4096 * 576 * 2 * 7 / 8 / CLUSTER.intra.bytes_per_s, rel=0.01)


def test_tokens_are_dealt_only_among_gpus_that_would_cache_the_same() -> None:
    cluster, model = Cluster.load("hgx-h100-8"), Model.load("llama3-70b")
    with pytest.raises(PlanError, match=r"1 of tp = 8 GPUs have the same keys and values.*tp above the model's 8"):
        check(InferencePlan(tp=8, dcp=2), model, cluster)
    with pytest.raises(PlanError, match=r"2 of tp = 8 GPUs.*dcp = 2, or 1"):
        check(InferencePlan(tp=8, dcp=4), Model.load("qwen3-235b-a22b"), cluster)
    with pytest.raises(PlanError, match=r"together with attention_dp is not modelled"):
        check(InferencePlan(tp=8, dcp=8, experts="dealt", attention_dp=True), Model.load("deepseek-v3"), cluster)
    check(InferencePlan(tp=8, dcp=8), Model.load("deepseek-v3"), cluster)


def test_gpus_part_a_prompt_and_gather_its_keys_and_values() -> None:
    """Products and pairs are a fourth each; K and V of all tokens come from the three others; decoding is as before but for its own."""
    model, new = Model.load("llama3-70b"), 8192
    plans = [InferencePlan(tp=8, pcp=each) for each in (1, 4)]
    assert [plan.num_devices for plan in plans] == [8, 32]
    alone, parted = (costs_of(model, plan) for plan in plans)
    chunk = Chunk(new=new, cached=0, last=False)
    one, other = (costs.costs(Batch(decodes=0, keys=(0,), chunks=(chunk,)))[0] for costs in (alone, parted))
    assert (one.gemm_s, one.attention_s) == pytest.approx((4 * other.gemm_s, 4 * other.attention_s), rel=0.02)
    channels = 2 * 1 * 128  # of one key-value head of 8 on 8 GPUs
    gathered = model.num_layers * new * channels * 2 * 3 / 4 / CLUSTER.intra.bytes_per_s
    assert other.exchange_s == pytest.approx(one.exchange_s / 4 + gathered, rel=0.01)
    one, other = (costs.costs(batch_of(costs, 16, 4000))[0] for costs in (alone, parted))
    assert (other.gemm_s, other.attention_s) == (one.gemm_s, one.attention_s)
    own = model.num_layers * 4 * 16 * channels * 2 * 3 / 4 / CLUSTER.intra.bytes_per_s
    assert other.exchange_s - one.exchange_s == pytest.approx(own, rel=0.01)
    held = [kv_bytes_per_token(stage_shards(model, plan)[0], plan) for plan in plans]
    assert held[0] == held[1]


def test_experts_lie_over_all_gpus_that_part_prompts() -> None:
    """A GPU holds as much of them on tp 4 × pcp 2 as on tp 8, and computes as much of a prompt: all of its tokens."""
    model, new = Model.load("deepseek-v3"), 4096
    for experts in ("split", "dealt"):
        plans = [InferencePlan(tp=8, experts=experts), InferencePlan(tp=4, pcp=2, experts=experts)]
        whole, parted = (
            [
                kernel
                for _, _, kernels, _ in costs_of(model, plan)._forward["layer"].at(new // plan.pcp)
                for kernel in kernels
            ]
            for plan in plans
        )
        grouped = [[one for one in each if isinstance(one, Gemm) and one.grouped] for each in (whole, parted)]
        assert grouped[0] == grouped[1]
        assert len(grouped[0]) == 2
        moved = [max(one.read_bytes for one in each if isinstance(one, Stream)) for each in (whole, parted)]
        assert moved[0] == moved[1]  # rows of tokens, as often as they have experts here
        assert (
            len({weight_bytes(stage_shards(model, plan)[0], plan) // 2**30 for plan in plans}) == 2
        )  # attention is whole
    one, other = (
        costs_of(model, plan).costs(Batch(decodes=0, keys=(0,), chunks=(Chunk(new=new, cached=0, last=False),)))[0]
        for plan in (InferencePlan(tp=4), InferencePlan(tp=4, pcp=2))
    )
    each = new * 2 / CLUSTER.intra.bytes_per_s / 2
    gathered = 61 * each * 576 + 58 * each * (2 * model.d_model + 256)
    assert other.exchange_s == pytest.approx(one.exchange_s / 2 + gathered, rel=0.01)


def test_prompts_are_parted_only_where_it_is_modelled() -> None:
    cluster, model = Cluster.load("hgx-h100-8"), Model.load("deepseek-v3")
    with pytest.raises(PlanError, match=r"pcp: together with dcp is not modelled"):
        check(InferencePlan(tp=4, dcp=4, pcp=2, speculative="mtp", acceptance=0.5), model, cluster)
    with pytest.raises(PlanError, match=r"tp 2 × pcp 3 = 6 GPUs do not divide"):
        check(InferencePlan(tp=2, pcp=3), model, cluster.with_nodes(3))
    with pytest.raises(PlanError, match=r"tp 4 × pp 1 × pcp 4 × dp 1 = 16, the cluster has 8"):
        check(InferencePlan(tp=4, pcp=4), model, cluster)
    with pytest.raises(
        PlanError, match=r"prefill_pcp: tp 2 × pcp 3 = 6 GPUs do not fill.*prefill_pcp = 1, or a power of two"
    ):
        check(InferencePlan(tp=8, prefill_tp=2, prefill_pcp=3, prefill_dp=1), model, cluster.with_nodes(2))
    with pytest.raises(PlanError, match=r"no engines for prompts alone"):
        check(InferencePlan(prefill_pcp=2), model, cluster)
    check(InferencePlan(tp=4, pcp=2), model, cluster)
    check(InferencePlan(tp=8, prefill_tp=4, prefill_pcp=2, prefill_dp=1), model, cluster.with_nodes(2))


def test_parted_prompts_are_served() -> None:
    """A lone request of 8,000 tokens: its first token comes sooner on 4 GPUs than on 1, by less than four times; the next ones later."""
    model, cluster = Model.load("llama3.2-1b"), Cluster.load("hgx-h100-8")
    request = [Request(arrival_s=0.0, prompt_tokens=8000, output_tokens=20)]
    plans = [InferencePlan(pcp=n, max_batched_tokens=8192) for n in (1, 4)]
    runs = [
        Deployment.of(model, plan, cluster, Stack.load(plan.stack)).play(request, (0.0, math.inf)) for plan in plans
    ]
    ((alone,), (parted,)) = (run.jobs for run in runs)
    assert ttft_s(alone) / 4 < ttft_s(parted) < 0.7 * ttft_s(alone)
    assert (tpot_s(parted) or 0.0) > (tpot_s(alone) or 0.0)
