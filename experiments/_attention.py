"""Fits of fused attention, by kernel generation and direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import _tables
import numpy as np
from _devices import Subject
from _robust import Array, Fitted, Start, fit, held, quantile, rounded
from numpy.typing import NDArray

from simulator.calibration import AttentionCurve, Quality
from simulator.calibration.curves import QUERY_TILE, Basis
from simulator.kernels import Direction

# A launch inside a step: forward is one kernel, backward three (row sums, gradients, conversion of dQ). The tables'
# own floors (12-44 µs) are those of a serving wrapper.
LAUNCH_US: dict[Direction, float] = {"forward": 8.0, "backward": 15.0}
LONG_S = 5e-3  # ten calls of this length reach the power cap within a measurement
BW_FRAC, BLEND = 0.8, 2.5
HEAD_DIMS = (64, 96, 128, 256)


@dataclass(frozen=True, slots=True)
class Calls:
    """Measured attention calls as columns; causal is 0 or 1."""

    batch: Array
    seq: Array
    heads: Array
    kv_heads: Array
    head_dim: Array
    causal: Array
    time_s: Array

    def where(self, keep: NDArray[np.bool_]) -> Calls:
        return Calls(*(getattr(self, name)[keep] for name in self.__slots__))


def calls(rows: Sequence[Mapping[str, Any]]) -> Calls:
    """Rows of the attention table (`time_us`) or of our samples (`time_s`)."""
    table = []
    for r in rows:
        heads = ("n_heads", "n_kv_heads") if "n_heads" in r else ("num_heads", "num_kv_heads")
        time = float(r["time_s"]) if "time_s" in r else float(r["time_us"]) * 1e-6
        causal = r["causal"] in ("y", True)
        table.append([float(r[c]) for c in ("batch", "seq_q", *heads, "head_dim")] + [float(causal), time])
    return Calls(*np.array(table).reshape(-1, 7).T)


def seconds(c: Mapping[str, float], x: Calls, device: Subject, direction: Direction, *, peak: float) -> Array:
    """The curve of simulator.calibration.curves.AttentionCurve on columns; a unit test holds the two equal."""
    backward = direction == "backward"
    flop = 4 * x.batch * x.heads * x.seq**2 * x.head_dim * np.where(x.causal > 0, 0.5, 1.0) * (2.5 if backward else 1.0)
    dims = [d for d in HEAD_DIMS if f"e{d}" in c]
    e = np.interp(x.head_dim, dims, [c[f"e{d}"] for d in dims])
    keys = x.seq * np.where(x.causal > 0, 0.5, 1.0)
    e *= keys / (keys + c["s0"])
    e *= np.where(x.causal > 0, 1.0, c["noncausal"]) * np.where(x.time_s > LONG_S, c["sustained"], 1.0)
    waves = x.batch * x.heads * np.ceil(x.seq / QUERY_TILE) / device.device.num_sms
    compute = flop / (peak * e) * (0.5 + 0.5 * np.ceil(waves) / waves)
    size = 2 * x.batch * x.seq * x.head_dim * (2 * x.heads + 2 * x.kv_heads) * (2 if backward else 1)
    memory = size / (device.device.memory_bytes_per_s * BW_FRAC)
    return np.asarray((compute**BLEND + memory**BLEND) ** (1 / BLEND) + c["t0"] * 1e-6)


def fit_calls(device: Subject, x: Calls, direction: Direction, *, wrapper: bool = False, **known: float) -> Fitted:
    """Free: e_max of every head_dim in the rows, s0, noncausal, sustained; `known` holds some of them.

    wrapper: the rows were timed around a framework's call, whose floor is free and not kept.
    """
    starts = {f"e{int(d)}": Start(0.5, 0.05, 0.95) for d in sorted(set(x.head_dim))}
    starts |= {
        "s0": Start(300.0, 0.0, 3000.0),
        "t0": held(LAUNCH_US[direction]),
        "noncausal": Start(1.05, 0.8, 1.4),
        "sustained": Start(0.92, 0.8, 1.0),
    }
    if not (x.causal == 0).any() or not (x.causal > 0).any():
        starts["noncausal"] = held(1.0)
    starts |= {name: held(value) for name, value in known.items()}
    if wrapper:
        starts["t0"] = Start(30.0, 0.0, 100.0)
    return fit(lambda c: seconds(c, x, device, direction, peak=device.peak), x.time_s, starts, None)


def curve(
    kernels: tuple[str, ...], direction: Direction, device: Subject, c: Mapping[str, float], quality: Quality,
    *, power_limited: float,
) -> AttentionCurve:  # fmt: skip
    """Coefficients as they are stored."""
    return AttentionCurve(
        kernels=kernels,
        direction=direction,
        peak_flop_per_s=device.peak,
        e_max={str(d): rounded(c[f"e{d}"]) for d in HEAD_DIMS if f"e{d}" in c},
        s0=rounded(c["s0"]),
        t0_s=rounded(c["t0"] * 1e-6),
        noncausal=rounded(c["noncausal"]),
        sustained=rounded(c["sustained"]),
        power_limited=power_limited,
        bw_frac=BW_FRAC,
        p=BLEND,
        quality=quality,
    )


def quality(found: Fitted, x: Calls, *notes: str, basis: Basis = "measured") -> Quality:
    """Residuals of the fit's own rows: too few are independent to hold some out."""
    return Quality(
        basis=basis,
        num_samples=len(x.seq),
        p50=quantile(found.residuals, 0.5),
        p95=quantile(found.residuals, 0.95),
        standard_errors={name: rounded(v, 2) for name, v in found.errors.items()},
        measured_range={
            "seq_kv": (float(x.seq.min()), float(x.seq.max())),
            "head_dim": (float(x.head_dim.min()), float(x.head_dim.max())),
        },
        notes=notes,
    )


def named(table: list[_tables.Row], direction: str, gpu: str = "", **columns: str) -> list[_tables.Row]:
    """Rows of one direction of at least 512 tokens."""
    found = _tables.select(table, gpu=gpu, direction=direction, **columns)
    return [r for r in found if float(r["batch"]) * float(r["seq_q"]) >= 512 and float(r["seq_q"]) >= 128]
