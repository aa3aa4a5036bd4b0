"""Fits of memory-bound kernels: one fraction of the memory's speed and one floor a launch for each kind of pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from simulator.base.kernels import StreamOp
from simulator.spec.calibration import Quality, StreamCurve
from simulator.spec.calibration.datasheet import STREAM_OPS
from simulator.spec.cluster.device import Device
from simulator.work.ops.loss import SHORT_ROW_BYTES
from validate.fit.robust import Array, Start, bootstrap, held, quantile, rounded, trimmed
from validate.samples import Sample

MIN_SIZES = 3
FP32 = 4
_ADAMW_BYTES = {"fused": 28, "foreach": 80}  # a parameter: simulator.work.ops.optimizer counts the passes
_FOREACH_LAUNCHES = 8
_PER_LAUNCH = 32  # tensors a multi-tensor kernel takes


@dataclass(frozen=True, slots=True)
class Pass:
    """One measured call: what it must read and write, and its launches."""

    op: StreamOp
    num_bytes: float
    launches: int
    time_s: float
    sample: Sample


# Samples without bytes of their own (older files): operation, bytes an element of 16 bits, launches.
_KNOWN: dict[tuple[str, str], tuple[StreamOp, float, int]] = {
    ("membound_forward", "copy"): ("copy", 4, 1),
    ("membound_forward", "add"): ("elementwise", 6, 1),
    ("membound_forward", "gelu"): ("elementwise", 4, 1),
    ("membound_forward", "silu_mul"): ("elementwise", 10, 2),
    ("membound_forward", "dropout"): ("elementwise", 5, 1),
    ("membound_forward", "cast_fp32"): ("cast", 6, 1),
    ("membound_forward", "rms_norm"): ("norm_forward", 4, 1),
    ("membound_forward", "layer_norm"): ("norm_forward", 4, 1),
    ("membound_backward", "gelu"): ("elementwise", 6, 1),
    ("membound_backward", "silu_mul"): ("elementwise", 18, 3),
    ("membound_backward", "rms_norm"): ("norm_backward", 10, 3),
    ("membound_backward", "layer_norm"): ("norm_backward", 10, 3),
}


def passes(samples: Iterable[Sample]) -> Iterator[Pass]:
    """Every sample that is a pass over memory."""
    for s in samples:
        if s.kind == "stream":
            size = s["read_bytes"] + s["write_bytes"] + s.shape.get("zeroed_bytes", 0)
            yield Pass(s["stream_op"], size, s["launches"], s.time_s, s)
        elif (s.kind, s.shape.get("op")) in _KNOWN:
            op, per_element, launches = _KNOWN[s.kind, s["op"]]
            yield Pass(op, per_element * s["elements"], launches, s.time_s, s)
        elif s.kind == "adamw" and s["impl"] in _ADAMW_BYTES:
            kernels = -(-int(s.shape.get("tensors", 16)) // _PER_LAUNCH)
            launches = kernels * (1 if s["impl"] == "fused" else _FOREACH_LAUNCHES)
            yield Pass("optimizer", _ADAMW_BYTES[s["impl"]] * s["parameters"], launches, s.time_s, s)
        elif s.kind.startswith("cross_entropy_") and s.shape.get("dtype") == "fp32":
            yield _loss(s)
        elif s.kind == "hbm_copy":
            yield Pass("copy", s["bytes_moved"], 1, s.time_s, s)


def _loss(s: Sample) -> Pass:
    """Cross-entropy in fp32 as simulator.work.ops.loss counts it: forward the passes of log-softmax, backward a fill more."""
    numel = s["tokens"] * s["vocab"]
    short = FP32 * s["vocab"] <= SHORT_ROW_BYTES
    passes_of_one = (3 if short else 4) if s.kind == "cross_entropy_forward" else 5
    return Pass("softmax", FP32 * passes_of_one * numel, 2, s.time_s, s)


@dataclass(frozen=True, slots=True)
class StreamResult:
    """All curves, how sure they are together, what was left out and what could not be fitted."""

    curves: tuple[StreamCurve, ...]
    sigma: float
    outliers: tuple[Sample, ...]
    refused: tuple[str, ...]


def fit_streams(
    samples: Iterable[Sample], device: Device, priors: Sequence[StreamCurve], min_bytes: float
) -> StreamResult:
    """A curve for every StreamOp: measured where there are sizes enough, else the architecture's prior.

    min_bytes: smaller passes say what a launch costs, not how fast memory is; they still fit the floor.
    """
    by_op: dict[str, list[Pass]] = {}
    for one in passes(samples):
        if one.op in STREAM_OPS:
            by_op.setdefault(one.op, []).append(one)
    curves, sigmas, outliers, refused = [], [], [], []
    for prior in priors:
        found = by_op.get(prior.op, [])
        sizes = {p.num_bytes for p in found}
        if not found:
            refused.append(f"{prior.op}: not measured, the architecture's typical fraction")
            curves.append(prior)
            continue
        if len(sizes) < MIN_SIZES:
            refused.append(f"{prior.op}: {len(sizes)} sizes, {MIN_SIZES} are needed for its launch cost")
        curve, sigma, left_out = _fit(
            found, device, free_floor=len(sizes) >= MIN_SIZES, floor=prior.t0_s, large=min_bytes
        )
        curves.append(curve)
        sigmas.append(sigma)
        outliers += left_out
    together = float(np.sqrt(np.mean(np.square(sigmas)))) if sigmas else 0.2
    return StreamResult(tuple(curves), together, tuple(outliers), tuple(refused))


def _fit(
    found: Sequence[Pass], device: Device, *, free_floor: bool, floor: float, large: float
) -> tuple[StreamCurve, float, list[Sample]]:
    size, launches, time = (
        np.array([float(getattr(p, n)) for p in found]) for n in ("num_bytes", "launches", "time_s")
    )
    speed = device.memory_bytes_per_s
    starts = {
        "bw_frac": Start(0.6, 0.01, 1.0),
        "t0": Start(1e6 * floor, 0.1, 500.0) if free_floor else held(1e6 * floor),
    }
    # what takes long decides a step: a caching CPU is four times as fast on small tensors, and no line shows both
    weights = np.where(size >= large, 1.0, 0.5) * (size / size.max()) ** 0.25

    def curve(c: dict[str, float]) -> Array:
        return np.asarray(launches * c["t0"] * 1e-6 + size / (speed * c["bw_frac"]))

    fitted, used = trimmed(curve, time, starts, weights)  # type: ignore[arg-type]
    keys = [p.sample.key for p in found]
    big = used & (size >= min(large, float(np.median(size))))
    values = bootstrap(curve, time, starts, keys, 20)  # type: ignore[arg-type]
    total = [float(np.log(curve(v)[big]).mean()) for v in values]
    left = fitted.residuals[used]
    quality = Quality(
        basis="measured",
        num_samples=int(used.sum()),
        p50=quantile(left, 0.5),
        p95=quantile(left, 0.95),
        standard_errors={"bw_frac": rounded(fitted.errors["bw_frac"], 2)}
        | ({"t0_us": rounded(fitted.errors["t0"], 2)} if free_floor else {}),
        measured_range={"num_bytes": (float(size.min()), float(size.max()))},
    )
    made = StreamCurve(
        op=found[0].op,
        bw_frac=rounded(fitted.values["bw_frac"]),
        t0_s=rounded(fitted.values["t0"] * 1e-6),
        quality=quality,
    )
    sigma = float(np.hypot(np.std(total), quality.p50 or 0.0))
    return made, sigma, [p.sample for p, inside in zip(found, used, strict=True) if not inside]
