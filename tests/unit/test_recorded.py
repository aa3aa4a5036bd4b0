"""Recorded traces as programs: what is read, what is inferred, what a change makes of it."""

from __future__ import annotations

import gzip
import json
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.kernels import Attention, Gemm
from simulator.cli import main
from simulator.formats.readers.capture import capture_of
from simulator.formats.readers.recording import is_recording, read_recording, read_recordings
from simulator.play.engine import run
from simulator.play.lower.recorded import recorded_programs
from simulator.predict.recorded import ReplayedStep, WhatIf, replay_recording
from simulator.predict.repriced import operator_kernels
from simulator.spec.cluster import Cluster
from simulator.work.captured.tensors import CapturedTensor
from simulator.work.recorded.script import recorded_script
from validate.lined_up import lined_up
from validate.recorded_operators import read_operators

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "experiments" / "measured"
SOLO = MEASURED / "h200-solo-2026-11-20"
KINETO = MEASURED / "h200-2026-11-20" / "kineto-small.json.gz"
GLOO = ROOT / "docs" / "examples" / "traces"
SPANS = sorted(SOLO.glob("*-spans.json.gz"))
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

Event = dict[str, Any]


def launched(
    name: str, call_us: float, start_us: float, dur_us: float, stream: int = 7, cid: int = 0, **args: Any
) -> list[Event]:
    """A kernel and the 5 us call that launched it."""
    cid = cid or round(call_us * 10)
    told = {"device": 0, "stream": stream, "correlation": cid, **args}
    call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": call_us, "dur": 5, "args": {"correlation": cid}}
    kernel = {"cat": "kernel", "name": name, "ts": start_us, "dur": dur_us, "args": told}
    return [{"ph": "X", "pid": 1, "tid": 1, **one} for one in (call, kernel)]


def called(name: str, at_us: float, dur_us: float = 1, cid: int = 0) -> Event:
    found = {"ph": "X", "pid": 1, "tid": 1, "cat": "cuda_runtime", "name": name, "ts": at_us, "dur": dur_us}
    return {**found, "args": {"correlation": cid or round(at_us * 10)}}


def marked(number: int, host: tuple[float, float], device: tuple[float, float]) -> list[Event]:
    name = f"ProfilerStep#{number}"
    rows = (("user_annotation", host), ("gpu_user_annotation", device))
    return [{"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": a, "dur": b - a} for cat, (a, b) in rows]


def reduced(call_us: float, start_us: float, dur_us: float, **more: Any) -> list[Event]:
    told: dict[str, Any] = {
        "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": 2, "dtype": "BFloat16",
        "Process Group Description": "dp", "Process Group Ranks": "[0, 1]",
    }  # fmt: skip
    return launched(NCCL, call_us, start_us, dur_us, 20, **told, **more)


def write(
    path: Path, events: list[Event], rank: int = 0, world: int = 2, device: str = "NVIDIA H100 80GB HBM3"
) -> Path:
    head = {
        "schemaVersion": 1,
        "deviceProperties": [{"name": device}],
        "distributedInfo": {"rank": rank, "world_size": world},
    }
    path.write_text(json.dumps({**head, "traceEvents": events}))
    return path


def played(path: Path, asked: WhatIf | None = None) -> ReplayedStep:
    return replay_recording(read_recordings(path), asked)


# A step of 200 us on the device. The host is ahead: products of 50, 60 and 70 us run back to back, an all-reduce of 30 us beside
# the second one, and the optimizer of 10 us waits for it. The device is idle for the last 8 us.
AHEAD = [
    *marked(1, (900, 1100), (1000, 1190)),
    *launched("gemm_a", 905, 1000, 50),
    *launched("gemm_b", 915, 1051, 60),
    called("cudaEventRecord", 918),
    called("cudaStreamWaitEvent", 919),
    *reduced(920, 1052, 30),
    *launched("gemm_c", 930, 1112, 70),
    called("cudaStreamWaitEvent", 940),
    *launched("multi_tensor_adam", 945, 1182, 10),
    *marked(2, (1100, 1300), (1200, 1390)),
    *launched("gemm_a", 1105, 1200, 50),
]


