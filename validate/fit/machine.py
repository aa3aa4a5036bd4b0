"""A whole machine from its samples: device, cluster, calibration and, on a CPU, the software's own costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from simulator.base.errors import CalibrationError, ClusterError, Fault
from simulator.base.files import write_whole
from simulator.base.kernels import Direction, Dtype
from simulator.spec.calibration import AttentionCurve, Calibration, GemmCurve, Overheads, Provenance
from simulator.spec.calibration.datasheet import FUSED
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device, PeakFlop
from simulator.spec.cluster.parts import Intra
from simulator.spec.software.stack import Stack
from validate.fit.attention import fit_attention
from validate.fit.gemm import fit_gemm, scaled_gemm
from validate.fit.gloo import GlooResult, fit_gloo
from validate.fit.host import host_costs
from validate.fit.interference import fit_interference
from validate.fit.pace import at_one_pace, reference_of
from validate.fit.ranks import named, slow_ranks
from validate.fit.robust import rounded
from validate.fit.streams import fit_streams, passes
from validate.fit.transfers import copies, driver_call
from validate.samples import Machine, Sample, SampleFile

CPU_STACK = "torch-2.13-cpu"
DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "tf32", "fp32", "fp8")
_LARGE_CPU_BYTES, _LARGE_GPU_BYTES = 2**16, 6e7  # smaller passes: launch cost on a CPU, second-level cache on a GPU
_PEAK_BYTES = 2**18  # a pass of this size says what memory can do


@dataclass(slots=True)
class Report:
    """What the fit says besides the files: who was left out, what was refused, how good each curve is."""

    lines: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def outliers(self, topic: str, samples: Sequence[Sample]) -> None:
        """Samples that a fit left out, the worst kinds named."""
        if samples:
            lines = ", ".join(str(s.line) for s in samples[:8]) + (", …" if len(samples) > 8 else "")
            self.dropped.append(f"{topic}: {len(samples)} outliers (lines {lines})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What `predict` needs for this machine. stack: None where the shipped ones hold (GPUs)."""

    calibration: Calibration
    cluster: Cluster | None
    device: Device
    stack: Stack | None
    report: Report


def fit_machine(found: SampleFile, name: str, device: Device | None = None) -> Fit:
    """Fit everything that the samples say. device: overrides the one that the machine line names.

    Raises CalibrationError where products were measured at too few shapes: without them nothing can be predicted.
    """
    report = Report()
    samples = at_one_pace(_without_slow(found.samples, report))
    cpu = found.machine.facts.get("architecture") == "cpu"
    device = device or (cpu_device(found.machine, samples, name) if cpu else gpu_device(found.machine))
    prior = Calibration.datasheet(device)
    gemms, gemm_sigma = _gemms(samples, device, report)
    attention, attention_sigma = _attention(samples, device, prior, report)
    streams = fit_streams(samples, device, prior.streams, _LARGE_CPU_BYTES if cpu else _LARGE_GPU_BYTES)
    report.refused += streams.refused
    report.outliers("streams", streams.outliers)
    gloo = _links(samples, found, report) if cpu else GlooResult(None, 0.0, 0.25, (), ())
    floor = min((c.t0_s for c in streams.curves if c.quality.basis == "measured"), default=prior.overheads.launch_s)
    calibration = Calibration(
        name=name,
        kind="fitted",
        power=None if cpu else prior.power,
        gemms=gemms,
        attention=attention,
        streams=streams.curves,
        overheads=_overheads(samples, floor),
        interference=prior.interference if cpu else fit_interference(samples, device, prior.interference),
        memory=prior.memory,
        uncertainty={
            "gemm": rounded(gemm_sigma, 3),
            "attention": rounded(attention_sigma, 3),
            "elementwise": rounded(streams.sigma, 3),
            "communication": rounded(gloo.sigma, 3) if cpu else prior.uncertainty["communication"],
        },
        provenance=_provenance(found, report),
        links=gloo.links,
    )
    cluster = cpu_cluster(device, name, found.machine, gloo) if cpu else None
    stack = _stack(samples, device, calibration, name) if cpu else None
    _summarise(calibration, report)
    moved = copies(samples)
    report.lines += moved.lines
    report.refused += moved.refused
    return Fit(calibration=calibration, cluster=cluster, device=device, stack=stack, report=report)


