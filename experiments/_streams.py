"""Fits of memory-bound kernels: one fraction of the memory's speed an operation, one floor a launch.

On the H200 the kernels that a training step consists of were timed inside steps, by a profiler: there inputs are where
the kernel before left them, and no launch is in the time. They take the place of calls timed alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import _tables
import numpy as np
from _devices import Subject
from _gemm_devices import Report
from _in_steps import Ops
from _power import tensor_use

from simulator.base.kernels import StreamOp
from simulator.spec.calibration import GemmCurve, Power, Quality, StreamCurve
from simulator.spec.calibration.datasheet import STREAM_OPS
from validate.fit.robust import Start, fit, held, quantile, rounded

Samples = list[dict[str, Any]]
# Priors of what nobody measured here: fraction of memory speed. Column sums read rows in order; a scatter of gradients
# touches whole rows.
PRIOR: dict[str, float] = {"reduce": 0.70, "embedding_forward": 0.6, "embedding_backward": 0.2}
BF16, FP32 = 2, 4
# Ops of profiled steps that are one kind of kernel each
_IN_STEPS: dict[str, StreamOp] = {
    "sums": "elementwise",
    "SwiGLU products": "elementwise",
    "SwiGLU forward": "activation",
    "SwiGLU backward": "activation",
    "rotary, strided": "strided",
    "rotary, cat": "join",
    "cast to bf16": "cast",
    "cast to fp32": "widen",
    "mixed sums": "widen",
    "FSDP copy-in": "widen",
    "FSDP copy-out": "copy",
    "bucket copies": "copy",
    "norm forward": "norm_forward",
    "norm backward": "norm_backward",
    "log-softmax": "softmax",
    "fill": "memset",
    "optimizer": "optimizer",
}
H200_HZ = 1.98e9
SM_LIMITED: tuple[StreamOp, ...] = ("strided", "join", "widen")
_SMALL = 0.002  # of a step: ops that take less are left out


@dataclass(frozen=True, slots=True)
class Pass:
    """One measured call: what it must read and write, and its kernels."""

    op: StreamOp
    num_bytes: float
    launches: int
    time_s: float
    sm_limited: float = 0.0  # elements over (SMs at their highest clock × seconds) where SMs limit


def passes(
    device: Subject, table: list[_tables.Row], own: Samples, steps: Mapping[str, Ops], power: Power, product: GemmCurve
) -> list[Pass]:
    """Every usable measurement of one device; where kernels were timed inside steps, those only."""
    found = [*_liger(device, table), *_plain(device, table)]
    if device.calibration == "a100-sxm":
        timed = list(_differences(table))
        sixteen_bits = {one.op for one in timed} & {
            "norm_forward"
        }  # Liger's norms are of fp32 inputs, which no step has
        found = [*timed, *(one for one in found if one.op not in sixteen_bits)]
    if device.calibration != "h200-sxm":
        return found
    inside = list(_inside(device, steps, power, product))
    known = {one.op for one in inside}
    return [*inside, *(one for one in (*found, *_own(own)) if one.op not in known)]


def _inside(device: Subject, steps: Mapping[str, Ops], power: Power, product: GemmCurve) -> Iterator[Pass]:
    for ops in steps.values():
        sms = device.device.num_sms * power.clock(device.device, tensor_use(ops, product))
        whole_s = sum(seconds for seconds, _ in ops.values())
        for name, op in _IN_STEPS.items():
            seconds, bill = ops.get(name, (0.0, None))
            if bill is not None and bill.amount and seconds > _SMALL * whole_s:
                yield Pass(op, bill.amount, 0, seconds, bill.numel / (sms * seconds) if op in SM_LIMITED else 0.0)


def _liger(device: Subject, table: list[_tables.Row]) -> Iterator[Pass]:
    """PyTorch's own operators in Liger-Kernel's benchmarks (fp32 norms and losses), backward = full - forward."""
    gpu = {"h100-sxm": "H100 80GB HBM3", "a100-sxm": "A100-SXM4-80GB"}.get(device.calibration)
    if gpu is None:
        return
    rows = _tables.select(table, gpu=gpu, source="Liger")
    times = {(r["op"], r["direction"], r["shape"]): float(r["time_us"]) * 1e-6 for r in rows}
    for (op, direction, shape), time in times.items():
        size, fields = _shape(shape)
        if op == "layer_norm" and size >= 2048:
            numel = size * fields["M"]
            if direction == "forward":
                yield Pass("norm_forward", 2 * FP32 * numel, 1, time)
            elif direction == "full":  # dx: 3 passes; weight and bias gradients: 2 more
                yield Pass("norm_backward", 5 * FP32 * numel, 3, time - times[op, "forward", shape])
        elif op == "cross_entropy" and direction == "forward" and size >= 32768:
            # rows above the cache's share are read three times and written once; the pick costs little
            yield Pass("softmax", 4 * FP32 * size * fields["B"] * fields["T"], 2, time)
        elif op == "relu_squared" and direction == "forward" and size >= 4096:
            yield Pass("activation", 4 * BF16 * size * fields.get("BT", fields.get("M", 0)), 2, time)


def _shape(text: str) -> tuple[int, dict[str, int]]:
    """`V=4096 {"B": 8, "T": 2048}` -> 4096 and the whole numbers of the braces."""
    name, _, braces = text.partition(" ")
    fields = json.loads(braces) if braces else {}
    return int(name.partition("=")[2]), {k: v for k, v in fields.items() if isinstance(v, int)}


def _plain(device: Subject, table: list[_tables.Row]) -> Iterator[Pass]:
    """Stream kernels, fp8 casts and serving's additions. Smaller rows live in the cache, in part, and are left out."""
    names = {
        "a100-sxm": ("A100-80GB", "A100-SXM4"),
        "h100-sxm": ("H100-SXM5", "H100-80GB (vidur)"),
        "h200-sxm": ("H200-SXM",),
        "gb200": ("GB200",),
        "gb300": ("GB300",),
    }.get(device.calibration, ("B200",))
    ops: dict[str, StreamOp] = {
        "add": "elementwise",
        "stream_triad": "elementwise",
        "stream_scale": "copy",
        "stream_init(write)": "memset",
        "fp8_cast_scale": "quantise",
    }
    for row in table:
        if (
            not row["gpu"].startswith(names)
            or "LLMCompass" in row["source"]
            or row["op"] not in ops
            or not row["bytes"]
            or float(row["bytes"]) < _MIN_TABLE_BYTES
        ):
            continue
        time = float(row["time_us"]) * 1e-6
        yield Pass(ops[row["op"]], float(row["bytes"]), 1, time)


