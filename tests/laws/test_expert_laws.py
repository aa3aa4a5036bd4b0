"""What holds of every placement of a mixture: FLOP, parameters, bounds, folding, imbalance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.base.errors import PlanError
from simulator.parallel.legality import check
from simulator.parallel.model_shard import shard_of
from simulator.predict import Prediction, predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import build_blocks
from simulator.work.script import flat_numels
from tests.examples import examples

RANKS = 8
HOST = Cluster.load("hgx-h100-8")
SMALL = {
    "name": "small",
    "num_layers": 3,
    "d_model": 256,
    "num_heads": 8,
    "d_ff": 512,
    "vocab_size": 1024,
    "experts": {"num_experts": 8, "top_k": 2, "d_ff": 128, "shared_d_ff": 128, "first_dense_layers": 1},
}
MODEL = Model.model_validate(SMALL)
STACK = "megatron-core-2025"

degrees = st.sampled_from([1, 2, 4, 8])
placements = st.fixed_dictionaries(
    {"tp": st.sampled_from([1, 2, 4]), "ep": degrees, "whole": st.booleans(), "sharded": st.booleans()}
)


def plan_of(placement: dict[str, int], **fields: object) -> Plan:
    """A legal Megatron plan on RANKS ranks, or one that `check` refuses."""
    tp, dp = placement["tp"], RANKS // placement["tp"]
    sharding = {"zero": 1, "dp_shard": dp} if placement["sharded"] else {"zero": 0, "dp_replicate": dp}
    return Plan.model_validate(
        {
            "data_parallel": "megatron",
            "stack": STACK,
            "tp": tp,
            "ep": placement["ep"],
            "etp": 1 if placement["whole"] else tp,
            "sequence_parallel": tp > 1,
            "seq_len": 512,
            "num_micro_batches": 2,
            **sharding,
            **fields,
        }
    )


def played(plan: Plan, *, fold: bool = True) -> Prediction:
    return predict(MODEL, plan, HOST, fold=fold)


def is_legal(plan: Plan) -> bool:
    try:
        check(plan)
    except PlanError:
        return False
    return True


@given(placements)
@examples(25)
def test_products_and_parameters_are_dealt_out_and_none_is_lost(placement: dict[str, int]) -> None:
    """Over all ranks, products of experts are those of one rank that holds all and sees every token."""
    plan = plan_of(placement)
    if not is_legal(plan):
        return
    alone = build_blocks(MODEL, Stack.load(STACK), plan_of({"tp": 1, "ep": 1, "whole": True, "sharded": False})).layer
    layer = build_blocks(MODEL, Stack.load(STACK), plan).layer
    grouped = [sum(k.flop for op in block.ops if op.name.startswith("experts.") for k in (*op.forward, *op.backward))
               for block in (layer, alone)]  # fmt: skip
    assert grouped[0] * plan.tp == grouped[1]  # tp ranks share the tokens of one data-parallel rank
    share = shard_of(MODEL, plan)
    held = sum(numel for numel, _ in flat_numels(share, plan))
    assert held == share.num_parameters
    assert share.experts is not None
    assert share.experts.num_local * plan.ep == 8
    assert share.experts.d_ff * plan.experts.etp == 128


@given(placements, st.sampled_from(["all_to_all", "all_gather", "deep_ep"]))
@examples(12)
def test_steps_stay_within_their_bounds_and_folding_changes_nothing(placement: dict[str, int], dispatcher: str) -> None:
    plan = plan_of(placement, dispatcher=dispatcher)
    if not is_legal(plan):
        return
    folded, every = played(plan), played(plan, fold=False)
    assert folded.lower_s <= folded.step_s <= folded.upper_s
    assert every.step_s == pytest.approx(folded.step_s, rel=1e-9)


@given(st.sampled_from([2, 4, 8]), st.floats(1.0, 3.0), st.floats(1.0, 3.0))
@examples(10)
def test_more_imbalance_never_shortens_a_step_nor_frees_memory(ep: int, one: float, other: float) -> None:
    placement = {"tp": 1, "ep": ep, "whole": True, "sharded": True}
    less, more = (played(plan_of(placement, expert_imbalance=i)) for i in sorted((one, other)))
    assert less.step_s <= more.step_s * (1 + 1e-9)
    assert less.memory.peak_allocated_bytes <= more.memory.peak_allocated_bytes