def _without_slow(samples: Sequence[Sample], report: Report) -> list[Sample]:
    slow = slow_ranks(samples)
    report.dropped += named(slow, samples)
    return [s for s in samples if (s.host, s.rank) not in slow]


# -- device and cluster --------------------------------------------------------------------------------------------


def gpu_device(machine: Machine) -> Device:
    """The device that the machine line names. Raises ClusterError with the nearest names."""
    name = machine.text("device")
    try:
        return Device.load(name)
    except ClusterError as exc:
        faults = [replace(f, place="machine line: device", remedy=f"--device NAME; {f.remedy}") for f in exc.faults]
        raise CalibrationError(faults) from None


def cpu_device(machine: Machine, samples: Sequence[Sample], name: str) -> Device:
    """One rank's share of the processor. A CPU has no data sheet here: the best measured speeds are its peaks."""
    peaks = {d: _best_flop_per_s(samples, d) for d in DTYPES}
    speed = [p.num_bytes / p.time_s for p in passes(samples) if p.num_bytes >= _PEAK_BYTES]
    if not peaks["fp32"] or not speed:
        missing = "products in fp32" if not peaks["fp32"] else f"passes over at least {_PEAK_BYTES} bytes"
        problem = f"no sample of {missing}"
        raise CalibrationError(
            Fault(place="samples", problem=problem, remedy="shardwise calibrate run, with more time")
        )
    memory = int(machine.facts.get("memory_bytes", 4 * 2**30)) // max(1, int(machine.facts.get("num_ranks", 1)))
    measured = "the best measured here"
    return Device(
        name=name,
        architecture="cpu",
        memory_bytes=memory,
        memory_bytes_per_s=rounded(float(np.quantile(speed, 0.95))),
        peak_flop_per_s=PeakFlop(**{d: rounded(v) for d, v in peaks.items() if v}),
        num_sms=1,
        power_w=1.0,
        sources={
            "memory_bytes": "one rank's part of what the system reports",
            "memory_bytes_per_s": f"{measured}: 95th percentile of passes from {_PEAK_BYTES} bytes on",
            "peak_flop_per_s": f"{measured}: fastest product of each dtype",
            "num_sms": "by definition: a rank's threads are one processor",
            "power_w": "not known, and not used: no power curve",
        },
    )


def _best_flop_per_s(samples: Sequence[Sample], dtype: str) -> float:
    rates = [2 * s["m"] * s["n"] * s["k"] / s.time_s for s in samples if s.kind == "gemm" and s["dtype"] == dtype]
    return float(np.max(rates)) if rates else 0.0


def cpu_cluster(device: Device, name: str, machine: Machine, gloo: GlooResult) -> Cluster:
    """The machine as one node whose ranks meet on its loopback."""
    ranks = max(1, int(machine.facts.get("num_ranks", 1)))
    source = "fitted on this machine's gloo collectives" if gloo.links else "not measured: memory's speed"
    speed = gloo.port_bytes_per_s or device.memory_bytes_per_s
    return Cluster(
        name=name,
        device=device,
        gpus_per_node=ranks,
        nvlink_domain_size=ranks,
        intra=Intra(kind="loopback", shape="switch", bytes_per_s=rounded(speed)),
        sources={"intra": source},
    )


# -- curves --------------------------------------------------------------------------------------------------------


