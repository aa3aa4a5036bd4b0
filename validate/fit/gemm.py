"""Fits of matrix products: GemmCurve's coefficients from products as columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.base.errors import CalibrationError, Fault
from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.calibration import GemmCurve, Quality
from simulator.spec.calibration.curves import MAX_SPLIT_K
from simulator.spec.calibration.datasheet import TILES, TYPICAL
from simulator.spec.cluster.device import Device
from validate.fit.robust import Array, Fitted, Start, bootstrap, fit, held, quantile, rounded, trimmed
from validate.samples import Sample

Mask = NDArray[np.bool_]
Tiles = tuple[tuple[int, int], ...]

# f0 in TFLOP, t0 in µs: so that all coefficients are of a size.
STARTS = {
    "e_burst": Start(0.82, 0.2, 1.0),
    "e_sust": Start(0.70, 0.2, 1.0),
    "f0": Start(1.5, 0.05, 50.0),
    "bw_frac": Start(0.8, 0.3, 1.0),
    "t0": Start(3.5, 0.5, 20.0),
    "k_ramp": Start(120.0, 0.0, 600.0),
    "p": Start(3.0, 1.2, 30.0),
    "alpha": Start(0.2, 0.0, 0.6),
    "tile_pen": Start(0.5, 0.0, 6.0),
}
# What single calls of a model's shapes leave open; widths of the fits of published sweeps (docs/background/kernels.md).
PULLS = {
    "e_burst": 0.05,
    "bw_frac": 0.05,
    "t0": 1.0,
    "k_ramp": 40.0,
    "p": 0.7,
    "alpha": 0.15,
    "tile_pen": 0.5,
    "f0": 1.0,
}
HOST_BOUND_S = 3e-5  # shorter calls that were launched one by one show the host's time, not the device's
_STORED = {"f0": "f0_tflop", "t0": "t0_us"}
CPU_TILES: Tiles = ((16, 64),)  # a register block of one core: sides are rounded up to it, nothing waits for a wave
LARGE = 512  # a training product has no side below this
MIN_SHAPES = 8
MIN_OF_LAYOUT = 5
_FEW = 2
MIN_FLOP_RANGE = 100.0
MANY_SHAPES = 60  # enough to free the coefficients of waves and tiles


@dataclass(frozen=True, slots=True)
class Products:
    """Measured products as columns."""

    m: Array
    n: Array
    k: Array
    time_s: Array

    @property
    def flop(self) -> Array:
        return np.asarray(2 * self.m * self.n * self.k)

    @property
    def large(self) -> Mask:
        """No side below what training uses."""
        return np.asarray(np.minimum(np.minimum(self.m, self.n), self.k) >= LARGE)

    def where(self, keep: Mask) -> Products:
        return Products(self.m[keep], self.n[keep], self.k[keep], self.time_s[keep])


def seconds(
    c: Mapping[str, Any], p: Products, device: Device, *, peak: float, element: int, burst: bool, tiles: Tiles = TILES
) -> Array:
    """The curve of simulator.spec.calibration.curves.GemmCurve on columns; a unit test holds the two equal."""
    e: Array | float = c["e_sust"]
    if burst:
        e = c["e_sust"] + (c["e_burst"] - c["e_sust"]) / (1 + p.flop / (c["f0"] * 1e12))
    sms = device.num_sms
    best = np.full_like(p.m, np.inf)
    for tm, tn in tiles:
        waves = np.ceil(p.m / tm) * np.ceil(p.n / tn) / sms
        full_waves = waves >= 1
        split = np.where(full_waves, 1.0, np.minimum(MAX_SPLIT_K, np.floor(1 / np.minimum(waves, 1))))
        waves = np.where(full_waves, (1 - c["alpha"]) * waves + c["alpha"] * np.ceil(waves), 1 / split)
        area = tm * tn
        cost = waves * area * (p.k + c["k_ramp"] * split) * (1 + 0.1 * c["tile_pen"] * (32768 / area - 1))
        best = np.minimum(best, cost)
    compute = 2 * best * sms / (peak * e) * c.get("factor", 1.0)
    size = element * (p.m * p.k + p.k * p.n) + c.get("out_bytes", 2.0) * p.m * p.n
    memory = size / (device.memory_bytes_per_s * c["bw_frac"])
    high, low = np.maximum(compute, memory), np.minimum(compute, memory)
    return np.asarray(high * (1 + (low / high) ** c["p"]) ** (1 / c["p"]) + c["t0"] * 1e-6)


def products(samples: Iterable[Sample]) -> Products:
    """Samples of products as columns."""
    table = np.array([[float(s["m"]), float(s["n"]), float(s["k"]), s.time_s] for s in samples])
    return Products(*table.reshape(-1, 4).T)


@dataclass(frozen=True, slots=True)
class GemmResult:
    """A dtype's curve; `sigma`: how sure the time of all its products together is; `outliers`: samples left out."""

    curve: GemmCurve
    sigma: float
    outliers: tuple[Sample, ...]
    notes: tuple[str, ...]