_LLMCOMPASS: dict[str, StreamOp] = {"gelu": "activation", "layernorm": "norm_forward"}


def _differences(table: list[_tables.Row]) -> Iterator[Pass]:
    """LLMCompass's calls on A100 (16-bit inputs), each less the next smaller one of its kind.

    Its harness adds some 40 us to every call: GELU takes 83, 168, 335 and 668 us more with each doubling from 67 MB on, and
    layer_norm of rows of 4096 38, 76 and 154. Faster than the memory of the 40 GB part, so the 80 GB one's.
    """
    by_op: dict[StreamOp, list[tuple[float, float]]] = {}
    for row in _tables.select(table, source="LLMCompass"):
        op = _LLMCOMPASS.get(row["op"])
        width = row["shape"].partition("x")[2].split(" ")[0]
        if op is not None and float(row["bytes"]) >= _MIN_OWN_BYTES and width in ("", "4096"):
            by_op.setdefault(op, []).append((float(row["bytes"]), float(row["time_us"]) * 1e-6))
    for op, calls in by_op.items():
        calls.sort()
        for (small, short_s), (large, long_s) in pairwise(calls):
            if large > 1.5 * small:
                yield Pass(op, large - small, 0, long_s - short_s)


_OWN: dict[tuple[str, str], tuple[StreamOp, float, int]] = {
    # (kind, op) -> operation, bytes an element, launches; 16-bit inputs
    ("membound_forward", "copy"): ("copy", 4, 1),
    ("membound_forward", "add"): ("elementwise", 6, 1),
    ("membound_forward", "mul"): ("elementwise", 6, 1),
    ("membound_forward", "mul_ff"): ("elementwise", 6, 1),
    ("membound_forward", "neg"): ("elementwise", 4, 1),
    ("membound_forward", "gelu"): ("activation", 4, 1),
    ("membound_forward", "silu"): ("activation", 4, 1),
    ("membound_forward", "silu_mul"): ("activation", 10, 2),
    ("membound_forward", "dropout"): ("elementwise", 5, 1),
    ("membound_forward", "add_fp32"): ("elementwise", 8, 1),
    ("membound_backward", "gelu"): ("activation", 6, 1),
    ("membound_backward", "silu"): ("activation", 6, 1),
    ("membound_backward", "silu_mul"): ("activation", 18, 3),
    ("membound_forward", "cast_to_bf16"): ("cast", 6, 1),
    ("membound_forward", "rms_norm"): ("norm_forward", 4, 1),
    ("membound_forward", "layer_norm"): ("norm_forward", 4, 1),
    ("membound_backward", "rms_norm"): ("norm_backward", 6, 1),
    ("membound_backward", "layer_norm"): ("norm_backward", 6, 1),
    ("membound_forward", "zero"): ("memset", 2, 1),
    ("membound_forward", "sum_rows"): ("reduce", 2, 1),
}
_MIN_TABLE_BYTES = 3e8
_MIN_OWN_BYTES = 60e6  # below it the second-level cache helps


