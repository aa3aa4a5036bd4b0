"""Plans, memory, steps and scheduling of inference."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from simulator.base.errors import CalibrationError, InputError, PlanError, StackError, json_text
from simulator.base.fit import Fit
from simulator.base.kernels import Attention, Gemm, Kernel
from simulator.formats.writers.serving import render, report
from simulator.formats.writers.text import to_text
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving import (
    Batch,
    Chunk,
    InferencePlan,
    Lognormal,
    Request,
    Slo,
    StepCosts,
    Uniform,
    Workload,
    check,
    decode_step,
    serve,
    serving_memory,
)
from simulator.studies.serving.batch import padded
from simulator.studies.serving.blocks import forward_blocks, forward_ops
from simulator.studies.serving.engine import Engine
from simulator.studies.serving.limits import Limits
from simulator.studies.serving.memory import activation_bytes
from simulator.studies.serving.report import spread
from simulator.studies.serving.serving import assumptions
from simulator.studies.serving.shards import stage_shards


@pytest.fixture(scope="module")
def h100() -> Cluster:
    return Cluster.load("hgx-h100-8")


@pytest.fixture(scope="module")
def llama() -> Model:
    return Model.load("llama3-8b")


def costs_of(model: Model, plan: InferencePlan, cluster: Cluster) -> StepCosts:
    calibration = Calibration.for_device(cluster.device)
    return StepCosts(model, plan, cluster, Stack.load(plan.stack), calibration, default_curves())


def test_a_slower_host_takes_longer_to_schedule_and_to_launch(llama: Model, h100: Cluster) -> None:
    """Where the host decides, which it does of small steps without CUDA graphs, the whole step follows it."""
    slow = h100.model_copy(update={"device": h100.device.model_copy(update={"host_factor": 100.0})})
    slower = h100.model_copy(update={"device": h100.device.model_copy(update={"host_factor": 50.0})})
    plan, batch = InferencePlan(cuda_graphs=False), Batch(decodes=1, keys=(128,))
    twice, once = costs_of(llama, plan, slow), costs_of(llama, plan, slower)
    assert twice.overhead_s == pytest.approx(2 * once.overhead_s)
    assert twice.stages_s(batch) == pytest.approx([2 * seconds for seconds in once.stages_s(batch)])
    assert costs_of(llama, plan, h100).overhead_s == pytest.approx(twice.overhead_s / 100)


def faults_of(model: Model, plan: InferencePlan, cluster: Cluster) -> str:
    with pytest.raises(PlanError) as caught:
        check(plan, model, cluster)
    return str(caught.value)


def test_a_degree_that_splits_no_heads_is_told_the_nearest_that_does(llama: Model, h100: Cluster) -> None:
    told = faults_of(llama, InferencePlan(tp=6), h100)
    assert "32 heads" in told
    assert "8 key-value heads" in told
    assert "tp = 4 or 8" in told


def test_key_value_heads_may_be_held_by_several_gpus() -> None:
    cluster = Cluster.load("hgx-h100-8", 2)
    check(InferencePlan(tp=16), Model.load("llama3-70b"), cluster)


def test_all_faults_of_a_plan_are_told_at_once(llama: Model, h100: Cluster) -> None:
    plan = InferencePlan(
        pp=40, replicate=("head",), max_model_len=10_000, max_batched_tokens=100, chunked_prefill=False
    )
    told = faults_of(llama, plan, h100)
    for part in (
        "40 stages for 32 layers",
        "tp = 1 does not split",
        "8192 positions",
        "max_batched_tokens",
        "nodes = 5",
    ):
        assert part in told
    assert told.count("\n") == 6


def test_slices_of_experts_must_be_whole(h100: Cluster) -> None:
    told = faults_of(Model.load("qwen3-30b-a3b").model_copy(update={"num_kv_heads": 32}), InferencePlan(tp=32), h100)
    assert "nodes = 4" in told  # 32 divides heads and the 768 columns of an expert
    narrow = Model.load("qwen3-30b-a3b")
    assert narrow.experts is not None
    odd = narrow.model_copy(update={"experts": narrow.experts.model_copy(update={"d_ff": 770})})
    told = faults_of(odd, InferencePlan(tp=4), h100)
    assert "770 columns of an expert" in told
    assert "tp = 2 or 1" in told or "tp = 1 or 2" in told


def test_stacks_that_cannot_read_a_cache_are_refused(llama: Model, h100: Cluster) -> None:
    with pytest.raises(StackError, match="no fused kernel"):
        costs_of(llama, InferencePlan(stack="megatron-2021"), h100)


def test_a_plan_file_is_strict(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('tp = 2\nreplicate = ["embedding", "head"]\nweights = "int8"\n')
    assert InferencePlan.load(file) == InferencePlan(tp=2, replicate=("embedding", "head"), weights="int8")
    file.write_text('tp = 0\nreplicate = ["neck"]\nwheels = 4\n')
    with pytest.raises(PlanError) as caught:
        InferencePlan.load(file)
    assert len(caught.value.faults) == 3


@pytest.mark.parametrize(("weights", "bits"), [("fp8", 8), ("int8", 8), ("int4", 4 + 20 / 128)])
def test_narrow_weights_shrink_the_layers_matrices_and_the_steps_that_read_them(
    llama: Model, h100: Cluster, weights: str, bits: float
) -> None:
    wide, narrow = InferencePlan(), InferencePlan(weights=weights)
    stack = Stack.load(wide.stack)
    before, after = (serving_memory(llama, plan, h100.device, stack) for plan in (wide, narrow))
    matrices = llama.num_matmul_parameters - llama.vocab_size * llama.d_model
    assert before.weight_bytes - after.weight_bytes == pytest.approx(matrices * (16 - bits) / 8, abs=llama.num_layers)
    batch = Batch(decodes=1, keys=(100,))
    slow, fast = (costs_of(llama, plan, h100).stages_s(batch)[0] for plan in (wide, narrow))
    saved = (before.weight_bytes - after.weight_bytes) / h100.device.memory_bytes_per_s
    assert slow - fast > 0.9 * saved


def test_without_a_graph_the_host_is_the_floor(h100: Cluster) -> None:
    small = Model.load("llama3.2-1b")
    batch = Batch(decodes=1, keys=(100,))
    eager, graph = (costs_of(small, InferencePlan(tp=4, cuda_graphs=on), h100) for on in (False, True))
    (cost,) = eager.costs(batch)
    assert cost.host_s > cost.busy_s
    assert eager.stages_s(batch) == (cost.host_s,)
    assert graph.costs(batch)[0].host_s == 0
    assert graph.stages_s(batch)[0] == pytest.approx(cost.busy_s, rel=1e-3)
    mixed = Batch(decodes=1, keys=(100,), chunks=(Chunk(new=8, cached=0),))
    assert not graph.graphed(mixed)


def test_graphs_are_captured_for_some_sizes() -> None:
    assert [padded(n) for n in (1, 2, 3, 4, 5, 8, 9, 100, 512, 513)] == [1, 2, 4, 4, 8, 8, 16, 104, 512, 513]


def test_windows_bound_what_decoding_reads(h100: Cluster) -> None:
    gemma = Model.load("gemma2-9b")
    costs = costs_of(gemma, InferencePlan(), h100)
    assert costs.windows == (None, 4096)
    assert costs.layers_by_window == ((21, 21),)


def test_cache_blocks_are_what_the_budget_leaves(llama: Model, h100: Cluster) -> None:
    plan = InferencePlan(gpu_memory_utilization=0.8)
    m = serving_memory(llama, plan, h100.device, Stack.load(plan.stack))
    left = m.budget_bytes - m.weight_bytes - m.activation_bytes - m.seen_outside_bytes
    assert m.budget_bytes == int(0.8 * m.capacity_bytes)
    assert m.num_blocks == left // (16 * 2 * 32 * 8 * 128 * 2)
    assert m.fit.runs
    logits = plan.max_sequences * 128_256 * 4  # in fp32, their softmax beside them
    assert m.activation_bytes > 2 * logits


def test_what_does_not_fit_is_an_answer_with_changes_that_do(h100: Cluster) -> None:
    model = Model.load("llama3-70b")
    served = serve(model, InferencePlan(tp=2, gpu_memory_utilization=0.85), h100, Workload(num_requests=5).requests())
    assert (served.verdict, served.fits) == ("does not fit", False)
    assert served.memory.missing_bytes > 0
    assert served.remedies
    for remedy in served.remedies:
        plan = InferencePlan(tp=2, gpu_memory_utilization=0.85).model_copy(update=remedy.plan)
        memory = serving_memory(model, plan, h100.device, Stack.load(plan.stack))
        assert memory.fit.runs
        assert memory.kv_tokens == remedy.kv_tokens
    assert served.remedies[0].change in served.suggestion
    assert "DOES NOT FIT" in to_text(render(served))


def test_arrivals_above_capacity_are_named(llama: Model, h100: Cluster) -> None:
    quick = serve(llama, InferencePlan(), h100, Workload(rate=1, num_requests=200).requests())
    assert quick.verdict == "ok"
    assert quick.load is not None
    rate = 2 * quick.load.capacity_per_s
    slow = serve(llama, InferencePlan(), h100, Workload(rate=rate, num_requests=3000).requests())
    assert slow.verdict == "overloaded"
    assert "dp = 3" in slow.suggestion
    assert slow.latencies is not None
    assert quick.latencies is not None
    assert slow.latencies.ttft.p99_s > 10 * quick.latencies.ttft.p99_s


def test_equal_questions_get_equal_bytes(llama: Model, h100: Cluster) -> None:
    def answer(seed: int) -> str:
        workload = Workload(
            rate=5,
            num_requests=80,
            seed=seed,
            prompt_tokens=Lognormal(distribution="lognormal", median=300, sigma=1, high=4000),
            output_tokens=Uniform(distribution="uniform", low=1, high=100),
        )
        return json_text(
            report(serve(llama, InferencePlan(dp=2), h100, workload.requests(), slo=Slo(ttft_s=0.1, tpot_s=0.01)))
        )

    assert answer(0) == answer(0) != answer(1)


def test_service_levels_count_requests(llama: Model, h100: Cluster) -> None:
    requests = [
        Request(arrival_s=float(10 * i), prompt_tokens=100 * (1 + 9 * (i % 4 == 0)), output_tokens=10)
        for i in range(40)
    ]
    free = serve(llama, InferencePlan(), h100, requests, warmup=0)
    assert free.latencies is not None
    assert (free.attainments, free.slo_share) == ((), None)
    tight = serve(
        llama, InferencePlan(), h100, requests, warmup=0, slo=Slo(ttft_s=1.01 * free.latencies.ttft.p50_s, tpot_s=1.0)
    )
    assert [(a.name, a.share, a.held) for a in tight.attainments] == [("ttft", 0.75, False), ("tpot", 1.0, True)]
    assert tight.slo_share == 0.75
    assert "p99 is above" in to_text(render(tight))


def test_percentiles_are_of_the_nearest_rank() -> None:
    found = spread([float(n) for n in range(1, 201)])
    assert (found.p50_s, found.p90_s, found.p99_s, found.max_s, found.mean_s) == (100, 180, 198, 200, 100.5)
    assert spread([7.0]).p99_s == 7.0


def test_warm_up_is_in_no_figure(llama: Model, h100: Cluster) -> None:
    crowd = [Request(arrival_s=0.0, prompt_tokens=2000, output_tokens=10)] * 50
    calm = [Request(arrival_s=60.0 + i, prompt_tokens=100, output_tokens=10) for i in range(50)]
    with_crowd = serve(llama, InferencePlan(), h100, [*crowd, *calm], warmup=0.5)
    alone = serve(llama, InferencePlan(), h100, [replace(r, arrival_s=r.arrival_s - 60) for r in calm], warmup=0)
    assert with_crowd.num_warmup == 50
    assert with_crowd.latencies is not None
    assert alone.latencies is not None
    assert with_crowd.latencies.latency.p99_s == pytest.approx(alone.latencies.latency.p99_s, rel=1e-9)


def test_requests_longer_than_a_sequence_are_refused_with_their_lines(llama: Model, h100: Cluster) -> None:
    requests = [
        Request(arrival_s=0, prompt_tokens=9000, output_tokens=1, line=7),
        Request(arrival_s=0, prompt_tokens=1, output_tokens=1),
    ]
    with pytest.raises(InputError, match="line 7: 9000 tokens of prompt"):
        serve(llama, InferencePlan(), h100, requests)
    with pytest.raises(InputError, match="max_model_len = 200 or more"):
        serve(
            llama, InferencePlan(max_model_len=100), h100, [Request(arrival_s=0, prompt_tokens=150, output_tokens=50)]
        )
    late = Request(arrival_s=2.0, prompt_tokens=1, output_tokens=1)
    with pytest.raises(InputError, match="in order"):
        serve(llama, InferencePlan(), h100, [late, replace(late, arrival_s=1.0)])
    with pytest.raises(InputError, match="no token"):
        serve(llama, InferencePlan(), h100, [Request(arrival_s=0, prompt_tokens=1, output_tokens=0)])
    with pytest.raises(InputError, match="there are none"):
        serve(llama, InferencePlan(), h100, [])


def test_everything_at_once_is_a_batch_job(llama: Model, h100: Cluster) -> None:
    served = serve(llama, InferencePlan(), h100, Workload(rate=0, num_requests=50).requests(), warmup=0)
    assert served.load is not None
    assert served.load.arriving_per_s == 0
    assert served.load.output_tokens_per_s == pytest.approx(50 * 128 / served.load.measured_s)
    assert "batch job" in served.cause


def test_drawn_lengths_keep_to_their_bounds() -> None:
    workload = Workload(
        num_requests=2000,
        prompt_tokens=Lognormal(distribution="lognormal", median=100, sigma=2, high=500),
        output_tokens=Uniform(distribution="uniform", low=3, high=5),
    )
    requests = workload.requests()
    assert {r.output_tokens for r in requests} == {3, 4, 5}
    assert min(r.prompt_tokens for r in requests) >= 1
    assert max(r.prompt_tokens for r in requests) == 500
    assert sorted(r.prompt_tokens for r in requests)[1000] == pytest.approx(100, rel=0.15)
    assert math.isclose(requests[-1].arrival_s / 2000, 1.0, rel_tol=0.1)
    twice = workload.model_copy(update={"rate": 2.0}).requests()
    assert [r.prompt_tokens for r in twice] == [r.prompt_tokens for r in requests]
    assert [2 * r.arrival_s for r in twice] == pytest.approx([r.arrival_s for r in requests])


LINED = ["llama3-8b", "gpt-neox-20b", "gemma2-9b", "qwen3-8b", "gpt2-xl", "falcon-7b", "mixtral-8x7b", "deepseek-v3"]


@pytest.mark.parametrize("name", LINED)
@pytest.mark.parametrize("stack", ["vllm-2025", "torch-2.6-eager", "torch-2.11-compiled"])
def test_sizes_of_a_forward_are_straight_lines_over_its_tokens(name: str, stack: str) -> None:
    """All but experts' products, which are not among those compared."""
    model = Model.load(name)
    plan = InferencePlan(tp=1 if name in ("falcon-7b", "gpt2-xl") else 2, stack=stack)
    share, software = stage_shards(model, plan)[0], Stack.load(stack)

    def other(kernel: Kernel) -> bool:
        return not isinstance(kernel, Attention) and not (isinstance(kernel, Gemm) and kernel.grouped)

    lines = forward_ops(share, plan, software)
    for tokens in (3, 37, 1000):
        blocks = forward_blocks(share, plan, software, tokens)
        assert lines.keys() == blocks.keys()
        for kind, block in blocks.items():
            built = [(op.category, tuple(filter(other, op.forward)), op.forward_exchanges) for op in block.ops]
            at = [
                (category, tuple(filter(other, kernels)), between)
                for _, category, kernels, between in lines[kind].at(tokens)
            ]
            assert [op for op in at if op[1] or op[2]] == [op for op in built if op[1] or op[2]]


