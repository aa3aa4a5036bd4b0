"""Which measurement gives which attention kernel on which device. The first curve of a direction is the default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import _tables
import numpy as np
from _attention import calls, curve, fit_calls, named, quality
from _devices import Subject, subjects
from _gemm_devices import Report

from simulator.base.kernels import Attention, Direction
from simulator.spec.calibration import AttentionCurve, Quality
from validate.fit.attention import Calls
from validate.fit.robust import Fitted, Start, rounded

DIRECTIONS: tuple[tuple[str, Direction], ...] = (("fwd", "forward"), ("bwd", "backward"))
Samples = list[dict[str, Any]]
Curves = tuple[AttentionCurve, ...]


def fit_attention(
    device: Subject, table: list[_tables.Row], own: Samples, h200: Curves, h100: Curves, report: Report
) -> Curves:
    """Curves of one device from its own tables; `lend` adds the rest. Relatives are fitted before (Hopper first)."""
    if device.calibration == "h200-sxm":
        return _h200(device, own, report)
    if device.calibration == "h100-sxm":
        return _h100(device, table, h200, report)
    if device.calibration == "a100-sxm":
        return _a100(device, table, h100, report)
    b200 = subjects()["b200-sxm"]
    curves = _b200(b200, table, h100, report)
    return curves if device.gpu == b200.gpu else _beside_b200(device, b200, curves, table, report)


def _print(report: Report, topic: str, found: Fitted) -> None:
    z = 100 * np.abs(found.residuals)
    values = " ".join(f"{k} {v:.3g}" for k, v in found.values.items())
    report.lines.append(
        f"attention {topic}: n {len(z)} median {np.median(z):.1f} % p90 {np.quantile(z, 0.9):.1f} %; {values}"
    )


def _h200(device: Subject, own: Samples, report: Report) -> Curves:
    """Our own calls of torch's scaled_dot_product_attention, which runs cuDNN's kernel here. FA3 takes the same curve."""
    curves = []
    for _, direction in DIRECTIONS:
        x = calls([r for r in own if r["kind"] == f"attention_{direction}" and not r.get("sustained")])
        found = fit_calls(device, x, direction)
        _print(report, f"cudnn {direction}", found)
        # calls above 5 ms ran at the power cap (`sustained`); inside a step, the clock says what every call loses
        values = found.values | {"e256": found.values["e128"], "sustained": 1.0}
        note = "torch 2.11 scaled_dot_product_attention; too fast for flash-attention 2, so cuDNN's kernel"
        q = quality(found, x, note, "flash3 and head_dim 256 take the same values: unmeasured here")
        curves.append(curve(("cudnn", "flash3"), direction, device, values, q, power_limited=1.0))
    return tuple(curves)


def lend(attention: dict[str, Curves], devices: Mapping[str, Subject], reports: Mapping[str, Report]) -> None:
    """Add the older kernels that a device has no measurement of, from the relative that has.

    They use Ampere's instructions on every later device. H200 has the H100's SMs at the H100's clock; B200 runs them
    at the H100's rate per SM and clock; the Triton kernel of 2022, measured on A100 alone, follows flash-attention 2.
    """
    a100, h100, h200 = devices["a100-sxm"], devices["h100-sxm"], devices["h200-sxm"]
    ratio = _of_peak(h100, attention["h100-sxm"]) / _of_peak(a100, attention["a100-sxm"])
    triton = [c for c in attention["a100-sxm"] if c.kernels == ("flash1_triton",)]
    why = "A100's, by the ratio of flash-attention 2 on both"
    attention["h100-sxm"] += tuple(_borrowed(c, why, ratio, peak_flop_per_s=h100.peak) for c in triton)
    reports["h100-sxm"].borrowed.append("a100-sxm: attention kernel flash1_triton")
    older = [c for c in attention["h100-sxm"] if c.kernels in (("flash2",), ("flash1_triton",))]
    for device in (h200, *(d for d in devices.values() if d.is_blackwell)):
        scale = h100.peak * device.sm_rate / h100.sm_rate / device.peak
        why = "the H100's, per SM and clock"
        attention[device.calibration] += tuple(_borrowed(c, why, scale, peak_flop_per_s=device.peak) for c in older)
        reports[device.calibration].borrowed.append("h100-sxm: attention kernels flash2 and flash1_triton")
    reports["a100-sxm"].lines.append(f"flash2 on {h100.gpu} over {a100.gpu}: {ratio:.3f} of peak's fraction")


def _of_peak(device: Subject, curves: Curves) -> float:
    """What flash-attention 2 makes of a device's peak forward, in the longest call of the Hopper figures."""
    call = Attention(
        batch=1, seq_q=16384, seq_kv=16384, num_heads=16, num_kv_heads=16, head_dim=128, causal=True, direction="forward",
        dtype="bf16",
    )  # fmt: skip
    made = _pick(curves, "flash2", "forward")
    seconds = made.seconds(call, device.peak, device.device.memory_bytes_per_s, device.device.num_sms)
    return call.flop / seconds / device.peak


