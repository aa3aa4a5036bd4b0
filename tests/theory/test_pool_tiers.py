"""A pool over several tiers in a predicted step, against what its bytes take on the links that carry them."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

from simulator import Cluster, Model, Plan, Prediction, predict
from simulator.base.errors import PlanError
from simulator.play.lower import Lowering, lower
from simulator.predict.telemetry import telemetry
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.software.stack import Stack
from simulator.work.program import Collective

MODEL = Model.load("llama3.2-1b").model_copy(update={"num_layers": 6})
NODE = Cluster.load("hgx-h100-8").model_copy(update={"gpus_per_node": 1, "nvlink_domain_size": 1})
assert NODE.host_tier is not None
HOST = NODE.host_tier
ENOUGH, SHORT, SHORTER = 80, 14, 12  # GB of HBM
MOVES = ("d2h", "h2d")


def on(gb: float, **tier: Any) -> Cluster:
    """One GPU with so much HBM, and another host."""
    device = NODE.device.model_copy(update={"memory_bytes": int(gb * 1e9), "cuda_memory_bytes": int(gb * 1e9)})
    return NODE.model_copy(update={"device": device, "tier": HOST.model_copy(update=tier)})


def plan(policy: str, **fields: Any) -> Plan:
    return Plan(dp_shard=1, zero=0, data_parallel="ddp", memory_policy=policy, **{"seq_len": 2048, **fields})


@cache
def of(policy: str, gb: float, **fields: Any) -> tuple[Prediction, Lowering]:
    cluster, asked = on(gb), plan(policy, **fields)
    calibration = Calibration.for_device(cluster.device)
    lowering = lower(MODEL, asked, cluster, Stack.of(asked), calibration, calibration.links or default_curves())
    return predict(MODEL, asked, cluster), lowering


def moved(lowering: Lowering) -> Counter[str]:
    """Bytes of a step by kind of transfer."""
    ops = lowering.programs(lowering.plan.num_micro_batches)[0].ops
    return sum((Counter({op.kind: op.size_bytes}) for op in ops if isinstance(op, Collective)), Counter[str]())


def extra_s(policy: str, gb: float, **fields: Any) -> float:
    """What the step takes beyond one with memory enough."""
    return of(policy, gb, **fields)[0].step_s - of(policy, ENOUGH, **fields)[0].step_s


def test_where_all_fits_the_step_is_that_of_one_tier_to_the_digit() -> None:
    one, _ = of("expandable", ENOUGH)
    for policy in ("tiered", "unified", "overcommit"):
        found, lowering = of(policy, ENOUGH)
        assert (found.step_s, found.breakdown) == (one.step_s, one.breakdown)
        assert found.memory.by_category == one.memory.by_category
        assert found.memory.used_bytes == one.memory.used_bytes
        assert not moved(lowering)


def test_on_demand_a_step_takes_its_bytes_over_the_link_longer() -> None:
    """Nothing runs beside: a use waits until room is made and its tensor is there, and asks for it when it could begin."""
    found, lowering = of("tiered", SHORT)
    assert found.fits
    sizes, program = moved(lowering), lowering.programs(1)[0]
    copies = sum(float(op.cost.latency_s) for op in program.ops if isinstance(op, Collective))
    expected = sizes["d2h"] / HOST.d2h_bytes_per_s + sizes["h2d"] / HOST.h2d_bytes_per_s + copies
    assert extra_s("tiered", SHORT) == pytest.approx(expected, rel=2e-3)
    assert found.breakdown["exposed:h2d"] + found.breakdown["exposed:d2h"] == pytest.approx(expected, rel=2e-3)


def test_what_leaves_comes_back_and_is_at_least_what_has_no_room() -> None:
    for policy in ("lru", "belady", "cost"):
        found, lowering = of("tiered", SHORT, pool_evict=policy)
        sizes = moved(lowering)
        assert sizes["d2h"] == sizes["h2d"]  # a step leaves the tiers as it found them
        whole = of("expandable", ENOUGH)[0].memory
        lacks = whole.peak_allocated_bytes + whole.outside_torch_bytes - found.memory.capacity_bytes
        assert sizes["d2h"] >= found.memory.host_bytes >= found.memory.spilled_bytes >= lacks > 0
        assert sum(found.memory.by_category.values()) == found.memory.peak_allocated_bytes
        assert found.memory.used_bytes <= found.memory.capacity_bytes


def test_page_faults_take_their_rounds() -> None:
    """A round moves `fault_bytes` in its latency and what they take on the link; both ways."""
    _, lowering = of("unified", SHORT)
    slow = min(HOST.h2d_bytes_per_s, HOST.d2h_bytes_per_s)
    round_s = HOST.fault_latency_s + HOST.fault_bytes / slow
    rounds = sum(moved(lowering)[kind] for kind in MOVES) / HOST.fault_bytes
    assert extra_s("unified", SHORT) == pytest.approx(rounds * round_s, rel=2e-3)


@pytest.mark.parametrize("policy", ["tiered", "unified"])
def test_less_memory_is_never_faster_and_prefetch_never_slower(policy: str) -> None:
    steps = [of(policy, gb)[0].step_s for gb in (ENOUGH, SHORT, SHORTER)]
    assert steps == sorted(steps)
    assert steps[0] < of(policy, SHORT, pool_prefetch=True)[0].step_s <= of(policy, SHORT)[0].step_s


def test_mappings_cost_a_call_of_the_driver_a_move() -> None:
    assert extra_s("overcommit", SHORT) > extra_s("tiered", SHORT)


def test_micro_batches_that_repeat_are_played_once() -> None:
    folded, _ = of("tiered", SHORT, num_micro_batches=9)
    whole = predict(MODEL, plan("tiered", num_micro_batches=9), on(SHORT), fold=False)
    assert folded.num_played < 9
    assert folded.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert folded.breakdown == pytest.approx(whole.breakdown, rel=1e-6)


def test_tiers_fill_in_their_order_and_what_none_holds_does_not_fit() -> None:
    usual, asked = of("tiered", SHORT)[0].memory, plan("tiered")
    lent = predict(MODEL, asked, on(SHORT).model_copy(update={"idle_gpus": 1})).memory
    assert (lent.peer_bytes > 0, lent.host_bytes < usual.host_bytes) == (True, True)
    small = on(SHORTER, memory_bytes=int(2.3e9))
    spread = predict(MODEL, asked, small).memory
    assert spread.fit.runs
    assert 0 < spread.host_bytes <= 2.3e9
    assert spread.nvme_bytes > 0
    full = predict(MODEL, asked, on(SHORTER, memory_bytes=int(1e9), nvme_bytes=int(1e9))).memory
    assert full.binding.name == "NVMe"
    assert not full.fit.runs


def test_what_one_use_needs_at_once_is_the_least_that_fits() -> None:
    """The optimizer steps the head at once: parameters, gradients and two moments in fp32. Short sequences need less elsewhere."""
    model = MODEL.model_copy(update={"tied_embeddings": False})
    at_once = 4 * 4 * model.num_parameters_of("head")
    outside = of("tiered", SHORT)[0].memory.outside_torch_bytes
    fits = [
        predict(model, plan("tiered", seq_len=256), on((at_once + outside) / 1e9 * share)).fits for share in (1.1, 0.99)
    ]
    assert fits == [True, False]


def test_moves_are_streams_of_the_step() -> None:
    found, lowering = of("tiered", SHORT)
    spans = found.timeline.of()
    assert {span.stream for span in spans if span.category in MOVES} == set(MOVES)
    (program,) = telemetry(found, MODEL, lowering.plan, lowering.cluster).programs
    sizes = moved(lowering)
    assert program.of("pcie up").amount == pytest.approx(sizes["d2h"])
    assert program.of("pcie down").amount == pytest.approx(sizes["h2d"])


def test_what_is_not_modelled_is_told() -> None:
    for fields, place in (
        ({"offload": {"activations": "host"}}, "offload"),
        ({"alloc_conf": "expandable_segments:True"}, "PyTorch"),
    ):
        with pytest.raises(PlanError, match=place):
            predict(MODEL, plan("tiered", **fields), on(SHORT))
    bare = on(SHORT).model_copy(update={"host": None, "tier": None})
    with pytest.raises(PlanError, match="no host memory"):
        predict(MODEL, plan("tiered"), bare)