def test_a_decoding_step_is_the_sum_of_its_parts(h100: Cluster) -> None:
    model = Model.load("llama3-70b")
    calibration, curves = Calibration.for_device(h100.device), default_curves()
    for plan in (
        InferencePlan(tp=4),
        InferencePlan(tp=2, pp=2),
        InferencePlan(pp=4),
        InferencePlan(tp=4, cuda_graphs=False),
    ):
        step = decode_step(costs_of(model, plan, h100), 8, 1000, calibration, curves)
        assert sum(step.parts.values()) == pytest.approx(step.step_s, rel=1e-9)
        assert step.parts["collectives"] > 0
        assert step.parts["host"] >= Stack.load(plan.stack).fitted.step_overhead_s * (1 - 1e-9)
        assert step.low_s < step.step_s < step.high_s
        assert step.step_s / step.low_s == pytest.approx(step.high_s / step.step_s)
        assert 0.3 < step.bandwidth_share < 1


def test_a_number_that_the_calibration_lacks_is_told_before_the_clock_runs() -> None:
    cluster = Cluster.load("dgx1-v100-8")
    with pytest.raises(CalibrationError, match="no bf16 matrix units") as caught:
        serve(Model.load("llama3-8b"), InferencePlan(tp=8), cluster, Workload(num_requests=5).requests())
    assert len(caught.value.faults) == 1


