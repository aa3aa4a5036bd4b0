"""Serving against theory: queues, rooflines, cache sizes, conservation. Expected values are derived here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from statistics import stdev

import pytest

from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving import Batch, Choice, Chunk, InferencePlan, Request, StepCosts, Workload, serve
from simulator.studies.serving.attention import KEYS_APART
from simulator.studies.serving.batch import causal_pairs
from simulator.studies.serving.engine import Engine, ServedRun
from simulator.studies.serving.limits import Limits
from simulator.studies.serving.memory import serving_memory
from simulator.studies.serving.shards import experts_reached, kv_bytes_per_token, stage_shards, weight_bytes


@pytest.fixture(scope="module")
def h100() -> Cluster:
    return Cluster.load("hgx-h100-8")


@pytest.fixture(scope="module")
def llama() -> Model:
    return Model.load("llama3-8b")


def ideal_costs(model: Model, plan: InferencePlan, cluster: Cluster) -> StepCosts:
    stack = Stack.load(plan.stack)
    return StepCosts(model, plan, cluster, stack, Calibration.ideal(), LinkCurves.ideal())


def real_costs(model: Model, plan: InferencePlan, cluster: Cluster) -> StepCosts:
    calibration = Calibration.for_device(cluster.device)
    return StepCosts(model, plan, cluster, Stack.load(plan.stack), calibration, default_curves())


def limits(plan: InferencePlan, costs: StepCosts, num_blocks: int = 10**6) -> Limits:
    return Limits(
        num_blocks=num_blocks,
        block_size=plan.block_size,
        max_sequences=plan.max_sequences,
        max_tokens=plan.batched_tokens(costs.model),
        chunked=plan.chunked_prefill,
        windows=costs.windows,
    )


def service_s(costs: StepCosts, prompt: int) -> float:
    """A request whose answer is one token, alone."""
    batch = Batch(decodes=0, keys=(0,), chunks=(Chunk(new=prompt, cached=0),))
    return costs.idle_s(0.0, 1) + sum(costs.stages_s(batch))


def queued(costs: StepCosts, played: ServedRun) -> Iterator[float]:
    """When each request reaches the queue: behind its time outside, and none before another."""
    return itertools.accumulate((job.request.arrival_s + costs.outside_s(job.request) for job in played.jobs), max)


def waits(costs: StepCosts, plan: InferencePlan, workload: Workload) -> tuple[float, float]:
    """Mean time from arrival to the beginning of service, one at a time, and its standard error from 20 batch means."""
    played = Engine(costs, limits(plan, costs), workload.requests(), (0.0, math.inf)).run()
    alone = {n: service_s(costs, n) for n in {job.request.prompt_tokens for job in played.jobs}}
    found = [
        job.end_s - queued_s - alone[job.request.prompt_tokens]
        for job, queued_s in zip(played.jobs, queued(costs, played), strict=True)
    ]
    assert min(found) > -1e-9
    size = len(found) // 20
    means = [sum(found[i : i + size]) / size for i in range(0, 20 * size, size)]
    return sum(means) / 20, stdev(means) / math.sqrt(20)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_sequence_at_a_time_and_one_length_is_an_m_d_1_queue(llama: Model, h100: Cluster, load: float) -> None:
    plan = InferencePlan(max_sequences=1)
    costs = real_costs(llama, plan, h100)
    each_s = service_s(costs, 512)
    workload = Workload(rate=load / each_s, num_requests=20_000, prompt_tokens=512, output_tokens=1)
    waited_s, error_s = waits(costs, plan, workload)
    expected_s = load * each_s / (2 * (1 - load))  # Pollaczek-Khinchine, constant service time: rho S / (2 (1 - rho))
    assert error_s < 0.05 * expected_s
    assert abs(waited_s - expected_s) < 3 * error_s


def test_one_sequence_at_a_time_and_two_lengths_is_an_m_g_1_queue(llama: Model, h100: Cluster) -> None:
    plan = InferencePlan(max_sequences=1)
    costs = real_costs(llama, plan, h100)
    prompts = Choice(distribution="choice", values=(256, 2048), weights=(0.7, 0.3))
    short_s, long_s = service_s(costs, 256), service_s(costs, 2048)
    mean_s, square = 0.7 * short_s + 0.3 * long_s, 0.7 * short_s**2 + 0.3 * long_s**2
    rate = 0.5 / mean_s
    workload = Workload(rate=rate, num_requests=20_000, prompt_tokens=prompts, output_tokens=1)
    waited_s, error_s = waits(costs, plan, workload)
    expected_s = rate * square / (2 * (1 - 0.5))  # Pollaczek-Khinchine: lambda E[S^2] / (2 (1 - rho))
    assert error_s < 0.05 * expected_s
    assert abs(waited_s - expected_s) < 3 * error_s


def test_a_decode_step_of_an_ideal_machine_reads_everything_once(llama: Model, h100: Cluster) -> None:
    """One sequence: every kernel is bound by memory, so the step is bytes over bandwidth; weights are 99 % of them."""
    plan = InferencePlan(cuda_graphs=False)
    costs = ideal_costs(llama, plan, h100)
    context = 1000
    (step_s,) = costs.stages_s(Batch(decodes=1, keys=(context,)))
    matrices = 2 * (llama.num_parameters - llama.num_parameters_of("embedding"))
    cache = 2 * llama.num_layers * llama.num_kv_heads * llama.head_dim * 2 * context
    floor_s = (matrices + cache) / h100.device.memory_bytes_per_s
    assert floor_s <= step_s <= 1.01 * floor_s


def test_a_long_prefill_of_an_ideal_machine_computes_everything_once(llama: Model, h100: Cluster) -> None:
    plan = InferencePlan()
    costs = ideal_costs(llama, plan, h100)
    tokens = 8192
    (step_s,) = costs.stages_s(Batch(decodes=0, keys=(0,), chunks=(Chunk(new=tokens, cached=0),)))
    layers = llama.num_matmul_parameters - llama.vocab_size * llama.d_model
    # two products a pair and channel: QK and PV; the head works on one row
    attention = 4 * llama.num_layers * llama.q_width * (tokens * (tokens + 1) // 2)
    flop = 2 * layers * tokens + attention
    floor_s = flop / h100.device.peak("bf16")
    streams_s = 30 * tokens * llama.d_model * 2 * llama.num_layers / h100.device.memory_bytes_per_s
    assert floor_s <= step_s <= floor_s + streams_s


@pytest.mark.parametrize(("name", "tp", "kv"), [("llama3-8b", 1, 8), ("llama3-8b", 4, 2), ("llama3-70b", 16, 1)])
def test_cached_bytes_of_a_token(name: str, tp: int, kv: int) -> None:
    """2 (K and V) x layers x kv heads x head_dim x bytes; beyond one kv head a GPU there is nothing left to split."""
    model = Model.load(name)
    for dtype in ("bf16", "fp8"):
        plan = InferencePlan(tp=tp, kv_cache=dtype)
        expected = 2 * model.num_layers * kv * model.head_dim * DTYPE_BYTES[dtype]
        assert kv_bytes_per_token(stage_shards(model, plan)[0], plan) == expected


def test_layers_with_windows_cache_no_more_than_these(h100: Cluster) -> None:
    """gpt-oss: every second of 36 layers sees 128 tokens. A sequence holds all of it in 18 layers, and 128 tokens in 18 others."""
    model = Model.load("gpt-oss-20b").model_copy(update={"num_layers": 36})
    plan = InferencePlan(weights="mxfp4", window_cache=True, block_size=16)
    each = 2 * 8 * 64 * 2
    (whole,), (part,) = (stage_shards(model, one) for one in (InferencePlan(), plan))
    assert kv_bytes_per_token(whole, InferencePlan()) == 36 * each
    assert kv_bytes_per_token(part, plan) == 18 * each
    memory = serving_memory(model, plan, h100.device, Stack.load("vllm-2025"))
    assert (memory.window_tokens, memory.window_share) == (128, 1.0)
    assert memory.needed_blocks == model.max_positions // 16 + 128 // 16
    costs = ideal_costs(model, plan, h100)
    bounds = replace(limits(plan, costs, num_blocks=1000), window_tokens=128, window_share=1.0)
    short, long = ([Request(arrival_s=0.0, prompt_tokens=n, output_tokens=17)] for n in (48, 1000))
    for asked, blocks in ((short, 4 + 4), (long, 64 + 8)):  # 64 tokens are cached at the end, and 1,016
        run = Engine(costs, bounds, asked, (0.0, math.inf)).run()
        assert run.meter.peak_blocks == blocks
        assert run.leftover_blocks == 0
    handed = InferencePlan(window_cache=True, prefill_dp=1)
    assert not handed.decode_pool.window_cache


def test_cached_bytes_of_latents() -> None:
    """DeepSeek-V3 keeps 70.272 KB a token (Zhao et al., ISCA 2025, table 1), the same on every GPU of a tp group."""
    model = Model.load("deepseek-v3")
    for tp in (1, 8):
        plan = InferencePlan(tp=tp)
        assert kv_bytes_per_token(stage_shards(model, plan)[0], plan) == 70_272


def test_a_mixture_s_decode_step_reads_the_experts_that_its_tokens_reach(h100: Cluster) -> None:
    """One token passes the active parameters; many tokens read all of them."""
    model = Model.load("mixtral-8x7b")
    plan = InferencePlan(cuda_graphs=False)
    costs = ideal_costs(model, plan, h100)
    bandwidth = h100.device.memory_bytes_per_s
    table = model.num_parameters_of("embedding")
    context = 10
    cache = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2 * context
    (one_s,) = costs.stages_s(Batch(decodes=1, keys=(context,)))
    floor_s = (2 * (model.num_active_parameters - table) + cache) / bandwidth
    assert floor_s <= one_s <= 1.02 * floor_s
    (many_s,) = costs.stages_s(Batch(decodes=64, keys=(64 * context,)))
    floor_s = (2 * (model.num_parameters - table) + 64 * cache) / bandwidth
    assert floor_s <= many_s <= 1.05 * floor_s


def test_experts_reached_by_even_routing() -> None:
    """Of 8 experts, two for each token: the union of t random pairs, counted over all draws of two tokens."""
    experts = Model.load("mixtral-8x7b").experts
    assert experts is not None
    pairs = list(itertools.combinations(range(8), 2))
    union = [len({*a, *b}) for a in pairs for b in pairs]
    assert experts_reached(experts, 1) == pytest.approx(2)
    assert experts_reached(experts, 2) == pytest.approx(sum(union) / len(union))


def test_attention_over_latents_multiplies_them_as_they_are(h100: Cluster) -> None:
    """A query of 512 + 64 channels meets each latent, and its weights the latent's 512 once more; latents are read once."""
    model = Model.load("deepseek-v3")
    costs = ideal_costs(model, InferencePlan(), h100)
    count, keys = 128, 128 * 4096
    flop_s = 2 * keys * 128 * (576 + 512) / h100.device.peak("bf16")
    read_s = (keys * 576 + count * 128 * (576 + 512)) * 2 / h100.device.memory_bytes_per_s
    assert costs.attention.decode_exactly_s(count, keys) == pytest.approx(max(flop_s, read_s), rel=1e-6)


