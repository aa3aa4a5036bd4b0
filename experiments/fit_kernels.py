"""Fit the kernel calibrations of topologies/calibrations (A100, H100, H200, B200, GB200, GB300) on published kernel tables and our H200 samples.

    python experiments/fit_kernels.py                   fit, write the calibrations, print residuals
    python experiments/fit_kernels.py --check           fit, compare with the files as they are, exit 1 on a difference
    python experiments/fit_kernels.py --collect FOLDER  first cut experiments/measured/kernels from full tables

Nothing here looks at a training run. Robust least squares on log time; one family of weight shapes in five is held
out. docs/background/kernels.md has the forms, the traps of the data and the residuals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _tables
import numpy as np
from _attention_devices import b200_loops, fit_attention, lend
from _devices import Subject, subjects
from _gemm_devices import Report, fit_gemms, lend_accumulation, lend_fp8
from _in_steps import Ops
from _power import attention_clock, by_products, fit_h200, h200_steps, power_of
from _streams import fit_streams, launch_floor_s, passes

from simulator.spec.calibration import (
    AttentionCurve,
    Calibration,
    DriverCall,
    Interference,
    MemoryOverheads,
    Overheads,
    Power,
    Provenance,
    Quality,
    StreamCurve,
)

OUTPUT = Path(__file__).resolve().parent.parent / "topologies" / "calibrations"
DATE = "2026-11-20"
MIB = 2**20
# Channels of NCCL's rings inside a node: 24 on A100 (12 NVLinks, both ways), 16-32 on Hopper and later.
CHANNELS = 24


def fit_all() -> tuple[list[Calibration], dict[str, Report]]:
    """Every calibration, and what the fits said. The H200 comes first: others borrow from it."""
    tables = {name: _tables.rows(name) for name in _tables.WANTED}
    own, devices = _tables.own_samples(), subjects()
    reports = {name: Report() for name in devices}
    gemms: dict[str, Any] = {}
    attention: dict[str, tuple[AttentionCurve, ...]] = {}
    streams: dict[str, tuple[StreamCurve, ...]] = {}
    steps: dict[str, Ops] = {}
    powers: dict[str, Power] = {}
    for name, device in devices.items():
        gemms[name], reports[name] = fit_gemms(device, tables["gemm"], own, gemms)
        steps = steps or h200_steps(device, gemms[name])
        powers[name] = _power(device, gemms, steps, powers, tables["attention"], reports[name])
        relatives = attention.get("h200-sxm", ()), attention.get("h100-sxm", ())
        attention[name] = fit_attention(device, tables["attention"], own, *relatives, reports[name])
        found = passes(device, tables["membound"], own, steps, powers[name], gemms[name]["bf16"])
        streams[name] = fit_streams(device, tables["membound"], found, streams.get("h200-sxm", ()), reports[name])
    lend(attention, devices, reports)
    lend_accumulation(gemms, reports)
    lend_fp8(devices, gemms, reports)
    floors = {name: launch_floor_s(device, tables["membound"]) for name, device in devices.items()}
    calibrations = [
        _calibration(
            devices[name], powers[name], gemms[name], attention[name], streams[name], reports[name], floors[name], own
        )
        for name in sorted(devices)
    ]
    return calibrations, reports


def _power(
    device: Subject, gemms: dict[str, Any], steps: dict[str, Ops], powers: dict[str, Power], attention: list[_tables.Row],
    report: Report,
) -> Power:  # fmt: skip
    """The H200's comes first; others take its draw of memory-bound kernels and how speed follows the clock."""
    h200 = gemms["h200-sxm"]["bf16"]
    if device.calibration == "h200-sxm":
        found = fit_h200(device, gemms["h200-sxm"], steps)
    else:
        theirs = powers["h200-sxm"]
        own, loop = gemms[device.calibration]["bf16"], None
        if device.calibration == "b200-sxm":
            loop = attention_clock(own, b200_loops(device, attention), theirs)
        elif device.calibration != "h100-sxm":
            relative = "b200-sxm" if device.is_blackwell else "h200-sxm"
            loop = by_products(own, gemms[relative]["bf16"], powers[relative].loop_clock)
        found = power_of(device, theirs.loop_clock, theirs.memory_draw, h200, loop=loop)
        report.borrowed.append("h200-sxm: draw of memory-bound kernels, and how speed follows the clock")
    report.lines.append(
        f"power: clock in loops {found.loop_clock:.2f} of the highest, as watts^{found.clock_exponent:.2f}; "
        f"memory-bound kernels draw {found.memory_draw:.2f} of products"
    )
    return found


def _calibration(
    device: Subject,
    power: Power,
    gemms: Any,  # noqa: ANN401
    attention: tuple[AttentionCurve, ...],
    streams: tuple[StreamCurve, ...],
    report: Report,
    floor_s: float,
    own: list[dict[str, Any]],
) -> Calibration:
    name = device.calibration
    return Calibration(
        name=name,
        kind="fitted",
        power=power,
        gemms=gemms,
        attention=attention,
        streams=streams,
        overheads=_overheads(own, floor_s),
        interference=_interference(own, CHANNELS),
        memory=_memory(name),
        uncertainty={
            "gemm": report.sigma,
            "attention": _sigma([c.quality for c in attention[:2]]),
            "elementwise": _sigma([c.quality for c in streams]),
            "communication": 0.15,
        },
        provenance=_provenance(name, report),
    )


