"""Kernel curves against their limits, derived here from the roofline and the wave model, and against loops on an H200."""

from __future__ import annotations

import gzip
import json
import math
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.base.kernels import Attention, Gemm, Stream
from simulator.spec.calibration import Calibration, GemmCurve, Power, Quality, StreamCurve, calibration_names
from simulator.spec.calibration.curves import blend
from simulator.spec.cluster.device import Device, PeakFlop
from simulator.spec.software.stack import AttentionBackend
from tests.examples import examples

PEAK, BANDWIDTH, SMS = 1e15, 4e12, 128
DEVICE = Device(
    name="test",
    architecture="hopper",
    memory_bytes=80 * 2**30,
    memory_bytes_per_s=BANDWIDTH,
    peak_flop_per_s=PeakFlop(fp32=5e13, tf32=5e14, bf16=PEAK, fp16=PEAK, fp8=2e15),
    num_sms=SMS,
    power_w=700.0,
)
IDEAL = Calibration.ideal()
SIDE = st.integers(1, 2**15)
SAMPLES = Path(__file__).parents[2] / "experiments/measured/h200-2026-11-20/kernels.jsonl.gz"


def gemm(m: int, n: int, k: int, **kwargs: object) -> Gemm:
    return Gemm(m=m, n=n, k=k, dtype="bf16", **kwargs)  # type: ignore[arg-type]


def curve(**changes: object) -> GemmCurve:
    fields: dict[str, object] = {
        "peak_flop_per_s": PEAK,
        "e_burst": 0.8,
        "e_sust": 0.7,
        "f0_flop": 1e12,
        "bw_frac": 0.5,
        "t0_s": 3e-6,
        "k_ramp": 100.0,
        "alpha": 0.0,
        "tile_pen": 0.0,
        "tiles": ((128, 128),),
        "quality": Quality(basis="definition"),
    }
    return GemmCurve.model_validate(fields | changes)


def attention(seq: int, *, causal: bool, direction: str = "forward", heads: int = 32) -> Attention:
    return Attention(
        batch=1,
        seq_q=seq,
        seq_kv=seq,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        causal=causal,
        direction=direction,  # type: ignore[arg-type]
        dtype="bf16",
    )


@given(SIDE, SIDE, SIDE)
def test_an_ideal_product_is_exactly_the_roofline(m: int, n: int, k: int) -> None:
    compute = 2.0 * m * n * k / PEAK
    memory = 2 * (m * k + k * n + m * n) / BANDWIDTH
    assert IDEAL.kernel_s(gemm(m, n, k), DEVICE) == pytest.approx(max(compute, memory), rel=1e-12)


def test_ideal_attention_is_exactly_the_roofline() -> None:
    call = attention(8192, causal=True)
    # QK' and PV: 2 products of 2 s² C FLOP a head, half of them masked
    assert IDEAL.kernel_s(call, DEVICE) == pytest.approx(32 * 4 * 8192**2 * 128 / 2 / PEAK, rel=1e-12)
    assert IDEAL.kernel_s(attention(1, causal=False), DEVICE) == pytest.approx(4 * 32 * 128 * 2 / BANDWIDTH, rel=1e-12)


def test_an_ideal_stream_moves_bytes_at_the_memory_speed() -> None:
    assert IDEAL.kernel_s(Stream(op="copy", read_bytes=3, write_bytes=5, launches=7), DEVICE) == 8 / BANDWIDTH


def test_a_deep_product_reaches_e_times_peak() -> None:
    """Whole waves (16 × 8 tiles = 128 SMs) and k → ∞: the ramp and the floor vanish, e · peak is left."""
    one = gemm(16 * 128, 8 * 128, 2**24)
    seconds = curve().seconds(one, 0.7 * PEAK, BANDWIDTH, SMS)
    assert one.flop / seconds == pytest.approx(0.7 * PEAK, rel=1e-3)


def test_efficiency_grows_as_k_over_k_plus_ramp() -> None:
    """t_c ∝ k + k_ramp, so at k = k_ramp half of the speed is reached."""
    c = curve(t0_s=0.0)
    assert c.compute_s(2048, 1024, 100, 1, PEAK, SMS) == pytest.approx(2 * 2.0 * 2048 * 1024 * 100 / PEAK)


def test_waves_are_rounded_up_with_weight_alpha() -> None:
    """129 tiles on 128 SMs: α = 1 takes two waves, α = 0 takes 129/128."""
    tall = (129 * 128, 128, 2**20)
    whole = curve(alpha=1.0, k_ramp=0.0).compute_s(*tall, 1, PEAK, SMS)
    smooth = curve(alpha=0.0, k_ramp=0.0).compute_s(*tall, 1, PEAK, SMS)
    assert whole / smooth == pytest.approx(2 * 128 / 129)