def test_an_interval_brackets_the_answer(llama: Model, h100: Cluster) -> None:
    heard: list[tuple[int, int]] = []
    requests = Workload(rate=20, num_requests=100).requests()
    served = serve(llama, InferencePlan(), h100, requests, interval=True, progress=lambda a, b: heard.append((a, b)))
    found, low, high = served.latencies, served.low_latencies, served.high_latencies
    assert found is not None
    assert low is not None
    assert high is not None
    assert low.latency.p50_s < found.latency.p50_s < high.latency.p50_s
    assert low.ttft.p50_s < found.ttft.p50_s < high.ttft.p50_s
    assert heard[-1][0] == heard[-1][1]
    assert sorted(heard) == heard
    told = to_text(render(served))
    assert "at best" in told
    assert "at worst" in told


def test_no_end_of_an_interval_crosses_the_answer(llama: Model, h100: Cluster) -> None:
    """Of three engines: longer steps part two prompts by chance that otherwise share a step, so that one waits less."""
    requests = Workload(rate=10, num_requests=40, prompt_tokens=1024, output_tokens=64, seed=1).requests()
    served = serve(llama, InferencePlan(dp=3, max_model_len=4096, stack="sglang-2025"), h100, requests, interval=True)
    ends = (served.low_latencies, served.latencies, served.high_latencies)
    low, found, high = (asdict(one) for one in ends if one)
    for figure, values in found.items():
        assert all(low[figure][key] <= value <= high[figure][key] for key, value in values.items()), figure


