"""A floor never exceeds what it stands for, whatever the plan."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from simulator.base.errors import EngineError, InputError
from simulator.parallel.legal import legal
from simulator.parallel.pipeline import SCHEDULES
from simulator.predict import predict
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.model.experts import Experts
from simulator.spec.model.hybrid import Mamba
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.search import SearchStudy, Space
from simulator.studies.search.context import ModelShards, SearchContext
from simulator.studies.search.memory_floor import MemoryFloor
from simulator.studies.search.space import Pruned
from simulator.studies.search.survey import Surveyor
from simulator.studies.search.time_floor import TimeFloor
from tests.examples import examples

MODEL = Model(
    name="small",
    num_layers=8,
    d_model=2048,
    num_heads=16,
    num_kv_heads=8,
    d_ff=5632,
    vocab_size=32768,
    max_positions=1024,
)
HYBRID = MODEL.model_copy(
    update={
        "name": "hybrid",
        "pattern": "M-M*EM-E",
        "mamba": Mamba(num_heads=64, head_dim=64, num_groups=8, state_dim=128),
        "experts": Experts(num_experts=8, top_k=2, d_ff=1024),
    }
)
CLUSTERS = {nodes: Cluster.load("hgx-h100-8", nodes) for nodes in (1, 4)}
STACKS = {name: Stack.load(name) for name in ("torch-2.6-eager", "torch-2.11-compiled", "megatron-core-2025")}
PAIRS = (
    *(("ddp", 0), ("zero_redundancy", 1), ("fsdp1", 2), ("fsdp1", 3), ("fsdp2", 2), ("fsdp2", 3)),
    *(("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("megatron", 0), ("megatron", 1)),
)
_POWERS = st.sampled_from((1, 2, 4, 8))


def compressed(draw: st.DrawFn, parallel: str, zero: int, replicas: int, shards: int) -> dict[str, object]:
    """What an implementation can do to its traffic, or nothing; combinations without meaning are refused later."""
    if draw(st.booleans()):
        return {}
    if (parallel, zero) == ("deepspeed", 3):
        if replicas > 1:
            return {"hierarchical_gather": draw(st.booleans())}
        near = draw(st.sampled_from([n for n in (1, 2, 8) if shards % n == 0]))
        return {"zeropp": {"secondary_ranks": near, "quantized_weights": draw(st.booleans())}}
    if parallel in ("ddp", "fsdp2") and replicas > 1 and draw(st.booleans()):
        return {"sync_every_steps": 4}
    if parallel == "ddp":
        return {"comm_hook": {"kind": draw(st.sampled_from(("fp16_compress", "powersgd")))}}
    return {"precision": "fp8", "fp8_all_gather": (parallel, zero) in (("fsdp2", 3), ("megatron", 1))}


@st.composite
def plans(draw: st.DrawFn, num_devices: int) -> Plan:
    tp, cp, pp = draw(_POWERS), draw(_POWERS), draw(_POWERS)
    ranks, rest = divmod(num_devices, tp * cp * pp)
    assume(rest == 0 and ranks > 0)
    parallel, zero = draw(st.sampled_from(PAIRS))
    replicas = (
        ranks if zero == 0 else draw(st.sampled_from([d for d in (1, 2, 4) if ranks % d == 0 and d < ranks] or [1]))
    )
    splits = zero in (0, 1)
    schedule = draw(st.sampled_from(SCHEDULES if splits else SCHEDULES[:3])) if pp > 1 else None
    assume(pp < 8 or schedule in ("gpipe", "1f1b", "zb_h1"))
    return Plan(
        **compressed(draw, parallel, zero, replicas, ranks // replicas),  # type: ignore[arg-type]
        dp_replicate=replicas,
        dp_shard=ranks // replicas,
        tp=tp,
        cp=cp,
        pp=pp,
        zero=zero,
        data_parallel=parallel,  # type: ignore[arg-type]
        schedule=schedule,
        virtual_stages=2 if schedule in ("interleaved", "dualpipe", "dualpipe_v") else 1,
        micro_batch_size=draw(st.sampled_from((1, 2))),
        num_micro_batches=draw(st.sampled_from((8, 16) if pp > 1 else (1, 2, 8))),
        seq_len=1024,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(("none", "selective", "full", "every_k"))),  # type: ignore[arg-type]
        recompute_every=2,
        reshard_after_forward=draw(st.sampled_from((None, True, False))),
        stack=draw(st.sampled_from(sorted(STACKS))),
    )


@st.composite
def sharded(draw: st.DrawFn, num_devices: int) -> Plan:
    """FSDP2 through micro-batches and pipelines, where its gathers and reductions take turns."""
    pp = draw(st.sampled_from((1, 2, 4)))
    schedule = draw(st.sampled_from(("1f1b", "interleaved", "gpipe"))) if pp > 1 else None
    cp, tp = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2)))
    ranks = num_devices // (cp * tp * pp)
    assume(ranks > 0)
    replicas = draw(st.sampled_from([r for r in (1, 2) if ranks % r == 0 and r < ranks] or [1]))
    return Plan(
        dp_replicate=replicas,
        dp_shard=ranks // replicas,
        tp=tp,
        cp=cp,
        pp=pp,
        zero=draw(st.sampled_from((2, 3))),
        data_parallel=draw(st.sampled_from(("fsdp2", "fsdp1"))),
        schedule=schedule,
        virtual_stages=draw(st.sampled_from((2, 3, 4, 8) if pp == 2 else (2,))) if schedule == "interleaved" else 1,
        micro_batch_size=draw(st.sampled_from((1, 4))),
        num_micro_batches=draw(st.sampled_from((1, 2, 3))) * pp,
        seq_len=1024,
        recompute=draw(st.sampled_from(("none", "selective", "full", "every_k"))),  # type: ignore[arg-type]
        recompute_every=2,
        backward_prefetch=draw(st.sampled_from((0, 1, 2))),
        sync_every_micro_batch=draw(st.sampled_from((None, None, False))),
        reshard_after_forward=draw(st.sampled_from((None, True, False))),
        stack=draw(st.sampled_from(("torch-2.6-eager", "torch-2.11-compiled"))),
    )


@examples(50, ci=20, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data(), st.sampled_from((1, 4)))
def test_floors_are_below_the_prediction(data: st.DataObject, nodes: int) -> None:
    _check(data.draw(plans(CLUSTERS[nodes].num_devices)), CLUSTERS[nodes])


@examples(50, ci=20, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data(), st.sampled_from((1, 4)))
def test_floors_of_sharded_pipelines_are_below_the_prediction(data: st.DataObject, nodes: int) -> None:
    _check(data.draw(sharded(CLUSTERS[nodes].num_devices)), CLUSTERS[nodes])


@examples(12, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data(), st.sampled_from((plans, sharded)))
def test_floors_of_hybrids_are_below_the_prediction(
    data: st.DataObject, kind: Callable[[int], st.SearchStrategy[Plan]]
) -> None:
    """Stages and layers of unequal content; some plans with layers at the ends in bf16."""
    plan = data.draw(kind(CLUSTERS[1].num_devices))
    if plan.narrow and data.draw(st.booleans()):
        plan = plan.copy_with(first_layers_bf16=1, last_layers_bf16=2, fp8_all_gather=False)
    _check(plan, CLUSTERS[1], HYBRID)


def _check(plan: Plan, cluster: Cluster, model: Model = MODEL) -> None:
    try:
        legal(model, plan, cluster, STACKS[plan.stack])
    except InputError:
        assume(condition=False)
    context = SearchContext(
        model=model, cluster=cluster, stack=STACKS[plan.stack], calibration=Calibration.for_device(cluster.device)
    )
    time = TimeFloor(context, ModelShards(model))
    memory = MemoryFloor(context, time.shards, time.shapes)
    try:
        prediction = predict(model, plan, cluster, stack=context.stack)
    except (
        EngineError
    ):  # DualPipeV's messages in one order can wait for each other: the search counts such plans as failed
        assume(condition=False)
    assert time.seconds(plan) <= prediction.step_s
    assert time.least_s(plan) <= prediction.step_s
    assert memory.num_bytes(plan) <= prediction.memory.peak_allocated_bytes


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
def test_bounds_do_not_depend_on_what_was_bounded_before(order: str) -> None:
    """Floors of one surveyor share prices and blocks: what plans share must be all that those depend on."""
    fixed = {"stack": ("megatron-core-2025",), "zero": (3,), "schedule": (None, "1f1b"), "micro_batch_size": (1,)}
    fixed |= {"rank_order": (order,), "recompute": ("none",), "tp": (2,), "pp": (1, 2)}
    mixture = MODEL.model_copy(
        update={"name": "mixture", "max_positions": 16384, "experts": Experts(num_experts=16, top_k=2, d_ff=1024)}
    )
    space = Space(model=mixture, clusters=(CLUSTERS[4],), global_batch=64, seq_len=16384, fixed=fixed)
    study = SearchStudy(space=space, layouts=True)
    together = Surveyor(study)
    branches = list(space.branches(Pruned()))
    assert len({branch.fields["ep"] for branch in branches}) > 3
    found = [(together.survey(branch), Surveyor(study).survey(branch)) for branch in branches]
    assert sum(len(alone.prospects) for _, alone in found) > 10
    for one, alone in found:
        assert one.prospects == alone.prospects