@pytest.mark.parametrize("path", [KINETO, *SPANS, *(GLOO / "ddp", GLOO / "fsdp")], ids=lambda path: path.name[:40])
def test_every_trace_at_hand_gives_its_own_step_back(path: Path) -> None:
    found = played(path)
    assert found.step_s == pytest.approx(found.recorded_s, rel=0.01)
    assert sum(found.breakdown.values()) == pytest.approx(found.step_s, rel=1e-6)


@pytest.mark.parametrize("path", [KINETO, SPANS[0], GLOO / "fsdp" / "rank0.json.gz"], ids=lambda path: path.name[:40])
def test_every_op_is_where_it_was_recorded(path: Path) -> None:
    one = read_recording(path)
    script = recorded_script(one)
    (program,) = recorded_programs([script])
    starts = {span.label: float(span.end_s) for span in run([program]).spans}
    for label, index in script.sources.items():
        assert starts[label] == pytest.approx(one.ops[index].end_s, abs=1e-6)


def test_a_step_lasts_until_the_next_one_begins(tmp_path: Path) -> None:
    found = played(write(tmp_path / "a.json", AHEAD))
    assert found.step == 1  # the file's end cuts the other one short
    assert found.recorded_s == pytest.approx(200e-6)
    assert found.step_s == pytest.approx(200e-6)
    assert found.breakdown["gemm"] == pytest.approx(180e-6)


def test_a_faster_kernel_moves_what_follows_it(tmp_path: Path) -> None:
    """gemm_a 25 us earlier: so is everything behind it, until the host is in the way (it is through after 200 us)."""
    path = write(tmp_path / "a.json", AHEAD)
    rest = [op for op in read_recording(path).ops if op.name == "gemm_c"]
    assert rest[0].start_s == pytest.approx(112e-6)
    found = played(path, WhatIf(faster=(("gemm_a", 2.0),)))
    spans = {span.label.partition(" #")[0]: span for span in found.timeline.spans}
    assert float(spans["gemm_c"].end_s) == pytest.approx((182 - 25) * 1e-6)
    assert float(spans["multi_tensor_adam"].end_s) == pytest.approx((192 - 25) * 1e-6)
    assert found.step_s == pytest.approx(200e-6)  # a step of the host takes 200 us: the device would wait for it
    free = played(path, WhatIf(faster=(("gemm_a", 2.0),), without_host=True))
    assert free.step_s == pytest.approx(
        168e-6, abs=1.1e-6
    )  # 8 us until the next step have become the usual gap of 1 us


def test_a_slower_collective_holds_back_who_waits_for_it(tmp_path: Path) -> None:
    """The all-reduce ends 100 us before the optimizer starts; ten times as long, 170 us after."""
    path = write(tmp_path / "a.json", AHEAD)
    found = played(path, WhatIf(faster=(("all_reduce", 0.1),)))
    spans = {span.label.partition(" #")[0]: span for span in found.timeline.spans}
    assert float(spans[NCCL].end_s) == pytest.approx((52 + 300) * 1e-6)
    assert float(spans["multi_tensor_adam"].start_s) == pytest.approx(352e-6)
    assert float(spans["gemm_c"].end_s) == pytest.approx(182e-6)  # it does not wait
    hidden = played(path, WhatIf(faster=(("all_reduce", 0.1),), communication="hidden"))
    assert hidden.step_s == pytest.approx(352e-6, abs=10e-6)  # the step still ends with it
    free = played(path, WhatIf(faster=(("all_reduce", 0.1),), communication="free"))
    assert free.step_s == pytest.approx(200e-6)


