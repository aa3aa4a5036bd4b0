"""Plans written for other frameworks: written, read back and compared, so the file is either the same plan or an error.

A framework keeps part of a plan outside its file (DeepSpeed has no sequence length, say): those fields are named beside the text.
What it cannot run at all, or would run otherwise, is a fault with what it would run instead.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from pydantic import ValidationError

from simulator.base.errors import Fault, InputError, PlanError
from simulator.base.schema import faults_of, nearest
from simulator.formats.readers import PLAN_FORMATS, READ_ONLY
from simulator.formats.readers.plans import Draft, plan_fields
from simulator.formats.readers.plans.accelerate import read_accelerate
from simulator.formats.readers.plans.deepspeed import read_deepspeed
from simulator.formats.readers.plans.megatron import read_megatron
from simulator.formats.readers.plans.options import table_of
from simulator.formats.readers.plans.torchtitan import read_torchtitan, shape_of
from simulator.formats.readers.yaml_document import read_yaml
from simulator.formats.writers.plans import Job
from simulator.formats.writers.plans.accelerate import accelerate_yaml
from simulator.formats.writers.plans.deepspeed import deepspeed_json
from simulator.formats.writers.plans.megatron import megatron_script
from simulator.formats.writers.plans.study_toml import study_toml
from simulator.formats.writers.plans.torchtitan import torchtitan_toml
from simulator.parallel.legality import check, idle_details, runnable, unused
from simulator.parallel.legality.software import ALL as FRAMEWORKS
from simulator.parallel.legality.software import refusal, text_of
from simulator.parallel.pipeline.layers import stage_layers
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.compression import ONE_BIT_SETTINGS

__all__ = ["FORMATS", "Export", "Job", "effective_fields", "export_plan"]

FORMATS: Final = tuple(form for form in PLAN_FORMATS if form not in READ_ONLY)

_POOL: Final = (
    "memory_policy",
    "alloc_conf",
    "pool_block_bytes",
    "pool_evict",
    "pool_prefetch",
    "alloc_s",
    "free_s",
    "refill_every",
    "compress",
    "compress_bytes_per_s",
)  # of the environment
# What a framework's users state in the training script, or nowhere: beside the file
_BESIDE: Final[Mapping[str, frozenset[str]]] = {
    "toml": frozenset(),
    "megatron": frozenset({"memory_fraction", *_POOL}),
    "torchtitan": frozenset({"memory_fraction", *_POOL}),
    "deepspeed": frozenset({"memory_fraction", *_POOL, "seq_len", "recompute", "recompute_every"}),
    "accelerate": frozenset(
        {"memory_fraction", *_POOL, "seq_len", "micro_batch_size", "num_micro_batches", "recompute", "recompute_every",
         "optimizer", "optimizer_impl", "optimizer_dtype", "master_dtype"}
    ),
}  # fmt: skip
_DEGREES: Final = frozenset({"pp", "tp", "cp", "dp_shard", "dp_replicate"})
_OF_STAGES: Final = frozenset({"schedule", "stage_layers", "virtual_stages"})
# What the model's shape has no say in: names, and what time and memory do not hang on
_NO_SHAPE: Final = {"name", "family", "sources", "fused_qkv", "max_positions", "embedding_scale"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan in another framework's format. beside: Plan's fields that the file cannot hold (training script)."""

    format: str
    text: str
    beside: Mapping[str, Any]
    draft: Draft


def export_plan(job: Job, form: str, head: dict[str, str | int] | None = None) -> Export:
    """`job` in one of FORMATS. head: names for our own study file.

    Raises PlanError with every field that the format would run otherwise.
    """
    if form not in FORMATS:
        raise PlanError.at("--to", f"{form!r} is not a format", nearest(form, (*FORMATS, "launch-kit", "chakra")))
    text = _written(job, form, head or {})
    draft = _read_back(text, form, job)
    plan = job.plan
    default = Plan()
    stated = {name for name in _BESIDE[form] if plan.value(name) != default.value(name)} | set(draft.assumed)
    beside = {name: plan.value(name) for name in Plan.flat_fields() if name in stated and name not in draft.fields}
    faults = list(_faults(job, draft, beside, form))
    PlanError.raise_for(faults)
    return Export(format=form, text=text, beside=beside, draft=draft)


