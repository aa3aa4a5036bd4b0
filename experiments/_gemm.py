"""Fits of matrix products. Shape coefficients from burst sweeps, sustained speed from loops at the power cap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import _tables
import numpy as np
from _devices import Subject

from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.calibration import GemmCurve, Quality
from simulator.spec.calibration.datasheet import TILES
from simulator.spec.cluster.device import Device
from validate.fit.gemm import STARTS, Products, seconds
from validate.fit.robust import Array, Fitted, Start, fit, held, quantile, rounded

MIN_ROWS = 64  # fewer rows are decoding, not training
LONG_S = 5e-4  # B200: calls longer than this ran at the power cap in the loops of SimuMax


def products(rows: list[Any], *, unit_s: float) -> Products:
    """Rows with m, n, k and `time_us` or `time_s`."""
    time = "time_us" if unit_s < 1 else "time_s"
    table = np.array([[float(r["m"]), float(r["n"]), float(r["k"]), float(r[time]) * unit_s] for r in rows])
    return Products(*table.reshape(-1, 4).T)


CAST_COLUMNS, CAST_NUMEL = 256, 5e7  # calls with so few columns of so large an operand are spent on casting it


def cast_line(device: Device, calls: Products, element: float) -> tuple[float, float]:
    """(seconds, seconds an element) that calls of few columns spend on narrowing their first operand to `element` bytes.

    Their products read it once and are bound by that: 0.8 of the data sheet's memory speed.
    """
    memory = 0.8 * device.memory_bytes_per_s
    few = calls.where((calls.n <= CAST_COLUMNS) & (calls.m * calls.k >= CAST_NUMEL))
    product_s = (element * (few.m + few.n) * few.k + 2 * few.m * few.n) / memory
    slope, floor = np.polyfit(few.m * few.k, few.time_s - product_s, 1, w=1 / few.time_s)
    return float(floor), float(slope)


@dataclass(frozen=True, slots=True)
class GemmFit:
    """A fit on open families, and its residuals on held-out ones (burst)."""

    fitted: Fitted
    open_rows: Products
    test_rows: Products
    test: Array

    @property
    def large_test(self) -> Array:
        return np.asarray(self.test[self.test_rows.large])


def fit_sweep(device: Subject, table: list[_tables.Row], *, dtype: str) -> GemmFit:
    """Shape coefficients of one dtype from the burst sweeps of inference software (layout tn)."""
    data = products([r for r in _rows_of(device, table, dtype) if float(r["m"]) >= MIN_ROWS], unit_s=1e-6)
    out = np.array([_tables.held_out(int(n), int(k)) for n, k in zip(data.n, data.k, strict=True)])
    peak, element = device.device.peak(dtype), DTYPE_BYTES[dtype]
    train, test = data.where(~out), data.where(out)

    def curve(c: Mapping[str, float], rows: Products = train) -> Array:
        return seconds(c, rows, device.device, peak=peak, element=element, burst=True)

    fitted = fit(curve, train.time_s, STARTS, np.where(train.large, 3.0, 1.0))
    return GemmFit(fitted, train, test, np.log(curve(fitted.values, test) / test.time_s))


def _rows_of(device: Subject, table: list[_tables.Row], dtype: str) -> list[_tables.Row]:
    rows = _tables.select(table, gpu=device.gpu, source="aiconfigurator", dtype=dtype)
    return [row for row in rows if _tables.watts(row) is None]


def fit_factor(
    device: Subject, shape: Mapping[str, float], rows: Products, *, free: str, peak: float, accumulate: bool = False,
    element: int = 2,
) -> Fitted:  # fmt: skip
    """One coefficient (`e_sust` or `factor`) on sustained rows, the shape held."""
    starts = {name: held(shape[name]) for name in STARTS}
    starts["factor"] = held(1.0)
    starts["out_bytes"] = held(8.0 if accumulate else 2.0)
    starts[free] = Start(shape.get(free, 1.5), 0.1, 20.0 if free == "factor" else 1.0)
    return fit(
        lambda c: seconds(c, rows, device.device, peak=peak, element=element, burst=False), rows.time_s, starts, None
    )


def curve_of(
    c: Mapping[str, float], peak: float, quality: Quality, *, layout: Mapping[str, float], accumulate: float = 1.0,
    misaligned: float = 1.0,
) -> GemmCurve:  # fmt: skip
    """Coefficients as they are stored. Strides between odd and aligned are interpolated geometrically: a prior."""
    aligned = {
        "1": rounded(misaligned, 3),
        "2": rounded(misaligned ** (2 / 3), 3),
        "4": rounded(misaligned ** (1 / 3), 3),
    }
    return GemmCurve.model_validate(
        {
            "peak_flop_per_s": peak,
            "e_burst": rounded(max(c["e_burst"], c["e_sust"])),
            "e_sust": rounded(c["e_sust"]),
            "f0_flop": rounded(c["f0"] * 1e12),
            "bw_frac": rounded(c["bw_frac"]),
            "t0_s": rounded(c["t0"] * 1e-6),
            "k_ramp": rounded(c["k_ramp"]),
            "p": rounded(c["p"]),
            "alpha": rounded(c["alpha"]),
            "tile_pen": rounded(c["tile_pen"]),
            "tiles": TILES,
            "layout": {name: rounded(value) for name, value in layout.items()},
            "accumulate_fp32": rounded(accumulate),
            "misaligned": aligned if misaligned > 1 else {},
            "quality": quality,
        }
    )


def sweep_quality(result: GemmFit, notes: tuple[str, ...]) -> Quality:
    """Residuals of held-out families with all sides at least 512, which is what training uses."""
    rows = result.open_rows
    return Quality(
        basis="measured",
        num_samples=len(rows.m),
        held_out=int(result.test_rows.large.sum()),
        p50=quantile(result.large_test, 0.5),
        p95=quantile(result.large_test, 0.95),
        standard_errors={_STORED.get(name, name): rounded(v, 2) for name, v in result.fitted.errors.items()},
        measured_range={
            "m": (float(rows.m.min()), float(rows.m.max())),
            "n": (float(rows.n.min()), float(rows.n.max())),
            "k": (float(rows.k.min()), float(rows.k.max())),
        },
        notes=notes,
    )


_STORED = {"f0": "f0_tflop", "t0": "t0_us"}