def test_a_stream_waits_for_as_many_collectives_as_events_oldest_first(tmp_path: Path) -> None:
    """Two gathers of 20 us and a reduction, all over before the first product that waits for one of them: the first gather."""

    def gathered(call_us: float, start_us: float, name: str = "_allgather_base") -> list[Event]:
        kernel = NCCL if name == "allreduce" else "ncclDevKernel_AllGather_RING_LL()"
        told: dict[str, Any] = {
            "Collective name": name,
            "In msg nelems": 500,
            "Out msg nelems": 1000,
            "Group size": 2,
            "dtype": "BFloat16",
        }
        return launched(kernel, call_us, start_us, 20, 20, **told)

    events = [
        *marked(1, (900, 1100), (1000, 1190)),
        *gathered(902, 1000, "allreduce"),
        *gathered(905, 1021),
        *gathered(915, 1042),
        called("cudaStreamWaitEvent", 924),
        *launched("gemm_a", 925, 1070, 10),
        called("cudaStreamWaitEvent", 934),
        *launched("gemm_b", 935, 1081, 10),
        *launched("multi_tensor_adam", 945, 1092, 10),
    ]
    found = played(write(tmp_path / "a.json", events), WhatIf(faster=(("all_gather", 0.1),)))
    spans = {span.label.partition(" #")[0]: span for span in found.timeline.spans}
    assert float(spans["gemm_a"].start_s) == pytest.approx((20 + 1 + 200) * 1e-6)
    assert float(spans["gemm_b"].start_s) == pytest.approx((20 + 1 + 200 + 1 + 200) * 1e-6)


def test_recorded_waits_of_the_profiler_come_first(tmp_path: Path) -> None:
    """gemm_c is recorded to wait for the all-reduce, and the optimizer is not."""
    sync = {
        "ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "ts": 929, "dur": 0,
        "args": {"stream": 7, "correlation": 9290, "wait_on_stream": 20, "wait_on_cuda_event_record_corr_id": 9270},
    }  # fmt: skip
    events = [*AHEAD, called("cudaEventRecord", 927), called("cudaStreamWaitEvent", 929), sync]
    ops = read_recording(write(tmp_path / "a.json", events)).ops
    by_name = {op.name: op for op in ops}
    assert [ops[index].name for index in by_name["gemm_c"].after] == [NCCL]
    found = played(tmp_path / "a.json", WhatIf(faster=(("all_reduce", 0.1),)))
    spans = {span.label.partition(" #")[0]: span for span in found.timeline.spans}
    assert float(spans["gemm_c"].start_s) == pytest.approx(352e-6)


def test_the_host_waits_for_the_device_and_goes_on(tmp_path: Path) -> None:
    """A synchronisation from 20 to 105 us, 5 us longer than the kernel; then the host launches again after 20 us."""
    events = [
        *marked(1, (1000, 1200), (1000, 1200)),
        *launched("gemm_a", 1000, 1000, 100),
        called("cudaDeviceSynchronize", 1020, 85),
        *launched("gemm_b", 1120, 1125, 50),
        *marked(2, (1200, 1390), (1200, 1390)),
        *launched("gemm_a", 1200, 1200, 100),
    ]
    path = write(tmp_path / "a.json", events)
    assert played(path).step_s == pytest.approx(200e-6)
    found = played(path, WhatIf(faster=(("gemm_a", 2.0),)))
    spans = {span.label.partition(" #")[0]: span for span in found.timeline.spans}
    assert float(spans["gemm_b"].start_s) == pytest.approx(75e-6)


def ranks(folder: Path, late_us: float = 40, apart_us: float = 1e6) -> Path:
    """Two ranks: the second comes `late_us` later to the all-reduce of 30 us, and its clock is ahead by `apart_us`."""
    folder.mkdir()
    for rank, busy in ((0, 50.0), (1, 50.0 + late_us)):
        at = 1000 + rank * apart_us
        come, over = at + 1 + busy, at + 1 + 50 + late_us + 30
        events = [
            *marked(1, (at - 100, at + 200), (at, at + 200)),
            *launched("gemm_a", at - 95, at, busy),
            *reduced(at - 90, come, over - come),
            *launched("gemm_b", at - 80, over, 20),
            *marked(2, (at + 200, at + 390), (at + 200, at + 390)),
            *launched("gemm_a", at + 105, at + 200, busy),
        ]
        write(folder / f"rank{rank}.json", events, rank)
    return folder