def _written(job: Job, form: str, head: dict[str, str | int]) -> str:
    match form:
        case "megatron":
            return megatron_script(job)
        case "deepspeed":
            return deepspeed_json(job.plan)
        case "accelerate":
            return accelerate_yaml(job)
        case "torchtitan":
            return torchtitan_toml(job, _flavor(job.model))
        case _:
            return study_toml(job.plan, head)


def _flavor(model: Model) -> tuple[str, str]:
    """The name of a model's shape in torchtitan. Raises PlanError with its known names."""
    flavors = [
        ((family, flavor), preset)
        for family, presets in table_of("torchtitan")["flavors"].items()
        for flavor, preset in presets.items()
    ]
    for flavor, written in flavors:
        shape = shape_of(written, " ".join(flavor))
        other = Model.load(shape) if isinstance(shape, str) else shape
        if other is not None and not list(_shape_differences(model, other)):
            return flavor
    known = ", ".join(f"{family} {size}" for (family, size), written in flavors if isinstance(written, str))
    raise PlanError.at("torchtitan: model", f"{model.name} is not one of torchtitan's flavors", f"one of {known}")


def _read_back(text: str, form: str, job: Job) -> Draft:
    file = f"{form}, as written"
    given = {name: job.plan.value(name) for name in _BESIDE[form]}
    match form:
        case "megatron":
            return read_megatron(text, file, given)
        case "deepspeed":
            return read_deepspeed(json.loads(text), file, given)
        case "accelerate":
            return read_accelerate(read_yaml(text, file), file, _no_file, given)
        case "torchtitan":
            return read_torchtitan(tomllib.loads(text), file, given)
        case _:
            fields = Plan.flattened(tomllib.loads(text)["plan"])
            fields.setdefault("dp_shard", 1)
            fields.setdefault("dp_replicate", 1)
            return Draft(
                format="toml", software="shardwise", file=file, fields=fields, places={}, leftover=None,
                stack=fields.get("stack", job.plan.stack), stack_why="the plan's own",
            )  # fmt: skip


def _no_file(name: str) -> Mapping[str, Any]:
    raise PlanError.at(name, "is not written")


def _faults(job: Job, draft: Draft, beside: Mapping[str, Any], form: str) -> Iterator[Fault]:
    """Faults where the plan read back from the file differs from the original."""
    if isinstance(draft.model, Model):
        yield from _model_faults(job.model, draft.model, form)
    try:
        back = Plan.model_validate(plan_fields(draft, _devices(job.plan, draft), beside, job.model))
        check(back)
    except InputError as exc:
        yield from exc.faults
        return
    except ValidationError as exc:
        yield from faults_of(exc, form, Plan)
        return
    faults = _refusals(job.plan, form) | _differences(job, back, draft, form)
    if "pp" in faults:
        faults = {name: fault for name, fault in faults.items() if name not in _OF_STAGES}
    if faults.keys() & _DEGREES:
        faults.pop("rank_order", None)
    yield from (faults[name] for name in sorted(faults))


def _refusals(plan: Plan, form: str) -> dict[str, Fault]:
    """By field: settings that the format's framework cannot run."""
    software = next((each for each in FRAMEWORKS if each.name == form), None)
    found = runnable(plan, software, form) if software is not None else []
    return {fault.place.removeprefix(f"{form}: "): fault for fault in found}


def _differences(job: Job, back: Plan, draft: Draft, form: str) -> dict[str, Fault]:
    """By field: values that were read back differently. Fields with an effect in only one of the plans follow from another difference."""
    wanted, got = effective_fields(job.plan, job.model), effective_fields(back, job.model)
    found = {}
    for name in wanted.keys() & got.keys():
        if wanted[name] != got[name]:
            problem, remedy = refusal(draft.software, name, wanted[name], got[name])
            found[name] = Fault(place=f"{form}: {name}", problem=problem, remedy=remedy)
    return found


def _devices(plan: Plan, draft: Draft) -> int:
    """The number of GPUs at which a different degree is reported as such."""
    return plan.num_data_parallel * prod(int(draft.fields.get(degree, 1)) for degree in ("tp", "cp", "pp"))


def _model_faults(model: Model, back: Model, form: str) -> Iterator[Fault]:
    for name, wanted, got in _shape_differences(model, back):
        problem = f"its arguments cannot state {name} = {text_of(wanted)}"
        yield Fault(place=f"{form}: model.{name}", problem=problem, remedy=f"{name} = {text_of(got)}")


