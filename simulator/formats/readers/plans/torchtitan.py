"""torchtitan's job file: TOML, or the JSON that it saves; as of 0.2 (torchtitan/config/job_config.py), older names too.

The shard degree −1 takes the GPUs that the others leave. With one shard and no context parallelism nothing is sharded:
DDP, under autocast where it runs alone, in the training dtype under tensor or pipeline parallelism. Tensor parallelism
brings sequence parallelism. In a pipeline the local batch is cut into micro-batches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Final

from simulator.base.errors import Fault, ModelError
from simulator.base.units import whole
from simulator.formats.readers.plans.draft import Degree, Draft
from simulator.formats.readers.plans.options import options_of, table_of
from simulator.formats.readers.plans.reading import Entry, Reading, flattened
from simulator.spec.model import Model
from simulator.spec.model.families import preset_of
from simulator.spec.model.files import fields_like

SOFTWARE: Final = "torchtitan 0.2"
_P: Final = "parallelism."
_LEAVES: Final = ("model_args",)
_SCHEDULES: Final = {
    "GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved", "DualPipeV": "dualpipe_v",
    "ZBVZeroBubble": "", "InterleavedZeroBubble": "", "LoopedBFS": "",
}  # fmt: skip
_DTYPES: Final = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
_IMPLEMENTATIONS: Final = {"fused": "fused", "foreach": "foreach", "for-loop": "loop"}


def read_torchtitan(data: Mapping[str, Any], file: str, given: Collection[str] = ()) -> Draft:
    """The plan of a job file that was read as plain data. Faults are the draft's."""
    r = Reading(_entries(data, file), file, given)
    fields: dict[str, Any] = {}
    changes: dict[str, tuple[object, str]] = {}
    by_model: dict[str, Any] = {}
    leftover = _data_parallel(r, fields)
    _tensor_parallel(r, fields, changes)
    total = _batch(r, fields)
    _pipeline(r, fields, by_model)
    _gathers(r, fields)
    _precision(r, fields)
    _optimizer(r, fields)
    _recompute(r, fields)
    (model, unknown), preset = _model(r), _stack(r)
    r.sort_rest(options_of("torchtitan"))
    return Draft(
        format="torchtitan",
        software=SOFTWARE,
        file=file,
        fields=fields,
        places={field: r.place(name) for field, name in _PLACES.items() if name in r},
        leftover=leftover,
        model=model,
        model_unknown=unknown,
        global_batch_size=total,
        by_model=by_model,
        stack=preset,
        stack_why="compile.enable says whether blocks are compiled; a version is not stated",
        stack_changes=changes,
        settings=r.settings(),
        faults=tuple(r.faults),
    )


_PLACES: Final = {
    "tp": f"{_P}tensor_parallel_degree",
    "pp": f"{_P}pipeline_parallel_degree",
    "cp": f"{_P}context_parallel_degree",
    "dp_shard": f"{_P}data_parallel_shard_degree",
    "dp_replicate": f"{_P}data_parallel_replicate_degree",
    "global_batch_size": "training.global_batch_size",
    "model": "model.flavor",
}


def _entries(data: Mapping[str, Any], file: str) -> dict[str, Entry]:
    found = flattened(data, file, _LEAVES)
    old_names = table_of("torchtitan")["old_names"]
    return {old_names.get(name, name): entry for name, entry in found.items()}


def _data_parallel(r: Reading, fields: dict[str, Any]) -> Degree | None:
    fields |= r.integers({name: _PLACES[name] for name in ("tp", "pp", "cp")})
    fields |= r.integers({"ep": f"{_P}expert_parallel_degree"}, above=1)
    etp = r.integer(f"{_P}expert_tensor_parallel_degree")
    if etp is not None and etp > 1:
        fields["etp"] = etp
    backend = r.choice(f"{_P}expert_parallel_comm_backend", ("standard", "deepep"))
    if backend == "deepep":
        fields["dispatcher"] = "deep_ep"
    replicate = r.integer(_PLACES["dp_replicate"], plan_field="dp_replicate") or 1
    shard = r.integer(_PLACES["dp_shard"], least=-1, plan_field="dp_shard")
    if shard == 0:
        r.fault(_PLACES["dp_shard"], "0 is not a degree", "-1: the GPUs that the others leave; or 1 or more")
    if shard == 1 and fields.get("cp", 1) == 1:
        fields |= {"zero": 0, "data_parallel": "ddp", "dp_shard": 1, "dp_replicate": replicate}
        return None
    fields |= {"zero": 3, "data_parallel": "fsdp2", "dp_replicate": replicate}
    if shard is None or shard < 1:
        return "dp_shard"
    fields["dp_shard"] = shard
    return None


