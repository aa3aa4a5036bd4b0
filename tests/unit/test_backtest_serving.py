"""Backtest of tables of servers: what rows say, what is refused by name, and the report's shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.base.kernels import Gemm
from simulator.formats.readers.measured_table import read_measured
from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.calibration.intervals import unknown_engine
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.software.engine import Engine as EngineTable
from simulator.spec.software.stack import Stack
from simulator.studies.backtest import render, run
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.rows import ServingRow
from simulator.studies.backtest.serving import ServingReport
from simulator.studies.backtest.serving_figures import _run, deployed_once, figure_of, predicted
from simulator.studies.backtest.serving_rows import load_of, metric_of, resolve
from simulator.studies.serving import InferencePlan, Request, StepCosts, engine_of, with_defaults
from simulator.studies.serving.batch import Batch, padded
from simulator.studies.serving.decoding import batch_of, sigma_of
from simulator.studies.serving.engine import Engine
from simulator.studies.serving.groups import own_all_reduce_s
from simulator.studies.serving.kernels import NarrowWeights
from simulator.studies.serving.limits import Limits, RequestState
from simulator.studies.serving.scheduler import Scheduler
from simulator.work.ops import Exchange

ROW = ServingRow(
    line=2,
    id="one",
    source="lab",
    engine="vLLM",
    engine_version="0.9.0",
    model="meta-llama/Llama-3.1-8B-Instruct",
    gpu="h100_sxm",
    n_gpus=1,
    tp=1,
    precision="bf16",
    input_tokens=512,
    output_tokens=64,
    concurrency_or_rate="4",
    metric="ttft_mean",
    value=100.0,
    unit="ms",
)
HEADER = "id,source,engine,engine_version,model,gpu,n_gpus,tp,precision,input_tokens,output_tokens,concurrency_or_rate,metric,value,unit,colour"
TABLE = f"""{HEADER}
a,lab,vLLM,0.9.0,LLaMA v3.1 8B,H100-80GB-SXM,1,1,bf16,512,64,4,ttft_mean,30,ms,red
b,lab,vLLM,0.9.0,LLaMA v3.1 8B,H100-80GB-SXM,1,1,bf16,512,64,4,output_throughput_total,400,tokens/s,red
c,lab,vLLM,0.9.0,a model of ours,H100-80GB-SXM,1,1,bf16,512,64,4,ttft_mean,30,ms,red
a,lab,vLLM,0.9.0,LLaMA v3.1 8B,H100-80GB-SXM,1,1,bf16,512,64,4,ttft_mean,30,ms,red
d,lab,vLLM,0.9.0,LLaMA v3.1 8B,H100-80GB-SXM,1,1,bf16,512,-3,4,ttft_mean,30,ms,red
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ServingReport:
    file = tmp_path_factory.mktemp("serving") / "serving.csv"
    file.write_text(TABLE)
    found = run(read_measured(file))
    assert isinstance(found, ServingReport)
    return found


def test_rows_stand_in_the_tables_order_with_what_became_of_each(report: ServingReport) -> None:
    rows = json.loads(json.dumps(report.as_json()))["rows"]
    assert [(row["id"], row["status"]) for row in rows] == [
        ("a", "ok"), ("b", "ok"), ("c", "refused"), ("a", "bad"), ("d", "bad"),
    ]  # fmt: skip
    assert {"metric", "unit", "predicted", "low", "high", "measured", "reason"} <= rows[0].keys()
    assert rows[0]["low"] < rows[0]["predicted"] < rows[0]["high"]
    assert "a model of ours" in rows[2]["reason"]
    assert "line 2" in rows[3]["reason"]
    assert "output_tokens" in rows[4]["reason"]


def test_four_users_share_what_one_loop_serves(report: ServingReport) -> None:
    """Little's law: throughput = users / latency; a latency is at least its ttft, so tokens/s is at most 4 · 64 / ttft."""
    ttft_ms, rate = (row["predicted"] for row in report.as_json()["rows"][:2])
    assert 0 < rate < 4 * 64 / (ttft_ms * 1e-3)


