"""Megatron-Core without its fused kernels: SwiGLU and rotary positions as the operators that torch runs, and what autograd keeps."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.base.kernels import Stream
from simulator.parallel.model_shard import shard_of
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import build_blocks
from simulator.work.ops.core import Block

TOKENS, WIDTH = 256, 128
SIZES = {"name": "m", "num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": WIDTH, "vocab_size": 512}
DENSE = Model.model_validate(SIZES)
EXPERTS = Model.model_validate(SIZES | {"experts": {"num_experts": 4, "top_k": 2, "d_ff": WIDTH}})


def layer(model: Model, **kernels: str) -> Block:
    plan = Plan(data_parallel="megatron", zero=1, dp_shard=1, seq_len=TOKENS)
    stack = Stack.load("megatron-core-2025")
    own = stack.kernels.model_copy(update=kernels)
    return build_blocks(shard_of(model, plan), stack.model_copy(update={"kernels": own}), plan).layer


def saved_bytes(block: Block, *names: str) -> int:
    """Of the storages that these ops keep, each once."""
    sizes = {t.name: t.num_bytes for op in block.ops for t in op.outputs}
    return sum(sizes[name] for name in dict.fromkeys(v for op in block.ops if op.name in names for v in op.saved))


def kept_by_autograd(run: Any, *inputs: Any) -> int:
    """Bytes of the storages that torch keeps for the backward of run(*inputs)."""
    torch = pytest.importorskip("torch")
    storages: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run(*inputs)
        kept = sum(storages.values())
        out.float().sum().backward()
    return kept


def swiglu(both: Any, weights: Any = None) -> Any:
    torch = pytest.importorskip("torch")
    gate, up = torch.chunk(both, 2, dim=-1)
    out = torch.nn.functional.silu(gate) * (up + 0.0)
    return out if weights is None else (out * weights).to(out.dtype)


def test_autograd_keeps_the_product_the_activation_and_the_shifted_half() -> None:
    torch = pytest.importorskip("torch")
    both = torch.randn(TOKENS, 2 * WIDTH, dtype=torch.bfloat16, requires_grad=True)
    block = layer(DENSE, gated_activation="operators")
    assert saved_bytes(block, "activation", "product") == kept_by_autograd(swiglu, both)
    fused = layer(DENSE)
    assert saved_bytes(fused, "activation") == both.nbytes


def test_rows_of_experts_are_weighted_in_fp32() -> None:
    torch = pytest.importorskip("torch")
    rows = 2 * TOKENS
    both = torch.randn(rows, 2 * WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(rows, 1, requires_grad=True)
    block = layer(EXPERTS, gated_activation="operators")
    names = ("experts.activation", "experts.product", "weighted")
    own = kept_by_autograd(swiglu, both, weights) - weights.nbytes
    (weighted,) = (op for op in block.ops if op.name == "weighted")
    row_weights = {t.name: t.num_bytes for op in block.ops for t in op.outputs}[weighted.saved[1]]
    assert saved_bytes(block, *names) - row_weights == own
    assert weighted.outputs[0].num_bytes == 4 * rows * WIDTH


def test_operators_read_and_write_what_they_touch() -> None:
    """Of h bytes a half: activation and shift 2 h each, the product 3 h; backward 3 h each for both factors and the activation."""
    block, half = layer(DENSE, gated_activation="operators"), 2 * TOKENS * WIDTH
    ops = {op.name: op for op in block.ops}

    def touched(name: str, *, backward: bool = False) -> int:
        kernels = ops[name].backward if backward else ops[name].forward
        return sum(k.read_bytes + k.write_bytes for k in kernels if isinstance(k, Stream))

    assert [touched(name) for name in ("activation", "shifted", "product")] == [2 * half, 2 * half, 3 * half]
    assert [touched(name, backward=True) for name in ("activation", "shifted", "product")] == [3 * half, 0, 6 * half]
    assert touched("halves", backward=True) == 4 * half


def test_unfused_rotation_is_a_chain_of_operators_that_keeps_only_tables() -> None:
    """x cos + cat(-x2, x1) sin, and `cat` with nothing: six kernels for each of Q and K, against one."""
    unfused, fused = (
        [
            op
            for op in layer(DENSE, **kernels).ops
            if ".rotated" in op.name or op.name.split(".")[-1] in ("cos", "sin", "swapped")
        ]
        for kernels in ({"rope": "unfused"}, {})
    )
    launched = [sum(len(op.forward) for op in ops if "." in op.name) for ops in (unfused, fused)]
    assert launched == [2 * 6, 2]
    assert all(name in ("cos", "sin") for op in unfused for name in op.saved)