def _gemms(samples: Sequence[Sample], device: Device, report: Report) -> tuple[dict[Dtype, GemmCurve], float]:
    """The main dtype's curve and its sigma; others of their own where they have shapes enough, else of its form.

    Raises CalibrationError where the main dtype (fp32 on a CPU, bf16 on a GPU) has too few shapes.
    """
    mine = [s for s in samples if s.kind == "gemm"]
    main, *others = ("fp32", "bf16") if device.architecture == "cpu" else DTYPES
    result = fit_gemm(mine, main, device)
    report.outliers(f"gemm {main}", result.outliers)
    curves: dict[Dtype, GemmCurve] = {main: result.curve}
    for dtype in others:
        if not device.peak(dtype) or not any(s["dtype"] == dtype for s in mine):
            continue
        try:
            curves[dtype] = _other(mine, dtype, device, result.curve, report)
        except CalibrationError as exc:
            report.refused += [f"{f.place}: {f.problem} ({f.remedy})" for f in exc.faults]
    return curves, result.sigma


def _other(mine: Sequence[Sample], dtype: Dtype, device: Device, main: GemmCurve, report: Report) -> GemmCurve:
    try:
        result = fit_gemm(mine, dtype, device)
    except CalibrationError:
        return scaled_gemm(mine, dtype, device, main)
    report.outliers(f"gemm {dtype}", result.outliers)
    return result.curve


def _attention(
    samples: Sequence[Sample], device: Device, prior: Calibration, report: Report
) -> tuple[tuple[AttentionCurve, ...], float]:
    dtype = "fp32" if device.architecture == "cpu" else "bf16"
    curves: list[AttentionCurve] = []
    sigmas: list[float] = []
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        try:
            result = fit_attention(samples, direction, dtype, device, FUSED)
            curves.append(result.curve)
            sigmas.append(result.sigma)
            report.outliers(f"attention {direction}", result.outliers)
        except CalibrationError as exc:
            report.refused += [f"{f.place}: {f.problem} ({f.remedy})" for f in exc.faults]
            curves.append(prior.attention_curve(direction))
            sigmas.append(prior.uncertainty["attention"])
    return tuple(curves), float(np.max(sigmas))


def _links(samples: Sequence[Sample], found: SampleFile, report: Report) -> GlooResult:
    date = found.machine.text("date")
    result = fit_gloo(samples, f"gloo on {found.machine.text('device')}, {date}")
    report.refused += result.refused
    report.outliers("collectives", result.outliers)
    return result


# -- overheads -----------------------------------------------------------------------------------------------------


def _overheads(samples: Sequence[Sample], floor_s: float) -> Overheads:
    graph = [s.time_s / 200 for s in samples if s.kind == "graph_kernel_200"]
    dispatch = [s.time_s for s in samples if s.kind == "host_dispatch" and s["op"] == "add_"]
    malloc, free = (driver_call(samples, kind) for kind in ("device_malloc", "device_free"))
    measured = {"cuda_malloc": malloc, "cuda_free": free}
    return Overheads(
        launch_s=rounded(float(np.median(graph)) if graph else floor_s, 3),
        host_op_s=rounded(float(np.median(dispatch)) if dispatch else 9e-6, 3),
        cuda_malloc=malloc,
        cuda_free=free,
        sources={
            "launch_s": "tiny kernels in a CUDA graph" if graph else "smallest launch cost of a pass over memory",
            "host_op_s": "in-place addition of eight numbers" if dispatch else "assumed: not measured",
            **{name: "segments over size, nothing queued" for name, call in measured.items() if call is not None},
        },
    )


def _stack(samples: Sequence[Sample], device: Device, calibration: Calibration, name: str) -> Stack:
    """The shipped CPU stack with this machine's host costs and its own spread."""
    base = Stack.load(CPU_STACK)
    costs = host_costs(samples, device, calibration, base)
    update: dict[str, object] = {"name": f"{CPU_STACK}-{name}", "sources": {**base.sources, **costs.sources}}
    for cost in ("launch_s", "checkpoint_s", "collective_s", "unit_s"):
        if (seconds := getattr(costs, cost)) is not None:
            update[f"host_{cost}"] = rounded(seconds, 3)
    return base.copy_with(**update)


