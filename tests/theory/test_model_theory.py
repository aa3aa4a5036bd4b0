"""FLOP and activation bytes against published closed forms, exactly."""

from __future__ import annotations

import pytest

from simulator.base.kernels import Attention, Gemm
from simulator.spec.model import Model
from simulator.spec.model.files import preset_names
from simulator.spec.plan import Plan
from simulator.spec.software.stack import AttentionBackend, Stack
from simulator.work.ops import ModelBlocks, Op, build_blocks


def stack(blocks: str, kernel: str) -> Stack:
    return Stack.model_validate(
        {
            "name": "s",
            "framework": "f",
            "date": "2026-01",
            "blocks": blocks,
            "attention": AttentionBackend.model_validate({"kernel": kernel}),
        }
    )


def all_ops(blocks: ModelBlocks, num_layers: int) -> list[tuple[int, Op]]:
    once = [(1, op) for op in (*blocks.embedding.ops, *blocks.head.ops)]
    return [*once, *((num_layers, op) for op in blocks.layer.ops)]


SEQ = 1024


def _plain(model: Model) -> bool:
    """Every layer is attention over the whole sequence, and an MLP."""
    return (
        model.tower is None and model.experts is None and model.pattern is None and (model.sliding_window or SEQ) >= SEQ
    )


@pytest.mark.parametrize("name", [name for name in preset_names() if _plain(Model.load(name))])
@pytest.mark.parametrize("blocks", ["eager", "compiled", "fused"])
def test_flop_are_six_a_parameter_and_token_and_seven_half_squares_of_attention(name: str, blocks: str) -> None:
    """Tiled attention runs 2 products forward and 5 backward (one recomputes the scores) over half the square."""
    model, plan = Model.load(name), Plan(dp_shard=8, micro_batch_size=2, seq_len=SEQ)
    tokens = plan.micro_batch_size * plan.seq_len
    built = build_blocks(model, stack(blocks, "flash2"), plan)
    kernels = [(n, k) for n, op in all_ops(built, model.num_layers) for k in (*op.forward, *op.backward)]
    gemm = sum(n * k.flop for n, k in kernels if isinstance(k, Gemm))
    attention = sum(n * k.flop for n, k in kernels if isinstance(k, Attention))
    assert gemm == 6 * model.num_matmul_parameters * tokens
    pairs = plan.micro_batch_size * model.num_layers * model.num_heads * plan.seq_len**2 // 2
    assert attention == (2 + 5) * 2 * pairs * model.head_dim
    assert 6 * (gemm - gemm + attention) == 7 * (plan.micro_batch_size * model.model_flop_per_sequence(SEQ) - gemm)


@pytest.mark.parametrize("name", ["gpt2", "gpt3-175b"])
def test_model_flop_are_megatrons(name: str) -> None:
    """arXiv 2104.04473 section 5.1: 96 B s l h² (1 + s/6h + V/16lh) with recomputation; 72 … (1 + s/6h + V/12lh)
    without, that is 72 B s l h² + 12 B s² l h + 6 B s h V, the square of attention counted in full."""
    model, s = Model.load(name), 2048
    layers, h, v = model.num_layers, model.d_model, model.vocab_size
    expected = 72 * s * layers * h * h + 12 * s * s * layers * h + 6 * s * h * v
    assert model.model_flop_per_sequence(s, causal=False) == expected


def test_model_flop_are_palms_a_token() -> None:
    """arXiv 2204.02311 appendix B: 6 N + 12 L H Q T a token (N without embeddings here, with the LM head)."""
    model, s = Model.load("llama3-8b"), 8192
    matmul = model.num_parameters - 128256 * 4096 - (2 * 32 + 1) * 4096  # no lookup table, no norms
    assert model.num_matmul_parameters == matmul
    assert model.model_flop_per_token(s, causal=False) == 6 * matmul + 12 * 32 * 32 * 128 * s
    assert model.model_flop_per_token(s) == 6 * matmul + 6 * 32 * 32 * 128 * s


def test_training_gpt3_takes_its_published_flop() -> None:
    """arXiv 2005.14165 table D.1: 3.14e23 FLOP for 300 billion tokens at 6 a parameter and token."""
    assert f"{6 * Model.load('gpt3-175b').num_parameters * 300 * 10**9:.2e}" == "3.14e+23"


def test_activations_of_an_unfused_gpt_layer() -> None:
    """arXiv 2205.05198 equation 1: s b h (34 + 5 a s / h) bytes a layer, of which dropout takes its share.

    These stacks train without dropout: its two masks of one byte (s b h each) go, and so do the mask (1) and the
    output (2) of attention's dropout, since the product then reads the softmax's own output: 32 s b h + 2 a s² b.
    The paper leaves out the norms' mean and 1/std: 2 norms × 2 × 4 bytes a token.
    """
    model, s, b = Model.load("gpt3-175b"), 2048, 1
    plan = Plan(dp_shard=8, micro_batch_size=b, seq_len=s, precision="fp16")
    h, a = model.d_model, model.num_heads
    layer = build_blocks(model, stack("fused", "math"), plan).layer
    assert layer.saved_bytes == 32 * s * b * h + 2 * a * s * s * b + 16 * s * b


def test_activations_of_a_gpt_layer_with_tiled_attention() -> None:
    """No s² term: the scores are recomputed from Q, K and a log-sum-exp of 4 a bytes a token (arXiv 2205.14135)."""
    model, s, b = Model.load("gpt3-175b"), 2048, 1
    plan = Plan(dp_shard=8, micro_batch_size=b, seq_len=s, precision="fp16")
    h, a = model.d_model, model.num_heads
    layer = build_blocks(model, stack("fused", "flash2"), plan).layer
    random_state = 24
    assert layer.saved_bytes == 32 * s * b * h + 4 * a * s * b + 16 * s * b + random_state
