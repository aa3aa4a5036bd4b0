"""Comparison errors and their uncertainties, on runs whose truth is made up here."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.html import page
from simulator.formats.readers.kernel_names import category_of, collective_of
from simulator.predict import Prediction, predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.program import COMPUTE_STREAM
from simulator.work.trace import Timeline
from validate.compare import Line, compare_run, predicted_phases
from validate.compare.borders import borders
from validate.players.memory import with_buckets
from validate.run_plan import spread, times
from validate.spanfile import write_spans
from validate.spans import Event, timeline
from validate.text import comparison_text, run_text

MODEL = Model(name="tiny", num_layers=3, d_model=256, num_heads=4, d_ff=512, vocab_size=1000)
CLUSTER = Cluster.load("hgx-h100-8")
STACK = Stack.load("torch-2.6-eager")
SHARDED = Plan(dp_shard=8, seq_len=256)


def seconds(median_s: float, error_s: float = 0.0) -> dict[str, float]:
    return {"median_s": median_s, "p10_s": median_s, "p90_s": median_s, "standard_error_s": error_s}


def record(plan: Plan = SHARDED, mode: str = "full", **changes: Any) -> dict[str, Any]:
    """A run that went exactly as predicted."""
    prediction = predict(MODEL, plan, CLUSTER, None, STACK)
    alone = mode == "solo"
    phases = predicted_phases(prediction, alone=alone)
    told: dict[str, Any] = {
        "kind": "run",
        "schema_version": 1,
        "mode": mode,
        "verdict": "ok",
        "partial": False,
        "trouble": None,
        "model": MODEL.model_dump(mode="json"),
        "plan": plan.model_dump(mode="json"),
        "stack": STACK.model_dump(mode="json", exclude_unset=True),
        "study": {"cluster": CLUSTER.model_dump(mode="json"), "calibration": None},
        "time": {
            **seconds(sum(phases.values())),
            "times_s": [sum(phases.values())],
            "phases": {name: seconds(s) for name, s in phases.items()},
        },
        "memory": None,
        "profile": None,
        "files": {},
    }
    return {**told, **changes}


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


# --- one line


def test_the_uncertainties_add_in_quadrature() -> None:
    line = Line(name="step_s", predicted=12.0, measured=10.0, u_num=1.0, u_input=2.0, u_data=2.0)
    assert line.error == 2.0
    assert line.u_val == 3.0  # √(1 + 4 + 4)
    assert line.in_the_noise


def test_an_error_beyond_its_uncertainty_means_something() -> None:
    assert not Line(name="step_s", predicted=12.0, measured=10.0, u_input=1.2, u_data=1.5).in_the_noise  # 1.92 < 2


# --- phases of a prediction


PLANS = {
    "fsdp2": SHARDED,
    "kept": Plan(dp_shard=8, seq_len=256, zero=2),
    "hybrid": Plan(dp_shard=4, dp_replicate=2, seq_len=256),
    "ddp": Plan(zero=0, dp_replicate=8, seq_len=256),
    "accumulated": Plan(dp_shard=8, seq_len=256, num_micro_batches=3),
    "folded": Plan(dp_shard=8, seq_len=256, num_micro_batches=16),
    "recomputed": Plan(dp_shard=8, seq_len=256, recompute="full"),
}


def predicted(plan: Plan) -> Prediction:
    return predict(MODEL, plan, CLUSTER, None, STACK)


@pytest.mark.parametrize("name", PLANS)
def test_phases_fill_the_step(name: str) -> None:
    prediction = predicted(PLANS[name])
    phases = predicted_phases(prediction)
    assert sum(phases.values()) == pytest.approx(prediction.step_s, rel=1e-9)
    assert all(value > 0 for value in phases.values())
    alone = predicted_phases(prediction, alone=True)
    communication = sum(
        v for k, v in prediction.breakdown.items() if k.split(":")[0] in ("exposed", "wait", "interference")
    )
    assert sum(alone.values()) == pytest.approx(prediction.step_s - communication, rel=1e-9)


def test_recomputation_is_the_backwards() -> None:
    plain, again = (predicted_phases(predicted(PLANS[name]), alone=True) for name in ("fsdp2", "recomputed"))
    assert again["backward"] > plain["backward"]
    assert again["optimizer"] == pytest.approx(plain["optimizer"], rel=0.05)


# --- whole runs


@pytest.mark.parametrize("mode", ["full", "solo"])
@pytest.mark.parametrize("name", PLANS)
def test_a_run_as_predicted_has_no_error(name: str, mode: str) -> None:
    found = compare_run(record(PLANS[name], mode))
    for row in found["time"]:
        assert row["error"] == pytest.approx(0.0, abs=1e-9 * row["measured"])
        assert row["in_the_noise"]


@pytest.mark.parametrize("slower", [0.9, 1.1])
def test_the_interval_of_the_prediction_is_its_uncertainty(slower: float) -> None:
    """The end on the side of the measurement is step · exp(±1.6449 σ), so σ is what it gives back."""
    prediction, measured = predicted(SHARDED), record()
    measured["time"]["median_s"] *= slower
    step = by_name(compare_run(measured)["time"])["step_s"]
    end = prediction.high_s if slower > 1 else prediction.low_s
    sigma = abs(math.log(end / prediction.step_s)) / 1.6449
    assert step["u_input"] == pytest.approx(sigma * prediction.step_s, rel=1e-6)
    assert (step["u_num"], step["u_data"]) == (0.0, 0.0)


def test_the_phase_that_took_longer_explains_the_error() -> None:
    run = record()
    phases = run["time"]["phases"]
    late = 5 * phases["forward"]["median_s"]
    run["time"] |= seconds(run["time"]["median_s"] + late, 0.001 * late)
    phases["forward"] = seconds(phases["forward"]["median_s"] + late)
    found = compare_run(run)
    step = by_name(found["time"])["step_s"]
    assert step["error"] == pytest.approx(-late, rel=1e-9)
    assert step["u_data"] == pytest.approx(0.001 * late)
    assert not step["in_the_noise"]
    why = found["explains"]["time"]
    assert (why["part"], why["share"]) == ("forward_s", pytest.approx(1.0, abs=1e-6))


def test_with_a_profile_the_part_is_a_kind_of_work() -> None:
    prediction = predicted(SHARDED)
    compute: dict[str, float] = {}
    for name, value in prediction.breakdown.items():
        joined = {"copies": "elementwise"}.get(name, name)
        if joined in ("gemm", "attention", "norm", "elementwise", "loss", "embedding", "optimizer"):
            compute[joined] = compute.get(joined, 0.0) + value
    compute["attention"] += 0.5 * prediction.step_s
    run = record()
    run["time"] |= seconds(1.5 * prediction.step_s)
    communication = {kind: {"exposed_s": e, "hidden_s": h} for kind, (e, h) in prediction.communication.items()}
    run["profile"] = {"step_s": 1.5 * prediction.step_s, "compute_s": compute, "communication": communication}
    found = compare_run(run)
    assert found["explains"]["time"]["part"] == "attention_s"
    parts = by_name(found["parts"])
    assert parts["attention_s"]["error"] == pytest.approx(-0.5 * prediction.step_s)
    assert sum(row["measured"] for row in parts.values()) == pytest.approx(1.5 * prediction.step_s)
    exposed = by_name(found["communication"])
    assert all(row["error"] == pytest.approx(0.0, abs=1e-12) for row in exposed.values())


def test_the_page_draws_times_with_intervals_and_memory_over_the_step() -> None:
    def row(name: str, predicted: float, measured: float, **sigmas: float) -> dict[str, Any]:
        return Line(name=name, predicted=predicted, measured=measured, **sigmas).as_json()

    memory = [row(f"{name}_bytes", 2, 3) for name in ("after_forward", "start", "peak backward", "peak")]
    run = {
        "what": "a run", "mode": "full", "verdict": "ok", "explains": {}, "notes": [], "memory": memory,
        "time": [row("step_s", 2.0, 1.0, u_input=0.2, u_data=0.1)], "parts": [row("gemm_s", 0.1, 0.1, u_input=1.0)],
        "communication": [row("reduce_scatter_s", 0.3, 0.4)],
    }  # fmt: skip
    text = page("validate-compare", {"schema_version": 1, "runs": [run]})
    times, over_the_step = (json.loads(one) for one in re.findall(r"data-chart='([^']*)'", text))
    assert [one["name"].split(",")[0] for one in times["data"][::2]] == ["step", "gemm", "reduce scatter"]
    first, second, third, *_ = times["data"]
    assert (first["time_s"], second["time_s"]) == (2.0, 1.0)
    assert (first["low_s"], second["high_s"], third["low_s"]) == pytest.approx((2 - 0.329, 1 + 0.1645, 0))
    assert [(one["name"], one["memory_bytes"]) for one in over_the_step["data"]] == [
        (f"{name}, {side}", size)
        for name in ("start", "after forward", "peak backward")
        for side, size in (("predicted", 2), ("measured", 3))
    ]


def test_memory_is_compared_to_the_byte_and_by_owner() -> None:
    ours = borders(MODEL, SHARDED, STACK, granularity_bytes=1)
    owners = {**ours.by_category, "buffers": ours.by_category.get("buffers", 0) + 1000}
    memory = {
        "start_bytes": ours.start_bytes,
        "after_forward_bytes": ours.after_forward_bytes,
        "after_backward_bytes": ours.after_backward_bytes,
        "peak_bytes": ours.peak_bytes + 1000,
        "peak_phase": ours.peak_phase,
        "peak_by_phase_bytes": ours.peak_by_phase_bytes,
        "by_category": {"peak": owners},
    }
    found = compare_run(record(mode="fake", time=None, memory=memory))
    rows = by_name(found["memory"])
    assert rows["start_bytes"]["error"] == 0
    assert rows["peak_bytes"]["error"] == -1000
    assert not rows["peak_bytes"]["in_the_noise"]
    assert found["explains"]["memory"] == {"part": "buffers_bytes", "error": -1000, "share": 1.0, "of_error": -1000}


def test_a_partial_run_says_so() -> None:
    run = record(
        verdict="hung", partial=True, trouble={"rank": 1, "phase": "step 3", "detail": "late", "stderr": ["x"]}
    )
    found = compare_run(run)
    assert any("hung" in note for note in found["notes"])
    assert "hung" in comparison_text(found)
    assert "rank 1, phase step 3: late" in run_text(run)


TWO_RANKS = Plan(dp_shard=2, seq_len=256)


@pytest.mark.parametrize(
    ("plan", "reason"), [(TWO_RANKS, "2 ranks, and the study's hgx-h100-8 8 devices"), (SHARDED, "ran on a CPU")]
)
def test_a_cpu_run_of_a_study_for_another_machine_has_its_bytes_compared(plan: Plan, reason: str) -> None:
    ours = borders(MODEL, plan, STACK, granularity_bytes=1, library="gloo")
    names = ("start_bytes", "after_forward_bytes", "after_backward_bytes", "peak_bytes", "peak_phase")
    memory = {name: getattr(ours, name) for name in (*names, "peak_by_phase_bytes")}
    run = record(mode="cpu", memory=memory) | {"plan": plan.model_dump(mode="json")}
    found = compare_run(run)
    assert "time" not in found
    assert any("time is not compared" in note and reason in note for note in found["notes"])
    assert all(row["error"] == 0 for row in found["memory"])
    assert reason in comparison_text(found)


@pytest.mark.parametrize("nodes", [None, 2])
def test_a_record_of_no_cluster_says_so(nodes: int | None) -> None:
    run = record() | {"study": {}}
    found = compare_run(run, nodes=nodes)
    assert "time is not compared: the record holds no cluster (--cluster names another)" in found["notes"]
    assert "time" not in found
    assert "time" in compare_run(run, cluster="hgx-h100-8")


def test_what_cannot_be_timed_is_noted_and_bytes_are_compared() -> None:
    ours = borders(MODEL, SHARDED, STACK, granularity_bytes=1, library="gloo")
    names = ("start_bytes", "after_forward_bytes", "after_backward_bytes", "peak_bytes", "peak_phase")
    run = record(memory={name: getattr(ours, name) for name in (*names, "peak_by_phase_bytes")})
    run["study"]["calibration"] = "/nowhere/at-all.calibration.json"
    found = compare_run(run)
    assert any("time is not compared" in note and "at-all" in note for note in found["notes"])
    assert {row["error"] for row in found["memory"]} == {0}
    assert "time" not in found


def test_a_cluster_that_was_asked_for_must_fit() -> None:
    run = record(mode="cpu") | {"plan": TWO_RANKS.model_dump(mode="json")}
    with pytest.raises(InputError, match="the cluster has 8 devices"):
        compare_run(run, cluster="hgx-h100-8")


def test_a_record_of_no_plan_is_refused() -> None:
    with pytest.raises(InputError, match="dp_shard"):
        compare_run(record(plan=SHARDED) | {"plan": {"dp_shard": 0}})


def test_a_run_that_cannot_be_predicted_does_not_hide_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.jsonl"
    good, bad = record(), record() | {"plan": {"dp_shard": 0}}
    path.write_text("".join(json.dumps(one) + "\n" for one in (bad, good)), encoding="utf-8")
    assert main(["validate", "compare", str(path)]) == ExitCode.OK
    told = capfd.readouterr()
    assert "run 1: " in told.err
    assert "predicted" in told.out
    path.write_text(json.dumps(bad) + "\n", encoding="utf-8")
    assert main(["validate", "compare", str(path)]) == ExitCode.BAD_INPUT


# --- statistics of steps


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    found = times([[1.0, 5.0, 3.0], [2.0, 4.0, 3.0]], {"forward": [0.5, 0.7, 0.6]})
    assert found is not None
    assert found["times_s"] == [2.0, 5.0, 3.0]
    assert found["median_s"] == 3.0
    assert found["phases"]["forward"]["median_s"] == 0.6


def test_steps_that_not_all_ranks_finished_do_not_count() -> None:
    found = times([[1.0, 1.0], [1.0]], {})
    assert found is not None
    assert found["times_s"] == [1.0]
    assert times([[1.0], []], {}) is None


def test_the_median_of_n_normal_steps_is_known_to_one_and_a_quarter_of_the_means_error() -> None:
    """Asymptotically the variance of the median is π/2 of the mean's (Kendall & Stuart, vol. 1, ch. 10)."""
    values = [1.0, 2.0, 3.0, 4.0]
    sigma = math.sqrt(5 / 3)
    assert spread(values)["standard_error_s"] == pytest.approx(math.sqrt(math.pi / 2) * sigma / 2, rel=1e-3)


