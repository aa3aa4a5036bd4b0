"""Plain PyTorch as programs write it: loops and padded slices around experts; logits and tokens gathered under tensor parallelism."""

from __future__ import annotations

import pytest

from simulator.base.kernels import Gemm, Stream
from simulator.parallel.model_shard import shard_of
from simulator.predict import predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import build_blocks
from simulator.work.ops.core import Block, Op

EXPERTS, TOP_K, TOKENS = 8, 2, 2048
MODEL = Model.model_validate({"name": "m", "num_layers": 2, "d_model": 512, "num_heads": 8, "d_ff": 1024, "vocab_size": 4096,
                              "mlp": "swiglu", "norm": "rms", "positions": "rope",
                              "experts": {"num_experts": EXPERTS, "top_k": TOP_K, "d_ff": 1024}})  # fmt: skip
ROWS = TOKENS * TOP_K * MODEL.d_model * 2  # bytes


def layer(way: str, imbalance: float = 1.0) -> Block:
    stack = Stack.load("torch-2.6-eager").copy_with(expert_rows=way)
    plan = Plan.model_validate({"zero": 3, "seq_len": TOKENS, "expert_imbalance": imbalance})
    return build_blocks(shard_of(MODEL, plan), stack, plan).layer


def op(block: Block, name: str) -> Op:
    return next(one for one in block.ops if one.name == name)


def products_flop(block: Block) -> int:
    return sum(k.batch * k.m * k.n * k.k for one in block.ops for k in one.forward if isinstance(k, Gemm) and k.grouped)


@pytest.mark.parametrize("way", ["each", "padded", "stacked"])
def test_programs_of_their_own_read_counts_and_add_work(way: str) -> None:
    plain, own = layer("sorted"), layer(way)
    assert not any(one.waits for one in plain.ops)
    assert sum(one.waits for one in own.ops) == 1
    assert products_flop(own) == products_flop(plain)


def test_a_slice_that_is_read_makes_a_gradient_of_the_whole() -> None:
    backward = [k for k in op(layer("padded"), "padded").backward if isinstance(k, Stream)]
    assert sum(k.read_bytes for k in backward) == 3 * EXPERTS * ROWS  # the clone once, the sum twice
    assert sum(k.write_bytes for k in backward) == 3 * EXPERTS * ROWS


def test_padding_follows_the_busiest_expert() -> None:
    assert products_flop(layer("padded", 3.0)) == 3 * products_flop(layer("padded"))
    assert products_flop(layer("each", 3.0)) == products_flop(layer("each"))


def test_joined_weights_are_copied_each_way() -> None:
    joined = op(layer("stacked"), "stacked")
    for (kernel,) in (joined.forward, joined.backward):
        assert isinstance(kernel, Stream)
        assert kernel.write_bytes == 2 * 3 * EXPERTS * MODEL.d_model * 1024


def test_gathered_logits_are_whole_on_every_rank() -> None:
    plan = Plan.model_validate({"zero": 3, "tp": 2, "seq_len": TOKENS})
    dense = MODEL.model_copy(update={"experts": None})
    for gathers, parts in ((False, 2), (True, 1)):
        stack = Stack.load("torch-2.6-eager").copy_with(gathers_logits=gathers, loss="eager")
        head = build_blocks(shard_of(dense, plan), stack, plan).head
        picked = op(head, "nll").backward[0]
        assert isinstance(picked, Stream)
        assert picked.write_bytes == 2 * TOKENS * dense.vocab_size // parts
        assert any(one.name == "logits.whole" for one in head.ops) == gathers


@pytest.mark.parametrize("attention", [3, 1])
def test_linear_layers_that_gather_for_themselves_gather_once_a_product(attention: int) -> None:
    plan = Plan.model_validate({"zero": 3, "tp": 2, "sequence_parallel": True, "seq_len": TOKENS})
    dense = MODEL.model_copy(update={"experts": None, "fused_qkv": attention == 1})
    for each, expected in ((False, (1, 1)), (True, (attention, 2))):
        stack = Stack.load("torch-2.6-eager").copy_with(gathers_each=each)
        block = build_blocks(shard_of(dense, plan), stack, plan).layer
        entered = [op(block, name) for name in ("attention.enter", "mlp.enter")]
        assert tuple(len(one.forward_exchanges) for one in entered) == expected
        assert tuple(len(one.backward_exchanges) for one in entered) == expected


def test_a_variable_that_holds_the_logits_costs_them_at_the_peak() -> None:
    plan = Plan.model_validate({"zero": 3, "seq_len": TOKENS, "dp_shard": 8, "stack": "torch-2.6-eager"})
    dense = MODEL.model_copy(update={"experts": None, "vocab_size": 128256})
    cluster, stack = Cluster.load("hgx-h100-8"), Stack.load("torch-2.6-eager").copy_with(loss="eager")
    free, held = (
        predict(dense, plan, cluster, stack=stack.copy_with(holds_logits=one)).memory for one in (False, True)
    )
    assert held.peak_allocated_bytes - free.peak_allocated_bytes == 2 * TOKENS * dense.vocab_size
