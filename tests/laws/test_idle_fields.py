"""A field that is given and changes nothing of the answer is named as without effect, and one so named changes nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from simulator import Cluster, Model, Plan, predict
from simulator.base.errors import PlanError
from simulator.parallel.legality import unused
from simulator.predict import Prediction
from simulator.spec.model.experts import Experts
from tests.examples import examples

HGX = Cluster.load("hgx-h100-8")
SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "d_model": 512,
    "num_heads": 8,
    "num_kv_heads": 4,
    "d_ff": 1408,
    "vocab_size": 32000,
}
DENSE = Model(name="dense", **SHAPE)
MIXED = Model(name="mixed", experts=Experts(num_experts=8, top_k=2, d_ff=512), **SHAPE)
_MEGATRON = {"data_parallel": "megatron", "zero": 1}
BASES: tuple[tuple[Model, dict[str, Any]], ...] = (
    (DENSE, {"data_parallel": "ddp", "zero": 0, "dp_replicate": 8}),
    (DENSE, {"data_parallel": "zero_redundancy", "zero": 1, "dp_shard": 8}),
    (DENSE, {"data_parallel": "fsdp1", "dp_shard": 8}),
    (DENSE, {"data_parallel": "fsdp1", "zero": 2, "dp_shard": 8}),
    (DENSE, {"data_parallel": "fsdp2", "dp_shard": 8}),
    (DENSE, {"data_parallel": "fsdp2", "dp_shard": 8, "peft": "lora"}),
    (DENSE, {"data_parallel": "fsdp2", "dp_shard": 4, "pp": 2, "num_micro_batches": 4}),
    *((DENSE, {"data_parallel": "deepspeed", "zero": zero, "dp_shard": 8}) for zero in (1, 2, 3)),
    (DENSE, {"data_parallel": "deepspeed", "dp_shard": 8, "offload": {"optimizer": "host"}}),
    (DENSE, {"data_parallel": "fsdp2", "dp_shard": 8, "offload": {"optimizer": "host", "parameters": "host"}}),
    *(
        (DENSE, {"data_parallel": "ddp", "zero": 0, "dp_replicate": 8, "optimizer": kind})
        for kind in ("sgd", "adam8bit")
    ),
    (DENSE, {**_MEGATRON, "dp_shard": 2, "tp": 2, "pp": 2, "num_micro_batches": 4}),
    (MIXED, {**_MEGATRON, "dp_shard": 8, "ep": 4}),
    (MIXED, {"data_parallel": "fsdp2", "dp_shard": 8, "ep": 4}),
)
# Values that ask for something which no default has and which is no other name of what is done anyway
VALUES: dict[str, Any] = {
    **dict.fromkeys(("expert_overlap", "pool_prefetch", "upcast_frozen", "sequence_parallel", "mixed_units"), True),
    **dict.fromkeys(("embedding_as_layer", "head_as_layer", "gradient_as_bucket_view"), True),
    **dict.fromkeys(("shard_reserve_bytes", "compress_bytes_per_s"), 10**9),
    **dict.fromkeys(("bucket_bytes", "reduce_bucket_numel", "prefetch_bucket_numel"), 10**6),
    **dict.fromkeys(("galore_rank", "lora_rank", "prefix_tokens"), 4),
    **dict.fromkeys(("forward_prefetch", "expert_imbalance", "expert_capacity_factor"), 2),
    "optimizer_dtype": "bf16",
    "optimizer_impl": "loop",
    "cp_exchange": "all_to_all",
    "dispatcher": "all_gather",
    "schedule": "gpipe",
    "reshard_after_forward": 2,
    "lora_dropout": 0.1,
    "lora_targets": ("mlp",),
    "recompute_modules": ("mlp",),
    "recompute_every": 2,
    "pool_block_bytes": 2**22,
    "pool_evict": "cost",
    "comm_hook": {"rank": 4},
    "one_bit": {"freeze_step": 10},
    "offload": {"pinned": False},
}


@cache
def _said(at: int, field: str | None) -> tuple[Prediction, frozenset[str]] | None:
    """The answer to a base plan with a field's value, and what does nothing in it; None where the two are refused."""
    model, fields = BASES[at]
    if field in fields:
        return None
    try:
        plan = Plan(seq_len=256, **fields, **({field: VALUES[field]} if field else {}))
        found = predict(model, plan, HGX)
    except PlanError:
        return None
    return found, frozenset(unused(plan, experts=model.experts is not None))


@given(st.integers(0, len(BASES) - 1), st.sampled_from(sorted(VALUES)))
@examples(400, ci=150)
def test_a_field_changes_the_answer_or_is_named(at: int, field: str) -> None:
    plain, asked = _said(at, None), _said(at, field)
    assume(asked is not None)
    assert plain is not None
    assert asked is not None
    same = _figures(plain[0]) == _figures(asked[0])
    assert same == (field in asked[1])


def _figures(found: Prediction) -> tuple[Any, ...]:
    memory = found.memory
    return found.step_s, found.low_s, found.high_s, found.breakdown, memory.used_bytes, memory.by_category
