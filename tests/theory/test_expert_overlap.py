"""Experts' exchanges beside another micro-batch's compute: a forward and a backward of different micro-batches at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from simulator.base.errors import PlanError
from simulator.parallel.legality import check
from simulator.parallel.pipeline import order, peak_in_flight
from simulator.play.lower import Lowering, lower
from simulator.play.lower.builder import Builder
from simulator.play.lower.paired import paired
from simulator.play.lower.work import Phase
from simulator.predict import predict
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

MIXTRAL, QWEN = Model.load("mixtral-8x7b"), Model.load("qwen3-30b-a3b")
STACK = Stack.load("megatron-core-2025").without_host()


def lowered(model: Model = MIXTRAL, *, stack: Stack = STACK, **fields: Any) -> Lowering:
    given = {
        "ep": 8, "dp_shard": 8, "zero": 1, "data_parallel": "megatron", "seq_len": 4096, "num_micro_batches": 8,
        "expert_overlap": True, **fields,
    }  # fmt: skip
    plan = Plan.model_validate(given)
    check(plan)
    where = Cluster.load("hgx-h100-8").with_nodes(plan.num_devices // 8)
    return lower(model, plan, where, stack, Calibration.ideal(), LinkCurves.ideal())


def _cut(phase: Phase, port: float) -> tuple[list[float], list[int]]:
    """Seconds before, between and behind the two exchanges of a layer's rows, and the bytes of these.

    The weights travel behind their rows; the rows' counts are gathered before.
    """
    seconds, sizes = [0.0], []
    for segment in phase.segments:
        seconds[-1] += segment.work.duration_s
        moved = [exchange.num_bytes for exchange in segment.exchanges if exchange.kind == "all_to_all"]
        counts = [exchange.num_bytes for exchange in segment.exchanges if exchange.kind != "all_to_all"]
        assert all(exchange.axis == "ep" for exchange in segment.exchanges)
        seconds[-1] += sum(counts) * 7 / 8 / port
        if moved:
            sizes.append(sum(moved))
            seconds.append(0.0)
        seconds[-1] += segment.beside.duration_s
    return seconds, sizes


def test_each_exchange_runs_beside_the_other_micro_batch() -> None:
    # Megatron-LM, core/models/common/model_chunk_schedule_plan.py: combine b ‖ attention f; dispatch f ‖ experts b;
    # dispatch b ‖ experts f; combine f ‖ attention b
    lowering = lowered()
    layer = lowering.step.units[1].work
    port = lowering.cluster.intra.bytes_per_s
    (f, sent), (b, back) = _cut(layer.forward, port), _cut(layer.backward, port)

    def exchange_s(num_bytes: int) -> float:
        return num_bytes * 7 / 8 / port  # to the seven others

    expected = b[0] + f[2]
    expected += max(exchange_s(back[0]), f[0]) + max(exchange_s(sent[0]), b[1])
    expected += max(exchange_s(back[1]), f[1]) + max(exchange_s(sent[1]), b[2])
    work = paired(Builder(lowering.fabric), [layer.forward], [layer.backward])
    assert work.duration_s == pytest.approx(expected, rel=1e-9)


def test_each_piece_of_a_pair_is_a_call_of_python() -> None:
    """Attention, dispatch, experts and combine of either direction are nodes of a schedule, beside the layers' own modules."""
    lowering = lowered(
        stack=STACK.copy_with(host_module_s=1e-3), expert_capacity_factor=1.0
    )  # no wait for rows' counts
    layer, build = lowering.step.units[1].work, Builder(lowering.fabric)
    apart = build.summed(layer.forward, layer.backward)
    assert paired(build, [layer.forward], [layer.backward]).host_s - apart.host_s == pytest.approx(8e-3)


@pytest.mark.parametrize("stages", [2, 4])
def test_one_more_forward_makes_the_two_independent(stages: int) -> None:
    m, chunks = 4 * stages, 2
    for stage in range(stages):
        actions = order("interleaved", stages, m, stage, chunks, paired=True)
        plain = order("interleaved", stages, m, stage, chunks)
        assert sorted(map(str, actions)) == sorted(map(str, plain))
        done: list[str] = []
        for action, then in pairwise(actions):
            if then.beside:
                assert action.kind == "F"
                assert f"F{then.micro_batch}.{then.chunk}" in done  # not the one that runs beside it
            done.append(str(action))
        assert peak_in_flight("interleaved", stages, m, stage, chunks, paired=True) == 1 + peak_in_flight(
            "interleaved", stages, m, stage, chunks
        )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pp": 2, "virtual_stages": 2},
        {"pp": 4, "virtual_stages": 2, "num_micro_batches": 16},
        {"pp": 2, "virtual_stages": 2, "schedule": "dualpipe_v"},
        {"pp": 4, "virtual_stages": 2, "schedule": "dualpipe", "num_micro_batches": 16},
        {"pp": 2, "virtual_stages": 4, "num_micro_batches": 2},
    ],
)
def test_hiding_exchanges_shortens_a_step_by_at_most_their_time(fields: dict[str, Any]) -> None:
    between_nodes = {"ep": 16, "dp_shard": 16, **fields}
    hidden, plain = (play(lowered(QWEN, expert_overlap=flag, **between_nodes)) for flag in (True, False))
    exposed_s = plain.breakdown.get("exposed:all_to_all", 0.0)
    assert exposed_s > 0
    assert hidden.step_s < plain.step_s
    if not fields:  # in a pipeline the exchanges of other stages count too
        assert hidden.step_s >= plain.step_s - exposed_s
    assert hidden.lower_s <= hidden.step_s <= hidden.upper_s


def test_of_few_micro_batches_all_are_played_alike() -> None:
    many = lowered(num_micro_batches=12)
    whole, folded = play(many, fold=False), play(many)
    assert folded.step_s == pytest.approx(whole.step_s, rel=1e-9)


@pytest.mark.parametrize(
    ("fields", "layers"), [({}, 32), ({"pp": 2, "virtual_stages": 2, "dp_shard": 4, "ep": 4}, 5 * 8)]
)
def test_a_pair_grows_by_a_layer_as_it_shrinks_by_one(fields: dict[str, Any], layers: int) -> None:
    """TransformerModelChunkSchedulePlan.run: forward's layer i beside backward's L - 1 - i: L + 1 layers at once, not 2 L."""
    hidden, plain = (
        predict(MIXTRAL, lowered(expert_overlap=flag, **fields).plan, Cluster.load("hgx-h100-8"), stack=STACK)
        for flag in (True, False)
    )
    more = hidden.memory.peak_allocated_bytes - plain.memory.peak_allocated_bytes
    held = plain.memory.by_category["activations"]  # of `layers` layers: in a pipeline of five chunks of eight
    assert 0 <= more < 1.5 * held / layers


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"ep": 1}, "with ep = 1 there is nothing to exchange"),
        ({"dispatcher": "all_gather"}, "this dispatcher uses all-gathers"),
        ({"recompute": "full"}, "run the exchanges again"),
        ({"pp": 2}, "1f1b has no forward and backward of different micro-batches at once"),
        ({"zero": 3}, "it is not modelled with sharded parameters"),
    ],
)
def test_what_it_needs_is_told(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        lowered(**fields)