def fit_gemm(samples: Sequence[Sample], dtype: str, device: Device) -> GemmResult:
    """One dtype: shape and burst speed from single calls, sustained speed from loops, a factor for each layout.

    Raises CalibrationError where there are too few shapes.
    """
    mine = [s for s in samples if s["dtype"] == dtype]
    bursts, loops = [s for s in mine if _is_burst(s, device)], [s for s in mine if s.sustained]
    aligned = [s for s in bursts if not _odd(s)]
    _refuse_few(aligned, dtype)
    tiles = CPU_TILES if device.architecture == "cpu" else TILES
    peak, element = device.peak(dtype), DTYPE_BYTES[dtype]
    out_bytes = float(max(2, element))
    columns, layouts = products(aligned), [str(s["layout"]) for s in aligned]

    masks = {name: np.array([layout == name for layout in layouts]) for name in ("nn", "nt")}

    def curve(c: Mapping[str, float]) -> Array:
        factor = 1.0 + sum((c[name] - 1) * mask for name, mask in masks.items() if name in c)
        own = {**c, "out_bytes": out_bytes, "factor": factor}
        return seconds(own, columns, device, peak=peak, element=element, burst=True, tiles=tiles)

    starts = _starts(device, len({s.key for s in aligned}))
    starts |= {name: Start(1.0, 0.5, 2.0) for name, mask in masks.items() if mask.sum() >= MIN_OF_LAYOUT}
    weights = _weights(aligned)
    pulls = {} if device.architecture == "cpu" else PULLS
    found, used = trimmed(curve, columns.time_s, starts, weights, pulls)
    values = dict(found.values)
    notes: list[str] = []
    if loops:
        values["e_sust"] = _sustained(values, products(loops), device, peak=peak, element=element)
        notes.append(f"e_sust: {len(loops)} loops at the power limit")
    elif device.architecture != "cpu":
        notes.append("e_sust: asymptote of single calls; no loop was measured")
    values["e_burst"] = max(values["e_burst"], values["e_sust"])
    factors = {"tn": 1.0} | {name: values[name] for name in masks if name in values}
    resampled = bootstrap(curve, columns.time_s, starts, [s.key for s in aligned], 20, pulls)
    quality = _quality(found, used, columns, tuple(notes))
    made = _curve(values, peak, tiles, factors, _misaligned(values, bursts, device, peak, element, out_bytes), quality)
    total = [float(np.log(curve(v)[used]).mean()) for v in resampled]
    sigma = float(np.hypot(np.std(total), quality.p50 or 0.0))
    outliers = tuple(s for s, inside in zip(aligned, used, strict=True) if not inside)
    return GemmResult(made, sigma, outliers, tuple(notes))


def _is_burst(sample: Sample, device: Device) -> bool:
    shown = device.architecture == "cpu" or sample.time_s >= HOST_BOUND_S or sample.shape.get("graph")
    return not sample.sustained and bool(shown)


def scaled_gemm(samples: Sequence[Sample], dtype: str, device: Device, reference: GemmCurve) -> GemmCurve:
    """A dtype with a few shapes only: another dtype's shape coefficients, its own speed from the largest products.

    Raises CalibrationError where fewer than two products are usable.
    """
    mine = [s for s in samples if s["dtype"] == dtype and _is_burst(s, device) and not _odd(s)]
    if len(mine) < _FEW:
        problem, remedy = f"{len(mine)} usable products", f"at least {_FEW}"
        raise CalibrationError(Fault(place=f"gemm {dtype}", problem=problem, remedy=remedy))
    p, peak, element = products(mine), device.peak(dtype), DTYPE_BYTES[dtype]
    c = {name: getattr(reference, name) for name in ("bw_frac", "k_ramp", "alpha", "tile_pen")}
    c |= {"e_sust": 1.0, "t0": 1e6 * reference.t0_s, "p": reference.p or 3.0, "out_bytes": max(2, element)}
    ideal = seconds(c, p, device, peak=peak, element=element, burst=False, tiles=reference.tiles)
    large = p.flop >= p.flop.max() / 8
    burst = float(np.clip(np.median((ideal / p.time_s)[large]), 0.01, 1.0))
    own = {
        "peak_flop_per_s": peak,
        "e_burst": rounded(burst),
        "e_sust": rounded(burst * reference.e_sust / reference.e_burst),
        "misaligned": {},
        "layout": {},
        "quality": Quality(
            basis="measured", num_samples=len(mine), notes=("few shapes: the main dtype's form, own speed",)
        ),
    }
    return GemmCurve.model_validate(reference.model_dump() | own)