def test_below_a_wave_k_is_split_over_the_idle_sms() -> None:
    """32 tiles on 128 SMs split k four ways: as fast as a full device, but for four ramps."""
    c = curve(k_ramp=0.0)
    assert c.compute_s(32 * 128, 128, 2**16, 1, PEAK, SMS) == pytest.approx(2.0 * 32 * 128 * 128 * 2**16 / PEAK)
    with_ramp = curve().compute_s(32 * 128, 128, 2**16, 1, PEAK, SMS)
    assert with_ramp / c.compute_s(32 * 128, 128, 2**16, 1, PEAK, SMS) == pytest.approx(1 + 4 * 100 / 2**16)


def test_a_tiny_product_costs_the_floor() -> None:
    assert curve(k_ramp=0.0).seconds(gemm(1, 8, 8), 0.7 * PEAK, BANDWIDTH, SMS) == pytest.approx(3e-6, rel=0.02)


def test_a_shallow_product_writes_its_output_at_bandwidth() -> None:
    """k = 8 of a 32k square: 4 FLOP a byte; the output's bytes decide."""
    one = gemm(2**15, 2**15, 8)
    bytes_s = (2 * 2 * 8 * 2**15 + 2 * 2**30) / (BANDWIDTH * 0.5)
    assert curve(k_ramp=0.0).seconds(one, 0.7 * PEAK, BANDWIDTH, SMS) == pytest.approx(bytes_s + 3e-6, rel=1e-9)


@pytest.mark.parametrize(
    ("layout", "shape"), [("tn", (64, 50257, 64)), ("nn", (64, 64, 50257)), ("nt", (50257, 64, 64))]
)
def test_the_odd_vocabulary_misaligns_all_three_products_of_the_head(layout: str, shape: tuple[int, int, int]) -> None:
    c = curve(misaligned={"1": 6.0, "2": 3.0, "4": 2.0})
    assert c.slowdown(gemm(*shape, layout=layout)) == 6.0
    even = tuple(50264 if side == 50257 else side for side in shape)
    assert c.slowdown(gemm(*even, layout=layout)) == 1.0


def test_only_strides_need_alignment() -> None:
    """A forward product with an odd number of tokens has aligned rows."""
    assert curve(misaligned={"1": 6.0}).slowdown(gemm(4095, 4096, 4096)) == 1.0


@pytest.mark.parametrize("name", calibration_names())
def test_sustained_speed_follows_the_power_cap(name: str) -> None:
    """Halving the cap divides a large product's speed by 2 ** exponent, far from floor and bandwidth."""
    calibration = Calibration.load(name)
    assert calibration.power is not None
    watts = calibration.power.reference_w
    full, half = (DEVICE.model_copy(update={"power_w": w}) for w in (watts, watts / 2))
    device_peak = calibration.gemms["bf16"].peak_flop_per_s
    full, half = (d.model_copy(update={"peak_flop_per_s": PeakFlop(fp32=1e13, bf16=device_peak)}) for d in (full, half))
    one = gemm(2**14, 2**14, 2**14)
    ratio = calibration.kernel_s(one, half) / calibration.kernel_s(one, full)
    assert ratio == pytest.approx(2**calibration.power.exponent, rel=0.01)


@cache
def _products(name: str) -> GemmCurve:
    """Read once, not for each example."""
    calibration = Calibration.datasheet(DEVICE) if name == "datasheet" else Calibration.load(name)
    return calibration.gemms["bf16"]


@pytest.mark.parametrize("name", [*calibration_names(), "datasheet"])
@examples(60)
@given(m=SIDE, n=SIDE, k=SIDE, scale=st.floats(0.01, 100))
def test_products_are_never_faster_than_the_roofline_and_scale_with_the_device(
    name: str, m: int, n: int, k: int, scale: float
) -> None:
    """Homogeneity: a device `scale` times slower in everything (floors too) takes `scale` times as long."""
    one, c = gemm(m, n, k), _products(name)
    seconds = c.seconds(one, c.e_sust * PEAK, BANDWIDTH, SMS)
    assert seconds >= max(one.flop / PEAK, one.num_bytes / BANDWIDTH)
    few = c.few_rows and c.few_rows.model_copy(update={"t0_s": c.few_rows.t0_s * scale})
    slower = c.model_copy(update={"t0_s": c.t0_s * scale, "few_rows": few})
    assert slower.seconds(one, c.e_sust * PEAK / scale, BANDWIDTH / scale, SMS) == pytest.approx(
        seconds * scale, rel=1e-9
    )


@pytest.mark.parametrize("name", calibration_names())
def test_long_attention_reaches_its_fraction_of_peak(name: str) -> None:
    """s → ∞ with whole waves: e_max · sustained · peak; 2 ** 20 keys leave the ramp below 0.3 %."""
    calibration = Calibration.load(name)
    for c in calibration.attention:
        one = attention(2**20, causal=False, direction=c.direction, heads=64)
        speed = one.flop / c.seconds(one, PEAK, BANDWIDTH, SMS)
        assert speed == pytest.approx(PEAK * c.peak_fraction(128) * c.noncausal * c.sustained, rel=0.005)