def _borrowed(source: AttentionCurve, why: str, scale: float = 1.0, **fields: Any) -> AttentionCurve:  # noqa: ANN401
    """A relative's curve with its efficiency scaled."""
    note = Quality(basis="borrowed", measured_range=source.quality.measured_range, notes=(why,))
    e_max = {d: rounded(v * scale) for d, v in source.e_max.items()}
    return AttentionCurve.model_validate(source.model_dump() | {"e_max": e_max, "quality": note} | fields)


def _pick(curves: Curves, kernel: str, direction: Direction) -> AttentionCurve:
    return next(c for c in curves if kernel in c.kernels and c.direction == direction)


def _h100(device: Subject, table: list[_tables.Row], h200: Curves, report: Report) -> Curves:
    """FA3: the serving sweep's shape, pull-request tables, the paper's figures. cuDNN: the H200's. FA2: figures."""
    curves: list[AttentionCurve] = []
    for short, direction in DIRECTIONS:
        curves.append(
            _borrowed(_pick(h200, "cudnn", direction), "the H200's: same SMs, compute-bound", kernels=("cudnn",))
        )
        x = calls(named(table, short, "H100", software="FA3"))
        if direction == "backward":  # head_dim 64 was measured at 512 to 2048 tokens only: too short for the ramp
            x = x.where(np.asarray(x.head_dim == 128))
        found = fit_calls(device, x, direction, sustained=1.0)
        _print(report, f"flash3 {direction}", found)
        values = dict(found.values)
        if direction == "backward":
            forward = _pick(tuple(curves), "flash3", "forward").e_max
            values |= {f"e{d}": values["e128"] * forward[str(d)] / forward["128"] for d in (64, 256)}
        q = quality(found, x, "paper figures (2024) and pull requests (2026): bursts")
        curves.append(curve(("flash3",), direction, device, values, q, power_limited=1.0))
    curves += _flash2_hopper(device, table, report)
    _compare(device, table, report)
    report.borrowed.append("h200-sxm: cuDNN attention")
    return tuple(curves)


def _compare(device: Subject, table: list[_tables.Row], report: Report) -> None:
    """The serving sweep of FA3 has a wrapper's floor; its fit is printed beside, not used."""
    x = calls(named(table, "fwd", "H100-SXM", software="kernel=fa3"))
    x = x.where(np.asarray(np.isin(x.head_dim, (64, 128, 256))))
    serving = fit_calls(device, x, "forward", wrapper=True, sustained=1.0)
    _print(report, "flash3 forward, serving sweep, for comparison", serving)