def _refuse_few(samples: Sequence[Sample], dtype: str) -> None:
    shapes = {(s["m"], s["n"], s["k"]) for s in samples}
    flop = [2 * m * n * k for m, n, k in shapes]
    if len(shapes) < MIN_SHAPES or max(flop) < MIN_FLOP_RANGE * min(flop):
        span = f" over a factor of {max(flop) / min(flop):.0f} in FLOP" if flop else ""
        remedy = f"at least {MIN_SHAPES} shapes over a factor of {MIN_FLOP_RANGE:.0f}"
        problem = f"{len(shapes)} different shapes{span}"
        raise CalibrationError(Fault(place=f"gemm {dtype}", problem=problem, remedy=remedy))


def _odd(sample: Sample) -> bool:
    strides = (sample["m"], sample["n"]) if sample["layout"] == "nt" else (sample["n"], sample["k"])
    aligned = 16 // DTYPE_BYTES[sample["dtype"]]
    return bool(min(s & -s for s in strides) < aligned)


def _starts(device: Device, shapes: int) -> dict[str, Start]:
    """What is free: on a CPU one speed, no waves; on a GPU waves and tiles only where there are many shapes."""
    starts = dict(STARTS)
    if device.architecture == "cpu":
        starts |= {"e_sust": Start(0.8, 0.02, 1.0), "bw_frac": Start(0.5, 0.02, 1.0), "t0": Start(5.0, 0.2, 200.0)}
        # one speed whatever the length of a call: f0 out of reach, so that the burst's never enters
        return starts | {
            "f0": held(1e-9),
            "alpha": held(0.0),
            "tile_pen": held(0.0),
            "p": Start(1.5, 1.0, 8.0),  # 1: operands are brought in, then multiplied; prefetch lets both run
            "e_burst": held(1.0),
        }
    typical = TYPICAL[device.architecture]
    if shapes < MANY_SHAPES:
        starts |= {"alpha": held(typical.alpha), "tile_pen": held(0.5), "p": held(3.0)}
    return starts


def _weights(samples: Sequence[Sample]) -> Array:
    """Calls that matter more weigh more: a fourth root of FLOP, and what was measured on several ranks counts once."""
    flop = np.array([2.0 * s["m"] * s["n"] * s["k"] for s in samples])
    return np.asarray((flop / flop.max()) ** 0.125)


def _sustained(values: Mapping[str, float], loops: Products, device: Device, *, peak: float, element: int) -> float:
    starts = {name: held(values[name]) for name in STARTS}
    starts |= {"factor": held(1.0), "out_bytes": held(2.0), "e_sust": Start(values["e_sust"], 0.05, 1.0)}
    found = fit(
        lambda c: seconds(c, loops, device, peak=peak, element=element, burst=False), loops.time_s, starts, None
    )
    return found.values["e_sust"]


def _misaligned(
    values: Mapping[str, float], bursts: Sequence[Sample], device: Device, peak: float, element: int, out_bytes: float
) -> float:
    """Factor on products whose rows are odd; 1 where none was measured or it is no slower."""
    odd = [s for s in bursts if _odd(s) and min((s["n"] & -s["n"]), (s["k"] & -s["k"])) == 1]
    if len(odd) < 2 or device.architecture == "cpu":
        return 1.0
    columns = products(odd)
    c = {**values, "out_bytes": out_bytes}
    expected = seconds(c, columns, device, peak=peak, element=element, burst=True)
    return max(1.0, float(np.median(columns.time_s / expected)))


def _quality(found: Fitted, used: Mask, p: Products, notes: tuple[str, ...]) -> Quality:
    """Residuals of the fit's own rows, outliers left out."""
    left = found.residuals[used]
    return Quality(
        basis="measured",
        num_samples=int(used.sum()),
        p50=quantile(left, 0.5),
        p95=quantile(left, 0.95),
        standard_errors={_STORED.get(name, name): rounded(v, 2) for name, v in found.errors.items()},
        measured_range={
            name: (float(getattr(p, name).min()), float(getattr(p, name).max())) for name in ("m", "n", "k")
        },
        notes=notes,
    )


def _curve(
    c: Mapping[str, float], peak: float, tiles: Tiles, factors: Mapping[str, float], misaligned: float, quality: Quality
) -> GemmCurve:
    """Coefficients as they are stored. Strides between odd and aligned are interpolated geometrically: a prior."""
    powers = {"1": 1.0, "2": 2 / 3, "4": 1 / 3}
    return GemmCurve.model_validate(
        {
            "peak_flop_per_s": peak,
            "e_burst": rounded(max(c["e_burst"], c["e_sust"])),
            "e_sust": rounded(c["e_sust"]),
            "f0_flop": rounded(max(c["f0"], 1e-9) * 1e12),
            "bw_frac": rounded(c["bw_frac"]),
            "t0_s": rounded(c["t0"] * 1e-6),
            "k_ramp": rounded(c["k_ramp"]),
            "p": rounded(c["p"]),
            "alpha": rounded(c["alpha"]),
            "tile_pen": rounded(c["tile_pen"]),
            "tiles": tiles,
            "layout": {name: rounded(value) for name, value in factors.items()},
            "misaligned": {key: rounded(misaligned**power, 3) for key, power in powers.items()}
            if misaligned > 1
            else {},
            "quality": quality,
        }
    )
