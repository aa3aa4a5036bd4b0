"""Tensor and sequence parallelism against Megatron's papers: what is sent, what is kept."""

from math import prod

import pytest

from simulator.base.errors import PlanError
from simulator.base.kernels import Gemm
from simulator.parallel.legality import check_split
from simulator.parallel.model_shard import shard_of
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import Block, build_blocks

SEQ, BATCH, WIDTH, HEADS = 2048, 4, 12288, 96
GPT = Model.model_validate(
    {
        "name": "gpt", "num_layers": 4, "d_model": WIDTH, "num_heads": HEADS, "d_ff": 4 * WIDTH, "vocab_size": 51200,
        "mlp": "gelu_tanh", "norm": "layer", "norm_bias": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True,
        "fused_qkv": True, "positions": "learned",
    }
)  # fmt: skip


def plan(tp: int, *, sequence: bool = False, stack: str = "megatron-2021", recompute: str = "none") -> Plan:
    return Plan.model_validate(
        {
            "tp": tp, "sequence_parallel": sequence, "seq_len": SEQ, "micro_batch_size": BATCH, "zero": 0,
            "data_parallel": "megatron", "precision": "fp16", "stack": stack, "recompute": recompute,
        }
    )  # fmt: skip


def layer(of: Plan) -> Block:
    return build_blocks(GPT, Stack.load(of.stack), of).layer


def sent(block: Block, phase: str) -> dict[str, list[int]]:
    kinds: dict[str, list[int]] = {}
    for op in block.ops:
        for exchange in op.forward_exchanges if phase == "forward" else op.backward_exchanges:
            kinds.setdefault(exchange.kind, []).append(exchange.num_bytes)
    return kinds


@pytest.mark.parametrize("stack", ["megatron-2021", "megatron-core-2025-exposed", "torch-2.6-eager"])
def test_a_layer_all_reduces_its_activations_twice_each_way(stack: str) -> None:
    # arXiv 1909.08053, figure 4: f and g of attention and of the MLP, each on b s h elements
    block = layer(plan(8, stack=stack))
    activations = 2 * SEQ * BATCH * WIDTH
    assert sent(block, "forward") == {"all_reduce": [activations] * 2}
    assert sent(block, "backward") == {"all_reduce": [activations] * 2}


@pytest.mark.parametrize(("stack", "again"), [("megatron-core-2025-exposed", 2), ("torch-2.6-eager", 0)])
def test_sequence_parallelism_gathers_and_scatters_instead(stack: str, again: int) -> None:
    # arXiv 2205.05198, section 4.2.2: an all-reduce is a reduce-scatter and an all-gather of the same bytes; Megatron
    # keeps its part of the linear layers' input only, and gathers it once more in the backward
    block = layer(plan(8, sequence=True, stack=stack))
    activations = 2 * SEQ * BATCH * WIDTH
    assert sent(block, "forward") == {"all_gather": [activations] * 2, "reduce_scatter": [activations] * 2}
    backward = sent(block, "backward")
    assert backward["reduce_scatter"] == [activations] * 2
    assert backward["all_gather"] == [activations] * (2 + again)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sequence", [False, True])
def test_activations_a_layer_are_those_of_the_paper(*, tp: int, sequence: bool) -> None:
    # arXiv 2205.05198, table 2, bytes a layer: s b h (10 + 24/t + 5 a s / (h t)) with tensor parallelism, and
    # s b h (34/t + 5 a s / (h t)) with sequence parallelism. It leaves out the norms' means and variances.
    saved = {t.name: t.num_bytes for t in layer(plan(tp, sequence=sequence)).saved_tensors()}
    kept = sum(size for name, size in saved.items() if "statistics" not in name)
    sbh, scores = SEQ * BATCH * WIDTH, 5 * HEADS * SEQ * SEQ * BATCH
    expected = 34 * sbh // tp if sequence else 10 * sbh + 24 * sbh // tp
    assert kept == expected + scores // tp