# --- spans


def test_profiler_events_become_spans_of_one_op_at_a_time() -> None:
    events = [
        Event(name="aten::linear", stream="1", start_s=10.0, end_s=12.0),
        Event(name="aten::mm", stream="1", start_s=10.5, end_s=11.5),  # inside its parent
        Event(name="aten::mul", stream="1", start_s=13.0, end_s=14.0),
        Event(name="gloo:all_gather", stream="2", start_s=11.0, end_s=13.5),
        Event(name="aten::to", stream="2", start_s=11.0, end_s=13.4),  # gloo's own copy, held up: no compute
        Event(name="aten::copy_", stream="2", start_s=11.0, end_s=13.4),
    ]
    ranges = [Event(name="Optimizer.step", stream="1", start_s=12.5, end_s=15.0)]
    found = timeline(events, "rank0", optimizer=ranges)
    assert [(s.label, s.category, s.start_s, s.end_s) for s in found.spans] == [
        ("aten::linear", "gemm", 0.0, 2.0),
        ("gloo:all_gather", "all_gather", 1.0, 3.5),
        ("aten::mul", "optimizer", 3.0, 4.0),
    ]
    assert found.step_s == 4.0
    assert found.exposed("all_gather") == 1.0  # between 2 and 3 nothing is computed
    assert found.hidden("all_gather") == 1.5
    assert found.busy("rank0", COMPUTE_STREAM) == 3.0


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNN", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "gemm"),
        ("aten::addmm", "gemm"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>", "loss"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel", "norm"),
        ("multi_tensor_apply_kernel<TensorListMetadata, FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor>", "elementwise"),
    ],
)
def test_kernels_are_sorted_by_name(name: str, category: str) -> None:
    assert category_of(name) == category
    assert collective_of(name) is None