def _tensor_parallel(r: Reading, fields: dict[str, Any], changes: dict[str, tuple[object, str]]) -> None:
    if fields.get("tp", 1) > 1:
        fields["sequence_parallel"] = True
    if r.flag(f"{_P}disable_loss_parallel") and fields.get("tp", 1) > 1:
        r.unmodelled(f"{_P}disable_loss_parallel", "the loss is computed on the vocabulary's shards here")
    if r.flag(f"{_P}enable_async_tensor_parallel"):
        compiled = r.flag("compile.enable")
        if compiled:
            changes["tp_overlap"] = ("symmetric_memory", r.place(f"{_P}enable_async_tensor_parallel"))
        else:
            r.fault(f"{_P}enable_async_tensor_parallel", "works on compiled blocks only", "compile.enable = true")
    if fields.get("cp", 1) > 1:
        rotation = r.choice(f"{_P}context_parallel_rotate_method", ("allgather", "alltoall")) or "allgather"
        if rotation == "allgather":
            note = "keys and values are taken to pass round a ring, not gathered at once"
            if f"{_P}context_parallel_rotate_method" in r:
                r.unmodelled(f"{_P}context_parallel_rotate_method", note)
            else:
                r.default_unmodelled(f"{_P}context_parallel_rotate_method", "allgather", note)