def _flash2_hopper(device: Subject, table: list[_tables.Row], report: Report) -> list[AttentionCurve]:
    """FA2 on Hopper: forward from figures; backward measured at head_dim 64, others by the forward's ratio."""
    x = calls(named(table, "fwd", "H100", software="FA2", source="FA3 paper"))
    forward = fit_calls(device, x, "forward", sustained=1.0)
    _print(report, "flash2 forward", forward)
    rows = [*named(table, "bwd", "H100", software="FA2"), *named(table, "bwd", "H100", software="ABI-stable")]
    y = calls(rows)
    backward = fit_calls(device, y, "backward", sustained=1.0)
    _print(report, "flash2 backward", backward)
    v, f = backward.values, forward.values
    # measured without a mask; the causal value is below it by the forward's own factor
    causal = v["e64"] / f["noncausal"]
    values = v | {f"e{d}": causal * f[f"e{d}"] / f["e64"] for d in (64, 128, 256)} | {"noncausal": f["noncausal"]}
    report.borrowed.append("flash2 backward: head_dim 128 and 256, and the mask, by the forward's ratios")
    return [
        curve(("flash2",), "forward", device, f, quality(forward, x, "paper figures (2024)"), power_limited=1.0),
        curve(
            ("flash2",), "backward", device, values, quality(backward, y, "head_dim 64 without mask"), power_limited=1.0
        ),
    ]


def _triton(table: list[_tables.Row], report: Report) -> list[AttentionCurve]:
    """The Triton kernel of 2022-23, on A100, head_dim 64, causal. Other head_dims take its value."""
    a100, found = subjects()["a100-sxm"], []
    for short, direction in DIRECTIONS:
        x = calls(_tables.select(table, direction=short, source="PR 1917"))
        one = fit_calls(a100, x, direction, sustained=1.0)
        _print(report, f"flash1_triton {direction} (A100)", one)
        q = quality(one, x, "GPU inferred to be an A100; head_dim 128 assumed like 64")
        values = one.values | {"e128": one.values["e64"]}
        found.append(curve(("flash1_triton",), direction, a100, values, q, power_limited=1.0))
    return found


def _a100(device: Subject, table: list[_tables.Row], h100: Curves, report: Report) -> Curves:
    """FA2: the serving sweep forward, SimuMax's calls on A100-PCIe backward; head_dim 64 by Hopper's ratio.

    The sweep's server writes keys and values into its cache beside the kernel: 2.3 passes over them, which long calls of few
    key-value heads show apart from the kernel. What is idle at the end of a call is fitted too: two blocks share an SM forward
    and one has it backward, whose tail is half as long. The PCIe board is the same chip at the same clock, and its forward is
    within 1 % of the sweep's at equal calls. All its calls have 4,096 tokens: the ramp over length is Hopper's, of the same
    kernel (figures; 267 keys there, 297 on RTX A5000 by github.com/gpu-mode/ring-attention/issues/10).
    """
    x = calls(named(table, "fwd", "A100-SXM", software="SGLang"))
    more = {"tail": Start(1.0, 0.0, 5.0), "cache_passes": Start(2.0, 0.0, 20.0)}
    found = fit_calls(device, x, "forward", wrapper=True, sustained=1.0, more=more)
    y = calls(_tables.select(table, gpu="A100-PCIe", source="SimuMax", head_dim="128", direction="bwd"))
    ramp = _pick(h100, "flash2", "backward").s0
    behind = fit_calls(
        device, y, "backward", wrapper=True, sustained=1.0, s0=ramp, tail=found.values["tail"] / 2, noncausal=1.0
    )
    small = _pick(h100, "flash2", "forward").e_max
    fits = {"forward": (x, found), "backward": (y, behind)}
    curves: list[AttentionCurve] = []
    for _, direction in DIRECTIONS:
        taken, one = fits[direction]
        _print(report, f"flash2 {direction}", one)
        hopper = _pick(h100, "flash2", direction)
        values = one.values | {
            "e64": one.values["e128"] * small["64"] / small["128"],
            "noncausal": hopper.noncausal,
            "t0": hopper.t0_s * 1e6,
        }
        q = quality(one, taken)
        if direction == "backward":
            note = "A100-PCIe at 4,096 tokens; ramp over length as on h100-sxm"
            q = q.model_copy(
                update={"basis": "borrowed", "measured_range": hopper.quality.measured_range, "notes": (note,)}
            )
        curves.append(curve(("flash2", "cudnn"), direction, device, values, q, power_limited=1.0))
    report.borrowed += ["h100-sxm: flash2 head_dim 64 and mask ratios, and the ramp of its backward"]
    return (*curves, *_triton(table, report))