def test_several_ranks_wait_for_each_other(tmp_path: Path) -> None:
    """Of the first rank's 70 us in the all-reduce, 40 are a wait for the second: a faster first rank gains nothing."""
    folder = ranks(tmp_path / "job")
    found = played(folder)
    assert found.num_ranks == 2
    assert found.step_s == pytest.approx(200e-6)
    spans = [span for span in found.timeline.spans if span.is_collective]
    assert [round(float(span.nominal_s) * 1e6) for span in spans] == [30, 30]
    assert float(spans[0].joined_s or 0) - float(spans[0].start_s) == pytest.approx(40e-6)
    one = replay_recording(read_recordings(folder / "rank0.json"), WhatIf(communication="free"))
    both = played(folder, WhatIf(communication="free"))
    ends = {
        name: max(float(s.end_s) for s in both.timeline.of(name) if s.label.startswith("gemm_b"))
        for name in both.timeline.programs
    }
    assert {name: round(end * 1e6) for name, end in ends.items()} == {"rank 0": 110, "rank 1": 110}
    (alone,) = [float(s.end_s) for s in one.timeline.spans if s.label.startswith("gemm_b")]
    assert alone == pytest.approx(70e-6, abs=2e-6)  # a rank on its own cannot tell


def test_other_links_scale_collectives_by_the_model_of_both(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", AHEAD)
    old, new = Cluster.load("hgx-h100-8"), Cluster.load("pcie-h100-8")
    found = played(path, WhatIf(cluster=new, recorded_on=old))
    assert found.repriced["collectives by the collective model"][0] == 1
    same = played(path, WhatIf(cluster=old, recorded_on=old))
    assert same.step_s == pytest.approx(same.recorded_s)


def test_collectives_need_the_fabric_that_they_ran_on(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", AHEAD)
    with pytest.raises(InputError, match="--recorded-on CLUSTER"):
        played(path, WhatIf(cluster=Cluster.load("pcie-h100-8")))
    with pytest.raises(InputError, match="does not say which device"):
        played(SPANS[0], WhatIf(cluster=Cluster.load("hgx-h100-8")))
    with pytest.raises(InputError, match="recorded on a CPU"):
        played(GLOO / "ddp", WhatIf(cluster=Cluster.load("hgx-h100-8")))


def test_data_parallel_ranks_scale_a_rings_bytes_and_shards() -> None:
    """Gloo names no fabric: of 2 ranks each sends half the tensor, of 8 seven eighths: 1.75 times."""
    found = played(GLOO / "fsdp", WhatIf(data_parallel=8))
    ((count, before, after),) = found.repriced.values()
    assert count == sum(op.carried is not None for one in read_recordings(GLOO / "fsdp") for op in one.ops)
    assert after / before == pytest.approx(1.75)


def test_gloos_collectives_are_those_that_were_asked_for() -> None:
    """FSDP2's reduce-scatter runs as gloo's all-reduce; its size is that of the whole tensor, 8 bytes of padding and all."""
    one = read_recording(GLOO / "fsdp" / "rank0.json.gz")
    kinds = [op.carried.kind for op in one.ops if op.carried is not None]
    assert set(kinds) == {"all_gather", "reduce_scatter"}
    sizes = [op.carried.size_bytes for op in one.ops if op.carried is not None]
    assert all(size and size % 8 == 0 for size in sizes)
    assert {op.carried.ranks for op in one.ops if op.carried is not None} == {(0, 1)}


def test_a_recorded_plan_becomes_another_recorded_plan() -> None:
    """Of the eleven recorded plans of one H200, those whose difference an option can express."""
    small, large = (next(p for p in SPANS if p.name.startswith(f"llama3.2-1b-s2048-b{b}")) for b in (4, 8))
    full, expandable, none = (
        next(p for p in SPANS if p.name.startswith(f"llama3-8b-s8192-{name}-spans"))
        for name in ("b1-full-dp_shard64", "b1-full-dp_shard64-expandable", "b2-none-dp_shard64")
    )
    unrolled = WhatIf(without_recompute=True, tokens=2.0)
    pairs = [
        (small, large, WhatIf(tokens=2.0)), (large, small, WhatIf(tokens=0.5)), (full, expandable, WhatIf()),
        (expandable, full, WhatIf()), (full, none, unrolled), (expandable, none, unrolled),
    ]  # fmt: skip
    for old, new, asked in pairs:
        assert played(old, asked).step_s == pytest.approx(read_recording(new).step_s, rel=0.05)


def test_what_a_backward_repeats_can_be_left_out(tmp_path: Path) -> None:
    """Three layers of norm, product, attention, product; the backward repeats the first three, not the copy before them."""
    forward = [("rms_norm", 5), ("gemm_in", 20), ("flash_fwd", 30), ("gemm_out", 20)]
    backward = [("split_with_sizes_copy", 3), *forward[:3], ("flash_bwd", 70), ("gemm_back", 80)]
    kernels = [*forward * 3, ("cross_entropy", 9), *backward * 3]
    at, events = 1000.0, marked(1, (900, 1000), (1000, 3000))
    for number, (name, duration) in enumerate(kernels):
        events += launched(name, 900 + number, at, duration, cid=number + 1)
        at += duration
    path = write(tmp_path / "a.json", events, world=1)
    found, plain = played(path, WhatIf(without_recompute=True)), played(path)
    assert plain.breakdown["attention"] - found.breakdown["attention"] == pytest.approx(3 * 30e-6)
    assert plain.breakdown["gemm"] - found.breakdown["gemm"] == pytest.approx(3 * 20e-6)
    assert plain.breakdown["norm"] - found.breakdown["norm"] == pytest.approx(3 * 5e-6)
    with pytest.raises(InputError, match="--recompute none: no layer's forward is run again"):
        played(SPANS[5], WhatIf(without_recompute=True))


def test_kernels_by_the_shapes_of_their_operator() -> None:
    x, w = CapturedTensor("bf16", (64, 128)), CapturedTensor("bf16", (128, 256), (1, 128))
    (product,) = operator_kernels("aten::mm", (x, w))
    assert isinstance(product, Gemm)
    assert (product.m, product.n, product.k, product.dtype) == (64, 256, 128, "bf16")
    q = CapturedTensor("bf16", (2, 1024, 16, 64))  # batch, rows, heads, channels
    (attends,) = operator_kernels("aten::_flash_attention_forward", (q, q, q, None, None, 1024, 1024, 0.0, True))
    assert isinstance(attends, Attention)
    assert (attends.num_heads, attends.seq_q, attends.head_dim) == (16, 1024, 64)
    assert operator_kernels("mine::kernel", (x,)) == ()
    assert operator_kernels("aten::mm", (x,)) == ()


def test_another_device_prices_by_shape_where_there_are_shapes(tmp_path: Path) -> None:
    """The product's operator says its shapes; the activation's kernel stands alone and goes by bandwidth: 3.35 of 4.8 TB/s."""
    mm = {
        "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 904, "dur": 10,
        "args": {"External id": 5, "Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16", "c10::BFloat16"]},
    }  # fmt: skip
    events = [
        *marked(1, (900, 1000), (1000, 1190)),
        mm,
        *launched("nvjet_hsh", 905, 1000, 100, **{"External id": 5}),
        *launched("vectorized_elementwise_kernel", 920, 1101, 50),
    ]
    path = write(tmp_path / "a.json", events, world=1)
    found = played(path, WhatIf(cluster=Cluster.load("hgx-h200-8"), recorded_on=Cluster.load("hgx-h100-8")))
    assert found.repriced["by its shapes"][0] == 1
    count, before, after = found.repriced["by the devices' memory bandwidth"]
    assert count == 1
    assert after / before == pytest.approx(3350 / 4800, rel=1e-3)
    assert list(found.unshaped) == ["vectorized_elementwise_kernel"]


# -- beside a capture


def operator(name: str, at_us: float, *shapes: list[int]) -> Event:
    args = {"Input Dims": list(shapes), "Input type": ["c10::BFloat16"] * len(shapes)}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": at_us, "dur": 8, "args": args}


def test_a_recording_lines_up_with_a_capture_of_the_same_program(tmp_path: Path) -> None:
    """Two products and an activation captured; recorded the products within their layers, another activation, and a copy."""
    x, w, y = (["T", "bf16", shape, None] for shape in ([64, 128], [128, 256], [64, 256]))
    data = {
        "format": "shardwise capture", "version": 1, "target": "train.py", "torch": "2.13.0", "rank": 0, "world_size": 1,
        "gpus_per_node": 1, "device": "h100-sxm5-80gb", "steady": 0, "names": [""], "groups": [], "categories": {}, "answers": {},
        "signatures": [["aten.mm.default", [[x, w], []], y], ["aten.silu.default", [[y], []], y]],
        "events": [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]],
    }  # fmt: skip
    events = [
        *marked(1, (900, 1000), (1000, 1190)),
        {**operator("aten::linear", 903, [64, 128], [256, 128]), "dur": 12},
        operator("aten::mm", 904, [64, 128], [128, 256]),
        *launched("nvjet_hsh", 905, 1000, 30),
        operator("aten::mm", 924, [64, 128], [128, 256]),
        *launched("splitk", 925, 1031, 20, cid=1),
        *launched("splitk_reduce", 926, 1052, 5, cid=2),
        operator("aten::gelu", 944, [64, 256]),
        *launched("gelu_kernel", 945, 1060, 7),
    ]
    found = lined_up(
        capture_of(data, "train.py"),
        read_operators(write(tmp_path / "a.json", events)),
        Cluster.load("hgx-h100-8").device,
    )
    assert (found.matched, found.in_order) == (2, 2)
    assert found.rows["mm"][0] == 2
    assert found.rows["mm"][2] == pytest.approx(55e-6)
    assert found.captured_only == {"silu": 1}
    assert list(found.recorded_only) == ["gelu_kernel"]
    assert found.recorded_only["gelu_kernel"][1] == pytest.approx(7e-6)


