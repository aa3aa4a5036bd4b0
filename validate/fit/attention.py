"""Fits of fused attention: AttentionCurve's coefficients from calls as columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.base.errors import CalibrationError, Fault
from simulator.base.kernels import DTYPE_BYTES, Direction
from simulator.spec.calibration import AttentionCurve, Quality
from simulator.spec.calibration.curves import QUERY_TILE
from simulator.spec.cluster.device import Device
from validate.fit.robust import Array, Fitted, Start, bootstrap, held, quantile, rounded, trimmed
from validate.samples import Sample

BW_FRAC, BLEND = 0.8, 2.5
MIN_CALLS = 4
LONG_S = 5e-3  # calls of this length reach a GPU's power cap within a measurement


@dataclass(frozen=True, slots=True)
class Calls:
    """Measured attention calls as columns; causal is 0 or 1. head_dim: of queries and keys; v_head_dim: of values."""

    batch: Array
    seq: Array
    heads: Array
    kv_heads: Array
    head_dim: Array
    v_head_dim: Array
    causal: Array
    time_s: Array

    def where(self, keep: NDArray[np.bool_]) -> Calls:
        return Calls(*(getattr(self, name)[keep] for name in self.__slots__))


_COLUMNS = ("batch", "seq_q", "num_heads", "num_kv_heads", "head_dim", "head_dim")  # ours have values as wide as keys


def calls(samples: Iterable[Sample]) -> Calls:
    """Samples of attention as columns."""
    table = [[float(s[c]) for c in _COLUMNS] + [float(s["causal"]), s.time_s] for s in samples]
    return Calls(*np.array(table).reshape(-1, 8).T)


def flop(x: Calls, direction: Direction) -> Array:
    """As simulator.base.kernels.Attention counts them: one product of either width forward; three and two backward."""
    channels = 3 * x.head_dim + 2 * x.v_head_dim if direction == "backward" else x.head_dim + x.v_head_dim
    return np.asarray(2 * x.batch * x.heads * x.seq**2 * channels * np.where(x.causal > 0, 0.5, 1.0))


def seconds(
    c: Mapping[str, float], x: Calls, device: Device, direction: Direction, *, peak: float, element: int, waves: bool
) -> Array:
    """The curve of simulator.spec.calibration.curves.AttentionCurve on columns; a unit test holds the two equal.

    cache_passes, in none of the curves: how often a server's call moves its keys and values beside the kernel.
    """
    backward = direction == "backward"
    masked = x.causal > 0
    dims = sorted(int(name[1:]) for name in c if name[0] == "e" and name[1:].isdecimal())
    keys = x.seq * np.where(masked, 0.5, 1.0)
    e = np.interp(x.head_dim, dims, [c[f"e{d}"] for d in dims])
    e *= keys / (keys + c["s0"])
    e *= np.where(masked, 1.0, c["noncausal"]) * np.where(x.time_s > LONG_S, c["sustained"], 1.0)
    compute = flop(x, direction) / (peak * e)
    if waves:
        count = x.batch * x.heads * np.ceil(x.seq / QUERY_TILE) / device.num_sms
        compute = compute * (1 + c["tail"] / count if "tail" in c else 0.5 + 0.5 * np.ceil(count) / count)
    width = x.head_dim + x.v_head_dim
    size = element * x.batch * x.seq * width * (x.heads + x.kv_heads) * (2 if backward else 1)
    bytes_per_s = device.memory_bytes_per_s * BW_FRAC
    cached = c.get("cache_passes", 0.0) * element * x.batch * x.seq * x.kv_heads * width / bytes_per_s
    return np.asarray((compute**BLEND + (size / bytes_per_s) ** BLEND) ** (1 / BLEND) + c["t0"] * 1e-6 + cached)


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """One direction's curve, how sure it is, and the samples left out."""

    curve: AttentionCurve
    sigma: float
    outliers: tuple[Sample, ...]