def _provenance(found: SampleFile, report: Report) -> Provenance:
    m = found.machine
    return Provenance(
        machine=f"{m.text('device')}, {m.text('num_ranks') or 1} ranks × {m.text('threads') or '?'} threads",
        driver=m.text("driver"),
        torch=m.text("torch"),
        date=m.text("date"),
        recipe="shardwise calibrate fit",
        reference_s=reference_of(found.samples),
        tables=dict(found.sha256),
        notes=(*report.dropped, *report.refused),
    )


def _summarise(calibration: Calibration, report: Report) -> None:
    named: list[tuple[str, object]] = [(f"gemm {d}", c) for d, c in calibration.gemms.items()]
    named += [(f"attention {c.direction}", c) for c in calibration.attention]
    named += [(f"stream {c.op}", c) for c in calibration.streams]
    for topic, curve in named:
        q = curve.quality  # type: ignore[attr-defined]
        if q.basis == "measured" and q.p50 is not None:
            errors = " ".join(f"{k} ±{v:g}" for k, v in q.standard_errors.items())
            report.lines.append(f"{topic}: {q.num_samples} samples, residual p50 {q.p50:.1%} p95 {q.p95:.1%}; {errors}")
    for port in calibration.links.ports if calibration.links else ():
        q = port.quality
        report.lines.append(
            f"collectives: {q.num_samples} samples, residual p50 small {q.small_p50:.1%} mid {q.mid_p50:.1%} "
            f"large {q.large_p50:.1%}"
        )


# -- files ---------------------------------------------------------------------------------------------------------


def write_cluster(cluster: Cluster, path: Path) -> None:
    """The cluster with its device inside, as a TOML file that `--cluster` reads."""
    device, intra = cluster.device, cluster.intra
    rows: list[tuple[str, Mapping[str, object]]] = [
        ("", {"name": cluster.name, "gpus_per_node": cluster.gpus_per_node}),
        (
            "device",
            {
                "name": device.name,
                "architecture": device.architecture,
                "memory_bytes": f"{device.memory_bytes}B",
                "memory_bytes_per_s": f"{device.memory_bytes_per_s:.10g}B/s",
                "num_sms": device.num_sms,
                "power_w": device.power_w,
            },
        ),
        ("device.peak_flop_per_s", {d: f"{device.peak(d):.10g}FLOP/s" for d in DTYPES if device.peak(d)}),
        ("device.sources", device.sources),
        ("intra", {"kind": intra.kind, "shape": intra.shape, "bytes_per_s": f"{intra.bytes_per_s:.10g}B/s"}),
        ("sources", cluster.sources),
    ]
    write_whole(path, _toml(rows))


def write_stack(stack: Stack, path: Path) -> None:
    """The stack as a TOML file that a plan's `stack` reads."""
    data = Stack.in_records(stack.model_dump(mode="json", exclude_unset=True))
    for record in (data.get("host", {}), data.get("fitted", {})):
        record |= {key: f"{value:.6g}s" for key, value in record.items() if key.endswith("_s") and value is not None}
    tables = {k: v for k, v in data.items() if isinstance(v, dict)}
    below = {f"{k}.{name}": v for k, table in tables.items() for name, v in table.items() if isinstance(v, dict)}
    plain = {k: v for k, v in data.items() if k not in tables}
    write_whole(path, _toml([("", plain), *tables.items(), *below.items()]))


def _toml(tables: Sequence[tuple[str, Mapping[str, object]]]) -> str:
    import json

    parts = []
    for title, rows in tables:
        lines = [f"[{title}]"] if title else []
        lines += [
            f"{key} = {json.dumps(value, ensure_ascii=False)}"
            for key, value in rows.items()
            if not isinstance(value, dict)
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
