"""Replicas that agree every H steps: traffic divided by H, the mean step, what the outer optimizer holds."""

from __future__ import annotations

import pytest

from simulator.base.errors import PlanError
from simulator.parallel.legality import check
from simulator.play.lower import Lowering, lower
from simulator.predict import predict
from simulator.predict.play import play
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.program import Collective
from simulator.work.script import resident_tensors

MODEL = Model(name="small", num_layers=2, d_model=256, num_heads=4, d_ff=1024, vocab_size=4096)
CLUSTER = Cluster.load("hgx-a100-80-8", 2)
DDP = {"zero": 0, "dp_replicate": 16, "seq_len": 256}
HSDP = {"zero": 3, "dp_shard": 8, "dp_replicate": 2, "seq_len": 256}


def plan(**fields: object) -> Plan:
    return Plan.model_validate(fields)


def lowering(plan: Plan) -> Lowering:
    calibration = Calibration.for_device(CLUSTER.device)
    return lower(MODEL, plan, CLUSTER, Stack.load(plan.stack), calibration, default_curves())


def reductions(lowering: Lowering) -> list[int]:
    ops = lowering.program(1).ops
    return [op.size_bytes for op in ops if isinstance(op, Collective) and op.kind == "all_reduce"]


def test_a_replica_reduces_its_parameters_once_and_no_gradients() -> None:
    assert reductions(lowering(plan(**DDP, sync_every_steps=8))) == [4 * MODEL.num_parameters]


def test_shards_agree_among_the_replicas_of_a_shard() -> None:
    it = lowering(plan(**HSDP, sync_every_steps=8))
    assert reductions(it) == [sum(resident_tensors(MODEL, it.plan)["parameters"])]
    kinds = {op.kind for op in it.program(1).ops if isinstance(op, Collective)}
    assert kinds == {"all_gather", "reduce_scatter", "all_reduce"}  # a replica's own ranks go on as before


@pytest.mark.parametrize("base", [DDP, HSDP], ids=["ddp", "hsdp"])
def test_the_step_is_the_mean_of_h(base: dict[str, object]) -> None:
    """T(H) = T alone + (T with the agreement - T alone) / H, so that 1 / H is a straight line through any two."""
    two, four, eight = (play(lowering(plan(**base, sync_every_steps=h))) for h in (2, 4, 8))
    assert (two.step_s - four.step_s) / (four.step_s - eight.step_s) == pytest.approx((1 / 4) / (1 / 8))
    for one in (two, four, eight):
        assert one.lower_s <= one.step_s <= one.upper_s
        assert sum(one.breakdown.values()) == pytest.approx(one.step_s)
    exposed = [one.communication["all_reduce"][0] for one in (two, eight)]
    assert exposed[0] == pytest.approx(4 * exposed[1])


def test_diloco_holds_where_replicas_agreed_and_its_momentum() -> None:
    """arXiv 2311.08105: beside the inner optimizer a copy of the parameters and the outer momentum, 8 bytes in fp32."""
    average = resident_tensors(MODEL, plan(**DDP, sync_every_steps=8))["optimizer_state"]
    outer = resident_tensors(MODEL, plan(**DDP, sync_every_steps=8, outer_optimizer="nesterov"))["optimizer_state"]
    assert sum(outer) - sum(average) == 8 * MODEL.num_parameters


def test_the_report_states_the_staleness() -> None:
    told = predict(MODEL, plan(**DDP, sync_every_steps=8), CLUSTER)
    (source,) = [source for source in told.sources if source.what == "staleness"]
    assert source.kind == "assumed"
    assert "up to 8 steps apart" in source.detail


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dp_replicate": 1}, "no replicas to agree with"),
        ({"zero": 1, "dp_shard": 4}, "zero_redundancy reduces gradients in every step"),
        ({"cp": 2}, "must reduce in every step"),
        ({"comm_hook": {"kind": "powersgd"}}, "local steps with comm_hook = powersgd"),
        ({"sync_every_steps": 1, "outer_optimizer": "nesterov"}, "sync_every_steps = 2 or more"),
    ],
)
def test_combinations_without_meaning(fields: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check(plan(**{"zero": 0, "dp_replicate": 4, "sync_every_steps": 4, **fields}))


def test_the_way_out_of_memory_takes_the_shards_and_leaves_what_only_replicas_have() -> None:
    """DDP holds 16 bytes a parameter and its buckets; sharded, the same model fits, without hook or local steps."""
    model = Model.load("llama3-8b")
    fields = {"zero": 0, "dp_replicate": 16, "seq_len": 2048, "comm_hook": {"kind": "powersgd"}}
    told = predict(model, plan(**fields), CLUSTER, advise=True)
    assert told.verdict == "does not fit"
    assert any(remedy.plan.get("zero") == 3 for remedy in told.remedies)
