"""Under a stack the search proposes what its framework can run, and nothing else: each plan is exported as it stands."""

from __future__ import annotations

import pytest

from simulator.base.errors import PlanError
from simulator.formats.exchange import Job, export_plan
from simulator.parallel.legality import runnable, software_of
from simulator.parallel.legality.software import ALL, DEEPSPEED, MEGATRON, MEGATRON_DEEPSPEED, TORCH, TORCHTITAN
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.search import Space
from simulator.studies.search.space import OFFLOADS, Pruned

CLUSTER = Cluster.load("hgx-h100-8", 2)
LLAMA, MIXTRAL = Model.load("llama3-8b"), Model.load("mixtral-8x7b")
OWN_FORMATS = {"deepspeed", "megatron", "torchtitan"}


def proposed(stack: str, model: Model, **fixed: tuple[object, ...]) -> list[Plan]:
    asked = {"stack": (stack,), "micro_batch_size": (1, 2), "recompute": ("none", "full"), **fixed}
    space, pruned = Space(model=model, clusters=(CLUSTER,), global_batch=64, seq_len=4096, fixed=asked), Pruned()
    return [plan for branch in space.branches(pruned) for plan in space.plans(branch, pruned)]


@pytest.mark.parametrize(
    ("stack", "model"),
    [
        ("deepspeed-0.14", LLAMA),
        ("deepspeed-0.14", MIXTRAL),
        ("megatron-core-2025", LLAMA),
        ("megatron-core-2025", MIXTRAL),
        ("nemo-24", LLAMA),
        ("torchtitan-2025-compiled", LLAMA),
    ],
)
def test_every_plan_is_kept_by_its_own_frameworks_format(stack: str, model: Model) -> None:
    loaded = Stack.load(stack)
    form = software_of(loaded.framework).name
    offloads = tuple(OFFLOADS) if model.experts is None else ("none",)
    plans = proposed(stack, model, offload=offloads)
    assert len(plans) > 60
    for plan in plans[:: len(plans) // 60]:
        export_plan(Job(plan=plan, model=model, stack=loaded, gpus_per_node=8), form)


def test_deepspeed_gets_no_pipeline_and_megatron_its_own_schedules() -> None:
    plans = proposed("deepspeed-0.14", LLAMA)
    assert {plan.pp for plan in plans} == {1}
    assert {plan.cp_exchange for plan in plans if plan.cp > 1} == {"all_to_all"}
    for stack in ("megatron-core-2025", "nemo-24", "megatron-2021"):
        stages = [plan.pipeline_schedule for plan in proposed(stack, LLAMA) if plan.pp > 1]
        assert set(stages) == {"1f1b", "interleaved"}


def test_deepspeeds_pipelines_are_for_programs_that_are_made_of_them() -> None:
    plans = [plan for plan in proposed("megatron-deepspeed-2022", LLAMA) if plan.pp > 1]
    assert {(plan.pipeline_schedule, plan.zero) for plan in plans} == {("1f1b", 0), ("1f1b", 1)}


def test_what_is_fixed_beats_a_habit_and_is_refused_where_it_cannot_run() -> None:
    assert not [plan for plan in proposed("deepspeed-0.14", LLAMA, cp_exchange=("ring",)) if plan.cp > 1]
    assert not proposed("megatron-core-2025", LLAMA, schedule=("dualpipe",), pp=(2,), virtual_stages=(2,))
    plans = proposed("torch-2.6-eager", LLAMA, data_parallel=("megatron",), pp=(2,))
    assert {plan.pipeline_schedule for plan in plans} == {"1f1b", "interleaved"}


def test_a_script_of_ones_own_may_run_any_schedule() -> None:
    plans = proposed("torch-2.6-eager", LLAMA, pp=(2,), tp=(1,), cp=(1,))
    assert "dualpipe" in {plan.pipeline_schedule for plan in plans}


@pytest.mark.parametrize(
    ("stack", "software"),
    [
        ("deepspeed-0.14", DEEPSPEED),
        ("gpt-neox-2023", MEGATRON_DEEPSPEED),
        ("megatron-deepspeed-2022", MEGATRON_DEEPSPEED),
        ("megatron-core-2025", MEGATRON),
        ("nemo-24", MEGATRON),
        ("torchtitan-2024-eager", TORCHTITAN),
        ("torch-2.6-eager", TORCH),
    ],
)
def test_a_stack_names_its_framework(stack: str, software: object) -> None:
    assert software_of(Stack.load(stack).framework) is software


REFUSED = (
    ("deepspeed", Plan(data_parallel="deepspeed", pp=2, dp_shard=4)),
    ("deepspeed", Plan(data_parallel="deepspeed", tp=2, dp_shard=8)),
    ("deepspeed", Plan(data_parallel="deepspeed", cp=2, dp_shard=8, cp_exchange="ring")),
    ("deepspeed", Plan(data_parallel="deepspeed", tp=2, dp_shard=4, sequence_parallel=True, vocab_parallel=False)),
    ("deepspeed", Plan(data_parallel="deepspeed", zero=1, dp_shard=4, dp_replicate=2)),
    ("megatron", Plan(data_parallel="megatron", zero=1, pp=2, schedule="gpipe", num_micro_batches=4, dp_shard=4)),
    ("megatron", Plan(data_parallel="megatron", zero=1, pp=2, schedule="zb_h1", num_micro_batches=4, dp_shard=4)),
    (
        "megatron",
        Plan(data_parallel="megatron", zero=1, pp=2, schedule="dualpipe", virtual_stages=2, num_micro_batches=4),
    ),
    ("megatron", Plan(data_parallel="megatron", zero=1, dp_shard=8, offload={"activations": "host"})),  # type: ignore[arg-type]
    ("torchtitan", Plan(tp=2, dp_shard=4)),
    ("torchtitan", Plan(dp_shard=1)),
)


@pytest.mark.parametrize(("form", "plan"), REFUSED)
def test_export_refuses_what_the_rules_say_in_the_words_of_reading_back(form: str, plan: Plan) -> None:
    (software,) = (each for each in ALL if each.name == form)
    assert form in OWN_FORMATS
    told = runnable(plan, software, form)
    assert told
    with pytest.raises(PlanError) as caught:
        export_plan(Job(plan=plan, model=LLAMA, stack=Stack.load("torch-2.6-eager"), gpus_per_node=8), form)
    assert set(told) <= set(caught.value.faults)
