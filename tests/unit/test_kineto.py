"""Profiler traces of any size and any damage as timelines."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.readers.json_stream import Broken, JsonStream, open_text
from simulator.formats.readers.kernel_names import category_of, collective_of
from simulator.formats.readers.kineto import read_kineto, summary
from simulator.work.program import COMPUTE_STREAM

ROOT = Path(__file__).resolve().parents[2]
NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, start_us: float, duration_us: float, stream: int = 7, **args: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": stream, **args}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start_us,
        "dur": duration_us,
        "args": args,
    }


def gather(start_us: float, duration_us: float) -> dict[str, Any]:
    told = {
        "Collective name": "_allgather_base", "In msg nelems": 1000, "Out msg nelems": 8000, "Group size": 8,
        "dtype": "BFloat16", "Process Group Description": "dp", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
    }  # fmt: skip
    return kernel(NCCL, start_us, duration_us, 20, **told)


def step(number: int, start_us: float, end_us: float) -> dict[str, Any]:
    mark = {"ph": "X", "cat": "gpu_user_annotation", "name": f"ProfilerStep#{number}", "pid": 0, "tid": 7}
    return {**mark, "ts": start_us, "dur": end_us - start_us, "args": {}}


# A step of 100 us: 40 of a product, a gather of 30 half under it, then 20 of attention, then nothing.
EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1000, "dur": 5, "args": {}},
    kernel("sm90_xmma_gemm_bf16", 1000, 40),
    gather(1025, 30),
    kernel("flash_fwd_kernel", 1057, 20),
    {**kernel("Memcpy HtoD (Pinned -> Device)", 1010, 4, 22), "cat": "gpu_memcpy"},
    step(3, 1000, 1080),
    kernel("sm90_xmma_gemm_bf16", 1100, 50),
    step(4, 1100, 1150),
]
HEAD = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
    "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
}


def write(path: Path, events: list[Any] = EVENTS, head: dict[str, Any] = HEAD) -> Path:
    text = json.dumps({**head, "traceEvents": events, "traceName": path.name})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_step_becomes_spans_in_seconds_from_its_start(tmp_path: Path, name: str) -> None:
    trace = read_kineto(write(tmp_path / name), step=3)
    spans = {span.label: span for span in trace.timeline.spans}
    assert [span.category for span in trace.timeline.spans] == ["gemm", "copies", "all_gather", "attention"]
    assert spans["sm90_xmma_gemm_bf16"].stream == COMPUTE_STREAM
    assert spans[NCCL].is_collective
    assert spans[NCCL].start_s == pytest.approx(25e-6)
    assert spans["flash_fwd_kernel"].end_s == pytest.approx(77e-6)
    assert trace.timeline.step_s == pytest.approx(100e-6)
    assert trace.timeline.exposed("all_gather") == pytest.approx(15e-6)
    assert trace.timeline.hidden("all_gather") == pytest.approx(15e-6)
    assert trace.about == {"devices": ["NVIDIA H100"], "backend": "nccl", "rank": 3, "world_size": 8}


def test_gaps_go_to_the_collective_that_ended_in_them(tmp_path: Path) -> None:
    breakdown = read_kineto(write(tmp_path / "a.json"), step=3).timeline.breakdown()
    assert sum(breakdown.values()) == pytest.approx(100e-6)
    assert breakdown["gemm"] == pytest.approx(40e-6)
    assert breakdown["exposed:all_gather"] == pytest.approx(17e-6)  # with the two microseconds it takes to go on
    assert breakdown["idle"] == pytest.approx(23e-6)


def test_collectives_have_bytes_of_the_full_tensor_and_their_group(tmp_path: Path) -> None:
    (found,) = read_kineto(write(tmp_path / "a.json"), step=3).collectives
    assert (found.kind, found.size_bytes, found.group_size, found.group) == ("all_gather", 16_000, 8, "dp")


def test_without_a_number_the_step_of_median_duration_is_taken(tmp_path: Path) -> None:
    durations = [300, 100, 101, 99, 500]
    events, now = [], 0.0
    for number, duration in enumerate(durations):
        events += [kernel("gemm", now, duration - 10), step(number, now, now + duration)]
        now += duration
    trace = read_kineto(write(tmp_path / "a.json", events))
    assert trace.step is not None
    assert trace.step.number == 2
    assert [round(s.duration_s * 1e6) for s in trace.steps] == durations


def test_without_steps_all_is_one(tmp_path: Path) -> None:
    trace = read_kineto(write(tmp_path / "a.json", [e for e in EVENTS if not str(e["name"]).startswith("Profiler")]))
    assert trace.step is None
    assert len(trace.timeline.spans) == 5
    assert "no ProfilerStep" in trace.notes[0]


def test_a_bare_list_of_events_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(EVENTS))
    assert len(read_kineto(path, step=3).timeline.spans) == 4


def test_the_optimizer_is_known_by_its_range(tmp_path: Path) -> None:
    mark = {**step(1, 1050, 1080), "name": "Optimizer.step#AdamW.step"}
    trace = read_kineto(write(tmp_path / "a.json", [*EVENTS, mark]), step=3)
    assert next(s for s in trace.timeline.spans if s.label == "flash_fwd_kernel").category == "optimizer"


def test_the_profilers_memory_becomes_a_memory_trace(tmp_path: Path) -> None:
    def memory(at: float, allocated: int, kind: int = 1) -> dict[str, Any]:
        args = {"Device Type": kind, "Device Id": 0, "Bytes": 1, "Total Allocated": allocated, "Total Reserved": 50}
        return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": at, "args": args}

    events = [*EVENTS, memory(1010, 20), memory(1020, 40), memory(1030, 10), memory(1015, 999, 0), memory(5000, 45)]
    trace = read_kineto(write(tmp_path / "a.json", events), step=3)
    assert trace.memory is not None
    assert (trace.memory.peak.allocated_bytes, len(trace.memory.samples)) == (40, 3)


def test_kernels_of_one_stream_never_overlap(tmp_path: Path) -> None:
    trace = read_kineto(write(tmp_path / "a.json", [kernel("a", 0, 10), kernel("b", 5, 10), kernel("c", 6, 2)]))
    ends = [(span.start_s, span.end_s) for span in trace.timeline.spans]
    assert ends == [pytest.approx(x) for x in ((0, 10e-6), (10e-6, 15e-6), (15e-6, 15e-6))]


def test_a_trace_of_a_real_gpu() -> None:
    """Three steps of a small network on an H200 under torch 2.11 (experiments/allocator_traces.py)."""
    trace = read_kineto(ROOT / "experiments" / "measured" / "h200-2026-11-20" / "kineto-small.json.gz")
    assert len(trace.steps) == 3
    assert not trace.notes
    assert trace.about["devices"] == ["NVIDIA H200"]
    found = summary(trace)
    assert {"gemm", "optimizer", "norm", "elementwise", "host"} <= set(found["breakdown_s"])
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_s"])
    assert found["memory"]["peak_reserved_bytes"] >= found["memory"]["peak_allocated_bytes"] > 0


# --- damage


def refusal(path: Path, number: int | None = None) -> str:
    with pytest.raises(InputError) as caught:
        read_kineto(path, number)
    return str(caught.value)


def test_what_breaks_off_is_kept_until_there_and_told(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    text = write(path).read_text()
    path.write_text(text[: text.index("ProfilerStep#4")])
    trace = read_kineto(path)
    assert trace.step is not None
    assert trace.step.number == 3
    assert "breaks off" in trace.notes[0]


def test_a_gzip_file_that_breaks_off_is_kept_until_there(tmp_path: Path) -> None:
    events = [kernel(f"kernel_{i}_{i * 7919 % 1000}", 10.0 * i, 5) for i in range(40_000)]
    path = write(tmp_path / "cut.json.gz", events)
    path.write_bytes(path.read_bytes()[:-2000])
    trace = read_kineto(path)
    assert 0 < len(trace.timeline.spans) < 40_000
    assert any("breaks off" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a trace"),
        (b"hello", "neither { nor ["),
        (b'{"traceEvents": []}', "none of its 0 events"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 1}]}', "ProfilerActivity.CUDA"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"traceEvents" [', "a key is missing"),
        (b"\xff\xfe\x00\x01", "is not a trace"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    assert words in refusal(path)


def test_an_absent_file_and_an_absent_step(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "nowhere.json")
    assert "its steps: 3, 4" in refusal(write(tmp_path / "a.json"), 9)


def test_odd_events_are_left_out_and_counted(tmp_path: Path) -> None:
    odd = [
        kernel("a", 0, 5),
        {**kernel("b", 0, 5), "ts": "soon"},
        {**kernel("c", 0, 5), "dur": -1},
        {**kernel("d", 0, 5), "args": 3},
        7,
        {**kernel("e", 0, 5), "dur": float("nan")},
    ]
    trace = read_kineto(write(tmp_path / "a.json", odd))
    assert {span.label for span in trace.timeline.spans} == {"a", "d"}
    assert "3 events left out: without a time" in trace.notes
    assert "1 event left out: no objects" in trace.notes


def test_names_in_no_encoding_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [kernel("MARK", 0, 5)])
    path.write_bytes(path.read_bytes().replace(b"MARK", b"\xff\xfegemm"))
    assert read_kineto(path).timeline.spans[0].category == "gemm"


def test_a_value_cut_by_a_chunk_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    rows = [{"n": n, "text": "x" * (n % 7)} for n in range(50)] + [123456789, -1.5e-3, "end"]
    path.write_text(json.dumps({"before": 1234567, "traceEvents": rows, "after": [1, {"a": 2}]}))
    for chunk in (1, 2, 3, 7, 64):
        monkeypatch.setattr("simulator.formats.readers.json_stream.CHUNK", chunk)
        with open_text(path) as file:
            stream = JsonStream(file, "traceEvents")
            assert list(stream.items()) == rows
        assert stream.head == {"before": 1234567, "after": [1, {"a": 2}]}


def test_a_value_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.formats.readers.json_stream.MAX_VALUE", 1000)
    monkeypatch.setattr("simulator.formats.readers.json_stream.CHUNK", 100)
    path = tmp_path / "a.json"
    path.write_text('{"traceEvents": ["' + "x" * 5000)
    with open_text(path) as file, pytest.raises(Broken, match="longer than"):
        list(JsonStream(file, "traceEvents").items())


# --- names


KERNELS = {
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": "gemm",
    "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NTT": "gemm",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>": "gemm",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention",
    "void cunn_SoftMaxForward<8, c10::BFloat16>": "loss",
    "void vectorized_layer_norm_kernel<c10::BFloat16, float>": "norm",
    "triton_red_fused_rms_norm_0": "norm",
    "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>": "elementwise",
    "Memset (Device)": "copies",
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_known_by_name(name: str) -> None:
    assert category_of(name) == KERNELS[name]
    assert collective_of(name) is None


def test_a_traced_step_and_a_measured_one_call_kernels_the_same() -> None:
    spans = pytest.importorskip("validate.spans")
    for name, category in KERNELS.items():
        if category != "copies":
            assert category_of(name) == spans.category_of(name)
    for name in (NCCL, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "ncclDevKernel_SendRecv(x)", "gloo:all_reduce"):
        assert collective_of(name) == spans.collective_of(name)


def test_an_all_to_all_is_known_although_its_kernel_is_a_send() -> None:
    assert collective_of("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "all_to_allv") == "all_to_all"


# --- size


GENERATE = """
import json, sys
KINDS = ("kernel", "cpu_op", "cpu_op", "cpu_op")
PAD = ', "pad": "' + 80 * "x" + '"}}'
n = 0
with open(sys.argv[1], "w") as f:
    f.write('{"schemaVersion": 1, "traceEvents": [')
    while f.tell() < 50e6:
        for n in range(n, n + 1000):  # json.dumps takes ten times as long
            f.write((', ' if n else '') + '{"ph": "X", "cat": "%s", "name": "aten::mm gemm %d", "pid": 0, "tid": 7, "ts": %.1f, "dur": 8.0, '
                    '"args": {"device": 0, "stream": 7, "External id": %d' % (KINDS[n % 4], n % 100, 10.0 * n, n) + PAD)
            if n % 50000 == 49999:
                mark = {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#" + str(n // 50000), "ts": 10.0 * (n - 49999), "dur": 499990.0}
                f.write(", " + json.dumps(mark))
        n += 1
    f.write("]}")
"""
MEASURE = """
import resource, sys
from pathlib import Path
from simulator.formats.readers.kineto import read_kineto
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
trace = read_kineto(Path(sys.argv[1]))
print(len(trace.timeline.spans), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_large_trace_takes_little_memory(tmp_path: Path) -> None:
    """50 MB of events; as objects they would take ten times that."""
    path = tmp_path / "large.json"
    subprocess.run([sys.executable, "-c", GENERATE, str(path)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    spans, grown = map(int, done.stdout.split())
    grown_bytes = grown * (1 if sys.platform == "darwin" else 1024)
    assert path.stat().st_size >= 50e6
    assert spans == 12_500
    assert grown_bytes < 40 * 2**20


# --- the command line


def test_import_prints_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.json")
    assert main(["import", str(path), "--step", "3"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "step 3, one of 2, 100 us" in out
    assert "all_gather: 1 times, 15.0 us exposed, 15.0 us hidden" in out
    assert main(["import", str(path), "--step", "3", "--json"]) == ExitCode.OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["comparison"] is None
    assert answer["communication"]["all_gather"]["groups"] == ["dp (8)"]
    assert {key: answer[key] for key in summary(read_kineto(path, 3))} == summary(read_kineto(path, 3))


def test_import_puts_a_prediction_beside_it_and_keeps_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, runs = tmp_path / "study.toml", tmp_path / "runs.jsonl"
    study.write_text('model = "gpt2"\ncluster = "hgx-h100-8"\n[plan]\nzero = 3\nseq_len = 128\n')
    path = write(tmp_path / "a.json")
    assert main(["import", str(path), "--study", str(study), "-o", str(runs), "--json"]) == ExitCode.OK
    compared = json.loads(capsys.readouterr().out)["comparison"]
    assert compared["time"][0]["measured"] == pytest.approx(75e-6)  # the median of a step of 100 and one of 50
    assert {line["name"] for line in compared["communication"]} >= {"exposed communication_s", "exposed all_gather_s"}
    assert main(["validate", "compare", str(runs), "--json"]) == ExitCode.OK
    again = json.loads(capsys.readouterr().out)["runs"][0]
    assert again["time"] == compared["time"]


def test_keeping_a_run_needs_to_know_what_was_run(tmp_path: Path) -> None:
    assert main(["import", str(write(tmp_path / "a.json")), "-o", "runs.jsonl"]) == ExitCode.USAGE