def test_a_recording_without_shapes_cannot_be_lined_up(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="record_shapes=True"):
        read_operators(write(tmp_path / "a.json", AHEAD))


# -- bad input


def damaged(path: Path, rng: random.Random) -> bytes:
    data = bytearray(path.read_bytes())
    match rng.randrange(3):
        case 0:
            return bytes(data[: rng.randrange(len(data))])
        case 1:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(data)
        case _:
            text = bytearray(gzip.decompress(path.read_bytes()))
            for _ in range(rng.randint(1, 30)):
                text[rng.randrange(len(text))] = rng.randrange(256)
            return bytes(text)


@pytest.mark.parametrize("seed", range(40))
def test_damaged_traces_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311  damage, not secrets
    path = tmp_path / "trace.json.gz"
    path.write_bytes(damaged([KINETO, GLOO / "ddp" / "rank0.json.gz"][seed % 2], rng))
    with suppress(InputError):
        assert played(path).step_s >= 0
    with suppress(InputError):
        assert read_operators(path).operators


HOSTILE: list[Any] = [
    None, -1, 1e300, "x", [], {}, [[]], True, 2**70, "9" * 400, {"a": {"b": 1}}, [None], float("1e17"),
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE, ids=str)
def test_mistyped_values_are_left_out(tmp_path: Path, value: Any) -> None:
    """Every key of every event, one after another, with a value that it cannot have."""
    for index, event in enumerate(AHEAD):
        for key in ("ts", "dur", "name", "args", "tid", "cat", "ph"):
            events = [*AHEAD]
            events[index] = {**event, key: value}
            with suppress(InputError):
                assert played(write(tmp_path / "a.json", events)).step_s >= 0
        for key in event.get("args", {}):
            events = [*AHEAD]
            events[index] = {**event, "args": {**event["args"], key: value}}
            assert played(write(tmp_path / "a.json", events)).step_s > 0