def _sigma(qualities: Sequence[Quality]) -> float:
    """5 % from machine to machine where measured, 15 % borrowed, 25 % a prior; and the residual. Root mean square."""
    between = {"measured": 0.05, "borrowed": 0.15, "prior": 0.25, "definition": 0.0}
    squares = [between[q.basis] ** 2 + (q.p50 or 0.0) ** 2 for q in qualities]
    return round(float((sum(squares) / len(squares)) ** 0.5), 3)


def _overheads(own: list[dict[str, Any]], floor_s: float) -> Overheads:
    dispatch = next(r["time_s"] for r in own if r["kind"] == "host_dispatch" and r["op"] == "add_")
    sources = {
        "launch_s": "interval of tiny kernels in a CUDA graph, gpu-benches (Hopper's for B200)",
        "host_op_s": "torch 2.11 in-place addition of eight numbers on the H200 machine",
        **dict.fromkeys(("cuda_malloc", "cuda_free"), "experiments/cuda_malloc.py on the H200 machine"),
    }
    return Overheads(
        launch_s=float(f"{floor_s:.3g}"),
        host_op_s=float(f"{dispatch:.3g}"),
        cuda_malloc=_driver_call(own, "cuda_malloc"),
        cuda_free=_driver_call(own, "cuda_free"),
        sources=sources,
    )


def _driver_call(own: list[dict[str, Any]], kind: str) -> DriverCall:
    """Least squares of relative errors over segments of 20 MiB and more (smaller ones share the driver's blocks)."""
    samples = [row for row in own if row["kind"] == kind and row["bytes"] >= 20 * MIB]
    terms = np.array([[1.0, row["bytes"]] for row in samples]) / np.array([[row["time_s"]] for row in samples])
    call_s, s_per_byte = np.linalg.lstsq(terms, np.ones(len(samples)), rcond=None)[0]
    return DriverCall(call_s=float(f"{call_s:.3g}"), s_per_byte=float(f"{s_per_byte:.3g}"))


def _interference(own: list[dict[str, Any]], channels: int) -> Interference:
    """A product beside a copy: seconds the pair takes beyond the product alone, per second of the copy alone."""
    time = {r["kind"]: r["time_s"] for r in own if r["kind"].startswith("overlap_")}
    weight = (time["overlap_both"] - time["overlap_gemm_alone"]) / time["overlap_copy_alone"]
    sources = {
        "hbm_weight": "H200: an 8192 cubed product beside a device copy at full memory speed",
        "num_channels": "prior: 16 to 32 on NVSwitch machines, 24 on A100; docs/background/collectives.md",
    }
    return Interference(num_channels=channels, hbm_weight=float(f"{weight:.3g}"), sources=sources)


def _memory(name: str) -> MemoryOverheads:
    hopper = name != "a100-sxm"
    measured = "H200, torch 2.11, one process without NCCL: device used less reserved bytes"
    return MemoryOverheads(
        context_bytes=804_061_184 if hopper else 500 * MIB,
        nccl_communicator_bytes=200 * MIB,
        cublas_workspace_bytes=32 * MIB if hopper else 8_519_680,
        sources={
            "context_bytes": measured if name == "h200-sxm" else f"{measured}; borrowed" if hopper else "prior",
            "nccl_communicator_bytes": "prior",
            "cublas_workspace_bytes": "PyTorch's CUBLAS_WORKSPACE_CONFIG defaults",
        },
    )


def _provenance(name: str, report: Report) -> Provenance:
    ours = name == "h200-sxm"
    return Provenance(
        machine="one NVIDIA H200, 700 W, and published tables" if ours else "published tables",
        driver="580.159.04" if ours else "",
        torch="2.11.0+cu130" if ours else "",
        date=DATE,
        recipe="python experiments/fit_kernels.py",
        tables=_tables.table_hashes(),
        borrowed=tuple(dict.fromkeys(report.borrowed)),
        notes=("fractions are of NVIDIA's dense peaks and memory speeds as in topologies/devices",),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(description="Fit the kernel calibrations.")
    parser.add_argument("--check", action="store_true", help="compare with the files as they are, write nothing")
    parser.add_argument(
        "--collect", type=Path, metavar="FOLDER", help="cut the committed subset out of full tables first"
    )
    options = parser.parse_args(arguments)
    if options.collect:
        _tables.collect(options.collect)
    calibrations, reports = fit_all()
    for name, report in sorted(reports.items()):
        print(f"{name}\n" + "\n".join(f"  {line}" for line in report.lines))
    different = [c.name for c in calibrations if not _write(c, check=options.check)]
    if different:
        print(f"differs from the file: {', '.join(different)}")
    return 1 if different else 0


def _write(calibration: Calibration, *, check: bool) -> bool:
    """True if the file holds (or now holds) exactly this calibration."""
    path = OUTPUT / f"{calibration.name}.calibration.json"
    before = Calibration.load(path) if path.is_file() else None
    fitted = _with_decoding(calibration, before) if before else calibration
    if check:
        return fitted == before
    fitted.save(path)
    return True


def _with_decoding(calibration: Calibration, before: Calibration) -> Calibration:
    """With what fit_few_rows.py wrote into the file: nothing here looks at decoding."""
    gemms = {
        dtype: curve.model_copy(update={"few_rows": before.gemms[dtype].few_rows} if dtype in before.gemms else {})
        for dtype, curve in calibration.gemms.items()
    }
    cached = {(c.kernels, c.direction): c.cache_bw_frac for c in before.attention}
    attention = tuple(
        c.model_copy(update={"cache_bw_frac": cached.get((c.kernels, c.direction))}) for c in calibration.attention
    )
    return calibration.model_copy(update={"gemms": gemms, "attention": attention})


if __name__ == "__main__":
    sys.exit(main())
