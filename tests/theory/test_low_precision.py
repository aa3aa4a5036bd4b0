"""Recipes of fp8: bytes of the casts around a product, of what is kept for the backward, and of gathers."""

from __future__ import annotations

from math import prod

import pytest

from simulator.calibration import Calibration
from simulator.collective_curves import default_curves
from simulator.errors import PlanError
from simulator.kernels import Gemm, Stream
from simulator.lower import lower
from simulator.model import Model
from simulator.ops import Op, build_blocks
from simulator.plan import Plan
from simulator.stack import Stack
from simulator.topology import Cluster
from simulator.zero import communication
from simulator.zero.units import pieces

MODEL = Model(name="small", num_layers=2, d_model=256, num_heads=4, d_ff=1024, vocab_size=4096)
FUSED, EAGER = Stack.load("megatron-core-2025"), Stack.load("torchtitan-2025-eager")
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
    assert cast_bytes("tensorwise", EAGER)[0] == 5 * (T * K + N * K)  # 2 + 2 read, one copy of 1 written
    assert cast_bytes(None, EAGER) == cast_bytes("tensorwise", EAGER)


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
    return sum(prod(s) for s in dict(pieces(MODEL))["layer0"] if len(s) > 1)


def test_fsdp2_gathers_matrices_of_layers_in_fp8_and_casts_no_weight() -> None:
    """torchao's enable_fsdp_float8_all_gather: 1 byte instead of 2; norms, embedding and head stay."""
    narrow, wide = (communication(MODEL, plan("tensorwise", dp_shard=8, fp8_all_gather=g)) for g in (True, False))
    for a, b in zip(narrow, wide, strict=True):
        saved = layer_matrices() if a.unit.startswith("layer") else 0
        assert b.all_gather_forward_bytes - a.all_gather_forward_bytes == saved
        assert b.all_gather_backward_bytes - a.all_gather_backward_bytes == saved
        assert a.reduce_scatter_bytes == b.reduce_scatter_bytes
    fields = {"dp_shard": 8, "fp8_all_gather": True}
    assert cast_bytes("tensorwise", EAGER, **fields)[0] == 5 * T * K


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
        ({"fp8_all_gather": True, "zero": 0, "dp_replicate": 2}, ["ddp with zero = 0 gathers no fp8"]),
        ({"fp8_all_gather": True, "fp8_recipe": "mxfp8"}, ["not mxfp8"]),
    ],
)
def test_bad_input(fields: dict[str, object], words: list[str]) -> None:
    with pytest.raises(PlanError) as told:
        Plan.model_validate({"precision": "fp8", **fields}).check()
    for word in words:
        assert word in str(told.value)