def _own(own: Samples) -> Iterator[Pass]:
    for row in own:
        known = _OWN.get((row["kind"], row.get("op", "")))
        if known is not None:
            op, per_element, launches = known
            # samples with weight gradients (they state ideal bytes) make two more passes
            extra = (
                4.0 if row["kind"] == "membound_backward" and op == "norm_backward" and "ideal_bytes" in row else 0.0
            )
            size = (per_element + extra) * row["elements"]
            if size >= _MIN_OWN_BYTES:
                yield Pass(op, size, launches + (2 if extra else 0), row["time_s"])
        elif row["kind"] == "adamw" and row["impl"] == "fused":
            yield Pass("optimizer", 28 * row["parameters"], 1, row["time_s"])
        elif row["kind"] == "hbm_copy":
            yield Pass("copy", row["bytes_moved"], 1, row["time_s"])
        elif row["kind"] == "overlap_copy_alone":
            yield Pass("copy", row["bytes"], 1, row["time_s"])
        elif row["kind"] == "loss" and row["op"] == "log_softmax_forward":
            yield Pass("softmax", 16 * row["tokens"] * row["vocab"], 1, row["time_s"])
        elif row["kind"] == "cross_entropy_forward":
            yield _softmax_of(row, own)


def _softmax_of(row: dict[str, Any], own: Samples) -> Pass:
    """Cross-entropy forward less its cast (as long an element as the cast measured alone): log-softmax."""
    cast = next(r for r in own if r.get("op") == "cast_fp32")
    numel = row["tokens"] * row["vocab"]
    return Pass("softmax", 16 * numel, 2, row["time_s"] - cast["time_s"] / cast["elements"] * numel)


def launch_floor_s(device: Subject, table: list[_tables.Row]) -> float:
    """Interval of tiny kernels in a CUDA graph: what a launch costs the device. Hopper's where nobody measured."""
    gpu = "A100-80GB" if device.calibration == "a100-sxm" else "H200"
    rows = [r for r in table if r["op"] == "kernel_launch_throughput" and "graph" in r["software"]]
    return next(float(r["value"]) * 1e-6 for r in rows if r["gpu"].startswith(gpu))


def fit_streams(
    device: Subject, table: list[_tables.Row], found: Iterable[Pass], h200: tuple[StreamCurve, ...], report: Report
) -> tuple[StreamCurve, ...]:
    """A curve for every StreamOp: measured (`found`), borrowed from the H200, or a prior."""
    floor = launch_floor_s(device, table)
    by_op: dict[str, list[Pass]] = {}
    for one in found:
        by_op.setdefault(one.op, []).append(one)
    curves: dict[str, StreamCurve] = {
        op: (_fit_rate if op in SM_LIMITED else _fit)(device, op, by_op[op], floor, report)
        for op in STREAM_OPS
        if op in by_op
    }
    if any(op in curves for op in SM_LIMITED):  # memory would let them run as fast as others
        limit = curves["elementwise"].bw_frac
        curves |= {op: curves[op].model_copy(update={"bw_frac": limit}) for op in SM_LIMITED if op in curves}
    cap = max(curves[op].bw_frac for op in ("elementwise", "quantise") if op in curves)
    for op in STREAM_OPS:
        if op not in curves:
            curves[op] = _borrow(device, op, h200, cap, floor, report)
    return tuple(curves[op] for op in STREAM_OPS)