@pytest.mark.parametrize("pp", [1, 3, 5])
def test_stages_hold_the_model_once(llama: Model, pp: int) -> None:
    plan = InferencePlan(pp=pp)
    shares = stage_shards(llama, plan)
    assert [layer for share in shares for layer in share.layers] == list(range(llama.num_layers))
    padding = -llama.vocab_size % 64 * llama.d_model * 2
    assert sum(weight_bytes(share, plan) for share in shares) == 2 * (llama.num_parameters + padding)


def test_replicated_ends_are_held_whole(llama: Model) -> None:
    split = stage_shards(llama, InferencePlan(tp=2))[0]
    whole = stage_shards(llama, InferencePlan(tp=2, replicate=("embedding", "head")))[0]
    more = weight_bytes(whole, InferencePlan(tp=2)) - weight_bytes(split, InferencePlan(tp=2))
    rows = llama.vocab_size + -llama.vocab_size % 64
    assert more == 2 * (rows // 2) * llama.d_model * 2  # half a table each, two bytes a number


@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize(("new", "cached"), [(1, 0), (1, 99), (30, 0), (30, 5), (64, 64), (100, 3)])
def test_pairs_are_counted_as_a_mask_would(new: int, cached: int, window: int | None) -> None:
    each = [min(cached + i + 1, window or cached + i + 1) for i in range(new)]
    assert causal_pairs(Chunk(new=new, cached=cached), window) == sum(each)


@pytest.mark.parametrize("count", [1, 7, 64, 300])
def test_attention_read_off_a_line_is_within_a_thousandth(llama: Model, h100: Cluster, count: int) -> None:
    costs = real_costs(llama, InferencePlan(), h100)
    for context in (1, 33, 65, 500, 1023, 4097, 8000):
        exact = costs.attention.decode_exactly_s(count, count * context)
        step = KEYS_APART * count
        if count * context >= step:
            assert costs.attention.decode_s(count, count * context) == pytest.approx(exact, rel=1e-3)


def test_conservation_of_tokens(llama: Model, h100: Cluster) -> None:
    """Every token of prompts and answers is computed once, and once more if thrown away."""
    plan = InferencePlan(max_sequences=32, max_batched_tokens=512)
    costs = real_costs(llama, plan, h100)
    prompts = Choice(distribution="choice", values=(50, 700, 2000))
    for chunked in (True, False):
        narrow = replace(limits(plan, costs, num_blocks=260), chunked=chunked, max_tokens=512 if chunked else 8192)
        workload = Workload(rate=15, num_requests=500, prompt_tokens=prompts, output_tokens=200)
        played = Engine(costs, narrow, workload.requests(), (0.0, math.inf)).run()
        assert played.preemptions > 0
        requests = [job.request for job in played.jobs]
        computed = sum(r.prompt_tokens + r.output_tokens - 1 for r in requests)  # the last token is never fed back
        assert played.prefilled + played.decoded == computed + played.recomputed
        assert played.meter.output_tokens == sum(r.output_tokens for r in requests)
        assert played.leftover_blocks == 0
        assert played.meter.peak_blocks <= 260


def test_a_lone_request_takes_its_steps_and_nothing_else(llama: Model, h100: Cluster) -> None:
    """Prompt in pieces of max_batched_tokens, then one step a token behind the first."""
    plan = InferencePlan(max_batched_tokens=256)
    costs = real_costs(llama, plan, h100)
    request = Request(arrival_s=3.0, prompt_tokens=600, output_tokens=5)
    (job,) = Engine(costs, limits(plan, costs), [request], (0.0, math.inf)).run().jobs
    pieces = [(256, 0, False), (256, 256, False), (88, 512, True)]
    first_s = 3.0 + costs.outside_s(request)
    for new, cached, last in pieces:
        chunk = Chunk(new=new, cached=cached, last=last)
        first_s += costs.idle_s(0.0, last) + sum(costs.stages_s(Batch(decodes=0, keys=(0,), chunks=(chunk,))))
    end_s = first_s
    for cached in range(600, 604):
        end_s += costs.idle_s(0.0, 1) + sum(costs.stages_s(Batch(decodes=1, keys=(cached + 1,))))
    assert job.first_s == pytest.approx(first_s, rel=1e-12)
    assert job.end_s == pytest.approx(end_s, rel=1e-12)
    engine = costs.stack.engine
    assert engine is not None
    longer = costs.outside_s(replace(request, prompt_tokens=1600)) - costs.outside_s(request)
    assert longer == pytest.approx(1000 * engine.token_s)
    assert engine.token_s > 0


def test_pipeline_stages_work_on_different_lanes(llama: Model, h100: Cluster) -> None:
    """Two lanes of two equal stages, both full: the second lane's steps run in the first one's shadow."""
    plan = InferencePlan(pp=2)
    costs = ideal_costs(llama, plan, h100)
    chunk = Chunk(new=1000, cached=0)
    first_s, second_s = costs.stages_s(Batch(decodes=0, keys=(0,), chunks=(chunk,)))
    requests = [Request(arrival_s=0.0, prompt_tokens=1000, output_tokens=1)] * 2
    played = Engine(costs, limits(plan, costs), requests, (0.0, math.inf)).run()
    ends = sorted(job.end_s for job in played.jobs)
    assert ends[0] == pytest.approx(first_s + second_s)
    assert ends[1] == pytest.approx(first_s + max(first_s, second_s) + second_s)


def test_capacity_of_a_queue_without_batching_is_one_over_its_service_time(llama: Model, h100: Cluster) -> None:
    plan = InferencePlan(max_sequences=1)
    served = serve(llama, plan, h100, Workload(rate=1, num_requests=20, output_tokens=1).requests())
    assert served.load is not None
    assert served.load.capacity_per_s == pytest.approx(1 / service_s(real_costs(llama, plan, h100), 512), rel=1e-9)


def test_an_all_reduce_less_and_half_a_table_more(h100: Cluster) -> None:
    """A whole embedding on every GPU saves its all-reduce; a whole head costs the other half's bytes at each step."""
    model = Model.load("gpt-neox-20b")
    batch = Batch(decodes=1, keys=(500,))
    step = {
        replicate: ideal_costs(model, InferencePlan(tp=2, replicate=replicate), h100).costs(batch)[0]
        for replicate in ((), ("embedding",), ("head",))
    }
    link = Fraction(int(h100.intra.bytes_per_s))
    embedded = model.d_model * 2
    saved = step[()].exchange_s - step["embedding",].exchange_s
    assert saved == pytest.approx(float(embedded / link))  # a ring of two sends 2 (n - 1) / n = 1 times the tensor
    half = (model.vocab_size // 2) * model.d_model * 2 / h100.device.memory_bytes_per_s
    assert step["head",].device_s - step[()].device_s == pytest.approx(half, rel=0.02)


def test_layers_with_windows_may_have_room_for_a_part_of_the_tokens(h100: Cluster) -> None:
    """SGLang: of 36 layers 18 see 128 tokens and have room for 0.8 of the others' tokens; a short sequence fills that first."""
    model = Model.load("gpt-oss-20b").model_copy(update={"num_layers": 36})
    plan = InferencePlan(weights="mxfp4", window_part=0.8, block_size=16)
    (shard,) = stage_shards(model, plan)
    assert kv_bytes_per_token(shard, plan) == math.ceil((18 + 0.8 * 18) * 2 * 8 * 64 * 2)
    memory = serving_memory(model, plan, h100.device, Stack.load("sglang-2025"))
    assert (memory.window_tokens, memory.needed_blocks) == (128, model.max_positions // 16)
    bounds = replace(
        limits(plan, ideal_costs(model, plan, h100), num_blocks=1000), window_tokens=128, window_part=plan.window_part
    )
    for prompt, blocks in (
        (48, 4 + 1),
        (128, 9 + 1),
        (1000, 64),
    ):  # 64, 144 and 1,016 tokens; 0, 80, 16 and 0 beyond a part
        asked = [Request(arrival_s=0.0, prompt_tokens=prompt, output_tokens=17)]
        run = Engine(ideal_costs(model, plan, h100), bounds, asked, (0.0, math.inf)).run()
        assert (run.meter.peak_blocks, run.leftover_blocks) == (blocks, 0)