def test_what_is_idle_at_the_end_of_attention_takes_its_waves() -> None:
    """16 heads of 4,096 queries are 512 blocks: on 64 SMs 8 waves, and 1.5 more make 9.5 of them."""
    calibration = Calibration.load("a100-sxm")
    full = next(c for c in calibration.attention if "flash2" in c.kernels).model_copy(
        update={"tail_waves": 0.0, "t0_s": 0.0, "p": None}
    )
    one = attention(4096, causal=True, heads=16)
    seconds = [c.seconds(one, PEAK, BANDWIDTH, 64) for c in (full, full.model_copy(update={"tail_waves": 1.5}))]
    assert seconds[1] / seconds[0] == pytest.approx(9.5 / 8)


def test_a_causal_mask_halves_long_attention() -> None:
    seconds = [IDEAL.kernel_s(attention(2**15, causal=causal), DEVICE) for causal in (True, False)]
    assert seconds[1] / seconds[0] == pytest.approx(2)


def test_head_dims_between_the_measured_are_interpolated() -> None:
    c = Calibration.datasheet(DEVICE).attention[0]
    low, high = c.e_max["64"], c.e_max["128"]
    assert c.peak_fraction(96) == pytest.approx((low + high) / 2)
    assert (c.peak_fraction(32), c.peak_fraction(256)) == (low, high)


def test_a_stack_may_state_its_kernels_speed() -> None:
    backend = AttentionBackend(kernel="flash1_triton", forward_efficiency={"hopper": 0.25})
    one = attention(4096, causal=True)
    assert IDEAL.kernel_s(one, DEVICE, backend=backend) == pytest.approx(one.flop / (0.25 * PEAK))


def test_streams_pay_a_floor_each_launch() -> None:
    c = StreamCurve(op="copy", bw_frac=0.5, t0_s=2e-6, quality=Quality(basis="definition"))
    kernel = Stream(op="copy", read_bytes=10**6, write_bytes=10**6, launches=3)
    assert c.seconds(kernel, BANDWIDTH, 100) == pytest.approx(3 * 2e-6 + 2e6 / (0.5 * BANDWIDTH))


@given(st.floats(1e-9, 1e3), st.floats(1e-9, 1e3), st.floats(1, 30))
def test_the_smooth_maximum_lies_between_maximum_and_sum(a: float, b: float, p: float) -> None:
    assert max(a, b) * (1 - 1e-12) <= blend(a, b, p) <= (a + b) * (1 + 1e-12)
    assert blend(a, b, p) == blend(b, a, p)
    assert blend(a, b, None) == max(a, b)


@pytest.mark.skipif(not SAMPLES.exists(), reason="the H200 samples are not in this checkout")
def test_h200_products_in_loops_are_predicted_within_five_percent() -> None:
    """Two-second loops at the power cap, eight shapes: one coefficient (e_sust) was fitted on them."""
    calibration, device = Calibration.load("h200-sxm"), Device.load("h200-sxm")
    with gzip.open(SAMPLES, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    loops = [
        r for r in rows if r.get("sustained") and "error" not in r and r["dtype"] == "bf16" and r["kind"] == "gemm"
    ]
    assert len(loops) >= 8
    for row in loops:
        one = gemm(row["m"], row["n"], row["k"], layout=row["layout"])
        assert abs(math.log(calibration.kernel_s(one, device) / row["time_s"])) < 0.05


def test_what_draws_less_leaves_the_rest_more() -> None:
    """x = cap / reference / (use + draw (1 - use)); speed goes as x^exponent, the clock as x^clock_exponent up to 1."""
    power = Power(reference_w=700, exponent=0.5, loop_clock=0.6, clock_exponent=1.0, memory_draw=0.5)
    device = DEVICE.model_copy(update={"power_w": 700.0})
    assert power.factor(device) == 1
    assert power.clock(device) == pytest.approx(0.6)
    assert power.factor(device, 0.5) == pytest.approx((1 / 0.75) ** 0.5)
    assert power.clock(device, 0.5) == pytest.approx(0.6 / 0.75)
    assert power.clock(device, 0.0) == 1  # 0.6 / 0.5 is above the highest clock
    half = DEVICE.model_copy(update={"power_w": 350.0})
    assert power.factor(half, 0.0) == pytest.approx(1)


def test_sms_limit_kernels_that_work_element_by_element() -> None:
    c = StreamCurve(op="strided", bw_frac=0.5, elements_per_sm_s=1e9, t0_s=0.0, quality=Quality(basis="definition"))
    few = Stream(op="strided", read_bytes=10**9, write_bytes=0, numel=10**6)
    many = Stream(op="strided", read_bytes=10**6, write_bytes=0, numel=10**9)
    assert c.seconds(few, BANDWIDTH, 100) == pytest.approx(1e9 / (0.5 * BANDWIDTH))
    assert c.seconds(many, BANDWIDTH, 100) == pytest.approx(1e9 / (1e9 * 100))
