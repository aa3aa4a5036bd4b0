"""Laws of a lowered step: folding changes nothing, bounds hold, the breakdown is the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.play.engine import run
from simulator.play.lower import Lowering, lower
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from tests.examples import examples
from tests.folding import fold_programs

MODEL = Model(
    name="small",
    family="llama",
    num_layers=5,
    d_model=512,
    num_heads=8,
    num_kv_heads=4,
    d_ff=1024,
    mlp="swiglu",
    norm="rms",
    positions="rope",
    vocab_size=4096,
)
STACKS = ("torch-2.6-eager", "torchtitan-2024-compiled", "maxtext-2024", "megatron-core-2025-exposed")
# (data_parallel, zero, dp_replicate, dp_shard) on 16 devices, then what splits the model
LAYOUTS = (
    ("ddp", 0, 2, 1, {"tp": 2, "pp": 4, "sequence_parallel": True}),
    ("fsdp2", 3, 1, 8, {"tp": 2}),
    ("fsdp2", 3, 1, 4, {"pp": 4}),
    ("megatron", 1, 1, 2, {"tp": 4, "pp": 2, "sequence_parallel": True}),
    ("megatron", 1, 1, 4, {"tp": 2, "pp": 2, "schedule": "zb_h1"}),
    ("megatron", 1, 1, 2, {"cp": 2, "tp": 2, "pp": 2, "schedule": "gpipe"}),
    ("ddp", 0, 16, 1),
    ("fsdp1", 3, 1, 16),
    ("fsdp1", 2, 1, 16),
    ("fsdp2", 3, 1, 16),
    ("fsdp2", 3, 2, 8),
    ("zero_redundancy", 1, 1, 16),
    ("deepspeed", 2, 1, 16),
    ("deepspeed", 3, 1, 16),
    ("megatron", 1, 1, 16),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    data_parallel, zero, replicate, shard, *split = draw(st.sampled_from(LAYOUTS))
    return Plan(
        **(split[0] if split else {}),
        rank_order=draw(
            st.sampled_from(("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "tp-pp-dp_shard-cp-dp_replicate", "dp-pp-cp-tp"))
        ),
        data_parallel=data_parallel,
        zero=zero,
        dp_replicate=replicate,
        dp_shard=shard,
        seq_len=draw(st.sampled_from((256, 2048))),
        micro_batch_size=draw(st.integers(1, 4)),
        num_micro_batches=draw(st.integers(1, 9)),
        recompute=draw(st.sampled_from(("none", "full", "selective", "every_k"))),
        recompute_every=2,
        backward_prefetch=draw(st.integers(0, 2)),
        forward_prefetch=draw(st.integers(0, 2)),
        sync_every_micro_batch=draw(st.sampled_from((None, True, False))),
        stack=draw(st.sampled_from(STACKS)),
    )


def lowered(plan: Plan) -> Lowering:
    cluster = Cluster.load("hgx-h100-8", 2)
    calibration = Calibration.datasheet(cluster.device)
    return lower(MODEL, plan, cluster, Stack.load(plan.stack), calibration, default_curves())


@examples(40, ci=20)
@given(plans())
def test_folded_equals_every_rank_playing_every_micro_batch(plan: Plan) -> None:
    lowering = lowered(plan)
    folded, full = play(lowering), play(lowering, fold=False)
    assert len(full.timeline.programs) == plan.num_devices
    assert folded.step_s == pytest.approx(full.step_s, rel=1e-9)
    for name, seconds in full.breakdown.items():
        assert folded.breakdown[name] == pytest.approx(seconds, rel=1e-6, abs=1e-9 * full.step_s)


@examples(15)
@given(plans())
def test_refinement_finds_that_all_ranks_are_equal(plan: Plan) -> None:
    lowering = lowered(plan)
    programs = [lowering.program(1, rank) for rank in range(plan.num_devices)]
    classes = fold_programs(programs)
    assert [each.num_ranks for each in classes] == [plan.num_devices // plan.pp] * plan.pp
    assert run(classes).step_s == pytest.approx(run(programs).step_s, rel=1e-9)


@examples(60)
@given(plans())
def test_bounds_hold_and_the_breakdown_is_the_step(plan: Plan) -> None:
    played = play(lowered(plan))
    slack = 1e-9 * played.step_s
    assert played.lower_s <= played.step_s + slack
    assert played.step_s <= played.upper_s + slack
    assert sum(played.breakdown.values()) == pytest.approx(played.step_s, rel=1e-9)
    assert all(seconds >= -slack for seconds in played.breakdown.values())
