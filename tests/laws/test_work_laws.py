"""Laws of the work of a step: schedules order it and recomputation adds to it, and neither loses any."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import Cluster, Model, Plan, Prediction, predict
from tests.examples import examples

HGX = Cluster.load("hgx-h100-8")
MODEL = Model(name="small", num_layers=12, d_model=512, num_heads=8, num_kv_heads=4, d_ff=1408, vocab_size=32000)
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"zero": 0, "dp_replicate": 8},
    "fsdp1": {"dp_shard": 8},
    "fsdp2": {"dp_shard": 8},
    "deepspeed": {"dp_shard": 8},
    "megatron": {"zero": 1, "dp_shard": 8},
}


@cache
def _of(way: str, mode: str = "none", every: int = 1) -> Prediction:
    plan = Plan(seq_len=256, data_parallel=way, recompute=mode, recompute_every=every, **WAYS[way])
    return predict(MODEL, plan, HGX)


@given(st.sampled_from(sorted(WAYS)), st.integers(1, 12))
@examples(60, ci=25)
def test_every_kth_layer_runs_its_share_of_all_layers_again(way: str, every: int) -> None:
    none, full, some = _of(way), _of(way, "full"), _of(way, "every_k", every)
    share = -(-MODEL.num_layers // every) / MODEL.num_layers
    more = full.hardware_flop_per_step - none.hardware_flop_per_step
    assert some.hardware_flop_per_step == pytest.approx(none.hardware_flop_per_step + share * more, rel=1e-9)
    assert none.model_flop_per_step == full.model_flop_per_step == some.model_flop_per_step
    assert none.step_s <= some.step_s * (1 + 1e-9)
    assert some.memory.peak_allocated_bytes <= none.memory.peak_allocated_bytes


SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb_h1", 1), ("dualpipe_v", 2))


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize(("pp", "rounds"), [(2, 2), (2, 3), (4, 2)])
def test_schedules_order_the_same_work(pp: int, rounds: int, schedule: str, chunks: int) -> None:
    """And keep no more than GPipe, which runs all forwards first: but DualPipe-V, whose stages hold two ends of the model."""
    way = {"data_parallel": "megatron", "zero": 1, "pp": pp, "dp_shard": 8 // pp, "num_micro_batches": 2 * pp * rounds}
    plain, other = (
        predict(MODEL, Plan(seq_len=256, schedule=name, virtual_stages=number, **way), HGX)
        for name, number in (("gpipe", 1), (schedule, chunks))
    )
    assert other.hardware_flop_per_step == plain.hardware_flop_per_step
    assert other.tokens_per_step == plain.tokens_per_step
    if schedule != "dualpipe_v":
        assert other.memory.peak_allocated_bytes <= plain.memory.peak_allocated_bytes
