"""Which measurement gives which coefficient of a device's products, and what is borrowed from a relative."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import _tables
import numpy as np
from _devices import Subject
from _gemm import LONG_S, GemmFit, cast_line, curve_of, fit_factor, fit_sweep, products, sweep_quality

from simulator.spec.calibration import GemmCurve, Quality
from simulator.spec.cluster.device import Device
from validate.fit.gemm import LARGE, Products, seconds
from validate.fit.robust import Fitted, quantile, rounded

Samples = list[dict[str, Any]]


@dataclass(slots=True)
class Report:
    """What the recipe prints and what provenance says."""

    lines: list[str] = field(default_factory=list)
    borrowed: list[str] = field(default_factory=list)
    sigma: float = 0.0


LONG_FLOP = 5e11  # what training products have and more
AT_THE_CAP = 0.9  # of the cap: rows whose logged power is below it were not limited by power


def fit_gemms(
    device: Subject, table: list[_tables.Row], own: Samples, fitted: Mapping[str, Mapping[str, GemmCurve]]
) -> tuple[dict[str, GemmCurve], Report]:
    """Curves by dtype. `fitted`: those of the devices before it, from which it borrows."""
    report, h200 = Report(), fitted.get("h200-sxm", {})
    sweep = fit_sweep(device, table, dtype="bf16")
    report.lines.append(_line("bf16 held-out, m,n,k >= 512", sweep))
    values = dict(sweep.fitted.values)
    notes: list[str] = []
    layout: dict[str, float] = {"tn": 1.0, "nn": 1.0, "nt": 1.0}
    accumulate, misaligned = 1.0, 1.0
    if device.calibration == "h200-sxm":
        misaligned = _own_h200(device, values, own, layout, report, notes)
    elif device.calibration == "b200-sxm":
        accumulate = _loops(device, values, table, "B200-SXM", layout, report, notes)
    elif device.is_blackwell:
        accumulate = _blackwell(device, values, table, fitted, layout, report, notes)
    elif device.calibration == "a100-sxm":
        accumulate = _loops(device, values, table, "A100-PCIe-80GB", layout, report, notes)
    else:
        notes.append("sustained speed is the asymptote of 6-run bursts; the same form on H200 loops gives 0.70")
        layout = {str(name): factor for name, factor in h200["bf16"].layout.items()}
        report.borrowed.append("h200-sxm: layout factors of bf16 products")
        report.sigma = 0.05
    if device.calibration != "h200-sxm":
        misaligned = _misaligned_like(device, values, h200["bf16"])
        report.borrowed.append("h200-sxm: products with rows off 16 bytes, at the same rate per SM and clock")
    curves = {
        "bf16": curve_of(
            values,
            device.peak,
            sweep_quality(sweep, tuple(notes)),
            layout=layout,
            accumulate=accumulate,
            misaligned=misaligned,
        )
    }
    curves |= _other_dtypes(device, curves["bf16"], values, own, h200, report)
    if device.is_blackwell:
        curves["fp8"] = _fp8(device, curves["bf16"], values, table, report)
    return curves, report


def _line(topic: str, sweep: GemmFit) -> str:
    z = sweep.large_test
    p50, p90, bias = 100 * np.median(np.abs(z)), 100 * np.quantile(np.abs(z), 0.9), 100 * np.median(z)
    every = np.abs(sweep.test)
    return (
        f"{topic}: n {len(z)} median {p50:.1f} % p90 {p90:.1f} % bias {bias:+.1f} %; "
        f"all m >= 64: n {len(every)} median {100 * np.median(every):.1f} % p90 {100 * np.quantile(every, 0.9):.1f} %"
    )


def _own_h200(
    device: Subject, values: dict[str, float], own: Samples, layout: dict[str, float], report: Report, notes: list[str]
) -> float:
    """Sustained speed from two-second loops; layouts from bursts, as ratios to tn of the same machine."""
    loops = products([r for r in own if _is_gemm(r, "tn", "bf16") and r.get("sustained")], unit_s=1)
    sustained = fit_factor(device, values, loops, free="e_sust", peak=device.peak)
    values["e_sust"] = sustained.values["e_sust"]
    report.lines.append(_loop_line("sustained loops tn", sustained))
    for name in ("nn", "nt"):
        layout[name], text = _layout_factor(device, values, own, name)
        notes.append(text)
        report.lines.append(text)
    odd = products([r for r in own if _is_gemm(r, None, "bf16") and _is_odd(r)], unit_s=1)
    factor = fit_factor(device, values, odd, free="factor", peak=device.peak)
    report.lines.append(_loop_line("odd strides", factor))
    notes.append(
        f"e_sust: {len(loops.m)} loops of 2 s at the 700 W cap, residual p95 {quantile(sustained.residuals, 0.95)}"
    )
    report.sigma = 0.03
    return factor.values["factor"]


def _layout_factor(device: Subject, values: Mapping[str, float], own: Samples, name: str) -> tuple[float, str]:
    """Ratio of a layout's time to tn's: from loops where they were run, else from bursts of the same three sides."""
    loops = products([r for r in own if _is_gemm(r, name, "bf16") and r.get("sustained") and not _is_odd(r)], unit_s=1)
    if len(loops.m) >= 5:
        found = fit_factor(device, values, loops, free="factor", peak=device.peak)
        return found.values["factor"], f"{name}: {len(loops.m)} loops, {found.values['factor']:.3f} of tn's time"
    mine, other = _by_sides(device, values, own, "tn"), _by_sides(device, values, own, name)
    logs = [other[sides] - mine[sides] for sides in sorted(other.keys() & mine.keys())]
    ratio = math.exp(float(np.median(logs)))
    return ratio, f"{name}: {len(logs)} bursts of 20 GFLOP and more, {ratio:.3f} of tn's time with the same sides"


def _by_sides(device: Subject, values: Mapping[str, float], own: Samples, layout: str) -> dict[tuple[int, ...], float]:
    """Sorted sides -> mean ln(measured / curve) of one layout's bursts."""
    logs: dict[tuple[int, ...], list[float]] = {}
    for row in own:
        if _is_gemm(row, layout, "bf16") and not row.get("sustained") and not _is_odd(row) and row["flop"] >= 2e10:
            one = products([row], unit_s=1)
            burst = seconds(values, one, device.device, peak=device.peak, element=2, burst=True)
            sides = tuple(sorted((row["m"], row["n"], row["k"])))
            logs.setdefault(sides, []).append(math.log(row["time_s"] / float(burst[0])))
    return {sides: sum(found) / len(found) for sides, found in logs.items()}