def test_collectives_are_known_by_their_library() -> None:
    assert collective_of("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL") == "reduce_scatter"
    assert collective_of("ncclDevKernel_AllGather_RING_LL") == "all_gather"
    assert collective_of("gloo:all_reduce") == "all_reduce"


def test_a_trace_has_predicted_and_measured_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record()
    found = predict(MODEL, SHARDED, CLUSTER, None, STACK).timeline
    rank = [s._replace(program="rank0", start_s=s.start_s + 1000, end_s=s.end_s + 1000) for s in found.of()]
    write_spans(tmp_path / "runs-1-spans.json.gz", Timeline(spans=tuple(rank), step_s=found.step_s))
    run["files"] = {"spans.json.gz": "runs-1-spans.json.gz"}
    runs, out = tmp_path / "runs.jsonl", tmp_path / "both.json.gz"
    runs.write_text(json.dumps(run) + "\n", encoding="utf-8")
    assert main(["validate", "compare", str(runs), "--trace", str(out)]) == ExitCode.OK
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert "measured rank0" in names.values()
    predicted, measured = (
        {(e["name"], round(e["ts"], 3)) for e in events if e["ph"] == "X" and names[e["pid"]].startswith(what)}
        for what in ("predicted", "measured")
    )
    assert measured
    assert len(measured & predicted) > 0.9 * len(measured)  # the same rows, from the same moment
    elsewhere = json.loads(json.dumps(run))
    elsewhere["study"]["cluster"]["num_nodes"] = 2
    runs.write_text("".join(json.dumps(one) + "\n" for one in (elsewhere, run)), encoding="utf-8")
    assert main(["validate", "compare", str(runs), "--trace", str(out)]) == ExitCode.OK
    assert "1 runs beside their predictions" in capsys.readouterr().err, "the other's cluster is not the run's"
    run["files"] = {}
    runs.write_text(json.dumps(run) + "\n", encoding="utf-8")
    assert main(["validate", "compare", str(runs), "--trace", str(tmp_path / "none.json.gz")]) == ExitCode.BAD_INPUT
    assert "--no-profile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seen", "total", "named"),
    [
        ({"parameters": 100}, 200, {"buckets": 100, "parameters": 100}),  # nothing written into them
        ({"parameters": 100, "temporaries": 70, "activations": 40}, 240, {"activations": 40, "buckets": 100, "parameters": 100}),
        ({"parameters": 100, "temporaries": 30, "activations": 90}, 220, {"activations": 20, "buckets": 100, "parameters": 100}),
    ],
)  # fmt: skip
def test_what_a_backward_wrote_into_buckets_is_theirs(seen: dict[str, int], total: int, named: dict[str, int]) -> None:
    """100 bytes of buckets: the account holds all of them, the tracker those that were written, as what backwards make."""
    memory = {"peak_bytes": total, "by_category": {"peak": seen}}
    assert with_buckets(memory, 100)["by_category"]["peak"] == named
    assert sum(named.values()) == total
    assert with_buckets(memory, 0)["by_category"]["peak"] == seen


def test_a_row_far_from_the_measured_one_keeps_its_columns_apart() -> None:
    row = {"name": "step_s", "predicted": 2.36, "measured": 0.00148, "error": 2.35852, "relative_error": 1593.6}
    text = comparison_text({"what": "a", "mode": "b", "explains": {}, "notes": [], "time": [
        row | {"u_val": 0.19, "in_the_noise": False}
    ]})  # fmt: skip
    assert "+2.36 s    × 1,595" in text