def _fit(device: Subject, op: StreamOp, found: list[Pass], floor: float, report: Report) -> StreamCurve:
    size, launches, time = (np.array([getattr(p, name) for p in found]) for name in ("num_bytes", "launches", "time_s"))
    speed = device.device.memory_bytes_per_s
    starts = {"bw_frac": Start(0.7, 0.05, 1.0), "t0": held(floor)}
    fitted = fit(lambda c: launches * c["t0"] + size / (speed * c["bw_frac"]), time, starts, None)
    z = 100 * np.abs(fitted.residuals)
    value = fitted.values["bw_frac"]
    report.lines.append(f"stream {op}: n {len(z)} bw_frac {value:.3f} median {np.median(z):.1f} % max {z.max():.1f} %")
    quality = Quality(
        basis="measured",
        num_samples=len(found),
        p50=quantile(fitted.residuals, 0.5),
        p95=quantile(fitted.residuals, 0.95),
        standard_errors={"bw_frac": rounded(fitted.errors["bw_frac"], 2)},
        measured_range={"num_bytes": (0.0, float(size.max()))},  # the floor is measured too
    )
    return StreamCurve(op=op, bw_frac=rounded(value), t0_s=rounded(floor), quality=quality)


def _fit_rate(device: Subject, op: StreamOp, found: list[Pass], floor: float, report: Report) -> StreamCurve:
    """Elements an SM handles in a second at its highest clock: the geometric mean over ops and steps."""
    logs = np.log([one.sm_limited for one in found])
    rate = float(np.exp(logs.mean()))
    z = 100 * np.abs(logs - logs.mean())
    report.lines.append(
        f"stream {op}: n {len(z)} {rate / device.boost_hz:.2f} elements an SM and clock, "
        f"median {np.median(z):.1f} % max {z.max():.1f} %"
    )
    quality = Quality(
        basis="measured",
        num_samples=len(found),
        p50=quantile(logs - logs.mean(), 0.5),
        p95=quantile(logs - logs.mean(), 0.95),
        notes=("inside steps of one H200",),
    )
    return StreamCurve(op=op, bw_frac=1.0, elements_per_sm_s=rounded(rate, 3), t0_s=rounded(floor), quality=quality)


def _borrow(
    device: Subject, op: StreamOp, h200: tuple[StreamCurve, ...], cap: float, floor: float, report: Report
) -> StreamCurve:
    """Between two bounds: the H200's fraction (memory limits), and its rate per SM and clock, capped (SMs limit).

    Where the H200's curve says that SMs limit, its elements an SM and clock are taken.
    """
    relative = next((c for c in h200 if c.op == op and c.quality.basis == "measured"), None)
    if relative is None:
        quality = Quality(basis="prior", notes=("not measured on any device here",))
        return StreamCurve(op=op, bw_frac=PRIOR[op], t0_s=rounded(floor), quality=quality)
    report.borrowed.append(f"h200-sxm: stream {op}")
    if relative.elements_per_sm_s is not None:
        rate = rounded(relative.elements_per_sm_s * device.boost_hz / H200_HZ, 3)
        quality = Quality(basis="borrowed", notes=("the H200's elements an SM and clock",))
        return StreamCurve(op=op, bw_frac=cap, elements_per_sm_s=rate, t0_s=rounded(floor), quality=quality)
    per_sm = relative.bw_frac * 4.8e12 / (132 * H200_HZ) * device.sm_rate / device.device.memory_bytes_per_s
    value = min(cap, float(np.sqrt(relative.bw_frac * min(cap, per_sm))))
    note = "geometric mean of the H200's fraction of memory speed and its rate per SM and clock"
    quality = Quality(basis="borrowed", notes=(note,))
    return StreamCurve(op=op, bw_frac=rounded(value, 3), t0_s=rounded(floor), quality=quality)