def _is_gemm(row: dict[str, Any], layout: str | None, dtype: str) -> bool:
    return row["kind"] == "gemm" and row["dtype"] == dtype and (layout is None or row["layout"] == layout)


def _is_odd(row: dict[str, Any]) -> bool:
    strides = (row["m"], row["n"]) if row["layout"] == "nt" else (row["n"], row["k"])
    return any(s % 2 for s in strides)


def _loops(
    device: Subject, values: dict[str, float], table: list[_tables.Row], gpu: str, layout: dict[str, float],
    report: Report, notes: list[str],
) -> float:  # fmt: skip
    """Training layouts of SimuMax's loops: sustained speed (B200), layout factors, fp32 accumulation."""
    rows = {lay: _tables.select(table, gpu=gpu, source="SimuMax", layout=lay) for lay in ("TN", "NN", "NT")}
    here = dict(values)
    tn = products(rows["TN"], unit_s=1e-6)
    long = tn.where(tn.time_s >= LONG_S)
    speed = fit_factor(device, here, long if gpu == device.gpu else tn, free="e_sust", peak=device.peak)
    here["e_sust"] = speed.values["e_sust"]
    report.lines.append(_loop_line(f"loops tn on {gpu}: e_sust {here['e_sust']:.3f}", speed))
    if gpu == device.gpu:
        values["e_sust"] = here["e_sust"]
        notes.append(
            "e_sust: SimuMax's loops above 0.5 ms; shorter runs at the cap, here and on GB200, say 0.57 to 0.59"
        )
        report.sigma = 0.09
    else:
        notes.append(
            f"e_sust: asymptote of bursts, which stay flat up to 10 TFLOP; loops on {gpu} give {here['e_sust']:.3f}"
        )
        report.sigma = 0.04
    data = {lay: products(rows[lay], unit_s=1e-6) for lay in ("NN", "NT")}
    data = {lay: p.where(p.time_s >= LONG_S) if gpu == device.gpu else p for lay, p in data.items()}
    layout["nn"] = fit_factor(device, here, data["NN"], free="factor", peak=device.peak).values["factor"]
    with_sum = fit_factor(device, here, data["NT"], free="factor", peak=device.peak, accumulate=True)
    report.lines.append(
        f"{gpu}: nn {layout['nn']:.3f}, nt with fp32 accumulation {with_sum.values['factor']:.3f} of tn's time"
    )
    report.borrowed.append("h200-sxm: nt without accumulation like tn")
    return with_sum.values["factor"]