def test_groups_and_unread_columns(report: ServingReport) -> None:
    groups = report.as_json()["groups"]
    assert [(group["metric"], group["n"], group["refused"]) for group in groups] == [
        ("output_throughput_total", 1, {}),
        ("ttft_mean", 1, {"model": 1}),
    ]
    assert any("colour" in column for column in report.unread)
    assert render(report) is not None


@pytest.mark.parametrize(
    ("text", "users", "rate"),
    [("16", 16, float("inf")), ("4 requests/s", 0, 4.0), ("INF requests/s", 0, float("inf")), ("0.5 req/s", 0, 0.5)],
)
def test_loads(text: str, users: int, rate: float) -> None:
    load = load_of(replace(ROW, concurrency_or_rate=text))
    assert (load.users, load.rate) == (users, rate)


def test_lengths_that_are_means_may_vary() -> None:
    """The longest of 40 exponential answers has ln 40 + 0.58 = 4.3 times their mean, and ends a queue that comes at once."""
    row = replace(ROW, concurrency_or_rate="inf", metric="output_throughput", unit="tokens/s", notes="40 requests")
    alike, varied = (predicted(resolve(replace(row, notes=row.notes + more))) for more in ("", "; lengths are means"))
    assert (varied.value, varied.high) == (alike.value, alike.high)
    assert varied.low < alike.low / 2


@pytest.mark.parametrize(
    ("metric", "unit", "figure", "percentile", "factor"),
    [
        ("ttft_mean", "ms", "ttft", None, 1e-3),
        ("itl_p99", "us", "itl", 99.0, 1e-6),
        ("tpot_median", "s", "tpot", 50.0, 1.0),
        ("request_latency(static batch)", "ms", "latency", None, 1e-3),
        ("(prompt+output tokens)/total time", "tokens/s", "token_rate", None, 1.0),
        ("output_throughput_total", "tokens/s", "output_rate", None, 1.0),
    ],
)
def test_metrics(metric: str, unit: str, figure: str, percentile: float | None, factor: float) -> None:
    asked = metric_of(replace(ROW, metric=metric, unit=unit))
    assert (asked.figure, asked.percentile, asked.unit) == (figure, percentile, factor)


