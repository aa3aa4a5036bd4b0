"""fp8 of hand-fused layers, counted against Transformer Engine's code: which copies are made, of what, and how often.

Read in Transformer Engine v1.11 and v2.7: pytorch/module/layernorm_linear.py, linear.py, base.py (grad_output_preprocess),
tensor/float8_tensor.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.base.kernels import Gemm, Stream
from simulator.play.lower.work import Clock
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import Op, build_blocks

T, D, FF, TP, MB = 512, 256, 1024, 2, 4  # tokens, widths, ranks of tp, micro-batches
A = T * D  # elements of the gathered tokens, of which each rank has A / TP
Q, P, F = 3 * A // TP, A // TP, T * FF // TP  # what a rank has of q, k and v, of attention's output, of the activation
MODEL = Model(
    name="small", num_layers=2, d_model=D, num_heads=4, d_ff=FF, vocab_size=4096, mlp="swiglu", norm="rms", positions="rope",
)  # fmt: skip
WEIGHTS = D * (3 * D + D + 3 * FF) // TP
STACK = Stack.load("megatron-core-2025")


def ops(recipe: str | None = "delayed", stack: Stack = STACK, **fields: object) -> tuple[Op, ...]:
    given: dict[str, object] = {
        "precision": "bf16" if recipe is None else "fp8", "fp8_recipe": recipe, "seq_len": T, "num_micro_batches": MB, "tp": TP,
        "sequence_parallel": True, "data_parallel": "megatron", "zero": 1, "dp_shard": 2,
    }  # fmt: skip
    return build_blocks(MODEL, stack, Plan.model_validate(given | fields)).layer.ops


def cast_bytes(layer: tuple[Op, ...]) -> tuple[int, int]:
    """Forward and backward, of casts and transposes; maxima apart."""
    kernels = ([k for op in layer for k in op.forward], [k for op in layer for k in op.backward])
    forward, backward = (sum(k.num_bytes for k in ks if isinstance(k, Stream) and k.op == "quantise") for ks in kernels)
    return forward, backward


def test_delayed_scaling_casts_as_transformer_engine_does() -> None:
    """Norms write fp8 themselves; the inputs of proj and fc2 and the weights take 2 bytes read and 1 + 1 written an element.

    Backward, of proj and fc2: each rank casts its part of the gradient (2 + 1), and turns the whole when it has come (1 + 1).
    Of qkv and fc1: both copies of the gradient at once, and the gathered input is turned.
    """
    forward, backward = cast_bytes(ops())
    assert forward == 4 * P + 4 * F + 4 * WEIGHTS // MB
    rows = 2 * (3 * A // TP + 2 * A)
    columns = 4 * Q + 4 * 2 * F + 2 * 2 * A
    assert backward == rows + columns


def test_a_norm_writes_what_the_product_behind_it_reads() -> None:
    """One byte instead of two, of both norms of a layer, under past maxima; current ones are found in 16 bits first."""

    def written(recipe: str | None) -> int:
        return sum(
            k.write_bytes for op in ops(recipe) for k in op.forward if isinstance(k, Stream) and k.op == "norm_forward"
        )

    assert written(None) - written("delayed") == 2 * A // TP
    assert written("tensorwise") == written(None)
    assert cast_bytes(ops("tensorwise"))[0] - cast_bytes(ops("delayed"))[0] == 2 * 3 * A // TP


def test_blocks_are_cast_along_both_sides_before_they_are_gathered() -> None:
    """Nothing turns a copy of MXFP8, so a rank writes both of its part (33/32 bytes each), of inputs and of gradients."""
    forward, backward = cast_bytes(ops("mxfp8"))
    element = 2 * 32 + 2 * 33  # thirty-two of them
    assert forward * 32 == element * (2 * A // TP + P + F + WEIGHTS // MB)
    assert backward * 32 == element * (2 * A // TP + Q + 2 * F)


@pytest.mark.parametrize(("recipe", "size"), [(None, 2), ("delayed", 1), ("tensorwise", 1), ("mxfp8", 2)])
def test_gradients_are_gathered_as_narrow_as_one_copy_serves(recipe: str | None, size: int) -> None:
    """Under one scale the rows travel and are turned; of MXFP8 both copies would have to, or 16 bits."""
    named = {op.name: op for op in ops(recipe)}
    for name in ("out", "down"):
        assert [e.num_bytes for e in named[name].backward_exchanges if e.kind == "all_gather"] == [size * A]


def test_weights_kept_in_fp8_are_turned_once_a_step_or_at_each_use() -> None:
    """Transformer Engine before 2: transpose_2d() of a parameter in each backward, no cache; from 2 on the copy is kept."""
    base = cast_bytes(ops())
    once = cast_bytes(ops(fp8_all_gather=True))
    often = cast_bytes(ops(stack=STACK.copy_with(fp8_transposes="each_use"), fp8_all_gather=True))
    assert once == (base[0] - 2 * WEIGHTS // MB, base[1])
    assert often == (base[0] - 4 * WEIGHTS // MB, base[1] + 2 * WEIGHTS)


def test_a_compiler_joins_equal_casts_of_what_several_products_read() -> None:
    """q, k and v read one tensor, gate and up another: four casts of inputs a layer each way, where seven products cast seven.

    A cast under a current scale reads 16 bits twice and writes a byte. Both ways, one of each weight and of each gradient.
    """
    stack = Stack.load("torchtitan-2025-compiled")

    def casts(recipe: str | None, *, backward: bool) -> int:
        layer = ops(recipe, stack, tp=1, sequence_parallel=False, data_parallel="fsdp2", zero=3, dp_shard=8)
        kernels = (k for op in layer for k in (op.backward if backward else op.forward))
        return sum(k.num_bytes for k in kernels if isinstance(k, Stream) and k.op == "cast")

    inputs, weights = T * (3 * D + FF), D * (4 * D + 3 * FF)
    results = T * (4 * D + D + 2 * FF)
    assert casts("tensorwise", backward=False) - casts(None, backward=False) == 5 * (inputs + weights)
    assert casts("tensorwise", backward=True) - casts(None, backward=True) == 5 * (inputs + weights + results)


def test_only_the_backward_splits_its_accumulators() -> None:
    """pytorch/module/base.py: _2X_ACC_FPROP False, _2X_ACC_DGRAD and _WGRAD True; so in torchao, but for scales by row."""

    def split(recipe: str, stack: Stack, **fields: object) -> set[tuple[str, bool]]:
        return {
            (way, k.split_accumulator) for op in ops(recipe, stack, **fields)
            for way, ks in (("forward", op.forward), ("backward", op.backward)) for k in ks if isinstance(k, Gemm)
        }  # fmt: skip

    assert split("delayed", STACK) == {("forward", False), ("backward", True)}
    torch, fields = Stack.load("torchtitan-2025-compiled"), {"data_parallel": "fsdp2", "zero": 3}
    assert split("tensorwise", torch, **fields) == {("forward", False), ("backward", True)}
    assert split("rowwise", torch, **fields) == {("forward", False), ("backward", False)}


def test_split_accumulators_cost_on_hopper_what_a_sweep_found() -> None:
    """1.1 to 1.2 (torchao issue 2377); Blackwell's accumulators are of full width."""
    for cluster, low, high in (("hgx-h100-8", 1.1, 1.2), ("hgx-b200-8", 1.0, 1.0)):
        device = Cluster.load(cluster).device
        timer = Calibration.for_device(device).timer(device)
        fast = Gemm(m=2**14, n=2**14, k=2**14, dtype="fp8")
        assert low <= timer.kernel_s(replace(fast, split_accumulator=True)) / timer.kernel_s(fast) <= high
        ideal = Calibration.ideal().timer(device)
        assert ideal.kernel_s(replace(fast, split_accumulator=True)) == ideal.kernel_s(fast)


def test_blackwell_turns_no_copies() -> None:
    device = Cluster.load("hgx-b200-8").device
    timer = Calibration.for_device(device).timer(device)
    turned = [
        k for op in ops() for k in op.backward if isinstance(k, Stream) and 0 < k.transposed_bytes == k.write_bytes
    ]
    assert len(turned) == 4
    assert sum(map(timer.kernel_s, turned)) == 0


def test_the_host_takes_twice_as_long_around_a_linear_layer_in_fp8() -> None:
    """An H100's host needs more than twice the time to schedule te.Linear (Transformer Engine issue 761)."""
    device = Cluster.load("hgx-h100-8").device
    stack = STACK.copy_with(host_launch_s=0.0, host_kernel_s=0.0, host_collective_s=0.0)
    clock = Clock(device, Calibration.for_device(device), stack)
    wide, narrow = (clock.phase(ops(recipe), forward=True).work.host_s for recipe in (None, "delayed"))
    assert wide == pytest.approx(5 * stack.host.module_s)  # four products and attention
    assert narrow == pytest.approx(9 * stack.host.module_s)
