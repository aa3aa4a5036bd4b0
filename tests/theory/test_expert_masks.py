"""Experts by masks, as GShard and DeepSpeed write them: against closed forms, and against torch's own products and saved tensors."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.base.errors import PlanError
from simulator.base.kernels import Gemm
from simulator.parallel.model_shard import shard_of
from simulator.predict import predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.resolve import resolve
from simulator.studies.backtest.rows import RunRow
from simulator.work.ops import build_blocks
from simulator.work.ops.core import Block
from simulator.work.script import communication, model_state_bytes

EXPERTS, TOP_K, TOKENS, WIDTH = 8, 2, 256, 64
MODEL = Model.model_validate({"name": "m", "num_layers": 2, "d_model": WIDTH, "num_heads": 8, "d_ff": 128, "vocab_size": 512,
                              "mlp": "gelu", "norm": "layer", "positions": "rope",
                              "experts": {"num_experts": EXPERTS, "top_k": TOP_K, "d_ff": 128}})  # fmt: skip
ROWS = TOKENS * TOP_K


def deepspeed(**fields: Any) -> Plan:
    return Plan.model_validate(
        {"data_parallel": "deepspeed", "zero": 2, "dp_shard": 8, "ep": 4, "seq_len": TOKENS, **fields}
    )


def layer(plan: Plan) -> Block:
    return build_blocks(shard_of(MODEL, plan), Stack.load("deepspeed-0.14"), plan).layer


def masked_flop(block: Block, *, backward: bool) -> int:
    ops = [op for op in block.ops if op.name in ("permuted", "unpermuted")]
    return sum(k.flop for op in ops for k in (op.backward if backward else op.forward) if isinstance(k, Gemm))


def test_rows_leave_and_return_by_products_that_grow_with_the_square_of_the_tokens() -> None:
    one, twice = layer(deepspeed()), layer(deepspeed(micro_batch_size=2))
    assert masked_flop(one, backward=False) == 2 * 2 * TOKENS * ROWS * WIDTH
    assert masked_flop(twice, backward=False) == 4 * masked_flop(one, backward=False)


def test_capacity_pads_and_the_busiest_expert_sets_it_where_nothing_is_dropped() -> None:
    plain = masked_flop(layer(deepspeed()), backward=False)
    assert masked_flop(layer(deepspeed(expert_capacity_factor=1.5)), backward=False) == 1.5 * plain
    assert masked_flop(layer(deepspeed(expert_imbalance=3.0)), backward=False) == 3 * plain


def test_products_and_what_is_saved_are_those_that_torch_runs() -> None:
    """A gate's masks, rows out and back, in torch on a CPU: FLOP of its products, and bytes that its autograd keeps."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    gates = torch.randn(TOP_K, TOKENS, EXPERTS, requires_grad=True)
    places = torch.nn.functional.one_hot(torch.randint(ROWS // EXPERTS, (TOP_K, TOKENS)), ROWS // EXPERTS).float()
    saved: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter:
        weights = sum(torch.einsum("se,sc->sec", gate, place) for gate, place in zip(gates, places, strict=True))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            mask, weighted = weights.bool().to(x.dtype), weights.to(x.dtype)
            rows = torch.einsum("sec,sm->ecm", mask, x)
            torch.einsum("sec,ecm->sm", weighted, rows).sum().backward()
    block = layer(deepspeed())
    assert counter.get_total_flops() == masked_flop(block, backward=False) + masked_flop(block, backward=True)
    sizes = {op.name: {t.name: t.num_bytes for t in op.outputs} for op in block.ops}
    assert sum(saved.values()) == (
        sizes["mask"]["mask"] + sizes["mask.weighted"]["mask.weighted"] + sizes["permuted"]["permuted"]
    )


def test_states_of_experts_are_cut_over_their_replicas() -> None:
    """16 B a parameter under stage 1 with 16-bit gradients: 2 and 2 whole, 12 over the ranks that share it."""
    plan = deepspeed(zero=1, precision="bf16")
    share = shard_of(MODEL, plan)
    assert share.experts is not None
    experts = 2 * 2 * share.experts.num_local * WIDTH * 128
    rest = share.num_parameters - experts
    sharded = 12 * rest / 8 + 12 * experts / 2
    assert model_state_bytes(share, plan) == pytest.approx(4 * (rest + experts) + sharded, abs=8)
    (first,) = {unit for unit in communication(share, plan) if unit.unit == "layer0"}
    assert first.experts is not None


@pytest.mark.parametrize(
    ("fields", "words"), [({"zero": 3}, "stages 0 to 2"), ({"dispatcher": "deep_ep"}, "all-to-alls")]
)
def test_what_deepspeed_does_not_run_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        predict(MODEL, deepspeed(**fields), Cluster.load("hgx-h100-8"))


def test_it_costs_more_than_sorted_rows() -> None:
    model, cluster = Model.load("mixtral-8x7b"), Cluster.load("hgx-h100-8")
    common = {"dp_shard": 8, "ep": 8, "seq_len": 2048, "stack": "megatron-deepspeed-2022", "zero": 1}
    masked, sorted_ = (
        predict(model, Plan.model_validate(common | {"data_parallel": name}), cluster)
        for name in ("deepspeed", "megatron")
    )
    assert masked.breakdown["gemm"] > 1.02 * sorted_.breakdown["gemm"]


def test_a_table_names_it() -> None:
    row = RunRow(
        line=2, id="r", framework="DeepSpeed-MoE", model_name="m", n_layers=4, d_model=512, n_heads=8, d_ff=2048,
        mlp_kind="gelu", vocab=51200, seq_len=1024, n_experts=16, top_k=1, gpu="A100-80GB-SXM", n_gpus=16, ep=16,
        micro_batch=4, global_batch=64, precision="fp16", metric="step_time_s", value=1.0,
    )  # fmt: skip
    run = resolve(row)
    assert (run.stack.name, run.plan.implementation, run.plan.ep) == ("deepspeed-moe-2022", "deepspeed", 16)
    assert run.plan.experts.capacity_factor == 1
