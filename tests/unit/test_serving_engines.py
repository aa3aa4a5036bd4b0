"""Engines of serving: what each sets by itself, by version, memory and GPUs."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import Any

import pytest

from simulator.base.errors import InputError, PlanError
from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.client import Client
from simulator.spec.software.engine import Engine as EngineTable
from simulator.spec.software.stack import Stack
from simulator.studies.backtest import serving_figures
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.rows import ServingRow
from simulator.studies.backtest.serving import evaluate_row
from simulator.studies.backtest.serving_rows import load_of, metric_of, resolve
from simulator.studies.serving import InferencePlan, check, engine_of, with_defaults
from simulator.studies.serving.batch import Batch, Chunk
from simulator.studies.serving.costs import StepCosts
from simulator.studies.serving.decoding import batch_of, parts_of
from simulator.studies.serving.groups import own_all_reduce_s
from simulator.studies.serving.memory import ServingMemory, serving_memory
from simulator.work.ops import Exchange

ROW = ServingRow(
    line=2,
    id="one",
    engine="SGLang",
    engine_version="0.5.8",
    model="Qwen/Qwen3-32B",
    gpu="h100_sxm",
    n_gpus=1,
    tp=1,
    precision="bf16",
    input_tokens=512,
    output_tokens=8,
    concurrency_or_rate="4",
    metric="ttft_mean",
    value=100.0,
    unit="ms",
)


def _deployed(text: str, plan: InferencePlan, cluster: Cluster) -> ServingMemory:
    stack, model = engine_of(text), Model.load("llama3.1-8b")
    return serving_memory(model, with_defaults(plan, stack, cluster.device, model), cluster.device, stack)


def test_sglang_takes_its_cache_from_what_is_free_before_the_weights() -> None:
    """profile_max_num_token: free × mem_fraction_static - weights; of the largest step's activations it knows nothing."""
    cluster = Cluster.load("hgx-h100-8")
    few, many = (_deployed("SGLang 0.5", InferencePlan(max_batched_tokens=n), cluster) for n in (2048, 8192))
    aside = {few: 10 * 1024, many: 512 + 1.5 * 8192 + 2 * 256 + 128}  # MiB; above 60 GiB at least 10
    for memory, mib in aside.items():
        share = round(1 - mib * 2**20 / cluster.device.memory_bytes, 3)
        free = memory.capacity_bytes - memory.outside_torch_bytes
        assert memory.num_blocks == (int(free * share) - memory.weight_bytes) // memory.block_bytes
        assert memory.missing_bytes == 0


@pytest.mark.parametrize(
    ("text", "gpu", "tp", "tokens", "sequences"),
    [
        ("vLLM 0.10", "hgx-h100-8", 1, 8192, 1024),
        ("vLLM 0.10", "hgx-a100-80-8", 1, 2048, 256),
        ("vLLM 0.10", "pcie-l40s-8", 1, 2048, 256),  # below 70 GiB
        ("SGLang 0.5", "hgx-h200-8", 1, 8192, 2048),
        ("SGLang 0.5", "hgx-b200-8", 1, 16384, 2048),
        ("SGLang 0.5", "pcie-l40s-8", 1, 4096, 2048),
        ("SGLang 0.5", "pcie-rtx4090-4", 1, 2048, 2048),
    ],
)
def test_defaults_follow_the_gpus_memory(text: str, gpu: str, tp: int, tokens: int, sequences: int) -> None:
    plan = with_defaults(InferencePlan(tp=tp), engine_of(text), Cluster.load(gpu).device)
    assert (plan.max_batched_tokens, plan.max_sequences) == (tokens, sequences)
    given = with_defaults(InferencePlan(max_batched_tokens=100), engine_of(text), Cluster.load(gpu).device)
    assert given.max_batched_tokens == 100


def test_sglang_captures_fewer_graphs_on_fewer_and_smaller_gpus() -> None:
    engine = engine_of("SGLang 0.5").engine
    assert engine is not None
    names = ("pcie-t4-8", "pcie-rtx4090-4", "pcie-l40s-8", "hgx-h100-8", "hgx-b200-8")
    most = [max(engine.graphs(Cluster.load(name).device, tp)) for name in names for tp in (1, 4)]
    assert most == [8, 8, 24, 80, 32, 160, 256, 512, 512, 512]


