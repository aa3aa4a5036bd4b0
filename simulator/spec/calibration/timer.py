"""From a kernel to seconds, for one device and attention backend; each distinct kernel is computed once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from simulator.base.errors import CalibrationError, Fault
from simulator.base.kernels import PARENT, Attention, Dtype, Gemm, Kernel, Scan, Stated, Stream, StreamOp
from simulator.spec.calibration.curve_set import CurveSet
from simulator.spec.calibration.curves import (
    SMALL_TILE_ROWS,
    TILE_ROWS,
    AttentionCurve,
    GemmCurve,
    StreamCurve,
    curve_dtype,
)
from simulator.spec.calibration.datasheet import fed
from simulator.spec.calibration.narrow import BLOCKS, MX_BLOCKS, SPLIT, fp4_fraction
from simulator.spec.calibration.scan import FRACTION, SPEED, tiled_attention_curve
from simulator.spec.cluster.device import Device
from simulator.spec.software.stack import AttentionBackend

_MOST_KERNELS: Final = 50_000  # remembered


class Timer:
    """Seconds of kernels on one device. Bound once: a lookup is a dictionary access, a miss a few microseconds.

    use: mean use of the tensor cores over the step (`Power`).
    """

    def __init__(
        self, calibration: CurveSet, device: Device, backend: AttentionBackend | None = None, use: float = 1.0
    ) -> None:
        self.calibration, self.device, self.backend = calibration, device, backend
        power = calibration.power
        self._power, self._clock = (power.factor(device, use), power.clock(device, use)) if power else (1.0, 1.0)
        self._memo: dict[Kernel, float] = {}
        self._gemm_rates: dict[str, tuple[GemmCurve, float]] = {}
        self._simt: GemmCurve | None = None
        self._streams: dict[str, StreamCurve] = {curve.op: curve for curve in calibration.streams}

    def kernel_s(self, kernel: Kernel) -> float:
        """Seconds of one kernel. Raises CalibrationError where a number is missing."""
        seconds = self._memo.get(kernel)
        if seconds is None:
            if len(self._memo) >= _MOST_KERNELS:
                self._memo.clear()
            seconds = self._memo[kernel] = self._compute(kernel)
        return seconds

    def kernels_s(self, kernels: Iterable[Kernel]) -> float:
        """Seconds of kernels run one after another."""
        return sum(map(self.kernel_s, kernels), 0.0)

    def tensor_use(self, kernel: Kernel) -> float:
        """Use of the tensor cores by one kernel: 1 for products; attention and scans by their speed; none for streams."""
        if isinstance(kernel, Stated) and not kernel.flop:
            return 0.0
        if not isinstance(kernel, Attention | Scan | Stated):
            return 1.0 if isinstance(kernel, Gemm) else 0.0
        _, flop_per_s = self._gemm_rate(kernel.dtype)
        seconds = self.kernel_s(kernel)
        return min(1.0, kernel.flop / (flop_per_s * seconds)) if seconds else 0.0

    def _compute(self, kernel: Kernel) -> float:
        speed = self.calibration.speed
        if isinstance(kernel, Stream):
            if kernel.transposed_bytes and self.device.architecture == "blackwell":  # its tensor cores take any layout
                if kernel.transposed_bytes == kernel.write_bytes:
                    return 0.0
                kernel = replace(kernel, write_bytes=kernel.write_bytes - kernel.transposed_bytes, transposed_bytes=0)
            sms = self.device.num_sms * self._clock
            seconds = self._stream(kernel.op).seconds(kernel, self.device.memory_bytes_per_s, sms)
            return seconds / speed.get("elementwise", 1)
        if isinstance(kernel, Gemm):
            return self._gemm_s(kernel) / speed.get("gemm", 1)
        if isinstance(kernel, Scan):
            return self._scan_s(kernel) / speed.get("scan", 1)
        if isinstance(kernel, Stated):
            return kernel.seconds or self._stated_s(kernel)
        return self._attention_s(kernel) / speed.get("attention", 1)

    def _stream(self, op: StreamOp) -> StreamCurve:
        curve = self._streams.get(op) or self._streams.get(PARENT.get(op, op))
        if curve is None:
            raise self._missing(f"streams: no curve for {op}", "measure it: a size sweep of that operation")
        return curve

    def _gemm_s(self, kernel: Gemm) -> float:
        if kernel.flop == 0:
            return 0.0
        if kernel.dtype == "tf32" and not self.device.peak("tf32"):  # leave to round is none to have such units
            kernel = replace(kernel, dtype="fp32")
        rate = self._gemm_rates.get(kernel.dtype)
        if rate is None:
            rate = self._gemm_rates[kernel.dtype] = self._gemm_rate(kernel.dtype)
        curve, flop_per_s = rate
        if kernel.dtype == "fp32" and self.calibration.kind != "ideal" and curve.quality.basis == "borrowed":
            curve = self._on_cuda_cores(curve)
        if self.device.architecture == "hopper" and self.calibration.kind != "ideal":
            flop_per_s *= BLOCKS if kernel.by_blocks else SPLIT if kernel.split_accumulator else 1
        elif kernel.by_blocks and self.calibration.kind != "ideal":
            flop_per_s *= MX_BLOCKS
        rows = TILE_ROWS if self.device.architecture in ("hopper", "blackwell") else SMALL_TILE_ROWS
        return curve.seconds(kernel, flop_per_s, self.device.memory_bytes_per_s, self.device.num_sms, rows)

    def _on_cuda_cores(self, curve: GemmCurve) -> GemmCurve:
        """A curve of tensor cores for products that run beside them.

        The beginning of a tile takes as long, and so as many fewer steps of k as these are slower; what small tiles read more
        often holds them up by as much less; cuBLAS's SIMT kernels have tiles of 32 columns (CUTLASS, simt 128x32).
        """
        if self._simt is None:
            wide = max(self.device.peak("bf16"), self.device.peak("fp16"))
            slower = min(1.0, self.peak("fp32") / wide) if wide else 1.0
            tiles = (*curve.tiles, (128, 32), (32, 128)) if curve.tiles else ()
            changed = {"k_ramp": curve.k_ramp * slower, "tile_pen": curve.tile_pen * slower, "tiles": tiles}
            self._simt = curve.model_copy(update=changed)
        return self._simt

    def _scan_s(self, kernel: Scan) -> float:
        """Its bytes' time plus its products' (`calibration.scan`); on an ideal machine the longer of the two."""
        moved = Stream(op="elementwise", read_bytes=kernel.read_bytes, write_bytes=kernel.write_bytes)
        sms = self.device.num_sms * self._clock
        memory_s = self._stream("elementwise").seconds(moved, self.device.memory_bytes_per_s, sms)
        products_s = kernel.flop / self._scan_flop_per_s(kernel)
        return max(products_s, memory_s) if self.calibration.kind == "ideal" else products_s + memory_s

    def _stated_s(self, kernel: Stated) -> float:
        """As fast as large products, or as a stream over memory: what takes longer."""
        moved = Stream(op="elementwise", read_bytes=kernel.num_bytes, write_bytes=0, launches=kernel.launches)
        products_s = kernel.flop / self._gemm_rate(kernel.dtype)[1] if kernel.flop else 0.0
        return max(products_s, self._compute(moved))

    def _scan_flop_per_s(self, kernel: Scan) -> float:
        dtype: Dtype = "tf32" if kernel.dtype == "fp32" and self.device.peak("tf32") else kernel.dtype
        _, products = self._gemm_rate(dtype)
        if self.calibration.kind == "ideal":
            return products
        curve = tiled_attention_curve(self.calibration.attention, kernel)
        if curve is None:
            return FRACTION * products
        fraction = SPEED * curve.peak_fraction(kernel.head_dim) * curve.sustained
        return fraction * self._attention_peak(curve, self.peak(dtype))

    def _gemm_rate(self, dtype: str) -> tuple[GemmCurve, float]:
        curves = self.calibration.gemms
        peak = self.peak(dtype)
        source = curve_dtype(dtype, frozenset(curves))  # type: ignore[arg-type]
        if source is None:
            raise self._missing(f"gemms: no curve for {dtype}", "measure it: a sweep of matrix products")
        curve = curves[source]  # type: ignore[index]
        curve = curve if self.calibration.kind == "ideal" else fed(curve, self.device)
        if source == dtype or {source, dtype} == {"bf16", "fp16"}:
            return curve, curve.sustained_flop_per_s(peak, self._power)
        # another dtype's curve: its fractions, of this dtype's peak
        own = self.device.peak(source) or curve.peak_flop_per_s
        narrow = dtype == "fp4" and self.calibration.kind != "ideal"
        narrower = fp4_fraction(peak / (self.device.peak("fp8") or own)) if narrow else 1.0
        return curve, curve.sustained_flop_per_s(own, self._power) * (peak / own) * narrower

    def peak(self, dtype: str) -> float:
        """Dense peak of `dtype`; a device without such units is an error that names what it has."""
        peak = self.device.peak(dtype)
        if peak <= 0:
            has = [d for d in ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4") if self.device.peak(d) > 0]
            raise self._missing(f"{self.device.name} has no {dtype} matrix units", f"one of {', '.join(has)}")
        return peak

    def _attention_s(self, kernel: Attention) -> float:
        if kernel.flop == 0:
            return 0.0
        # fp8 training keeps attention in bf16; fp32 attention runs on tf32 units where there are any
        dtype = {"fp8": "bf16", "fp4": "bf16", "fp32": "tf32" if self.device.peak("tf32") else "fp32"}.get(
            kernel.dtype, kernel.dtype
        )
        peak = self.peak(dtype)
        given = self._given_efficiency(kernel)
        if given is not None:
            return kernel.flop / (peak * given)
        curve = self.calibration.attention_curve(kernel.direction, self.backend)
        speed = self._attention_peak(curve, peak)
        return curve.seconds(kernel, speed, self.device.memory_bytes_per_s, self.device.num_sms)

    def _attention_peak(self, curve: AttentionCurve, peak: float) -> float:
        """The peak to which the curve's fractions refer, for a dtype of this `peak`, at the power cap's clock."""
        reference = self.device.peak("bf16") or self.device.peak("fp16") or peak
        limit = curve.peak_flop_per_s * self._clock**curve.power_limited
        return float(min(reference, limit)) * (peak / reference)

    def _given_efficiency(self, kernel: Attention) -> float | None:
        """The stack's own fraction of peak for its kernel on this architecture, if it states one."""
        backend = self.backend
        if backend is None:
            return None
        table = backend.forward_efficiency if kernel.direction == "forward" else backend.backward_efficiency
        given = table.get(self.device.architecture)
        if given is None and backend.kernel == "math":
            raise self._missing(
                f"attention kernel math has no {kernel.direction} speed on {self.device.architecture}",
                "math attention is two products and a softmax, not one fused kernel",
            )
        return given

    def _missing(self, problem: str, remedy: str) -> CalibrationError:
        return CalibrationError(Fault(place=self.calibration.name, problem=problem, remedy=remedy))