def _batch(r: Reading, fields: dict[str, Any]) -> int | None:
    """Sequences a micro-batch; the whole batch, where one is stated."""
    seq_len = r.integer("training.seq_len", plan_field="seq_len")
    fields["seq_len"] = seq_len or 2048  # job_config.py's default
    local = r.integer("training.local_batch_size", plan_field="micro_batch_size") or 8  # job_config.py's default
    stages = fields.get("pp", 1)
    each = r.integer(f"{_P}pipeline_parallel_microbatch_size", plan_field="micro_batch_size") or 1
    total = r.integer("training.global_batch_size", least=-1)
    total = total if total is not None and total > 0 else None
    fields["micro_batch_size"] = each if stages > 1 else local
    if stages > 1 and local % each:
        problem = f"{each} does not divide the local batch of {local}"
        r.fault(f"{_P}pipeline_parallel_microbatch_size", problem, f"{math.gcd(local, each)}")
    if total is None:
        fields["num_micro_batches"] = max(local // each, 1) if stages > 1 else 1
    elif stages > 1:
        note = "accumulated batches are taken to follow each other through the pipeline without a flush"
        r.note("training.global_batch_size", note)
    return total


def _pipeline(r: Reading, fields: dict[str, Any], by_model: dict[str, Any]) -> None:
    stages = fields.get("pp", 1)
    word = r.choice(f"{_P}pipeline_parallel_schedule", tuple(_SCHEDULES), plan_field="schedule") or "1F1B"
    first, last = (r.integer(f"{_P}pipeline_parallel_{end}_stage_less_layers", least=0) for end in ("first", "last"))
    each = r.integer(f"{_P}pipeline_parallel_layers_per_stage")
    parts = r.raw(f"{_P}module_fqns_per_model_part") or r.raw("experimental.pipeline_parallel_split_points")
    if stages == 1:
        return
    if r.text(f"{_P}pipeline_parallel_schedule_csv"):
        r.unmodelled(f"{_P}pipeline_parallel_schedule_csv", "a schedule of its own; the named one is taken")
    schedule = _SCHEDULES[word]
    if not schedule and "schedule" not in r.given:
        near = "--schedule dualpipe_v --virtual-stages 2" if word == "ZBVZeroBubble" else "--schedule interleaved"
        r.fault(f"{_P}pipeline_parallel_schedule", f"{word} is not simulated", f"{near} is the nearest")
    fields["schedule"] = schedule or "1f1b"
    fields["sync_every_micro_batch"] = False  # torch's stages reduce with the last micro-batch
    chunks = 2 if schedule in ("interleaved", "dualpipe_v", "") else 1
    if isinstance(parts, list) and parts:
        _stated_parts(r, fields, parts, stages)
        return
    less = (1 if first is None else first, 1 if last is None else last)
    if each is None and chunks > 1:
        fields["virtual_stages"] = chunks
    elif each is not None and chunks > 1:
        by_model["virtual_stages"] = partial(_virtual_stages, r, each, less)
    by_model["stage_layers"] = partial(_stage_layers, r, less, each)


def _stated_parts(r: Reading, fields: dict[str, Any], parts: list[Any], stages: int) -> None:
    """Lists of modules, one a model part."""
    name = f"{_P}module_fqns_per_model_part"
    if not all(isinstance(part, list) for part in parts) or len(parts) % stages:
        r.fault(name, f"{len(parts)} parts are not a multiple of {stages} stages", "a list of lists")
        return
    fields["stage_layers"] = tuple(sum(str(m).startswith("layers.") for m in part) for part in parts)
    if len(parts) > stages:
        fields["virtual_stages"] = len(parts) // stages


def _virtual_stages(
    r: Reading, each: int, less: tuple[int, int], model: Model, fields: Mapping[str, Any]
) -> int | Fault:
    parts, stages = math.ceil((model.num_layers + sum(less)) / each), int(fields.get("pp", 1))
    if parts % stages == 0:
        return parts // stages
    place = r.place(f"{_P}pipeline_parallel_layers_per_stage")
    near = math.ceil((model.num_layers + sum(less)) / (max(parts // stages, 1) * stages))
    return Fault(place, f"{each} layers a stage make {parts} stages, no multiple of {stages}", str(near))


def _stage_layers(
    r: Reading, less: tuple[int, int], each: int | None, model: Model, fields: Mapping[str, Any]
) -> tuple[int, ...] | Fault:
    """Layers of each part: the ends count as so many layers, and what is left over goes to the first parts."""
    stages, chunks = int(fields.get("pp", 1)), int(fields.get("virtual_stages", 1))
    parts, weighed = stages * chunks, model.num_layers + sum(less)
    place = r.place(_PLACES["pp"])
    if each is not None and chunks == 1 and math.ceil(weighed / each) != stages:
        problem = f"{each} layers a stage do not make {stages} stages of {model.num_layers} layers"
        return Fault(place, problem, str(math.ceil(weighed / stages)))
    if weighed // parts < max(*less, 1):
        problem = f"{parts} parts are too many for {model.num_layers} layers and the ends' {less[0]} and {less[1]}"
        return Fault(place, problem, f"{weighed // max(*less, 1)} parts at most")
    counts = [weighed // parts + (part < weighed % parts) for part in range(parts)]
    counts[0] -= less[0]
    counts[-1] -= less[1]
    return tuple(counts)


def _gathers(r: Reading, fields: dict[str, Any]) -> None:
    policy = r.choice(f"{_P}fsdp_reshard_after_forward", ("default", "always", "never")) or "default"
    if fields["zero"] == 0:
        return
    if policy == "never" or (policy == "default" and fields.get("pp", 1) > 1):
        fields["reshard_after_forward"] = False
    elif policy == "always":
        fields["reshard_after_forward"] = True
    if r.flag("training.enable_cpu_offload"):
        fields["offload"] = {"optimizer": "host", "parameters": "host"}


def _precision(r: Reading, fields: dict[str, Any]) -> None:
    master = r.choice("training.dtype", ("bfloat16", "float32")) or "float32"
    compute = r.choice("training.mixed_precision_param", ("bfloat16", "float32")) or "bfloat16"
    reduce = r.choice("training.mixed_precision_reduce", ("float32",)) or "float32"
    sharded = fields["zero"] == 3
    if master != "float32":
        fields["master_dtype"] = _DTYPES[master]
    if not sharded and (fields.get("tp", 1) > 1 or fields.get("pp", 1) > 1):
        compute = master
    fields["precision"] = _DTYPES[compute]
    if sharded:
        fields["reduce_dtype"] = _DTYPES[reduce]
    _fp8(r, fields, sharded=sharded)


def _fp8(r: Reading, fields: dict[str, Any], *, sharded: bool) -> None:
    """The converter of linear layers, and its fp8 scaling."""
    converters = r.raw("model.converters") or []
    words = converters if isinstance(converters, list) else str(converters).split(",")
    words = [*words, *(["float8"] if r.flag("float8.enable_float8_linear") else [])]  # before there were converters
    for word in map(str, words):
        if re.search(r"float8|mx", word):
            fields["precision"] = "fp8"
        if "mx" in word and "grouped" not in word:
            fields["fp8_recipe"] = "mxfp8"
        elif "grouped" in word:
            r.unmodelled("model.converters", f"{word}: taken as fp8 products of all layers")
        elif "float8" not in word:
            r.unmodelled("model.converters", f"{word} is not modelled")
    _in_bf16(r, "mx" if fields.get("fp8_recipe") == "mxfp8" else "float8", on=fields["precision"] == "fp8")
    recipe = r.text("quantize.linear.float8.recipe_name")
    if recipe not in (None, "tensorwise") and fields["precision"] == "fp8":
        fields.setdefault("fp8_recipe", "rowwise")
        if recipe != "rowwise":
            r.unmodelled("quantize.linear.float8.recipe_name", f"{recipe} is taken as rowwise")
    name = "quantize.linear.float8.enable_fsdp_float8_all_gather"
    if r.flag(name) and fields["precision"] == "fp8":
        if sharded and recipe in (None, "tensorwise") and "fp8_recipe" not in fields:
            fields["fp8_all_gather"] = True
        else:
            r.unmodelled(name, "weights are gathered in bf16 here")


def _in_bf16(r: Reading, converter: str, *, on: bool) -> None:
    """Layers that a converter leaves out: here it is the head, and routers are none of them."""
    listed = {kind: set(r.words(f"quantize.linear.{kind}.filter_fqns")) for kind in ("float8", "mx")}[converter]
    name, note = f"quantize.linear.{converter}.filter_fqns", "the head alone stays in bf16 here"
    if on and name not in r:
        r.default_unmodelled(name, "none", note)
    elif on and listed - {"router.gate"} != {"output"}:
        r.unmodelled(name, note)


def _optimizer(r: Reading, fields: dict[str, Any]) -> None:
    name = r.choice("optimizer.name", ("Adam", "AdamW"), plan_field="optimizer") or "AdamW"
    fields["optimizer"] = name.lower()
    usual = "foreach" if r.flag("optimizer.fused") is False else "fused"  # of releases before 0.1
    how = r.choice("optimizer.implementation", tuple(_IMPLEMENTATIONS)) or usual
    fields["optimizer_impl"] = _IMPLEMENTATIONS[how]
    if r.flag("optimizer.early_step_in_backward"):
        r.unmodelled("optimizer.early_step_in_backward", "the optimizer runs behind the backward here")


def _recompute(r: Reading, fields: dict[str, Any]) -> None:
    name = "activation_checkpoint.mode"
    mode = r.choice(name, ("none", "full", "selective", "memory_budget"), plan_field="recompute") or "selective"
    option = r.text("activation_checkpoint.selective_ac_option") or "2"  # job_config.py's defaults
    if mode == "memory_budget":
        if "recompute" not in r.given:
            r.fault(name, "the compiler's own choice of what to keep is not modelled", "--recompute selective or none")
        return
    if mode != "selective":
        fields["recompute"] = mode
    elif option == "op":
        fields["recompute"] = "selective"
    elif number := whole(option):
        fields |= {"recompute": "every_k", "recompute_every": number}
    else:
        r.fault("activation_checkpoint.selective_ac_option", f"{option!r} is not an option", 'a number, or "op"')


def _model(r: Reading) -> tuple[Model | str | None, str]:
    """The preset of the file's model, or its shape; if there is none, the name in the file and the known ones."""
    table = table_of("torchtitan")
    named, flavor = (r.text("model.name") or "llama3").rpartition(".")[2], r.text("model.flavor")
    source = r.text("hf_transformers.model")
    family = table["model_names"].get(named, named)
    of_family: dict[str, Any] = {**table["flavors"].get(family, {}), **table["other_flavors"].get(family, {})}
    found = shape_of(of_family.get(flavor or ""), f"{family} {flavor}", preset_of(source or "") or "")
    if flavor is None:
        return None, ""
    if found is not None:
        r.note("model.flavor", f"model {found if isinstance(found, str) else found.name}")
        return found, ""
    hint = f"of {family} {', '.join(of_family)} are" if of_family else _NO_FAMILY
    r.note("model.flavor", f"{family} {flavor} is not a preset")
    return None, f"{family} {flavor} is not a preset; {hint}"


_NO_FAMILY: Final = "its family has none; --model llama3-8b, or any other decoder, is predicted under this file's plan"


def shape_of(flavor: object, name: str, source: str = "") -> Model | str | None:
    """A flavor of the table: a preset's name, or a model like one; None where it has neither.

    source: the preset of the model that a job file names beside its flavor.
    """
    if not isinstance(flavor, dict):
        return flavor if isinstance(flavor, str) else None
    written = {**flavor, "name": name, "like": flavor["like"] or source}
    if not written["like"] or flavor.keys() == {"like"}:
        return source or None
    return Model.parse(fields_like(written, name), name, ModelError)


def _stack(r: Reading) -> str:
    components = r.words("compile.components")
    if r.flag("compile.enable") and ("compile.components" not in r or "model" in components):
        return "torchtitan-2025-compiled"
    return "torchtitan-2025-eager"