def _loop_line(topic: str, found: Fitted) -> str:
    z = 100 * np.abs(found.residuals)
    free = ", ".join(f"{name} {found.values[name]:.3f} +- {error:.3f}" for name, error in found.errors.items())
    return f"{topic}: n {len(z)} {free} residual median {np.median(z):.1f} % max {z.max():.1f} %"


def _misaligned_like(device: Subject, values: Mapping[str, float], relative: GemmCurve) -> float:
    """The relative's misaligned rate (SM kernels without bulk copies), moved by SMs and clock."""
    rate = relative.e_sust * relative.peak_flop_per_s / relative.misaligned["1"]
    sm_rate = 132 * 1.98e9  # the H200's
    return max(1.0, values["e_sust"] * device.peak / (rate * device.sm_rate / sm_rate))


def _blackwell(
    device: Subject, values: dict[str, float], table: list[_tables.Row], fitted: Mapping[str, Mapping[str, GemmCurve]],
    layout: dict[str, float], report: Report, notes: list[str],
) -> float:  # fmt: skip
    """Sustained speed from runs of 0.3 to 1 s at the logged power cap; layouts and accumulation from SimuMax's loops."""
    runs = products(_at_the_cap(device, table, "bf16"), unit_s=1e-6)
    if device.calibration == "gb200":
        found = fit_factor(device, values, runs, free="e_sust", peak=device.peak)
        values["e_sust"] = found.values["e_sust"]
        report.lines.append(_loop_line(f"runs of 0.3 to 1 s at the cap tn: e_sust {values['e_sust']:.3f}", found))
        notes.append(f"e_sust: {len(runs.m)} runs of 0.3 to 1 s at the logged power cap")
    else:
        values["e_sust"] = min(values["e_burst"], _by_power(device, fitted["gb200"]["bf16"], "bf16"))
        notes.append("e_sust: the GB200's, by the power cap: nobody published long enough runs at the cap")
        report.borrowed.append("gb200: sustained speed of bf16 products, by the power cap")
    report.sigma = 0.07
    relative = fitted["b200-sxm"]["bf16"]
    layout |= {str(name): factor for name, factor in relative.layout.items()}
    report.borrowed.append("b200-sxm: layouts and fp32 accumulation of bf16 products")
    return relative.accumulate_fp32


def _at_the_cap(device: Subject, table: list[_tables.Row], dtype: str) -> list[_tables.Row]:
    """Rows of training shapes, filled at random, whose logged power is the cap's."""
    rows = _tables.select(table, gpu=device.gpu, dtype=dtype, notes="power-mode")
    cap = AT_THE_CAP * device.device.power_w
    return [r for r in rows if (_tables.watts(r) or 0.0) >= cap and _is_large(r) and _flop(r) >= LONG_FLOP]


def _is_large(row: _tables.Row) -> bool:
    return min(float(row[side]) for side in "mnk") >= LARGE


def _flop(row: _tables.Row) -> float:
    return 2 * float(row["m"]) * float(row["n"]) * float(row["k"])