def test_time_scales(llama: Model, h100: Cluster) -> None:
    """Arrivals, host and devices three times as slow: everything takes three times as long."""
    costs = costs_of(llama, InferencePlan(), h100)
    limits = Limits(num_blocks=200, block_size=16, max_sequences=16, max_tokens=512, chunked=True)
    requests = Workload(
        rate=30, num_requests=60, prompt_tokens=Uniform(distribution="uniform", low=5, high=900)
    ).requests()
    slow = [replace(request, arrival_s=3 * request.arrival_s) for request in requests]
    once = Engine(costs, limits, requests, (0.0, math.inf)).run()
    thrice = Engine(costs.changed(pace=3.0), limits, slow, (0.0, math.inf)).run()
    assert [3 * job.end_s for job in once.jobs] == pytest.approx([job.end_s for job in thrice.jobs], rel=1e-9)
    assert once.preemptions == thrice.preemptions > 0


def test_dealt_experts_hold_as_much_and_read_as_much_as_split_ones(h100: Cluster) -> None:
    model = Model.load("qwen3-30b-a3b")
    split, dealt = InferencePlan(tp=4), InferencePlan(tp=4, experts="dealt")
    stack = Stack.load(split.stack)
    memories = [serving_memory(model, plan, h100.device, stack) for plan in (split, dealt)]
    assert memories[0].weight_bytes == memories[1].weight_bytes
    batch = Batch(decodes=256, keys=(256 * 500,))
    (a,), (b,) = (costs_of(model, plan, h100).costs(batch) for plan in (split, dealt))
    assert a.exchange_s == b.exchange_s
    assert a.gemm_s == pytest.approx(b.gemm_s, rel=0.25)  # narrow products of all rows, or wide ones of a quarter
    (c,) = costs_of(model, InferencePlan(tp=4, experts="dealt", expert_imbalance=4), h100).costs(
        Batch(decodes=0, keys=(0,), chunks=(Chunk(new=8192, cached=0),))
    )
    (d,) = costs_of(model, dealt, h100).costs(Batch(decodes=0, keys=(0,), chunks=(Chunk(new=8192, cached=0),)))
    assert c.gemm_s > 1.5 * d.gemm_s
    told = faults_of(Model.load("llama3-8b"), InferencePlan(experts="dealt"), h100)
    assert "no experts to deal" in told
    assert "slices of experts" in faults_of(model, InferencePlan(expert_imbalance=2), h100)


