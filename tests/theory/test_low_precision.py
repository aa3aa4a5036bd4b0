"""Recipes of fp8: bytes of the casts around a product, of what is kept for the backward, and of gathers."""

from __future__ import annotations

from math import prod

import pytest

from simulator.base.errors import PlanError
from simulator.base.kernels import Dtype, Gemm, Stream
from simulator.parallel.legality import check
from simulator.parallel.model_shard import shard_of
from simulator.play.lower import lower
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import Op, build_blocks
from simulator.work.ops.graph import stream
from simulator.work.script import communication
from simulator.work.script.sharding import pieces

MODEL = Model(name="small", num_layers=2, d_model=256, num_heads=4, d_ff=1024, vocab_size=4096)
FUSED, EAGER, COMPILED = map(Stack.load, ("megatron-core-2025", "torchtitan-2025-eager", "torchtitan-2025-compiled"))
T, K, N = 512, 256, 256  # tokens, and the sides of the output projection


def plan(recipe: str | None, **fields: object) -> Plan:
    return Plan.model_validate({"precision": "fp8", "fp8_recipe": recipe, "seq_len": T, **fields})


def projection(recipe: str | None, stack: Stack, **fields: object) -> list[Op]:
    """The square product behind attention with the casts of its input."""
    ops = build_blocks(MODEL, stack, plan(recipe, **fields)).layer.ops
    name = next(
        op.name for op in ops for k in op.forward if isinstance(k, Gemm) and (k.n, k.k, k.dtype) == (N, K, "fp8")
    )
    return [op for op in ops if op.name in (name, f"{name}.fp8")]


def cast_bytes(recipe: str | None, stack: Stack, **fields: object) -> tuple[int, int]:
    """Forward and backward."""
    ops = projection(recipe, stack, **fields)
    sides = ([k for op in ops for k in op.forward], [k for op in ops for k in op.backward])
    forward, backward = (sum(k.num_bytes for k in side if isinstance(k, Stream)) for side in sides)
    return forward, backward


def test_delayed_scaling_reads_once_and_writes_two_copies() -> None:
    """Hand-fused: 2 bytes read and 1 + 1 written, of input and weight forward and of the gradient backward."""
    assert cast_bytes("delayed", FUSED) == (4 * (T * K + N * K), 4 * T * N)
    assert cast_bytes(None, FUSED) == cast_bytes("delayed", FUSED)


def test_current_scaling_reads_once_more_for_the_maximum() -> None:
    more = [a - b for a, b in zip(cast_bytes("tensorwise", FUSED), cast_bytes("delayed", FUSED), strict=True)]
    assert more == [2 * (T * K + N * K) + 2 * 4, 2 * T * N + 4]  # and writes one fp32 maximum a tensor
    assert cast_bytes("tensorwise", COMPILED)[0] == 5 * (T * K + N * K)  # 2 + 2 read, one copy of 1 written
    assert cast_bytes(None, COMPILED) == cast_bytes("tensorwise", COMPILED)


def test_without_a_compiler_each_operator_of_a_cast_passes_over_memory() -> None:
    """torchao: |x| (2 + 2), its maximum (2), x in fp32 (2 + 4), times the scale (4 + 4), clamped (4 + 4), cast (4 + 1)."""
    assert cast_bytes("tensorwise", EAGER)[0] == (4 + 2 + 6 + 8 + 8 + 5) * (T * K + N * K)


def test_mxfp8_writes_rows_and_columns_with_a_scale_for_32() -> None:
    """OCP MX: 8-bit scales of 32 elements, so a copy takes 33/32 bytes; both are written as 16 bits are read once."""
    forward, backward = cast_bytes("mxfp8", FUSED)
    assert forward * 16 == (2 * 16 + 33) * (T * K + N * K)
    assert backward * 16 == (2 * 16 + 33) * T * N


def test_the_kept_input_has_its_scales() -> None:
    def kept(recipe: str) -> int:
        return sum(v.num_bytes for op in projection(recipe, FUSED) for v in op.outputs if v.name.endswith(".fp8"))

    assert kept("delayed") == T * K
    assert kept("mxfp8") * 32 == 33 * T * K


