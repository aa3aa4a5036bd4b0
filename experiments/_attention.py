"""Fits of fused attention, by kernel generation and direction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import _tables
import numpy as np
from _devices import Subject

from simulator.base.kernels import Direction
from simulator.spec.calibration import AttentionCurve, Quality
from simulator.spec.calibration.curves import Basis
from validate.fit.attention import BLEND, BW_FRAC, Calls, seconds
from validate.fit.robust import Fitted, Start, fit, held, quantile, rounded

# A launch inside a step: forward is one kernel, backward three (row sums, gradients, conversion of dQ). The tables'
# own floors (12-44 µs) are those of a serving wrapper.
LAUNCH_US: dict[Direction, float] = {"forward": 8.0, "backward": 15.0}
HEAD_DIMS = (64, 96, 128, 192, 256)
_V_HEAD_DIM = re.compile(r"\bv_head_dim=(\d+)")


def calls(rows: Sequence[Mapping[str, Any]]) -> Calls:
    """Rows of the attention table (`time_us`) or of our samples (`time_s`)."""
    table = []
    for r in rows:
        heads = ("n_heads", "n_kv_heads") if "n_heads" in r else ("num_heads", "num_kv_heads")
        time = float(r["time_s"]) if "time_s" in r else float(r["time_us"]) * 1e-6
        causal = r["causal"] in ("y", True)
        values = _V_HEAD_DIM.search(r.get("notes", ""))
        v_head_dim = float(values[1] if values else r["head_dim"])
        table.append([float(r[c]) for c in ("batch", "seq_q", *heads, "head_dim")] + [v_head_dim, float(causal), time])
    return Calls(*np.array(table).reshape(-1, 8).T)


def fit_calls(
    device: Subject,
    x: Calls,
    direction: Direction,
    *,
    wrapper: bool = False,
    more: Mapping[str, Start] = {},
    **known: float,
) -> Fitted:
    """Free: e_max of every head_dim in the rows, s0, noncausal, sustained, and `more`; `known` holds some of them.

    wrapper: the rows were timed around a framework's call, whose floor is free and not kept.
    """
    starts = {f"e{int(d)}": Start(0.5, 0.05, 0.95) for d in sorted(set(x.head_dim))}
    starts |= {
        "s0": Start(300.0, 0.0, 3000.0),
        "t0": held(LAUNCH_US[direction]),
        "noncausal": Start(1.05, 0.8, 1.4),
        "sustained": Start(0.92, 0.6, 1.0),
    }
    if not (x.causal == 0).any() or not (x.causal > 0).any():
        starts["noncausal"] = held(1.0)
    starts |= more
    starts |= {name: held(value) for name, value in known.items()}
    if wrapper:
        starts["t0"] = Start(30.0, 0.0, 100.0)
    return fit(
        lambda c: seconds(c, x, device.device, direction, peak=device.peak, element=2, waves=True),
        x.time_s,
        starts,
        None,
    )


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
        tail_waves=rounded(c["tail"]) if "tail" in c else None,
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