def test_the_context_comes_on_top_of_the_fraction(llama: Model, h100: Cluster) -> None:
    """A log of vLLM on an 80 GB GPU: 79.19 GiB x 0.8 - 1.12 weights - 0.16 outside - 0.23 activations = 61.84 for the cache."""
    stack = Stack.load("vllm-2025")
    m = serving_memory(llama, InferencePlan(), h100.device, stack)
    assert m.seen_outside_bytes == int(0.16 * 2**30) < m.outside_torch_bytes
    assert m.budget_bytes < m.used_bytes < m.capacity_bytes
    greedy = serving_memory(llama, InferencePlan(gpu_memory_utilization=1.0), h100.device, stack)
    assert greedy.fit is Fit.DOES_NOT_FIT
    assert not greedy.over_budget
    served = serve(llama, InferencePlan(gpu_memory_utilization=1.0), h100, Workload(num_requests=3).requests())
    assert "leaves too little for the CUDA context" in served.cause
    assert served.remedies[0].plan == {"gpu_memory_utilization": 0.95}
    assert round((0.8 * 79.19 - 1.12 - m.seen_outside_bytes / 2**30 - 0.23), 2) == 61.84


def test_an_engine_that_samples_in_place_keeps_no_copies_of_its_logits(llama: Model, h100: Cluster) -> None:
    """At most, fp32 logits and probabilities stand side by side, 8 bytes a logit; in place the product's 2 bytes."""
    plan = InferencePlan(max_sequences=2048, max_batched_tokens=2048)
    copied = Stack.load("tensorrt-llm-2024")
    assert copied.engine is not None
    copied = copied.copy_with(engine=copied.engine.model_copy(update={"samples_in_place": False}))
    shard = stage_shards(llama, plan)[0]
    kept, less = (
        activation_bytes(llama, shard, plan, s, h100.device) for s in (copied, Stack.load("tensorrt-llm-2024"))
    )
    logits = 2048 * 128_256  # the vocabulary is a multiple of 64
    assert kept - less == pytest.approx((8 - 2) * logits, rel=0.05)


def test_slices_that_are_no_whole_blocks_of_a_checkpoint_are_named(h100: Cluster) -> None:
    """1,536 columns of an expert over 8 GPUs are 192 each; over 4 they are 384, three blocks of 128."""
    model = Model.load("qwen3-235b-a22b")
    found = [
        [note for note in assumptions(StepCosts(model, plan, h100, Stack.load(plan.stack), Calibration.ideal(), LinkCurves.ideal()))
         if "192 columns" in note or "blocks of 128" in note]
        for plan in (InferencePlan(tp=8, weights="fp8"), InferencePlan(tp=4, weights="fp8"), InferencePlan(tp=8),
                     InferencePlan(tp=8, weights="fp8", experts="dealt"))
    ]  # fmt: skip
    assert [len(notes) for notes in found] == [1, 0, 0, 0]