def test_weights_are_cast_once_a_step_where_blocks_are_hand_fused() -> None:
    one, four = (cast_bytes("mxfp8", FUSED, num_micro_batches=n)[0] for n in (1, 4))
    assert (one - four) * 16 == (2 * 16 + 33) * N * K * 3 // 4


def layer_matrices() -> int:
    return sum(prod(s) for s in dict(pieces(MODEL, Plan()))["layer0"] if len(s) > 1)


def test_fsdp2_gathers_matrices_of_layers_in_fp8_and_casts_no_weight() -> None:
    """torchao's enable_fsdp_float8_all_gather: 1 byte instead of 2; norms, embedding and head stay."""
    narrow, wide = (communication(MODEL, plan("tensorwise", dp_shard=8, fp8_all_gather=g)) for g in (True, False))
    for a, b in zip(narrow, wide, strict=True):
        saved = layer_matrices() if a.unit.startswith("layer") else 0
        assert b.all_gather_forward_bytes - a.all_gather_forward_bytes == saved
        assert b.all_gather_backward_bytes - a.all_gather_backward_bytes == saved
        assert a.reduce_scatter_bytes == b.reduce_scatter_bytes
    fields = {"dp_shard": 8, "fp8_all_gather": True}
    assert cast_bytes("tensorwise", COMPILED, **fields)[0] == 5 * T * K


def test_megatron_gathers_updated_matrices_in_fp8() -> None:
    fields = {"zero": 1, "dp_shard": 8, "data_parallel": "megatron"}
    narrow, wide = (communication(MODEL, plan("delayed", fp8_all_gather=g, **fields)) for g in (True, False))
    saved = sum(b.parameter_gather_bytes - a.parameter_gather_bytes for a, b in zip(narrow, wide, strict=True))
    assert saved == MODEL.num_layers * layer_matrices()


def test_mxfp8_has_the_peak_of_fp8_on_blackwell_and_no_other_gpu() -> None:
    def lowered(cluster: Cluster) -> None:
        one = plan("mxfp8", dp_shard=8, stack="megatron-core-2025", data_parallel="megatron", zero=1)
        lower(MODEL, one, cluster, FUSED, Calibration.for_device(cluster.device), default_curves())

    lowered(Cluster.load("hgx-b200-8"))
    with pytest.raises(PlanError, match="no tensor cores for block-scaled fp8"):
        lowered(Cluster.load("hgx-h100-8"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"precision": "bf16", "fp8_recipe": "delayed", "fp8_all_gather": True}, ["fp8_recipe", "fp8_all_gather"]),
        ({"fp8_all_gather": True, "zero": 0, "dp_replicate": 2}, ["ddp with zero = 0 cannot gather fp8"]),
        ({"fp8_all_gather": True, "fp8_recipe": "mxfp8"}, ["not mxfp8"]),
    ],
)
def test_bad_input(fields: dict[str, object], words: list[str]) -> None:
    with pytest.raises(PlanError) as told:
        check(Plan.model_validate({"precision": "fp8", **fields}))
    for word in words:
        assert word in str(told.value)


# -- blocks of 128, and NVFP4 ------------------------------------------------------------------------------------


