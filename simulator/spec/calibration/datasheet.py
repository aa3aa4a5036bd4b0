"""Calibrations made without a measurement: the ideal machine, and typical fractions by architecture.

The fractions are medians of published sweeps of large shapes (docs/background/kernels.md names them); a device's own
deviate by 10-20 %, which is what its sigma says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

from simulator.base.kernels import PARENT, Direction, StreamOp
from simulator.base.presets import facts
from simulator.spec.calibration.curves import AttentionCurve, FewRows, GemmCurve, Power, Quality, StreamCurve
from simulator.spec.calibration.records import Interference, MemoryOverheads, Overheads, Provenance
from simulator.spec.cluster.device import Device

TILES = ((256, 128), (128, 256), (128, 128), (64, 256), (128, 64), (64, 64), (16, 64))
STREAM_OPS: tuple[StreamOp, ...] = get_args(StreamOp)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
FUSED = ("flash2", "flash3", "cudnn")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical fractions of one architecture; e of peak FLOP/s, bandwidth of peak bytes/s."""

    e_burst: float
    e_sust: float
    k_ramp: float
    alpha: float
    gemm_t0_s: float
    attention_forward: float
    attention_backward: float
    stream: float
    stream_slow: float  # norms backward, reductions, softmax, optimizer
    launch_s: float
    channels: int
    misaligned: float
    sm_hz: float | None = None  # highest clock of an SM with 128 lanes; None: memory alone limits
    held_w: float | None = (
        None  # power of the board that products and attention were measured on, which their speed hangs on
    )
    fp8: float = 1.0  # fraction of peak of fp8 products over that of 16-bit ones


TYPICAL: dict[str, Typical] = {name: Typical(**row) for name, row in facts(__file__, "typical").items()}
# Elements an SM handles in a clock where torch works on one at a time: kernels inside steps of one H200
# (docs/background/kernels.md). SMs of 64 lanes count half.
ELEMENTS_PER_CLOCK: dict[StreamOp, float] = {"strided": 1.2, "join": 0.9, "widen": 1.3}
FEW_ROWS = 0.82  # of bandwidth by products of 1 to 64 rows: 0.74 to 0.86 on six devices (experiments/fit_few_rows.py)
# Boards with less than this of tensor-core peak a watt are not held by their power: an A40 (0.5e12) and an RTX PRO 6000 (0.78e12)
# sustain 0.76 of peak in large products, an L40S (1.03e12) 0.52 (medians of the same sweeps)
_UNCAPPED_FLOP_PER_J, _UNCAPPED = 0.8e12, 0.76
# GeForce boards have half the tensor-core rate where sums are fp32: twice that of fp32 products, not four times. What feeds
# these cores then keeps up: cuBLAS reaches 105 to 115 TFLOP/s of 119.5 on an L20 (github:DefTruth/CUDA-Learn-Notes, hgemm)
_HALF_RATE, _OF_HALF_RATE = 2.1, 0.92
# What an SM of Hopper does at full rate (H100 SXM). H20's does a quarter: products reach 142 of 148 TFLOP/s, 72 of 74 in tf32
# (github:zzc0721/torch-performance-test-data issue 77)
_FULL_RATE = 989e12 / 132
# AMD's best products on the same chip at 750 and at 1,000 W: 654 and 794 TFLOP/s in fp16, 708 and 843 in bf16, 1,273 and 1,519 in
# fp8 (measuring-max-achievable-flops-part2): the ratio of the powers to the 0.61, 0.61 and 0.67
_OF_POWER, _MOST = 0.61, 0.9
_SLOW: tuple[StreamOp, ...] = ("norm_backward", "softmax", "reduce", "embedding_backward", "optimizer")
_SOURCE = "typical of the architecture, published sweeps"


def ideal() -> dict[str, Any]:
    """Fields of a machine without losses. Reference peaks are out of reach, so that no device is limited by them."""
    exact = Quality(basis="definition")
    return {
        "name": "ideal",
        "kind": "ideal",
        "gemms": {"bf16": _ideal_gemm(exact), "fp8": _ideal_gemm(exact)},
        "attention": tuple(_ideal_attention(d, exact) for d in DIRECTIONS),
        "streams": tuple(StreamCurve(op=op, bw_frac=1.0, t0_s=0.0, quality=exact) for op in STREAM_OPS),
        "overheads": Overheads(launch_s=0.0, host_op_s=0.0),
        "interference": Interference(sms_per_channel=0.0, num_channels=0, hbm_weight=0.0),
        "memory": MemoryOverheads(context_bytes=0, nccl_communicator_bytes=0, cublas_workspace_bytes=0),
        "uncertainty": {"gemm": 0.0, "attention": 0.0, "elementwise": 0.0, "communication": 0.0},
        "provenance": Provenance(machine="none: efficiency 1, latency 0"),
    }


def _ideal_gemm(quality: Quality) -> GemmCurve:
    return GemmCurve(
        peak_flop_per_s=1e30,
        e_burst=1.0,
        e_sust=1.0,
        f0_flop=1.0,
        bw_frac=1.0,
        t0_s=0.0,
        k_ramp=0.0,
        alpha=0.0,
        tile_pen=0.0,
        tiles=(),
        quality=quality,
    )


def _ideal_attention(direction: Direction, quality: Quality) -> AttentionCurve:
    return AttentionCurve(
        kernels=FUSED,
        direction=direction,
        peak_flop_per_s=1e30,
        e_max={"128": 1.0},
        s0=0.0,
        t0_s=0.0,
        bw_frac=1.0,
        p=None,
        half_waves=False,
        quality=quality,
    )