def _by_power(device: Subject, relative: GemmCurve, dtype: str) -> float:
    """A relative's sustained speed at this device's power cap, as simulator.spec.calibration.Power moves it; of this peak."""
    watts = device.device.power_w / Device.load("gb200").power_w
    speed = relative.e_sust * relative.peak_flop_per_s * float(watts**device.power_exponent)
    return speed / device.device.peak(dtype)


def _fp8(
    device: Subject, bf16: GemmCurve, values: Mapping[str, float], table: list[_tables.Row], report: Report
) -> GemmCurve:
    """Per-tensor scaled products: bf16's shape, own speeds. The calls find one operand's maximum and cast it, which is taken out.

    Without runs at the cap, e_sust is that of bursts until `lend_fp8`.
    """
    rows = [r for r in _tables.select(table, gpu=device.gpu, dtype="fp8") if _is_large(r)]
    calls = products(_tables.select(table, gpu=device.gpu, dtype="fp8"), unit_s=1e-6)
    cast = cast_line(device.device, calls, 1)
    report.lines.append(f"  fp8 casts: {cast[0] * 1e6:.0f} us and {cast[1] * 1e15:.2f} fs an element")
    bursts = _unquantised([r for r in rows if _tables.watts(r) is None and _flop(r) >= LONG_FLOP], cast)
    runs = _unquantised(_at_the_cap(device, table, "fp8"), cast)
    burst = sustained = _fp8_speed(device, values, bursts, report, "calls")
    if len(runs.m):
        sustained = _fp8_speed(device, values, runs, report, "runs of 0.3 to 1 s at the logged cap")
    own = {
        "peak_flop_per_s": device.device.peak("fp8"),
        "e_burst": rounded(burst),
        "e_sust": rounded(sustained),
        "misaligned": {},
        "layout": {},
        "accumulate_fp32": 1.0,
        "quality": Quality(
            basis="measured",
            num_samples=len(bursts.m) + len(runs.m),
            notes=(
                f"per-tensor scaled; bf16's shape; e_sust: {len(runs.m)} runs of 0.3 to 1 s at the logged power cap",
            ),
        ),
    }
    return GemmCurve.model_validate(bf16.model_dump() | own)


def _fp8_speed(device: Subject, shape: Mapping[str, float], rows: Products, report: Report, topic: str) -> float:
    found = fit_factor(device, shape, rows, free="e_sust", peak=device.device.peak("fp8"), element=1)
    report.lines.append(_loop_line(f"fp8 {topic}", found))
    return found.values["e_sust"]


def _unquantised(rows: list[_tables.Row], cast: tuple[float, float]) -> Products:
    """Calls less what casting the first operand takes, by calls that do little else; those where it is above a fifth left out."""
    found = products(rows, unit_s=1e-6)
    quantise_s = cast[0] + cast[1] * found.m * found.k
    few = quantise_s < 0.2 * found.time_s
    return Products(found.m, found.n, found.k, found.time_s - quantise_s).where(few)


def _other_dtypes(
    device: Subject, bf16: GemmCurve, values: Mapping[str, float], own: Samples, h200: Mapping[str, GemmCurve],
    report: Report,
) -> dict[str, GemmCurve]:  # fmt: skip
    """fp8, tf32 and fp32: bf16's shape; speeds of the H200's own products, or moved from them."""
    if device.calibration == "h200-sxm":
        return {dtype: _plain(device, values, own, dtype) for dtype in ("fp8", "tf32", "fp32")}
    curves: dict[str, GemmCurve] = {}
    for dtype in ("fp8", "tf32", "fp32"):
        if device.device.peak(dtype):
            curves[dtype] = _moved(device, bf16, h200, dtype)
            report.borrowed.append(f"h200-sxm: fraction of peak of {dtype} products, in proportion to bf16's")
    return curves