def _b200(device: Subject, table: list[_tables.Row], h100: Curves, report: Report) -> Curves:
    """Fits to SimuMax's loops of cuDNN's kernel; the ramp over length and head_dim 64 from the serving sweep.

    Calls above 5 ms ran at the power cap (`sustained`, which tells the clock there: b200_loops): curves are of bursts.
    """
    serving = _b200_sweep(device, table)
    _print(report, "serving forward", serving)
    curves = []
    for direction, (x, found) in b200_loops(device, table).items():
        _print(report, f"cudnn {direction}", found)
        small = serving.values["e64"] / serving.values["e128"]
        relative = _pick(h100, "flash3", direction)
        own = {"e64": found.values["e128"] * small, "noncausal": relative.noncausal, "t0": relative.t0_s * 1e6}
        values = found.values | own | {"sustained": 1.0}
        note = (
            "loops of 4096 to 131072 tokens; ramp over length and head_dim 64 from a serving sweep; mask as on h100-sxm"
        )
        curves.append(curve(("cudnn", "flash3"), direction, device, values, quality(found, x, note), power_limited=1.0))
    return tuple(curves)


def _b200_sweep(device: Subject, table: list[_tables.Row]) -> Fitted:
    """Bursts of a serving sweep, whose wrapper's floor is free."""
    sweep = calls(named(table, "fwd", "B200", software="trtllm_mha"))
    sweep = sweep.where(np.asarray(np.isin(sweep.head_dim, (64, 128, 256))))
    return fit_calls(device, sweep, "forward", wrapper=True, sustained=1.0)


def b200_loops(device: Subject, table: list[_tables.Row]) -> dict[Direction, tuple[Calls, Fitted]]:
    """SimuMax's loops of calls by direction, and their fit: head_dim 128, and 192 with values of 128 (latent attention)."""
    s0 = _b200_sweep(device, table).values["s0"]
    found: dict[Direction, tuple[Calls, Fitted]] = {}
    for short, direction in DIRECTIONS:
        x = calls(named(table, short, "B200", source="SimuMax"))
        found[direction] = x, fit_calls(device, x, direction, wrapper=True, s0=s0)
    return found


def _beside_b200(device: Subject, b200: Subject, curves: Curves, table: list[_tables.Row], report: Report) -> Curves:
    """The B200's curves, as much faster as the serving sweep ran the same calls here.

    GB300 doubled the exponentials, which limit the forward pass; its backward takes the GB200's ratio.
    """
    found = []
    for curve_, gpu in zip(curves, (device.gpu, "GB200"), strict=True):
        speed = {d: _faster(table, b200.gpu, gpu, d) for d in ("64", "128")}
        scale = {d: ratio * b200.peak / device.peak for d, ratio in speed.items()}
        e_max = {d: rounded(e * scale.get(d, scale["128"])) for d, e in curve_.e_max.items()}
        text = ", ".join(f"{ratio:.3f} at head_dim {d}" for d, ratio in speed.items())
        why = f"the B200's, times what the serving sweep's calls on {gpu} gain: {text}"
        note = Quality(basis="borrowed", measured_range=curve_.quality.measured_range, notes=(why,))
        fields = curve_.model_dump() | {"e_max": e_max, "quality": note, "peak_flop_per_s": device.peak}
        found.append(AttentionCurve.model_validate(fields))
        report.lines.append(f"attention {curve_.direction}: {why}")
    report.borrowed.append("b200-sxm: attention, by the ratios of a serving sweep")
    return tuple(found)


def _faster(table: list[_tables.Row], gpu: str, other: str, head_dim: str) -> float:
    """Median speed of `other` over `gpu` in prefill calls that both ran."""
    times = []
    for name in (gpu, other):
        rows = _tables.select(table, gpu=name, software="trtllm", direction="fwd")
        rows = [
            r for r in rows if r["head_dim"] == head_dim and r["seq_q"] == r["seq_kv"] and float(r["seq_q"]) >= 1024
        ]
        times.append(
            {tuple(r[c] for c in ("batch", "seq_q", "n_heads", "n_kv_heads")): float(r["time_us"]) for r in rows}
        )
    mine, theirs = times
    return float(np.median([mine[call] / theirs[call] for call in mine.keys() & theirs.keys()]))