def datasheet(device: Device) -> dict[str, Any]:
    """Fields of a calibration from the device's data sheet and the typical fractions of its architecture."""
    t = _held(_uncapped(TYPICAL[device.architecture], device), device)
    prior = Quality(basis="prior", notes=(_SOURCE,))
    dtypes = [d for d in ("bf16", "fp16", "tf32", "fp32", "fp8") if device.peak(d) > 0]
    return {
        "name": f"datasheet:{device.name}",
        "kind": "datasheet",
        "power": Power(reference_w=device.power_w, exponent=0.75, source="its own data sheet"),
        "gemms": {d: _typical_gemm(_of_dtype(t, d), device.peak(d), prior) for d in dtypes},
        "attention": tuple(_typical_attention(t, d, device, prior) for d in DIRECTIONS),
        "streams": tuple(_typical_stream(t, op, prior) for op in STREAM_OPS if t.sm_hz or op not in PARENT),
        "overheads": Overheads(
            launch_s=t.launch_s, host_op_s=9e-6, sources={"launch_s": _SOURCE, "host_op_s": _SOURCE}
        ),
        "interference": Interference(num_channels=t.channels, hbm_weight=0.5, sources={"all": _SOURCE}),
        "memory": MemoryOverheads(
            context_bytes=500 * MIB,
            nccl_communicator_bytes=200 * MIB,
            cublas_workspace_bytes=32 * MIB if device.architecture in ("hopper", "blackwell") else 8_519_680,
            sources={"all": _SOURCE},
        ),
        "uncertainty": {"gemm": 0.15, "attention": 0.25, "elementwise": 0.2, "communication": 0.25},
        "provenance": Provenance(machine=f"none: data sheet of {device.name}", notes=(_SOURCE,)),
    }


def _uncapped(t: Typical, device: Device) -> Typical:
    """The typical fractions, of a board whose power does not hold its products."""
    wide = max(device.peak("bf16"), device.peak("fp16"))
    if device.architecture not in ("ampere", "ada", "blackwell") or wide >= _UNCAPPED_FLOP_PER_J * device.power_w:
        return t
    if wide <= _HALF_RATE * device.peak("fp32"):
        return replace(t, e_burst=_OF_HALF_RATE, e_sust=_OF_HALF_RATE, k_ramp=t.k_ramp / 2)
    return replace(t, e_sust=max(t.e_sust, min(t.e_burst, _UNCAPPED)))


def fed(curve: GemmCurve, device: Device) -> GemmCurve:
    """A curve for a board of Hopper's with tensor cores of a reduced rate: what feeds them keeps up, no power holds them.

    The beginning of a tile, and what small tiles read more often, take as long as on others: as much less in their products.
    """
    slower = device.peak("bf16") / (device.num_sms * _FULL_RATE)
    if device.architecture != "hopper" or not 0 < slower < 0.5:
        return curve
    fractions = dict.fromkeys(("e_burst", "e_sust"), _OF_HALF_RATE)
    changed = {"k_ramp": curve.k_ramp * slower, "tile_pen": curve.tile_pen * slower}
    return curve.model_copy(update=fractions | changed)


def _held(t: Typical, device: Device) -> Typical:
    """The typical fractions, on a board of the same chip with another power cap."""
    if t.held_w is None:
        return t
    by = (device.power_w / t.held_w) ** _OF_POWER
    names = ("e_burst", "e_sust", "attention_forward", "attention_backward")
    return replace(t, **{name: min(_MOST, by * getattr(t, name)) for name in names})


def _of_dtype(t: Typical, dtype: str) -> Typical:
    return replace(t, e_burst=t.e_burst * t.fp8, e_sust=t.e_sust * t.fp8) if dtype == "fp8" else t


def _typical_gemm(t: Typical, peak: float, quality: Quality) -> GemmCurve:
    return GemmCurve(
        peak_flop_per_s=peak,
        e_burst=t.e_burst,
        e_sust=t.e_sust,
        f0_flop=1.5e12,
        bw_frac=0.8,
        t0_s=t.gemm_t0_s,
        k_ramp=t.k_ramp,
        p=3.0,
        alpha=t.alpha,
        tile_pen=1.0,
        tiles=TILES,
        misaligned={"1": t.misaligned, "2": t.misaligned ** (2 / 3), "4": t.misaligned ** (1 / 3)},
        few_rows=FewRows(rows=64, bw_frac=FEW_ROWS, t0_s=t.gemm_t0_s, quality=quality),
        quality=quality,
    )


def _typical_attention(t: Typical, direction: Direction, device: Device, quality: Quality) -> AttentionCurve:
    e = t.attention_forward if direction == "forward" else t.attention_backward
    return AttentionCurve(
        kernels=FUSED,
        direction=direction,
        peak_flop_per_s=device.peak("bf16") or device.peak("fp16") or device.peak("fp32"),
        e_max={"64": 0.8 * e, "128": e},
        s0=500.0,
        t0_s=10e-6,
        quality=quality,
    )


def _typical_stream(t: Typical, op: StreamOp, quality: Quality) -> StreamCurve:
    slow = t.stream_slow if op in _SLOW else t.stream
    per_clock = ELEMENTS_PER_CLOCK.get(op)
    rate = per_clock * t.sm_hz if per_clock and t.sm_hz else None
    return StreamCurve(op=op, bw_frac=slow, elements_per_sm_s=rate, t0_s=3e-6, quality=quality)
