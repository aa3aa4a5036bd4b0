"""A fault rests on the fields that its rule reads, and one list of rules is what all who ask derive from."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from simulator.base.errors import PlanError
from simulator.formats.exchange import FORMATS, Job, export_plan
from simulator.parallel.legality import RULES, Case, broken, faults, runnable
from simulator.parallel.legality.software import ALL
from simulator.parallel.legality.unused import EFFECTS
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Offload, Plan
from simulator.spec.plan.compression import CommHook, ZeroPlusPlus
from simulator.spec.plan.schedules import SCHEDULES
from simulator.spec.software.stack import Stack
from tests.examples import examples
from validate.playable import unplayable
from validate.torch_rules import PLAYED

HGX = Cluster.load("hgx-h100-8")
MODELS = tuple(Model.load(name) for name in ("llama3-8b", "mixtral-8x7b", "nemotron-h-8b"))
_DEGREES = st.sampled_from((1, 1, 2, 3, 4, 8))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "virtual_stages"), _DEGREES),
    "num_micro_batches": st.integers(1, 16),
    "zero": st.integers(0, 3),
    "data_parallel": st.sampled_from((None, "ddp", "fsdp1", "fsdp2", "zero_redundancy", "deepspeed", "megatron")),
    "schedule": st.sampled_from((None, *SCHEDULES)),
    "seq_len": st.sampled_from((7, 512, 1000, 4096)),
    "sequence_parallel": st.booleans(),
    "cp_exchange": st.sampled_from(("ring", "all_to_all")),
    "dispatcher": st.sampled_from(("all_to_all", "all_gather")),
    "expert_overlap": st.booleans(),
    "expert_capacity_factor": st.sampled_from((None, 1.5)),
    "expert_imbalance": st.sampled_from((1.0, 1.5)),
    "rank_order": st.sampled_from(("tp-cp-ep-dp-pp", "tp-dp", "tp-dp-ep-pp", "ep-tp-dp-pp")),
    "precision": st.sampled_from(("fp32", "bf16", "fp8", "nvfp4")),
    "fp8_recipe": st.sampled_from((None, "tensorwise", "rowwise", "blockwise")),
    "fp8_all_gather": st.booleans(),
    "first_layers_bf16": st.sampled_from((0, 1, 40)),
    "last_layers_bf16": st.sampled_from((0, 1)),
    "reduce_dtype": st.sampled_from((None, "fp32", "bf16")),
    "master_dtype": st.sampled_from(("fp32", "bf16")),
    "optimizer": st.sampled_from(("adamw", "sgd", "adam8bit", "adam4bit", "adafactor", "muon")),
    "recompute": st.sampled_from(("none", "full", "selective")),
    "recompute_modules": st.sampled_from((("core_attn",), ("moe",))),
    "cuda_graphs": st.sampled_from(((), ("attn",), ("full_iteration", "attn"), ("moe_preprocess",))),
    "reshard_after_forward": st.sampled_from((None, True, 2, 3)),
    "comm_hook": st.sampled_from((CommHook(), CommHook(kind="powersgd", start_step=0), CommHook(kind="fp16_compress"))),
    "sync_every_steps": st.sampled_from((1, 4)),
    "outer_optimizer": st.sampled_from(("average", "nesterov")),
    "zeropp": st.sampled_from((ZeroPlusPlus(), ZeroPlusPlus(quantized_gradients=True, secondary_ranks=4))),
    "hierarchical_gather": st.booleans(),
    "offload": st.sampled_from((Offload(), Offload(optimizer="host", parameters="host"), Offload(delayed=True))),
    "first_stage_layers": st.sampled_from((None, 0, 3)),
    "stage_layers": st.sampled_from((None, (16, 16), (3, 4))),
    "head_as_layer": st.booleans(),
}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    names = draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=12))
    return Plan(**{name: draw(VALUES[name]) for name in sorted(names)})


def test_rules_name_fields_that_are_there() -> None:
    rules = (*RULES, *PLAYED)
    nouns = {"degrees", "layers", ""}  # of no single field, or of another noun
    assert {rule.name.partition(":")[0] for rule in rules} <= {*Plan.flat_fields(), *nouns}
    assert {effect.where for effect in EFFECTS} <= set(Plan.flat_fields())


@given(plans(), st.sampled_from(MODELS), st.data())
@examples(300)
def test_a_fault_stands_whatever_becomes_of_fields_that_its_rule_does_not_read(
    plan: Plan, model: Model, data: st.DataObject
) -> None:
    """Which is how faults of half-read studies are told apart: by fields, not by words."""
    name = data.draw(st.sampled_from(sorted(VALUES)))
    other = plan.copy_with(**{name: data.draw(VALUES[name])})
    case = Case(plan=plan, model=model, cluster=HGX)
    found, still = dict(broken(case)), dict(broken(Case(plan=other, model=model, cluster=HGX)))
    for rule, subject in found.items():
        assert case.read_by(rule) <= set(Plan.flat_fields())
        if name not in case.read_by(rule):
            assert rule in still
            assert rule.fault(subject).problem == rule.fault(still[rule]).problem


@given(plans(), st.sampled_from(MODELS))
@examples(100)
def test_less_that_is_known_tells_fewer_faults_in_the_same_order(plan: Plan, model: Model) -> None:
    alone, together = faults(Case(plan=plan)), faults(Case(plan=plan, model=model, cluster=HGX))
    assert together[: len(alone)] == alone


@given(plans(), st.sampled_from(FORMATS))
@examples(100)
def test_what_a_format_keeps_its_framework_runs(plan: Plan, form: str) -> None:
    assume(not faults(Case(plan=plan)))
    try:
        export_plan(Job(plan=plan, model=MODELS[0], stack=Stack.load("torch-2.6-eager"), gpus_per_node=8), form)
    except PlanError:
        return
    assert not [fault for software in ALL if software.name == form for fault in runnable(plan, software)]


@given(plans(), st.sampled_from(("full", "solo", "cpu", "fake")))
@examples(60)
def test_what_cannot_be_played_says_what_could(plan: Plan, mode: str) -> None:
    for fault in unplayable(MODELS[0], plan, Stack.load("torch-2.6-eager"), mode):
        assert fault.problem
        assert fault.remedy