def test_a_rate_per_gpu_is_divided_by_the_gpus() -> None:
    row = replace(ROW, n_gpus=4, tp=2, metric="output_throughput_per_gpu", unit="tokens/s/GPU")
    server = resolve(row)
    assert (server.metric.unit, server.plan.tp, server.plan.dp) == (4.0, 2, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metric": "happiness"}, "happiness"),
        ({"unit": "tokens/s"}, "s or ms"),
        ({"concurrency_or_rate": "a few"}, "a few"),
        ({"n_gpus": 3, "tp": 2}, "tp 2"),
        ({"precision": "w2a2"}, "w2a2"),
        ({"input_tokens": None}, "blank"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        resolve(replace(ROW, **changes))


def test_requests_are_counted_from_the_remarks() -> None:
    assert load_of(replace(ROW, notes="500 requests, open loop at QPS; achieved req/s=2")).requests == 500
    assert load_of(replace(ROW, notes="requests 30000/3000 by length")).requests == 10 * 4


def test_an_empty_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "serving.csv"
    file.write_text(f"{HEADER}\n")
    assert run(read_measured(file)).outcomes == ()


def test_engines_are_found_by_name_and_version_and_bring_their_defaults() -> None:
    found = {
        text: engine_of(text) for text in ("TensorRT-LLM 0.17", "trtllm 1.0.0rc3", "SGLang 0.4.6", "an engine of ours")
    }
    assert [stack.name for stack in found.values()] == [
        "tensorrt-llm-2024", "tensorrt-llm-2025", "sglang-2025", "vllm-2026",
    ]  # fmt: skip
    assert found["an engine of ours"].known == "unknown"
    plan = with_defaults(InferencePlan(max_model_len=20_000, max_sequences=7), found["TensorRT-LLM 0.17"])
    assert (plan.max_sequences, plan.mixed, plan.cache_of) == (7, True, "free")  # what is given stays
    assert plan.max_batched_tokens == 20_000  # whole prompts must fit a step


def test_text_generation_inference_is_three_stacks_by_version() -> None:
    names = ["TGI 1.1.0", "text-generation-inference 2.0.4", "TGI 2.4", "Text Generation Inference v3.3.4", "TGI"]
    found = [engine_of(name).name for name in names]
    assert found == ["tgi-2023", "tgi-2024", "tgi-2025", "tgi-2025", "tgi-2025"]
    device, model = Cluster.load("hgx-a100-80-8").device, Model.load("llama3.1-70b")
    plan = with_defaults(InferencePlan(tp=4), engine_of("TGI 3.0"), device, model)
    assert plan.max_batched_tokens == int(4 * 312e12 / (2 * model.num_active_parameters))  # a second of products
    early = with_defaults(InferencePlan(), engine_of("TGI 1.1.0"))
    assert (early.max_batched_tokens, early.max_model_len, early.mixed, early.cuda_graphs) == (4096, 2048, False, False)


def test_a_step_runs_in_the_next_graph_that_is_captured() -> None:
    cluster = Cluster.load("hgx-a100-80-8")
    plan = InferencePlan(stack="tgi-2025")
    calibration = Calibration.for_device(cluster.device)
    costs = StepCosts(Model.load("llama3.2-1b"), plan, cluster, Stack.load("tgi-2025"), calibration, default_curves())
    keys = (32 * 256,)
    assert [padded(n, (1, 2, 4, 8, 16, 32)) for n in (1, 3, 17, 32, 33)] == [1, 4, 32, 32, 33]
    assert not costs.graphed(Batch(decodes=33, keys=keys))
    for wrong in ((8, 4), (0, 1), (2, 2)):
        with pytest.raises(ValueError, match="that grow"):
            EngineTable.model_validate({"graph_sizes": wrong})
    assert costs.graphed(Batch(decodes=32, keys=keys))


def test_an_engines_own_all_reduce_is_its_measured_one() -> None:
    """3.7 and 5.9 us for 512 bytes, 19.9 and 33.8 us for 1 MiB on 2 and 8 H100 (github.com/sgl-project/sglang/pull/2904)."""
    cluster, stack = Cluster.load("hgx-h100-8"), engine_of("SGLang 0.5")
    for ranks, size, measured_us in ((2, 512, 3.7), (8, 512, 5.9), (2, 2**20, 19.9), (8, 2**20, 33.8)):
        shape = GroupShape(
            num_ranks=ranks, num_nodes=1, ranks_per_node=ranks, num_groups_per_node=1, spans_domain=False
        )
        call = Exchange(kind="all_reduce", axis="tp", num_bytes=size)
        assert own_all_reduce_s(call, shape, cluster, stack) == pytest.approx(measured_us * 1e-6, rel=0.15)


def test_a_reserved_answer_is_never_preempted() -> None:
    """20 blocks, answers that end with 10: reserved, two run at once; otherwise four begin and some are thrown out."""
    requests = [Request(arrival_s=0.0, prompt_tokens=64, output_tokens=97) for _ in range(4)]
    model, cluster = Model.load("llama3.2-1b"), Cluster.load("hgx-h100-8")
    calibration = Calibration.for_device(cluster.device)
    costs = StepCosts(model, InferencePlan(), cluster, engine_of("vLLM"), calibration, default_curves())
    limits = Limits(num_blocks=20, block_size=16, max_sequences=8, max_tokens=512, chunked=True)
    for reserved, preempted in ((1.0, False), (0.0, True)):
        played = Engine(costs, replace(limits, reserved=reserved), requests, (0.0, float("inf"))).run()
        assert (played.preemptions > 0) == preempted
        assert played.leftover_blocks == 0


def test_prompts_come_first_where_steps_are_not_mixed() -> None:
    """Four prompts of two steps each: unmixed, nobody decodes before the last prompt is through."""
    requests = [Request(arrival_s=0.0, prompt_tokens=512, output_tokens=8) for _ in range(4)]
    scheduler = Scheduler(
        Limits(num_blocks=1000, block_size=16, max_sequences=8, max_tokens=256, chunked=True, mixed=False)
    )
    scheduler.waiting.extend(RequestState(request=request, index=i) for i, request in enumerate(requests))
    steps = []
    for step in range(10):
        batch = scheduler.next_batch()
        assert batch is not None
        steps.append((batch.decodes, sum(chunk.new for chunk in batch.chunks)))
        scheduler.complete(float(step))
    assert steps == [(0, 256)] * 8 + [(4, 0)] * 2


def test_a_cache_is_as_checkpoints_for_the_engine_have_it() -> None:
    stack = engine_of("trtllm 1.0")
    assert with_defaults(InferencePlan(weights="fp8"), stack).kv_dtype == "fp8"
    assert with_defaults(InferencePlan(weights="fp8", kv_cache="bf16"), stack).kv_dtype == "bf16"
    assert with_defaults(InferencePlan(), stack).kv_dtype == "bf16"


def test_products_of_few_rows_read_their_weights_or_compute_64_rows() -> None:
    """1 row and 64 take the same; H100 is bound by 2 n k bytes, H20, with 0.15 of its products, by the 64 rows."""
    calibration = Calibration.load("h100-sxm")
    few = calibration.gemms["bf16"].few_rows
    assert few is not None
    one, all_of_them = (Gemm(m=m, n=8192, k=8192, dtype="bf16") for m in (1, 64))
    h100, h20 = Device.load("h100-sxm5-80gb"), Device.load("h20")
    read_s = one.num_bytes / (h100.memory_bytes_per_s * few.bw_frac) + few.t0_s
    assert calibration.kernel_s(one, h100) == pytest.approx(read_s, rel=1e-9)
    slow_s = calibration.kernel_s(one, h20)
    assert slow_s > 2 * one.num_bytes / h20.memory_bytes_per_s
    assert slow_s == pytest.approx(calibration.kernel_s(all_of_them, h20), rel=1e-9)


def test_narrow_weights_and_experts_are_computed_in_tiles_of_16_rows() -> None:
    """On Ada every product is (mma.m16n8k16); a quarter of a byte a weight is then read, not multiplied, by RTX 4090 too."""
    plain = Gemm(m=1, n=8192, k=8192, dtype="bf16")
    narrow = NarrowWeights(m=1, n=8192, k=8192, dtype="bf16", weight_bits=4.25)
    for name in ("rtx-4090", "h100-sxm5-80gb", "a100-sxm4-80gb"):
        device = Device.load(name)
        calibration = Calibration.for_device(device)
        few = calibration.gemms["bf16"].few_rows
        assert few is not None
        read_s = narrow.num_bytes / (device.memory_bytes_per_s * few.bw_frac) + few.t0_s
        assert calibration.kernel_s(narrow, device) == pytest.approx(read_s, rel=1e-9)
    h20 = Device.load("h20")  # in tiles of 64 rows bound by products
    calibration = Calibration.for_device(h20)
    routed = replace(plain, batch=8, grouped=True)
    assert calibration.kernel_s(routed, h20) < calibration.kernel_s(replace(plain, batch=8), h20) / 1.5


def test_tokens_that_are_streamed_cost_each_sequence() -> None:
    costs = StepCosts(
        Model.load("llama3.2-1b"),
        InferencePlan(),
        Cluster.load("hgx-h100-8"),
        engine_of("vLLM"),
        Calibration.load("h100-sxm"),
        default_curves(),
    )
    each_s = engine_of("vLLM").engine.sequence_s  # type: ignore[union-attr]  # it is an engine
    assert costs.idle_s(0.0, 100) - costs.idle_s(0.0, 0) == pytest.approx(100 * each_s)
    assert costs.changed(streamed=False).idle_s(0.0, 100) == costs.idle_s(0.0, 0)


def test_a_closed_loops_interval_spans_users_in_step_and_apart(report: ServingReport) -> None:
    """Launched with room for one prompt a step, users in step wait for each other; with the engine's own tokens a step all
    four prompts are one step, which every one of them waits for."""
    row, server = report.as_json()["rows"][0], resolve(replace(ROW, output_tokens=64))
    assert server.other is not None
    found = []
    for plan in (server.plan, server.other):
        deployed = deployed_once(replace(server, plan=plan))
        found += [figure_of(_run(deployed, server.load, apart), server.metric) * 1e3 for apart in (0.0, 0.1)]
    assert found[0] == pytest.approx(row["predicted"])
    assert max(found) == found[2] > 1.2 * found[0]
    assert row["low"] < 0.85 * min(found)  # and what no play shows
    assert row["high"] > 1.2 * max(found)


class _Ahead(StepCosts):
    works_ahead = True


def test_a_host_that_works_ahead_admits_a_request_one_step_later() -> None:
    """The second request comes while the first decodes: its prompt is in the next step, or in the one behind that."""
    calibration, cluster = Calibration.load("h100-sxm"), Cluster.load("hgx-h100-8")
    stack = engine_of("vLLM 0.12")
    assert stack.engine is not None
    made = (Model.load("llama3.2-1b"), InferencePlan(), cluster, stack, calibration, default_curves())
    requests = [Request(arrival_s=at, prompt_tokens=32, output_tokens=64) for at in (0.0, 0.0501)]
    limits = Limits(num_blocks=1000, block_size=16, max_sequences=8, max_tokens=512, chunked=True)
    costs, ahead = StepCosts(*made), _Ahead(*made)
    later_s, first_s = (
        Engine(one, limits, requests, (0.0, float("inf"))).run().jobs[1].first_s or 0.0 for one in (ahead, costs)
    )
    step_s = costs.idle_s(0.0, 1) + sum(costs.stages_s(batch_of(costs, 1, 48)))
    assert later_s - first_s == pytest.approx(step_s, rel=0.01)


def test_a_launch_for_so_many_users_has_its_own_tokens_a_step() -> None:
    """One prompt, a token a user, and what the stack says; the engine's own default is played for the interval."""
    server = resolve(ROW)
    assert server.stack.engine is not None
    assert server.plan.max_batched_tokens == 512 + 4 + (server.stack.engine.launch_tokens or 0)
    assert server.plan.max_sequences == 4
    assert server.other is not None
    assert server.other.max_batched_tokens == 8192
    at_a_rate = resolve(replace(ROW, concurrency_or_rate="4 requests/s"))
    assert (at_a_rate.plan.max_batched_tokens, at_a_rate.other) == (8192, None)
    launched = resolve(replace(ROW, engine="trtllm", engine_version="1.0", output_tokens=3000))
    whole, default = launched.plan, launched.other
    assert (whole.chunked_prefill, whole.max_batched_tokens) == (False, 512 + 3000)  # a whole sequence fits a step
    assert default is not None
    assert (whole.gpu_memory_utilization, default.gpu_memory_utilization) == (0.8, 0.9)  # as its launches' files say


def test_software_that_nobody_described_has_a_wider_interval() -> None:
    """The spread of engines that were predicted as if nobody had described them comes on top, in quadrature."""
    cluster = Cluster.load("hgx-h100-8")
    calibration = Calibration.for_device(cluster.device)
    spreads = []
    for text in ("vLLM 0.14", "an engine of ours"):
        costs = StepCosts(
            Model.load("llama3.2-1b"), InferencePlan(), cluster, engine_of(text), calibration, default_curves()
        )
        spreads.append(sigma_of(costs, batch_of(costs, 8, 500), calibration, default_curves()))
    assert spreads[1] ** 2 - spreads[0] ** 2 == pytest.approx(unknown_engine().step ** 2)


def test_an_engine_that_nobody_described_may_let_prompts_join_steps_or_come_first() -> None:
    """No launch is known of it; its first tokens' interval spans both orders of prompts, and holds what either makes of users in step."""
    alone = replace(ROW, engine="an engine of ours", concurrency_or_rate="16", num_requests=64)
    server = resolve(alone)
    assert server.waits
    assert server.other is not None
    assert (server.plan.mixed, server.other.mixed) == (True, False)
    assert server.plan.max_batched_tokens == server.other.max_batched_tokens == 8192
    found = predicted(server)
    for plan in (server.plan, server.other):
        each = figure_of(_run(deployed_once(replace(server, plan=plan)), server.load), server.metric) * 1e3
        assert found.low < each / (1 + unknown_engine().wait)
        assert found.high > each * (1 + unknown_engine().wait)
    assert found.value == pytest.approx(figure_of(_run(deployed_once(server), server.load), server.metric) * 1e3)
    for load in ("4 requests/s", "inf"):
        at_a_rate = resolve(replace(alone, concurrency_or_rate=load))
        assert (at_a_rate.other, at_a_rate.waits) == (None, False)


def test_what_is_not_known_of_an_engine_comes_from_engines_that_were_described() -> None:
    """The file's sigmas hold nine tenths of most engines by what the others say, and every engine has its rows there."""
    found = unknown_engine()
    assert found.step > 0
    assert found.wait > 0
    assert set(found.sample) <= set(Stack.names())
    assert len(found.sample) >= 5
    assert all(one["rows"] > 0 for one in found.sample.values())


class _StepByStep(StepCosts):
    def on_a_line(self, batch: Batch) -> int:  # noqa: ARG002  as the one that it replaces
        return 1


@pytest.mark.parametrize(
    ("engine", "model"), [("vLLM", "llama3.2-1b"), ("SGLang", "llama3.2-1b"), ("vLLM", "gemma2-9b")]
)
def test_steps_that_are_passed_over_take_what_each_takes(engine: str, model: str) -> None:
    calibration, cluster = Calibration.load("h100-sxm"), Cluster.load("hgx-h100-8")
    made = (Model.load(model), InferencePlan(dp=2), cluster, engine_of(engine), calibration, default_curves())
    windows = StepCosts(*made).windows
    limits = Limits(num_blocks=60, block_size=16, max_sequences=8, max_tokens=512, chunked=True, windows=windows)
    sizes = ((30, 300), (200, 90), (64, 200), (500, 2), (16, 256), (100, 100))
    requests = [
        Request(arrival_s=0.3 * i, prompt_tokens=prompt, output_tokens=answer)
        for i, (prompt, answer) in enumerate(sizes)
    ]
    one, all_at_once = (Engine(kind(*made), limits, requests, (0.2, 1.5)).run() for kind in (_StepByStep, StepCosts))
    for figure in ("num_steps", "output_tokens", "peak_blocks", "busy_s", "block_s"):
        assert getattr(all_at_once.meter, figure) == pytest.approx(getattr(one.meter, figure), rel=1e-3), figure
    assert [job.end_s for job in all_at_once.jobs] == pytest.approx([job.end_s for job in one.jobs], rel=1e-9)
    assert (all_at_once.decoded, all_at_once.preemptions) == (one.decoded, one.preemptions)


def test_at_most_load_an_engine_is_launched_as_its_benchmarks_launch_it() -> None:
    row = replace(
        ROW, engine="TensorRT-LLM", engine_version="0.17", concurrency_or_rate="inf", metric="output_throughput"
    )
    at_most = resolve(replace(row, unit="tokens/s"))
    assert at_most.stack.engine is not None
    share = at_most.stack.engine.launch_plan["gpu_memory_utilization"]
    assert at_most.plan.gpu_memory_utilization == share != at_most.stack.engine.plan["gpu_memory_utilization"]
    assert at_most.plan.max_batched_tokens == at_most.stack.engine.plan["max_batched_tokens"]
    at_a_rate = resolve(replace(row, unit="tokens/s", concurrency_or_rate="4 requests/s"))
    assert at_a_rate.plan.gpu_memory_utilization == at_a_rate.stack.engine.plan["gpu_memory_utilization"]  # type: ignore[union-attr]