@pytest.mark.parametrize(("text", "tokens"), [("vLLM 0.6.4", 512), ("vLLM 0.6.5", 2048), ("vLLM 0.7.3", 2048)])
def test_vllm_of_2024_cuts_prompts_where_sequences_may_be_long(text: str, tokens: int) -> None:
    """Beyond 32768 tokens; below, a step has room for the longest prompt, and for 2048 tokens (vllm/config.py)."""
    stack, device = engine_of(text), Cluster.load("hgx-h100-8").device
    short, long = Model.load("llama3-8b"), Model.load("llama3.1-8b")
    cases = (
        (long, None, True, tokens),
        (short, None, False, 8192),
        (long, 32768, False, 32768),
        (long, 99, False, 2048),
    )
    for model, longest, chunked, batched in cases:
        plan = with_defaults(InferencePlan(max_model_len=longest), stack, device, model)
        assert (plan.chunked_prefill, plan.mixed, plan.max_batched_tokens) == (chunked, chunked, batched)


def test_gpus_without_bf16_compute_in_fp16() -> None:
    """T4 and V100, unless 16-bit weights are said to be bf16, which they cannot multiply."""
    t4, model = Cluster.load("pcie-t4-8").device, Model.load("llama3.1-8b")
    for said, weights, dtype in (
        ({}, "fp16", "fp16"),
        ({"weights": "int4"}, "int4", "fp16"),
        ({"weights": "bf16"}, "bf16", "bf16"),
    ):
        plan = with_defaults(InferencePlan.parse(said, "plan", PlanError), Stack.load("vllm-2025"), t4, model)
        assert (plan.weights, plan.compute_dtype) == (weights, dtype)
    tokens = with_defaults(InferencePlan(), Stack.load("tgi-2025"), t4, model).max_batched_tokens
    assert tokens == int(65e12 / (2 * model.num_active_parameters))  # FLOP of a second over a token's
    h100 = Cluster.load("hgx-h100-8").device
    assert with_defaults(InferencePlan(dtype="fp16"), Stack.load("vllm-2025"), h100, model).weights == "fp16"
    with pytest.raises(PlanError, match="leave it out"):
        check(InferencePlan(weights="bf16", dtype="fp16"), model, Cluster.load("hgx-h100-8"))


def test_vllm_is_four_stacks_by_version() -> None:
    found = {
        text: engine_of(text)
        for text in ("vLLM 0.6.3", "vLLM 0.7.2", "vLLM 0.8.5", "vllm v0.12.0", "vLLM 0.14.1", "vLLM")
    }
    assert [one.name for one in found.values()] == [
        "vllm-2024", "vllm-2024-12", "vllm-2025", "vllm-2025", "vllm-2026", "vllm-2026",
    ]  # fmt: skip
    assert [one.engine.overlapped for one in found.values() if one.engine] == [False, False, False, False, True, True]
    early = with_defaults(InferencePlan(), found["vLLM 0.6.3"])
    assert (early.chunked_prefill, early.mixed) == (False, False)


def test_benchmarks_with_users_leave_sglang_less_memory_unless_nothing_fits() -> None:
    server = resolve(ROW)
    assert server.other is not None
    assert (server.plan.gpu_memory_utilization, server.other.gpu_memory_utilization) == (0.8, 0.835)
    long = replace(ROW, input_tokens=8000, output_tokens=8)  # 0.8 leave 6,671 tokens, 0.835 leave 17,899
    assert evaluate_row(long).status == "ok"


@pytest.mark.parametrize(
    ("metric", "figure", "percentile"),
    [
        ("mean_ttft_ms", "ttft", None),
        ("median_tpot_ms", "tpot", 50.0),
        ("p99_itl_ms", "itl", 99.0),
        ("TTFT p50", "ttft", 50.0),
        ("latency_p99.9", "latency", 99.9),
        ("Time to first token (avg)", "ttft", None),
    ],
)
def test_statistics_stand_before_or_behind_a_figure(metric: str, figure: str, percentile: float | None) -> None:
    """As vLLM's and SGLang's clients write them (`mean_ttft_ms`), and as tables do."""
    asked = metric_of(replace(ROW, metric=metric))
    assert (asked.figure, asked.percentile) == (figure, percentile)


@pytest.mark.parametrize("metric", ["ttft_std", "ttft_min", "max_itl_ms", "ttft_99"])
def test_a_statistic_that_is_none_of_ours_is_not_taken_as_the_mean(metric: str) -> None:
    with pytest.raises(RefusedError, match="mean, median and percentiles"):
        metric_of(replace(ROW, metric=metric))