def fit_attention(
    samples: Sequence[Sample], direction: Direction, dtype: str, device: Device, kernels: tuple[str, ...]
) -> AttentionResult:
    """The curve of one direction from samples of one dtype. Raises CalibrationError where there are too few calls."""
    mine = [s for s in samples if s.kind == f"attention_{direction}" and s["dtype"] == dtype and not s.sustained]
    different = {s.key for s in mine}
    if len(different) < MIN_CALLS:
        problem, remedy = f"{len(different)} different calls", f"at least {MIN_CALLS}, of several lengths"
        raise CalibrationError(Fault(place=f"attention {direction} {dtype}", problem=problem, remedy=remedy))
    x, peak, cpu = calls(mine), device.peak(dtype), device.architecture == "cpu"

    def curve(c: Mapping[str, float]) -> Array:
        return seconds(c, x, device, direction, peak=peak, element=DTYPE_BYTES[dtype], waves=not cpu)

    starts = _starts(x, direction, cpu=cpu)
    found, used = trimmed(curve, x.time_s, starts, np.ones_like(x.time_s))
    resampled = bootstrap(curve, x.time_s, starts, [s.key for s in mine], 20)
    total = [float(np.log(curve(v)[used]).mean()) for v in resampled]
    quality = _quality(found, x, used)
    reference = device.peak("bf16") or device.peak("fp16") or peak  # what the timer scales by another dtype's peak
    made = _curve(found.values, kernels, direction, reference, quality, cpu=cpu)
    sigma = float(np.hypot(np.std(total), quality.p50 or 0.0))
    return AttentionResult(made, sigma, tuple(s for s, inside in zip(mine, used, strict=True) if not inside))


def _starts(x: Calls, direction: Direction, *, cpu: bool) -> dict[str, Start]:
    """e_max of every head_dim, s0, the mask's factor; launch cost free on a CPU, where calls are that short."""
    low, high = (0.002, 1.0) if cpu else (0.05, 0.95)
    starts = {f"e{int(d)}": Start(0.2 if cpu else 0.5, low, high) for d in sorted(set(x.head_dim))}
    starts |= {"s0": Start(100.0 if cpu else 300.0, 0.0, 3000.0), "sustained": held(1.0)}
    launch = 8.0 if direction == "forward" else 15.0  # one kernel forward, three backward
    starts["t0"] = Start(20.0, 1.0, 500.0) if cpu else held(launch)
    if not (x.causal == 0).any() or not (x.causal > 0).any():
        starts["noncausal"] = held(1.0)
    else:
        starts["noncausal"] = Start(1.4, 0.8, 3.0) if cpu else Start(1.05, 0.8, 1.4)
    if not cpu and (x.time_s > LONG_S).any():
        starts["sustained"] = Start(0.92, 0.8, 1.0)
    return starts


def _quality(found: Fitted, x: Calls, used: NDArray[np.bool_]) -> Quality:
    left = found.residuals[used]
    return Quality(
        basis="measured",
        num_samples=len(left),
        p50=quantile(left, 0.5),
        p95=quantile(left, 0.95),
        standard_errors={name: rounded(v, 2) for name, v in found.errors.items()},
        measured_range={
            "seq_kv": (float(x.seq.min()), float(x.seq.max())),
            "head_dim": (float(x.head_dim.min()), float(x.head_dim.max())),
        },
    )


def _curve(
    c: Mapping[str, float],
    kernels: tuple[str, ...],
    direction: Direction,
    peak: float,
    quality: Quality,
    *,
    cpu: bool,
) -> AttentionCurve:
    return AttentionCurve(
        kernels=kernels,
        direction=direction,
        peak_flop_per_s=peak,
        e_max={name[1:]: rounded(v) for name, v in sorted(c.items()) if name[0] == "e" and name[1:].isdecimal()},
        s0=rounded(c["s0"]),
        t0_s=rounded(c["t0"] * 1e-6),
        noncausal=rounded(c["noncausal"]),
        sustained=rounded(c["sustained"]),
        power_limited=0.0 if cpu else 1.0,
        bw_frac=BW_FRAC,
        p=BLEND,
        half_waves=not cpu,
        quality=quality,
    )