def _shape_differences(model: Model, other: Model) -> Iterator[tuple[str, object, object]]:
    """Fields in which two models' shapes differ; learned positions are parameters."""
    ignored = _NO_SHAPE - ({"max_positions"} if model.positions == "learned" else set())
    for name in Model.model_fields:
        one, two = getattr(model, name), getattr(other, name)
        if name not in ignored and one != two and not (name == "mlp" and {one, two} == {"gelu", "gelu_tanh"}):
            yield name, one, two


def effective_fields(plan: Plan, model: Model) -> dict[str, Any]:
    """The fields of a plan that have an effect: defaults resolved, fields that its implementation ignores left out."""
    apart = {"stack", "sharding_strategy", "data_parallel", "reduce_dtype", "offload", "zeropp", "one_bit"}
    found = {name: value for name, value in plan.model_dump().items() if name not in apart}
    if plan.ddp.comm_hook.kind == "powersgd" or plan.ddp.comm_hook.dtype is not None:
        found |= {f"comm_hook.{name}": value for name, value in plan.ddp.comm_hook.model_dump().items()}
    found |= {f"zeropp.{name}": value for name, value in plan.deepspeed.zeropp.model_dump().items()}
    one_bit = plan.deepspeed.one_bit
    settings = ("kind", "interval", *ONE_BIT_SETTINGS[one_bit.kind]) if one_bit.any else ("kind",)
    found |= {f"one_bit.{name}": getattr(one_bit, name) for name in settings}
    found |= {"data_parallel": plan.implementation, "reduce_dtype": plan.gradient_dtype}
    found["sync_every_micro_batch"] = plan.syncs_every_micro_batch if plan.num_micro_batches > 1 else None
    found |= _effective_pipeline(plan, model) | _effective_offload(plan) | _effective_gathers(plan)
    if plan.precision.compute == "fp8":
        found["fp8_recipe"] = plan.precision.fp8_recipe or ("delayed" if plan.traits.core_layers else "tensorwise")
    found |= {} if plan.narrow else {"first_layers_bf16": 0, "last_layers_bf16": 0}
    found["rank_order"] = "-".join(axis for axis in reversed(plan.axis_order) if getattr(plan, axis) > 1)
    idle = unused(plan, experts=model.experts is not None)
    found |= {"recompute": "full"} if plan.recompute.mode == "every_k" and plan.recompute.every == 1 else {}
    return {name: value for name, value in found.items() if name not in idle and (name != "cuda_graphs" or value)}


def _effective_pipeline(plan: Plan, model: Model) -> dict[str, Any]:
    dealt = ("first_stage_layers", "last_stage_layers", "stage_layers", "embedding_as_layer", "head_as_layer")
    off = dict.fromkeys(dealt)
    if plan.pp == 1:
        return {**off, "schedule": None, "virtual_stages": 1}
    try:
        layer_counts = stage_layers(
            model.num_layers, plan.pp, plan.pipeline.virtual_stages, split=plan.split, schedule=plan.pipeline_schedule
        )
    except PlanError:
        return {"schedule": plan.pipeline_schedule}
    return {
        **off,
        "schedule": plan.pipeline_schedule,
        "stage_layers": [[len(part) for part in stage] for stage in layer_counts],
    }


def _effective_offload(plan: Plan) -> dict[str, Any]:
    if not plan.offload.any:
        return {f"offload.{name}": "none" for name in ("optimizer", "parameters", "activations")}
    found, idle = plan.offload.model_dump(), idle_details(plan)
    return {f"offload.{name}": value for name, value in found.items() if name not in idle}


def _effective_gathers(plan: Plan) -> dict[str, Any]:
    """FSDP2's stage 2 is stage 3 whose parameters stay gathered."""
    if not plan.traits.shards_rows:
        return {"reshard_after_forward": None}
    reshard = plan.fsdp.reshard_after_forward
    if plan.zero == 2 or reshard is False or (reshard == 1 and reshard is not True):
        return {"zero": 3, "reshard_after_forward": False}
    if reshard is not None and plan.reshard_ranks is None:
        return {"zero": 3, "reshard_after_forward": True}
    return {"zero": 3, "reshard_after_forward": plan.reshard_ranks}