def test_what_is_no_trace_says_so(tmp_path: Path) -> None:
    cases = {
        "is not a trace": b"hello",
        "is a kernel or an operator": b'{"traceEvents": []}',
        "has no step 7": json.dumps({"traceEvents": AHEAD}).encode(),
        "breaks off|is not a trace": gzip.compress(b'{"traceEvents": [')[:-9] + b"garbage!!",
    }
    for message, data in cases.items():
        path = tmp_path / "t.json"
        path.write_bytes(data)
        with pytest.raises(InputError, match=message):
            read_recording(path, 7)
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="no traces"):
        read_recordings(tmp_path / "none")


def test_a_file_without_steps_is_one(tmp_path: Path) -> None:
    events = [event for event in AHEAD if not event["name"].startswith("ProfilerStep")]
    one = read_recording(write(tmp_path / "a.json", events))
    assert one.step is None
    assert "no ProfilerStep" in " ".join(one.notes)
    assert replay_recording([one]).step_s == pytest.approx(250e-6)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    folder = ranks(tmp_path / "job")
    (folder / "again.json").write_bytes((folder / "rank0.json").read_bytes())
    with pytest.raises(InputError, match=r"is of rank 0, as again\.json is"):
        read_recordings(folder)


# -- the command line


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["predict", "--plain", "--program", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_line_plays_and_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path / "a.json", AHEAD))
    code, out, _ = answer(
        capsys, path, "--faster", "gemm=2", "--graphed-host", "--trace", str(tmp_path / "out.json.gz")
    )
    assert code == ExitCode.OK
    assert "gemm 2 times as fast; launches cost the host nothing" in out
    assert is_recording(tmp_path / "out.json.gz")
    code, out, _ = answer(capsys, path, "--json", "--step", "1")
    found = json.loads(out)
    assert found["replayed_s"] == found["step_s"] == pytest.approx(200e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "llama3-8b"], "--model: a recorded program has its own"),
        (["--set", "plan.tp=2"], "--set plan.tp=2"),
        (["--recompute", "full"], "can only be left out"),
        (["--recompute", "none"], "no layer's forward is run again"),
        (["--faster", "gemm"], "is not REGEX=N"),
        (["--faster", "(=2"], "no regular expression"),
        (["--faster", "(a+)+b=2"], "could take for ever to try"),
        (["--faster", "nothing=2"], "matches no kernel"),
        (["--nodes", "2"], "changes a cluster that is not named"),
        (["--links", "a.svg"], "is not drawn"),
        (["--cluster", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_asked_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    code, out, err = answer(capsys, str(write(tmp_path / "a.json", AHEAD)), *flags)
    assert code == ExitCode.BAD_INPUT
    assert message in err
    assert not out


def test_options_of_recordings_are_refused_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--faster", "gemm=2"]) == ExitCode.USAGE
    assert "only of a --program that is a profiler's trace" in capsys.readouterr().err


def test_recordings_keep_what_changes_leave(tmp_path: Path) -> None:
    """A change of everything to itself is no change."""
    (one,) = read_recordings(write(tmp_path / "a.json", AHEAD))
    assert replay_recording([one], WhatIf(faster=(("gemm", 1.0),))).step_s == replay_recording([replace(one)]).step_s