def test_selective_recomputation_drops_the_scores() -> None:
    # the same, table 2: s b h 34/t with selective recomputation, which runs the core of attention again
    from simulator.work.ops import recompute_ops

    of = plan(8, sequence=True, recompute="selective")
    block = layer(of)
    again = {t.name for op in recompute_ops(block, of, Stack.load(of.stack)) for t in op.outputs}
    kept = {t.name: t.num_bytes for t in block.saved_tensors() if t.name not in again and "statistics" not in t.name}
    assert sum(kept.values()) == 34 * SEQ * BATCH * WIDTH // 8


def test_shares_add_up_to_the_model() -> None:
    share = shard_of(GPT, plan(8))
    replicated = [(name, shape) for name, shape in GPT.parameter_shapes("layer") if _whole(name)]
    split = GPT.num_parameters_of("layer") - sum(prod(shape) for _, shape in replicated)
    assert share.num_parameters_of("layer") == split // 8 + sum(prod(shape) for _, shape in replicated)


def _whole(name: str) -> bool:
    return "norm" in name or name in ("attention.out.bias", "mlp.down.bias")


GROUPED = Model.load("qwen3-30b-a3b")  # 32 heads, 4 of keys and values


def shared(tp: int, **fields: object) -> Plan:
    given = {"data_parallel": "megatron", "zero": 0, "sequence_parallel": True, "seq_len": SEQ, "etp": 1, **fields}
    return Plan.model_validate({"tp": tp, "stack": "megatron-core-2025", **given})


@pytest.mark.parametrize("tp", [4, 8, 16])
def test_ranks_that_share_a_key_value_head_hold_their_part_of_its_weights(tp: int) -> None:
    # Megatron-Core deals the rows of linear_qkv out evenly (core/transformer/attention.py): nothing is held twice
    columns = (GROUPED.num_heads + 2 * GROUPED.num_kv_heads) * GROUPED.head_dim
    share = shard_of(GROUPED, shared(tp))
    held = {name: prod(shape) for name, shape in share.parameter_shapes("layer") if name.startswith("attention.")}
    joint = sum(
        size for name, size in held.items() if name.removeprefix("attention.")[0] in "qkv" and "norm" not in name
    )
    assert joint == columns * GROUPED.d_model // tp
    assert (share.num_heads, share.num_kv_heads) == (32 // tp, max(1, 4 // tp))


def test_what_they_made_is_gathered() -> None:
    # the same: an all-gather of all columns and a slice; backward, a reduce-scatter
    of = shared(8)
    block = build_blocks(GROUPED, Stack.load(of.stack), of).layer
    gathered = next(op for op in block.ops if op.name == "qkv.gathered")
    whole = 2 * SEQ * (32 + 2 * 4) * GROUPED.head_dim
    assert [(e.kind, e.num_bytes) for e in gathered.forward_exchanges] == [("all_gather", whole)]
    assert [(e.kind, e.num_bytes) for e in gathered.backward_exchanges] == [("reduce_scatter", whole)]
    product = next(op for op in block.ops if op.name == "qkv").forward[-1]
    assert isinstance(product, Gemm)
    assert product.n * 8 == (32 + 2 * 4) * GROUPED.head_dim
    assert not any(op.name == "qkv.gathered" for op in build_blocks(GROUPED, Stack.load(of.stack), shared(4)).layer.ops)


def told(tp: int, **fields: object) -> str:
    with pytest.raises(PlanError) as caught:
        check_split(shared(tp, **fields), GROUPED, Cluster.load("hgx-h100-8"))
    return str(caught.value)


def test_degrees_that_heads_do_not_allow_are_told_the_nearest() -> None:
    assert "tp = 8 does not divide the model's 4 key-value heads (tp = 4)" in told(8, data_parallel="fsdp2", zero=3)
    assert "tp = 6 does not divide the model's 32 heads (tp = 4)" in told(6)
    check_split(shared(8), GROUPED, Cluster.load("hgx-h100-8"))  # Megatron's