def test_blocks_of_128_have_a_scale_of_four_bytes() -> None:
    """arXiv 2412.19437, section 3.3.2: 1 × 128 of tokens, 128 × 128 of weights; rows and columns have scales of their own."""
    forward, backward = cast_bytes("blockwise", FUSED)
    one, weights = T * K + 4 * T * K // 128, N * K + 4 * N * K // 128**2
    assert forward == 2 * (T * K + N * K) + 2 * one + 2 * weights
    assert backward == 2 * T * N + 2 * (T * N + 4 * T * N // 128)


def fp4_plan(**fields: object) -> Plan:
    return Plan.model_validate({"precision": "nvfp4", "seq_len": T, "data_parallel": "megatron", "zero": 1, **fields})


def fp4_projection(**fields: object) -> list[Op]:
    ops = build_blocks(MODEL, FUSED, fp4_plan(**fields)).layer.ops
    return [op for op in ops if op.name in ("out", "out.fp8")]


def test_nvfp4_products_and_casts() -> None:
    """arXiv 2509.25149: three products in fp4; half a byte an element and a byte for 16. The tensor's maximum first, then rows,
    then columns through the Hadamard transform; weights by squares, both copies at once."""
    ops = fp4_projection()
    products = [k for op in ops for k in (*op.forward, *op.backward) if isinstance(k, Gemm)]
    assert [k.dtype for k in products] == ["fp4"] * 3
    copy = T * K // 2 + T * K // 16
    weight = N * K // 2 + N * K // 16
    forward = sum(k.num_bytes for op in ops for k in op.forward if isinstance(k, Stream))
    backward = sum(k.num_bytes for op in ops for k in op.backward if isinstance(k, Stream))
    assert forward == 3 * 2 * T * K + 2 * copy + 4 + 2 * 2 * N * K + 2 * weight + 4
    assert backward == 3 * 2 * T * N + 2 * copy + 4
    (kept,) = (v for op in ops for v in op.outputs if v.name == "out.fp8")
    assert kept.num_bytes == copy


def test_nvfp4_tokens_are_gathered_with_their_scales() -> None:
    """A product by columns gathers T × D tokens of 9/16 bytes, forward and again backward."""
    plan = fp4_plan(tp=2, sequence_parallel=True)
    ops = {op.name: op for op in build_blocks(MODEL, FUSED, plan).layer.ops}
    sent = [
        e.num_bytes for e in (*ops["qkv"].forward_exchanges, *ops["qkv"].backward_exchanges) if e.kind == "all_gather"
    ]
    assert sent == [T * 256 * 9 // 16] * 2


def test_an_fp4_product_reads_nine_sixteenths_of_a_byte() -> None:
    one = Gemm(m=64, n=32, k=128, dtype="fp4")
    assert one.num_bytes == (64 * 128 + 128 * 32) * 9 // 16 + 2 * 64 * 32
    assert one.flop == 2 * 64 * 32 * 128


@pytest.mark.parametrize(
    ("cluster", "times"), [("hgx-b200-8", 1.47), ("gb200-nvl72", 1.54), ("gb300-nvl72", 1.60), ("dgx-b300-8", 1.72)]
)
def test_fp4_products_are_as_fast_beside_fp8_as_measured(cluster: str, times: float) -> None:
    """Medians of published calls (experiments/fit_narrow.py): three times the units of fp8 are hardly faster than twice."""
    device = Cluster.load(cluster).device
    timer = Calibration.for_device(device).timer(device)
    seconds = {d: timer.kernel_s(Gemm(m=2**16, n=2**14, k=2**14, dtype=d)) for d in ("fp8", "fp4")}
    assert seconds["fp8"] / seconds["fp4"] == pytest.approx(times, rel=0.06)
    ideal = Calibration.ideal().timer(device)
    assert ideal.kernel_s(Gemm(m=2**16, n=2**14, k=2**14, dtype="fp4")) == pytest.approx(2 * 2**44 / device.peak("fp4"))


TOKENS, LAYER = 15872, ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))


@pytest.mark.parametrize(
    ("dtype", "bytes_of", "measured_ms"),
    [
        ("fp8", {"x": (2, 0, 2, 1), "w": (2, 0, 2, 1)}, 9.147),  # this tensor's maximum
        ("fp8", {"x": (2, 2 + 1 / 16), "w": (2, 1 + 1 / 32)}, 8.984),  # MXFP8
        ("fp4", {"x": (2, 0, 2, 9 / 16, 2, 9 / 16), "w": (2, 0, 2, 9 / 16)}, 6.453),  # NVFP4
    ],
)
def test_casts_and_products_of_a_layer_on_b300(
    dtype: Dtype, bytes_of: dict[str, tuple[float, ...]], measured_ms: float
) -> None:
    """Transformer Engine's own benchmark: twelve products of a layer, its operands cast each time.

    NVIDIA/TransformerEngine docs/examples/gemm_profiling/gemm_profiling.rst of June 2026, "Per-layer total".
    """
    device = Cluster.load("dgx-b300-8").device
    timer = Calibration.for_device(device).timer(device)
    shapes = (
        [(TOKENS, k, n) for k, n in LAYER] + [(TOKENS, n, k) for k, n in LAYER] + [(k, TOKENS, n) for k, n in LAYER]
    )

    def cast_s(what: str, numel: int) -> float:
        each = iter(bytes_of[what])
        pairs = zip(each, each, strict=True)
        return sum(
            timer.kernel_s(stream("quantise" if wrote else "reduce", int(read * numel), int(wrote * numel) or 4))
            for read, wrote in pairs
        )

    mx = len(bytes_of["w"]) == 2
    products_s = sum(timer.kernel_s(Gemm(m=m, n=n, k=k, dtype=dtype, by_blocks=mx)) for m, k, n in shapes)
    casts_s = sum(cast_s("x", m * k) + cast_s("w", k * n) for m, k, n in shapes)
    assert products_s + casts_s == pytest.approx(measured_ms * 1e-3, rel=0.08)