@pytest.mark.parametrize("text", ["16", "16.0", "concurrency 16", "16 users", "max_concurrency=16", "c16", "bs=16"])
def test_users_are_told_in_many_ways(text: str) -> None:
    assert load_of(replace(ROW, concurrency_or_rate=text)).users == 16


def test_rates_and_all_at_once() -> None:
    loads = [
        load_of(replace(ROW, concurrency_or_rate=text)) for text in ("4 qps", "rate=4", "4 req/s", "offline", "inf")
    ]
    assert [(one.users, one.rate) for one in loads] == [(0, 4.0)] * 3 + [(0, float("inf"))] * 2


def test_weights_are_those_of_the_models_name_where_no_column_says_them() -> None:
    name = "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8"
    weights = [resolve(replace(ROW, model=name, precision=word)).plan.weights for word in ("", "auto", "bf16")]
    assert weights == ["fp8", "fp8", "bf16"]


@pytest.mark.parametrize("metric", ["normalized_latency", "per_token_latency", "latency per token", "prefill latency"])
def test_other_times_are_no_request_latencies(metric: str) -> None:
    with pytest.raises(RefusedError, match="none that is predicted"):
        metric_of(replace(ROW, metric=metric))


def test_a_largest_graph_is_one_of_those_that_are_captured() -> None:
    with pytest.raises(ValueError, match="graph_sizes"):
        EngineTable.model_validate({"plan_on": [{"memory": "35GiB", "largest_graph": 24}]})


def test_an_engine_says_how_long_sums_of_nccl_take_in_its_steps() -> None:
    """Twice as long, and nothing else of a step changes; a machine without losses knows no factor."""
    stack, plan, cluster = Stack.load("fastertransformer-2022"), InferencePlan(tp=8), Cluster.load("hgx-a100-80-8")
    assert stack.engine is not None

    def parts(factor: float, calibration: Calibration) -> dict[str, float]:
        engine = stack.engine.model_copy(update={"nccl_factor": factor}) if stack.engine else None
        other = stack.model_copy(update={"engine": engine})
        costs = StepCosts(Model.load("llama3-8b"), plan, cluster, other, calibration, default_curves())
        return parts_of(costs, batch_of(costs, 64, 100))

    measured, ideal = Calibration.for_device(cluster.device), Calibration.ideal()
    once, twice = parts(1.0, measured), parts(2.0, measured)
    assert twice.pop("collectives") == pytest.approx(2 * once.pop("collectives"))
    assert twice == pytest.approx(once)
    assert parts(1.0, ideal) == parts(2.0, ideal)


@pytest.mark.parametrize(
    ("said", "requests", "shortest"),
    [
        ({}, 40, 1.0),  # ten a user
        ({"client": "InferenceX"}, 40, 0.8),
        ({"client": "vllm bench serve"}, 1000, 1.0),
        ({"notes": "benchmark_serving.py --max-concurrency 4"}, 1000, 1.0),
        ({"client": "sglang.bench_serving"}, 1000, 0.0),
        ({"engine": "TensorRT-LLM (aiperf)"}, 80, 1.0),
        ({"client": "genai-perf"}, 40, 1.0),  # what runs AIPerf with twenty a user ran it with ten
        ({"notes": "static inference benchmark; memory 78 GB"}, 24, 1.0),
        ({"client": "one that nobody knows", "notes": "aiperf"}, 40, 1.0),
        ({"client": "InferenceX", "num_requests": 7, "shortest": 0.5}, 7, 0.5),
        ({"client": "InferenceX", "concurrency_or_rate": "4 requests/s"}, 1000, 1.0),  # of closed loops alone
    ],
)
def test_a_client_says_how_many_requests_and_how_long(said: dict[str, Any], requests: int, shortest: float) -> None:
    load = load_of(replace(ROW, **said))
    assert (load.requests, load.shortest) == (requests, shortest)


def test_lengths_are_drawn_from_the_shortest_to_the_stated_one() -> None:
    """Their means are those of whole numbers from 409 to 512 and from 6 to 8, and so their times differ from those of one length."""
    row = replace(ROW, concurrency_or_rate="64", shortest=0.8)
    found = serving_figures._requests(load_of(row))
    for field, low, high in (("prompt_tokens", 409, 512), ("output_tokens", 6, 8)):
        tokens = [getattr(one, field) for one in found]
        assert (min(tokens), max(tokens)) == (low, high)
        assert sum(tokens) / len(tokens) == pytest.approx((low + high) / 2, rel=0.02)