def _moved(device: Subject, bf16: GemmCurve, h200: Mapping[str, GemmCurve], dtype: str) -> GemmCurve:
    """A relative's curve for another dtype: its speed over bf16's there, times bf16's here. fp32 runs on other units."""
    relative, reference = h200[dtype], h200["bf16"]
    ratio = 1.0 if dtype == "fp32" else bf16.e_sust / reference.e_sust
    sustained = min(0.9, relative.e_sust * ratio)
    moved = {
        "peak_flop_per_s": device.device.peak(dtype),
        "e_sust": rounded(sustained),
        "e_burst": rounded(min(0.95, max(sustained, relative.e_burst * ratio))),
        "misaligned": {},
        "layout": {},
        "accumulate_fp32": 1.0,
        "quality": Quality(basis="borrowed", notes=("shape of this device's bf16, speed moved from h200-sxm",)),
    }
    return GemmCurve.model_validate(bf16.model_dump() | moved)


def _plain(device: Subject, values: Mapping[str, float], own: Samples, dtype: str) -> GemmCurve:
    """A dtype with a handful of samples: bf16's shape, its own speed: the median, and the longest's as sustained."""
    rows = [r for r in own if _is_gemm(r, "tn", dtype) and r["flop"] > 1e11]
    bursts = products([r for r in rows if not r.get("sustained")], unit_s=1)
    loops = products([r for r in rows if r.get("sustained")], unit_s=1)
    peak = device.device.peak(dtype)
    speed = _speed(device, values, bursts, peak)
    longest = bursts.flop >= bursts.flop.max() / 2
    if len(loops.m):
        sustained, how = float(np.median(_speed(device, values, loops, peak))), "loops"
    elif dtype == "fp32":  # its own units: no power limit was seen
        sustained, how = float(np.median(speed[longest])), "the longest bursts"
    else:  # the same units under the same cap
        drop = values["e_sust"] / values["e_burst"]
        sustained, how = float(np.median(speed)) * drop, f"bursts x {drop:.2f}, what bf16's loops lose to the power cap"
    c = dict(values) | {"e_burst": float(np.median(speed)), "e_sust": sustained}
    notes = (f"square products and a feed-forward's; bf16's shape; sustained from {how}",)
    quality = Quality(basis="measured", num_samples=len(rows), notes=notes)
    return curve_of(c, peak, quality, layout={})


def _speed(device: Subject, shape: Mapping[str, float], rows: Products, peak: float) -> np.ndarray[Any, Any]:
    """Fraction of peak that each row reached, with the shape's losses taken out."""
    one = dict(shape) | {"e_sust": 1.0}
    element = 1 if peak == device.device.peak("fp8") else 2
    ideal = seconds(one, rows, device.device, peak=peak, element=element, burst=False)
    return np.asarray(np.minimum(1.0, (ideal - shape["t0"] * 1e-6) / (rows.time_s - shape["t0"] * 1e-6)))


def lend_fp8(
    devices: Mapping[str, Subject], gemms: dict[str, dict[str, GemmCurve]], reports: Mapping[str, Report]
) -> None:
    """Sustained fp8 on B200 and GB300: the GB200's by the power cap."""
    for name in ("b200-sxm", "gb300"):
        curve = gemms[name]["fp8"]
        sustained = min(curve.e_burst, _by_power(devices[name], gemms["gb200"]["fp8"], "fp8"))
        note = "per-tensor scaled; bf16's shape; e_sust: the GB200's, by the power cap"
        quality = curve.quality.model_copy(update={"notes": (note,)})
        gemms[name]["fp8"] = curve.model_copy(update={"e_sust": rounded(sustained), "quality": quality})
        reports[name].borrowed.append("gb200: sustained speed of fp8 products, by the power cap")


def lend_accumulation(gemms: dict[str, dict[str, GemmCurve]], reports: Mapping[str, Report]) -> None:
    """Hopper's weight gradients with fp32 accumulation: the factor that A100 and B200 agree on."""
    known = [gemms[name]["bf16"].accumulate_fp32 for name in ("a100-sxm", "b200-sxm")]
    factor = rounded(math.sqrt(known[0] * known[1]))
    for name in ("h100-sxm", "h200-sxm"):
        gemms[name]["bf16"] = gemms[name]["bf16"].model_copy(update={"accumulate_fp32": factor})
        reports[name].borrowed.append("a100-sxm, b200-sxm: fp32 accumulation in weight gradients")
