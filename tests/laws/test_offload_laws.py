"""Laws of offload: it never costs HBM, bandwidth never hurts, folding changes nothing, memory returns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.base.errors import ClusterError
from simulator.memory import simulate_memory, step_live_bytes, write_history
from simulator.play.lower import Lowering, lower
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.tiers import HostTier
from simulator.spec.model import Model
from simulator.spec.plan import Offload, Plan
from simulator.spec.software.stack import Stack
from simulator.work.offload import tier_usage
from simulator.work.ops import build_blocks
from tests.examples import examples

MODEL = Model(
    name="small",
    family="llama",
    num_layers=5,
    d_model=256,
    num_heads=4,
    num_kv_heads=2,
    d_ff=512,
    mlp="swiglu",
    norm="rms",
    positions="rope",
    vocab_size=1024,
)
RANKS = 4
STACK = Stack.load("torch-2.6-eager")
# (data_parallel, zero, optimizer, parameters), each with less offload before it
STATES = (
    ("fsdp2", 3, "host", "host"),
    ("deepspeed", 1, "host", "none"),
    ("deepspeed", 2, "host", "none"),
    ("deepspeed", 3, "host", "none"),
    ("deepspeed", 3, "host", "host"),
    ("deepspeed", 3, "nvme", "host"),
    ("deepspeed", 3, "nvme", "nvme"),
)
RATES = tuple(name for name in HostTier.model_fields if name.endswith("_per_s") and not name.startswith("process"))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    implementation, zero, optimizer, parameters = draw(st.sampled_from(STATES))
    return Plan(
        data_parallel=implementation,  # type: ignore[arg-type]
        zero=zero,
        dp_shard=RANKS,
        seq_len=draw(st.sampled_from((256, 1024))),
        num_micro_batches=draw(st.integers(1, 6)),
        recompute=draw(st.sampled_from(("none", "full", "selective"))),
        backward_prefetch=draw(st.integers(0, 2)),
        offload=Offload(
            optimizer=optimizer,  # type: ignore[arg-type]
            parameters=parameters,  # type: ignore[arg-type]
            activations=draw(st.sampled_from(("none", "host"))),
            prefetch=draw(st.integers(0, 3)),
            pinned=draw(st.booleans()),
            overlap=draw(st.booleans()),
            migration=draw(st.sampled_from(("copy", "fault", "prefetch"))),
            sub_group_numel=draw(st.sampled_from((10**5, 10**9))),
        ),
    )


def cluster(**tier: float) -> Cluster:
    preset = Cluster.load("hgx-h100-8")
    data = {field: getattr(preset, field) for field in Cluster.model_fields}
    given_tier = {"tier": tier} if tier else {}
    return Cluster.parse({**data, "gpus_per_node": RANKS, "nvlink_domain_size": RANKS, **given_tier}, "t", ClusterError)


def lowered(plan: Plan, **tier: float) -> Lowering:
    place = cluster(**tier)
    return lower(MODEL, plan, place, STACK, Calibration.datasheet(place.device), default_curves())


def hbm_bytes(plan: Plan) -> int:
    use, _ = simulate_memory(MODEL, plan, STACK, build_blocks(MODEL, STACK, plan), cluster().device)
    return use.peak_allocated_bytes


@examples(40, ci=20)
@given(plans())
def test_less_offload_never_holds_less_hbm(plan: Plan) -> None:
    least = hbm_bytes(plan)
    nothing = {"optimizer": "none", "parameters": "none"}
    for kept in (nothing, {"activations": "none"}, {**nothing, "activations": "none"}):
        less = plan.copy_with(offload=plan.offload.model_copy(update=kept))
        # FSDP2's fetched fp32 shard of one unit is the price of not holding it
        fetched = 4 * MODEL.num_parameters // RANKS if plan.implementation == "fsdp2" else 2**20
        assert least <= hbm_bytes(less) + fetched


@examples(40)
@given(plans())
def test_memory_returns_and_what_leaves_hbm_is_below_it(plan: Plan) -> None:
    course = step_live_bytes(write_history(MODEL, plan, STACK, build_blocks(MODEL, STACK, plan), ()))
    assert course.final == course.resident
    below = tier_usage(MODEL, plan)
    assert below.host_bytes + below.nvme_bytes >= 16 * MODEL.num_parameters // RANKS


@examples(25, ci=20)
@given(plans(), st.sampled_from(RATES), st.sampled_from((2.0, 10.0)))
def test_more_bandwidth_never_slows(plan: Plan, rate: str, factor: float) -> None:
    usual = cluster().host_tier
    assert usual is not None
    slower = play(lowered(plan, **{rate: getattr(usual, rate) / factor})).step_s
    faster = play(lowered(plan)).step_s
    assert faster <= slower * (1 + 1e-9)


@examples(25, ci=20)
@given(plans())
def test_equal_ranks_and_micro_batches_fold(plan: Plan) -> None:
    lowering = lowered(plan)
    folded, full = play(lowering), play(lowering, fold=False)
    assert folded.step_s == pytest.approx(full.step_s, rel=1e-6)


@examples(25)
@given(plans())
def test_bounds_hold_and_the_breakdown_is_the_step(plan: Plan) -> None:
    played = play(lowered(plan))
    assert played.lower_s <= played.step_s * (1 + 1e-9)
    assert played.step_s <= played.upper_s * (1 + 1e-9)
    assert sum(played.breakdown.values()) == pytest.approx(played.step_s, rel=1e-9)