def test_what_a_client_sends_needs_a_source() -> None:
    described = [{"software": ["Loader"]}]
    with pytest.raises(InputError, match="sources: none of shortest"):
        Client.parse({"name": "Loader", "describes": described, "load": {"shortest": 0.5}}, "file", InputError)
    both = {"num_requests": 5, "requests_per_user": 5}
    with pytest.raises(InputError, match="give one of them"):
        Client.parse({"name": "Loader", "describes": described, "load": both}, "file", InputError)


def test_loads_that_nobody_could_play_are_refused() -> None:
    with pytest.raises(RefusedError, match="99,999,990 requests: at most 1,000,000 are played"):
        load_of(replace(ROW, concurrency_or_rate="9999999"))


def test_rows_may_have_engines_for_prompts() -> None:
    row = replace(ROW, engine="vLLM", n_gpus=8, tp=2, prefill_dp=4, precision="fp8")
    plan = resolve(row).plan
    assert (plan.tp, plan.dp, plan.prefill_tp, plan.prefill_dp) == (2, 2, 1, 4)
    assert resolve(replace(row, n_gpus=None, dp=3)).plan.num_devices == 10
    assert evaluate_row(row).status == "ok"
    with pytest.raises(RefusedError, match=r"tp 2 × pp 1 × dp 1 and 4 for prompts, not 7"):
        resolve(replace(row, n_gpus=7))
    with pytest.raises(RefusedError, match="no prefill_dp"):
        resolve(replace(row, prefill_tp=2, prefill_dp=None))


def test_lmdeploy_computes_prompts_apart_before_0_1_and_with_decoding_since() -> None:
    model, cluster, curves = Model.load("llama2-7b"), Cluster.load("hgx-a100-80-8"), default_curves()
    both = Batch(decodes=8, keys=(8 * 512,), chunks=(Chunk(new=511, cached=0, last=False),))
    alone = replace(both, chunks=()), replace(both, decodes=0, keys=(0,))
    for version, apart in (("0.0.14", True), ("0.2.0", False)):
        stack = engine_of(f"LMDeploy {version}")
        plan = with_defaults(InferencePlan(stack=stack.name), stack, cluster.device, model)
        costs = StepCosts(model, plan, cluster, stack, Calibration.for_device(cluster.device), curves)
        (whole_s,), *parts = map(costs.stages_s, (both, *alone))
        assert (whole_s == pytest.approx(sum(part_s for (part_s,) in parts))) == apart  # each reads the weights


@pytest.mark.parametrize(
    ("cluster", "ranks", "joined"),
    [("pcie-a40-8", 2, True), ("pcie-a40-8", 4, False), ("dgx1-v100-8", 4, True), ("dgx1-v100-8", 8, False), ("mi300x-8", 8, True)],
)  # fmt: skip
def test_an_engines_own_all_reduce_wants_a_link_between_each_two(cluster: str, ranks: int, *, joined: bool) -> None:
    """A40s have a bridge for each pair, a DGX-1 cables for each four, MI300X one for each two (`edges`, `mesh`)."""
    shape = GroupShape(num_ranks=ranks, num_nodes=1, ranks_per_node=ranks, num_groups_per_node=1, spans_domain=False)
    call = Exchange(kind="all_reduce", axis="tp", num_bytes=512)
    assert isfinite(own_all_reduce_s(call, shape, Cluster.load(cluster), Stack.load("vllm-2025"))) == joined


@pytest.mark.parametrize(
    ("text", "stack"),
    [
        ("vLLM V1 0.8.4", "vllm-2025"),  # V1 is the engine, not the release
        ("vLLM V0 0.6.6", "vllm-2024-12"),
        ("vllm vllm/vllm-openai:v0.10.2", "vllm-2025"),
        ("vllm rocm/vllm-dev:rocm6.4.1_vllm_0.10.1_20250909", "vllm-2025"),  # not ROCm's release
        ("vllm vllm/vllm-openai:latest", "vllm-2026"),
        ("trt nvcr.io#nvidia/tensorrt-llm/release:1.2.0rc2", "tensorrt-llm-2025"),
        ("TensorRT-LLM 0.20", "tensorrt-llm-2024"),
        ("sglang lmsysorg/sglang:v0.5.5-cu129", "sglang-2025"),
    ],
)
def test_an_engine_s_version_is_found_in_the_name_of_its_image(text: str, stack: str) -> None:
    assert engine_of(text).name == stack
    assert engine_of(text).known == "described"
