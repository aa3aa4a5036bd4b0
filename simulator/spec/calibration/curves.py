"""Closed forms of kernel time: what a shape costs on a device. The shape is physics, the coefficients are data.

Legend: m, n, k of a product; F its FLOP; w tiles over SMs (waves); s keys a query sees; e a fraction of peak.
Every function here is pure float arithmetic: one kernel takes a few microseconds, and a plan has a hundred.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from simulator.base.kernels import DTYPE_BYTES, Attention, Direction, Dtype, Gemm, Layout, Stream, StreamOp
from simulator.base.schema import Strict
from simulator.base.units import Share
from simulator.spec.cluster.device import Device

Basis = Literal["measured", "borrowed", "prior", "definition"]
MAX_SPLIT_K = 8
# Rows that a product's matrix instructions take, whatever there are: 64 on Hopper and Blackwell (PTX ISA, wgmma.m64nNk16 and
# tcgen05.mma), 16 elsewhere (mma.m16n8k16; AMD's v_mfma_f32_16x16x16), and what one such tile reaches of the speed of large products.
# H20 has little of it beside its memory: 32 billion weights take it 48 ms in 16 bits and 22 ms in fp8 (Qwen3's speed benchmark,
# the two rows that sglang-2025 names as its calibration: 0.74 takes a tenth from the first and gives it to the second).
TILE_ROWS, SMALL_TILE_ROWS, TILE_SHARE = 64, 16, 0.74
QUERY_TILE = 128  # rows of Q one thread block of a flash kernel owns


class Quality(Strict):
    """How far a curve may be trusted.

    basis: measured on this device; borrowed from a relative; a prior from documents; or true by definition.
    p50, p95: of |ln(predicted / measured)| on shapes that the fit never saw (of the fit's own where `held_out` is 0).
    standard_errors: of the fitted coefficients. measured_range: shape variable -> (smallest, largest).
    """

    basis: Basis
    num_samples: int = Field(ge=0, default=0)
    held_out: int = Field(ge=0, default=0)
    p50: float | None = Field(ge=0, default=None)
    p95: float | None = Field(ge=0, default=None)
    standard_errors: dict[str, NonNegativeFloat] = {}
    measured_range: dict[str, tuple[float, float]] = {}
    notes: tuple[str, ...] = ()

    def outside(self, **values: float) -> str | None:
        """The first variable that lies outside the measured range, as a sentence; None if all lie inside."""
        for name, value in values.items():
            low, high = self.measured_range.get(name, (value, value))
            if not low <= value <= high:
                return f"{name} = {value:.6g} outside the measured {low:.6g} to {high:.6g}"
        return None


class Power(Strict):
    """Speed under the board's power cap, which limits the mean of a step: kernels that draw less leave more to the rest.

    The power of a kernel at a given clock grows with its use of the tensor cores, from memory_draw (none) to 1 (a loop of
    products). A step with a mean use p draws p + memory_draw · (1 - p), so it has x = cap / reference_w / that to spend.
    Products reach e_sust · peak · x ** exponent; SMs run at min(1, loop_clock · x ** clock_exponent) of their highest clock.

    memory_draw: of kernels that stream over memory; 1: no difference is known. loop_clock: in a loop of products.
    """

    reference_w: float = Field(gt=0)
    exponent: float = Field(ge=0, le=1)
    loop_clock: float = Field(gt=0, le=1, default=1.0)
    clock_exponent: float = Field(ge=0, le=4, default=0.0)
    memory_draw: float = Field(gt=0, le=1, default=1.0)
    source: str = ""

    def factor(self, device: Device, use: float = 1.0) -> float:
        """Speed of products in a step with that use of tensor cores, over sustained speed at the reference."""
        return float(self._budget(device, use) ** self.exponent)

    def clock(self, device: Device, use: float = 1.0) -> float:
        """SM clock in such a step over the highest clock."""
        return float(min(1.0, self.loop_clock * self._budget(device, use) ** self.clock_exponent))

    def _budget(self, device: Device, use: float) -> float:
        return device.power_w / self.reference_w / (use + self.memory_draw * (1 - use))


class FewRows(Strict):
    """Products of at most `rows` rows, which read a matrix of weights: bytes / (bandwidth · bw_frac) + t0_s.

    Kernels compute a tile of rows whatever there are, so products only count where those take longer.
    """

    rows: int = Field(ge=1)
    bw_frac: float = Field(gt=0, le=1)
    t0_s: float = Field(ge=0)
    quality: Quality

    def seconds(self, kernel: Gemm, flop_per_s: float, bytes_per_s: float, tile_rows: int) -> float:
        """Time at a compute speed of `flop_per_s` and memory of `bytes_per_s`, in tiles of so many rows."""
        compute = 2.0 * max(kernel.m, tile_rows) * kernel.n * kernel.k * kernel.batch / (flop_per_s * TILE_SHARE)
        return max(compute, kernel.num_bytes / (bytes_per_s * self.bw_frac)) + self.t0_s


class GemmCurve(Strict):
    """Time of C[m,n] = A[m,k] B[k,n] in one dtype.

    tiles T = ⌈m/tm⌉⌈n/tn⌉ · batch, waves w = T / SMs, w' = (1-α) w + α ⌈w⌉ (below one wave k is split, at most 8 ways);
    t_c = min over tiles of w' · 2 tm tn (k + k_ramp · split) · SMs / (peak · e) · (1 + 0.1 tile_pen (32768/(tm tn) - 1));
    t_m = bytes / (bandwidth · bw_frac); t = (t_c^p + t_m^p)^(1/p) + t0_s (p = null: the larger of the two).
    Burst speed is e(F) = e_sust + (e_burst - e_sust) / (1 + F / f0_flop); inside a training step the board sits at its
    power cap and e = e_sust. Form and priors: published kernel sweeps, see docs/background/kernels.md.

    peak_flop_per_s: the peak that e is a fraction of. layout, accumulate_fp32: factors on t_c.
    misaligned: factor on t_c where a row stride is not a multiple of 16 bytes; the key is the largest power of two
    (1, 2, 4 elements) that divides it. No tiles: t_c = F / (peak · e). few_rows: of products that only read weights.
    """

    peak_flop_per_s: float = Field(gt=0)
    e_burst: float = Field(gt=0, le=1)
    e_sust: float = Field(gt=0, le=1)
    f0_flop: float = Field(gt=0)
    bw_frac: float = Field(gt=0, le=1)
    t0_s: float = Field(ge=0)
    k_ramp: float = Field(ge=0)
    p: float | None = Field(ge=1, default=None)
    alpha: float = Field(ge=0, le=1)
    tile_pen: float = Field(ge=0)
    tiles: tuple[tuple[int, int], ...]
    layout: dict[Layout, PositiveFloat] = {}
    accumulate_fp32: float = Field(gt=0, default=1.0)
    misaligned: dict[Literal["1", "2", "4"], PositiveFloat] = {}
    few_rows: FewRows | None = None
    quality: Quality

    @model_validator(mode="after")
    def _sustained_is_not_above_burst(self) -> Self:
        if self.e_sust > self.e_burst:
            msg = f"e_sust {self.e_sust} is above e_burst {self.e_burst}: sustained speed cannot exceed burst speed"
            raise ValueError(msg)
        return self

    def efficiency(self, flop: float) -> float:
        """Burst efficiency of one isolated call."""
        return self.e_sust + (self.e_burst - self.e_sust) / (1 + flop / self.f0_flop)

    def sustained_flop_per_s(self, peak: float, power: float) -> float:
        """Speed of large products inside a step, on a device with this `peak` whose cap gives the factor `power`.

        The cap limits watts, not clocks: a part with a lower peak but the same cap keeps the absolute speed, up to
        the burst fraction of its own peak.
        """
        return min(self.e_burst * peak, self.e_sust * self.peak_flop_per_s * power)

    def slowdown(self, kernel: Gemm) -> float:
        """Factor on the compute term for layout, fp32 accumulation and misaligned rows."""
        factor = self.layout.get(kernel.layout, 1.0) * (self.accumulate_fp32 if kernel.accumulate_fp32 else 1.0)
        strides = (kernel.m, kernel.n) if kernel.layout == "nt" else (kernel.n, kernel.k)
        aligned = 32 if kernel.dtype == "fp4" else 16 // DTYPE_BYTES[kernel.dtype]
        worst = min(s & -s for s in strides)
        if worst >= aligned or not self.misaligned:
            return factor
        return factor * self.misaligned.get("1" if worst == 1 else "2" if worst == 2 else "4", 1.0)

    def compute_s(self, m: int, n: int, k: int, batch: int, flop_per_s: float, num_sms: int) -> float:
        """t_c of the best tile, before `slowdown`."""
        if not self.tiles:
            return 2.0 * m * n * k * batch / flop_per_s
        best = float("inf")
        alpha, ramp, pen = self.alpha, self.k_ramp, 0.1 * self.tile_pen
        for tm, tn in self.tiles:
            waves = (-(-m // tm)) * (-(-n // tn)) * batch / num_sms
            split = 1
            if waves >= 1:
                waves = (1 - alpha) * waves + alpha * ceil(waves)
            else:
                split = min(MAX_SPLIT_K, int(1 / waves))
                waves = 1 / split
            area = tm * tn
            cost = waves * area * (k + ramp * split) * (1 + pen * (32768 / area - 1))
            best = min(best, cost)
        return 2.0 * best * num_sms / flop_per_s

    def seconds(
        self, kernel: Gemm, flop_per_s: float, bytes_per_s: float, num_sms: int, tile_rows: int = TILE_ROWS
    ) -> float:
        """Time of one product at `flop_per_s` (e · peak) and `bytes_per_s`. tile_rows: of the device's widest instructions."""
        few = self.few_rows
        if few is not None and kernel.m <= few.rows and kernel.layout == "tn" and not kernel.accumulate_fp32:
            return few.seconds(kernel, flop_per_s, bytes_per_s, min(tile_rows, kernel.tile_rows))
        compute = self.compute_s(kernel.m, kernel.n, kernel.k, kernel.batch, flop_per_s, num_sms)
        return (
            blend(compute * self.slowdown(kernel), kernel.num_bytes / (bytes_per_s * self.bw_frac), self.p) + self.t0_s
        )


class AttentionCurve(Strict):
    """Time of fused attention in one direction.

    e = e_max(head_dim) · s / (s + s0) · sustained, s = keys that a query sees on average (half of them under a causal
    mask); without that mask times `noncausal`;
    tiles of 128 query rows count half by whole waves of SMs: w' = (w + ⌈w⌉)/2, or w' = w + tail_waves where that was measured;
    t_c = F / (peak · e) · w'/w;
    t_m = bytes / (bandwidth · bw_frac); t = (t_c^p + t_m^p)^(1/p) + t0_s.

    kernels: the backends this curve stands for. e_max: head_dim -> fraction of peak, linear between, flat outside.
    cache_bw_frac: bw_frac of decoding, one query a sequence over cached keys and values; None: the same.
    power_limited: how much of what the power cap takes off the SMs' clock applies (0 none, 1 all).
    """

    kernels: tuple[str, ...] = Field(min_length=1)
    direction: Direction
    peak_flop_per_s: float = Field(gt=0)
    e_max: dict[str, Share] = Field(min_length=1)
    s0: float = Field(ge=0)
    t0_s: float = Field(ge=0)
    noncausal: float = Field(gt=0, default=1.0)
    sustained: float = Field(gt=0, le=1, default=1.0)
    power_limited: float = Field(ge=0, le=1, default=1.0)
    bw_frac: float = Field(gt=0, le=1, default=0.8)
    cache_bw_frac: float | None = Field(gt=0, le=1, default=None)
    p: float | None = Field(ge=1, default=2.5)
    half_waves: bool = True
    tail_waves: float | None = Field(ge=0, default=None)
    quality: Quality

    @model_validator(mode="after")
    def _head_dims_are_integers(self) -> Self:
        wrong = [k for k in self.e_max if not k.isdecimal()]
        if wrong:
            raise ValueError(f"e_max: head_dim {', '.join(map(repr, wrong))} is not a whole number")
        return self

    def peak_fraction(self, head_dim: int) -> float:
        """e_max at `head_dim`: linear between measured head_dims, flat outside."""
        points = sorted((int(k), v) for k, v in self.e_max.items())
        if head_dim <= points[0][0]:
            return points[0][1]
        for (x0, y0), (x1, y1) in pairwise(points):
            if head_dim <= x1:
                return y0 + (y1 - y0) * (head_dim - x0) / (x1 - x0)
        return points[-1][1]

    def seconds(self, kernel: Attention, peak: float, bytes_per_s: float, num_sms: int) -> float:
        """Time at a peak of `peak` FLOP/s (the clock already in it) and memory of `bytes_per_s`."""
        keys = kernel.seq_kv / 2 if kernel.causal else kernel.seq_kv
        e = self.peak_fraction(kernel.head_dim) * keys / (keys + self.s0) * self.sustained
        if not kernel.causal:
            e *= self.noncausal
        compute = kernel.flop / (peak * e)
        if self.half_waves and kernel.seq_q > 1:  # decoding splits the keys over what SMs there are
            waves = kernel.batch * kernel.num_heads * -(-kernel.seq_q // QUERY_TILE) / num_sms
            compute *= 0.5 + 0.5 * ceil(waves) / waves if self.tail_waves is None else 1 + self.tail_waves / waves
        share = self.cache_bw_frac if self.cache_bw_frac and kernel.seq_q == 1 else self.bw_frac
        return blend(compute, kernel.num_bytes / (bytes_per_s * share), self.p) + self.t0_s


class StreamCurve(Strict):
    """Time of a kernel that streams over memory: t0_s a launch, plus the longer of what memory and SMs need.

    Memory: bytes / (bandwidth · bw_frac). SMs, for kernels that work element by element: numel / (elements_per_sm_s · SMs
    · clock).

    elements_per_sm_s: of one SM at its highest clock; None where memory alone limits.
    """

    op: StreamOp
    bw_frac: float = Field(gt=0, le=1)
    elements_per_sm_s: float | None = Field(gt=0, default=None)
    t0_s: float = Field(ge=0)
    quality: Quality

    def seconds(self, kernel: Stream, bytes_per_s: float, sms: float) -> float:
        """Seconds with memory of `bytes_per_s` and `sms` SMs at their highest clock."""
        moving = kernel.num_bytes / (bytes_per_s * self.bw_frac)
        if self.elements_per_sm_s is not None:
            moving = max(moving, kernel.numel / (self.elements_per_sm_s * sms))
        return kernel.launches * self.t0_s + moving


def blend(a: float, b: float, p: float | None) -> float:
    """Smooth maximum (a^p + b^p)^(1/p); the maximum itself if p is None. Scaled so that nothing under- or overflows."""
    low, high = (a, b) if a < b else (b, a)
    if p is None or high == 0:
        return high
    return float(high * (1 + (low / high) ** p) ** (1 / p))


def curve_dtype(dtype: Dtype, available: frozenset[str]) -> str | None:
    """Which dtype's curve serves `dtype`: its own, bf16's for fp16 and the other way round, fp8's for fp4, else bf16 by peak ratio."""
    for candidate in (dtype, {"fp16": "bf16", "bf16": "fp16", "fp4": "fp8"}.get(dtype, "bf16"), "bf16", "fp16"):
        if candidate in available:
            return candidate
    return None