def test_hopper_scales_sums_of_blocks_beside_its_tensor_cores() -> None:
    for cluster, part in (("hgx-h100-8", 0.85), ("hgx-b200-8", 0.95)):
        device = Cluster.load(cluster).device
        timer = Calibration.for_device(device).timer(device)
        plain = Gemm(m=2**16, n=2**14, k=2**14, dtype="fp8")
        blocks = Gemm(m=2**16, n=2**14, k=2**14, dtype="fp8", by_blocks=True)
        assert timer.kernel_s(plain) / timer.kernel_s(blocks) == pytest.approx(part, rel=0.02)


@pytest.mark.parametrize("tp", [1, 2])
def test_layers_at_the_ends_stay_in_bf16(tp: int) -> None:
    plan = fp4_plan(tp=tp, first_layers_bf16=1)
    built = build_blocks(MODEL, FUSED, plan)
    assert [block.name for block in built.body] == ["layer", "layer_bf16"]
    dtypes = [{k.dtype for op in b.ops for k in op.forward if isinstance(k, Gemm)} for b in built.body]
    assert dtypes == [{"fp4"}, {"bf16"}]
    share = shard_of(MODEL, plan)
    assert share.body == ("layer_bf16", "layer")
    assert tp > 1 or share.num_parameters == MODEL.num_parameters


def test_who_cannot_multiply_fp4_or_blocks_is_told() -> None:
    def refused(gpus: str, stack: str, **fields: object) -> str:
        one = Plan.model_validate({"dp_shard": 8, "stack": stack, **fields})
        cluster = Cluster.load(gpus)
        with pytest.raises(PlanError) as caught:
            lower(MODEL, one, cluster, Stack.load(stack), Calibration.for_device(cluster.device), default_curves())
        return str(caught.value)

    text = refused("hgx-h100-8", "torch-2.6-eager", precision="nvfp4")
    assert "no fp4 matrix units" in text
    assert "Transformer Engine's" in text
    fields = {"precision": "fp8", "fp8_recipe": "blockwise"}
    assert "torch's own products" in refused("hgx-h100-8", "torch-2.6-eager", **fields)
    assert "by blocks of 128" in refused("pcie-l40s-8", "torch-2.6-eager", **fields)
    with pytest.raises(PlanError, match="the precision is bf16"):
        check(Plan(first_layers_bf16=1))


def test_a_fused_norm_finds_the_maximum_of_its_result() -> None:
    """Transformer Engine 2.7: the product in one module with a norm reads its input once; others, and gradients, twice."""

    def read(name: str) -> int:
        ops = build_blocks(MODEL, FUSED, plan("tensorwise")).layer.ops
        return sum(k.read_bytes for op in ops for k in op.forward if op.name == name and isinstance(k, Stream))

    assert read("qkv.fp8") == 2 * T * K
    assert read("out.fp8") == 2 * 2 * T * K


def test_blackwell_writes_no_transpose() -> None:
    """Transformer Engine's is_non_tn_fp8_gemm_supported: of 2 bytes read and 1 + 1 written the last is left out."""
    (cast,) = (k for op in projection("delayed", FUSED) for k in op.backward if isinstance(k, Stream))
    assert cast.transposed_bytes == T * N
    big = Stream(op="quantise", read_bytes=2 * 2**30, write_bytes=2 * 2**30, transposed_bytes=2**30)
    less = Stream(op="quantise", read_bytes=2 * 2**30, write_bytes=2**30)
    for cluster, same in (("hgx-b200-8", True), ("hgx-h100-8", False)):
        device = Cluster.load(cluster).device
        timer = Calibration.for_device(device).timer(device)
        assert (timer.kernel_s(big) == timer.kernel_s(less)) is same
