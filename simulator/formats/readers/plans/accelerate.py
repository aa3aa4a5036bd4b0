"""accelerate's YAML configuration with its DeepSpeed or FSDP plugin; as of 1.12 (commands/config, utils/dataclasses.py).

FSDP's gradients travel in the compute dtype, and `accumulate` reduces them in the last micro-batch only. Batch, sequence
length and gradient accumulation (but for DeepSpeed's) belong to the training script.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from simulator.base.errors import InputError
from simulator.formats.readers.plans import deepspeed
from simulator.formats.readers.plans.draft import Degree, Draft
from simulator.formats.readers.plans.options import options_of, shipped
from simulator.formats.readers.plans.reading import AUTO, Entry, Reading, ReadJson, flattened
from simulator.spec.model import Model

SOFTWARE: Final = "accelerate 1.12"
_F: Final = "fsdp_config.fsdp_"
_D: Final = "deepspeed_config."
_P: Final = "parallelism_config.parallelism_config_"
STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_ZERO: Final = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_M: Final = "megatron_lm_config.megatron_lm_"
_PLUGINS: Final = ("NO", "MULTI_GPU", "DEEPSPEED", "FSDP", "MEGATRON_LM", "TP")
# Not CUDA's: as MULTI_GPU
_OTHERS: Final = ("MULTI_CPU", "MULTI_NPU", "MULTI_MLU", "MULTI_XPU", "MULTI_HPU", "MULTI_MUSA", "MULTI_SDAA")
_PREFIXES: Final = {
    "fsdp_config.": "fsdp_",
    "parallelism_config.": "parallelism_config_",
    "megatron_lm_config.": "megatron_lm_",
}
_RENAMED: Final = {
    f"{_F}backward_prefetch_policy": f"{_F}backward_prefetch",
    "tp_config.tp_size": f"{_P}tp_size",
    "dynamo_backend": "dynamo_config.dynamo_backend",
    "deepspeed_config": f"{_D}deepspeed_config_file",
}


def read_accelerate(data: Mapping[str, Any], file: str, read_json: ReadJson, given: Collection[str] = ()) -> Draft:
    """The plan of a configuration that was read as plain data. read_json: reads a DeepSpeed file that it names."""
    r = Reading(_entries(data, file), file, given)
    kind = _kind(r, data)
    fields: dict[str, Any] = {}
    mixed = r.choice("mixed_precision", ("no", "fp16", "bf16", "fp8"))
    if mixed is not None:
        fields["precision"] = "fp32" if mixed == "no" else mixed
    elif "mixed_precision" in r and r.faults:
        fields["precision"] = "fp32"  # its word is a fault; the file does state it
    processes, machines = r.integer("num_processes"), r.integer("num_machines")
    if kind == "NO":
        processes = 1  # `accelerate launch` starts one process, whatever the file says (commands/launch.py)
    by_model: Mapping[str, Any] = {}
    leftover: Degree | None = "dp_replicate"
    changes: dict[str, tuple[object, str]] = {}
    match kind:
        case "DEEPSPEED":
            leftover, by_model = _deepspeed(r, fields, read_json, mixed)
        case "FSDP":
            leftover = fsdp(r, fields, processes, machines or 1)
            by_model = {"reduce_dtype": compute_dtype}
        case "MEGATRON_LM":
            leftover = _megatron(r, fields, changes)
            by_model = {"reduce_dtype": lambda _, others: "fp16" if others.get("precision") == "fp16" else "fp32"}
        case _:
            fields |= {"data_parallel": "ddp", "zero": 0}
    leftover = degrees(r, fields, leftover)
    total = fields.pop("global_batch_size", None)
    stack, why = _stack(r, kind)
    r.sort_rest(options_of("accelerate"))
    return Draft(
        format="accelerate",
        software=SOFTWARE,
        file=file,
        fields=fields,
        places={"num_devices": r.place("num_processes" if kind != "NO" else "distributed_type")} if processes else {},
        leftover=leftover,
        num_devices=processes,
        num_nodes=machines,
        global_batch_size=total,
        assumed=deepspeed.assumed(fields, total, bf16=True),
        by_model=by_model,
        stack=stack,
        stack_why=why,
        stack_changes=changes,
        settings=r.settings(),
        faults=tuple(r.faults),
    )


def _entries(data: Mapping[str, Any], file: str) -> dict[str, Entry]:
    """Settings by dotted name. Older releases wrote a table's keys without its prefix; a DeepSpeed file inline stays whole."""
    found: dict[str, Entry] = {}
    for name, entry in flattened(data, file, leaves=[_D[:-1]] if _inline(data) else []).items():
        table = next((table for table in _PREFIXES if name.startswith(table)), "")
        key = name.removeprefix(table)
        full = f"{table}{_PREFIXES[table]}{key.removeprefix(_PREFIXES[table])}" if table else name
        found[full if isinstance(entry.value, Mapping) else _RENAMED.get(full, full)] = entry
    return found


def _inline(data: Mapping[str, Any]) -> bool:
    """The deepspeed_config is DeepSpeed's own, and no plugin's."""
    table = data.get(_D[:-1])
    return isinstance(table, Mapping) and bool({"zero_optimization", "train_micro_batch_size_per_gpu"} & set(table))


def _kind(r: Reading, data: Mapping[str, Any]) -> str:
    """The data-parallel implementation; plugins that contradict it are faults."""
    kind = r.choice("distributed_type", (*_PLUGINS, *_OTHERS)) or "NO"
    if kind in _OTHERS:
        r.unmodelled("distributed_type", f"{kind}: read as MULTI_GPU on the cluster's GPUs")
        kind = "MULTI_GPU"
    tables = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
    for table, own in tables.items():
        if isinstance(data.get(table), Mapping) and data[table] and kind != own and kind in tables.values():
            r.fault(
                "distributed_type", f"{kind} beside a{'n' if table[0] == 'f' else ''} {table}", "keep one of the two"
            )
    return "MULTI_GPU" if kind == "TP" else kind


def _megatron(r: Reading, fields: dict[str, Any], changes: dict[str, tuple[object, str]]) -> Degree:
    """Megatron-LM by accelerate's plugin (utils/dataclasses.py, MegatronLMPlugin): the optimizer is distributed if it says so.

    What the plugin does not set is as Megatron's own arguments have it where nothing is stated: no overlap, no fused loss.
    """
    keys = {"tp": "tp_degree", "pp": "pp_degree", "num_micro_batches": "num_micro_batches"}
    fields |= r.integers({name: f"{_M}{key}" for name, key in keys.items()})
    parallel, distributed = r.flag(f"{_M}sequence_parallelism"), r.flag(f"{_M}use_distributed_optimizer")
    fields |= {"data_parallel": "megatron", "zero": 1 if distributed else 0, "optimizer_impl": "fused"}
    fields["sequence_parallel"] = bool(parallel) and fields.get("tp", 1) > 1
    fields["recompute"] = "selective" if r.flag(f"{_M}recompute_activations", plan_field="recompute") else "none"
    usual = {"late_gradients": True, "loss": "fp32_in_place"} | ({"late_parameters": True} if distributed else {})
    usual |= {"tp_overlap": "backward"} if fields.get("tp", 1) > 1 else {}
    changes |= {name: (value, f"{r.file}: Megatron-LM's default") for name, value in usual.items()}
    if r.number(f"{_M}gradient_clipping") == 0:
        changes["clips"] = ("", r.place(f"{_M}gradient_clipping"))
    return "dp_shard" if distributed else "dp_replicate"


_NONE: Final = Entry(name="", value=None, place="")


def _deepspeed(
    r: Reading, fields: dict[str, Any], read_json: ReadJson, mixed: str | None
) -> tuple[Degree, Mapping[str, Any]]:
    """The plugin's own keys, or the file that they name; a file and keys that say the same thing contradict each other."""
    if isinstance(r.entries.get(_D[:-1], _NONE).value, Mapping):
        data = r.raw(_D[:-1])
        return deepspeed_file(r, fields, lambda _: data, f"{r.file}: {_D[:-1]}", mixed)
    path = r.text(f"{_D}deepspeed_config_file")
    if path is not None:
        return deepspeed_file(r, fields, read_json, path, mixed)
    stage = r.integer(f"{_D}zero_stage", least=0, plan_field="zero")
    if stage is not None and stage > 3:
        r.fault(f"{_D}zero_stage", f"there is no stage {stage}", "0, 1, 2 or 3")
    stage = 2 if stage is None or stage > 3 else stage  # the plugin's default
    fields |= {"data_parallel": "deepspeed", "zero": stage}
    fields |= r.integers({"num_micro_batches": f"{_D}gradient_accumulation_steps"})
    deepspeed.default_overlap(r, stage)
    offload: dict[str, Any] = {}
    for key, field in (("offload_optimizer_device", "optimizer"), ("offload_param_device", "parameters")):
        device = r.choice(f"{_D}{key}", ("none", "cpu", "nvme")) or "none"
        if device != "none":
            offload[field] = {"cpu": "host", "nvme": "nvme"}[device]
            if stage < (3 if field == "parameters" else 1):
                r.fault(f"{_D}{key}", f"stage {stage} offloads no {field}", "a higher zero_stage, or none")
    if offload:
        fields["offload"] = {**offload, "pinned": False}  # the plugin's template leaves pin_memory at its default
    if mixed == "fp8":
        r.unmodelled("mixed_precision", "fp8 under DeepSpeed: taken as fp8 products")
    return ("dp_shard" if stage else "dp_replicate"), {}


def packaged(path: str) -> tuple[str, Mapping[str, Any]]:
    """The framework that ships a DeepSpeed file of that name or end of a path, and the file; "": none does."""
    whose, found = shipped(path, "deepspeed-packaged")
    enabled = {"enabled": AUTO}
    batches = {"gradient_accumulation_steps": AUTO, "train_micro_batch_size_per_gpu": AUTO}
    return whose, {"zero_optimization": found, **batches, "bf16": enabled, "fp16": enabled} if whose else {}


def deepspeed_file(
    r: Reading, fields: dict[str, Any], read_json: ReadJson, path: str, mixed: str | None
) -> tuple[Degree, Mapping[str, Any]]:
    """DeepSpeed's own file, with what it leaves `"auto"` to `r.given` and to the precision `mixed`."""
    name = f"{_D}deepspeed_config_file"
    for key in ("zero_stage", "gradient_accumulation_steps", "offload_optimizer_device", "offload_param_device"):
        if f"{_D}{key}" in r:
            r.fault(f"{_D}{key}", "contradicts deepspeed_config_file, which states it", "keep one")
            r.raw(f"{_D}{key}")
    try:
        data = read_json(path)
    except InputError as exc:
        whose, data = packaged(path)
        if not whose:
            r.faults += exc.faults
            return "dp_shard", {}
        path += f" (not here: {whose}'s own)"
    entries = deepspeed.entries(data, path)
    given = {*r.given, *(("precision",) if mixed else ())}
    inner = Reading(entries, path, given, faults=r.faults)
    found, leftover, by_model = deepspeed.settings(inner)
    total = inner.integer("train_batch_size") if entries.get("train_batch_size", _NONE).value != AUTO else None
    inner.sort_rest(options_of("deepspeed"))
    wanted = {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16", "no": "fp32"}.get(mixed or "")
    # a missing or auto one is filled in (DeepSpeedPlugin.set_mixed_precision)
    for dtype in ("bf16", "fp16") if mixed else ():
        stated = str(inner.entries.get(f"{dtype}.enabled", _NONE).value).lower()
        if stated == str(dtype != wanted).lower():
            problem = f"{mixed} contradicts {path}, whose {dtype}.enabled is {stated}"
            r.fault("mixed_precision", problem, f'"auto" in {path}')
    fields |= {**found, **({"precision": fields["precision"]} if mixed else {})}
    if total is not None:
        fields["global_batch_size"] = total
    r.note(name, "read as DeepSpeed's file")
    r.added += inner.settings()
    return leftover, by_model


def fsdp(r: Reading, fields: dict[str, Any], processes: int | None, machines: int) -> Degree:
    """FSDP's plugin, by the settings `fsdp_config.fsdp_*`."""
    version = r.integer(f"{_F}version") or 1
    if version > 2:
        r.fault(f"{_F}version", f"there is no FSDP {version}", "1 or 2")
    fields |= {"data_parallel": "fsdp2" if version == 2 else "fsdp1", "zero": 3, "sync_every_micro_batch": False}
    (_fsdp2 if version == 2 else _fsdp1)(r, fields, processes, machines)
    fields["recompute"] = "full" if r.flag(f"{_F}activation_checkpointing", plan_field="recompute") else "none"
    if r.flag(f"{_F}offload_params"):
        fields["offload"] = {"optimizer": "host", "parameters": "host"}
    wrap = r.choice(f"{_F}auto_wrap_policy", ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")) or "NO_WRAP"
    if wrap != "TRANSFORMER_BASED_WRAP":
        note = "a unit a block is taken"
        if f"{_F}auto_wrap_policy" in r:
            r.unmodelled(f"{_F}auto_wrap_policy", note)
        else:
            r.default_unmodelled(f"{_F}auto_wrap_policy", wrap, note)
    return "dp_replicate" if fields["zero"] == 0 or "dp_shard" in fields else "dp_shard"


def compute_dtype(model: Model, fields: Mapping[str, Any]) -> str:
    """Gradients travel in the dtype of the computation."""
    del model
    return {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}.get(str(fields.get("precision")), "fp32")


def _fsdp1(r: Reading, fields: dict[str, Any], processes: int | None, machines: int) -> None:
    name = f"{_F}sharding_strategy"
    stated = r.raw(name, "zero")
    if isinstance(stated, int) and 1 <= stated <= len(STRATEGIES):  # older files have the number
        strategy = STRATEGIES[stated - 1]
    else:
        strategy = r.choice(name, STRATEGIES, plan_field="zero") or "FULL_SHARD"
    reshard = r.raw(f"{_F}reshard_after_forward")
    if reshard is not None and str(reshard).upper() in STRATEGIES:
        if stated is not None:
            r.fault(f"{_F}reshard_after_forward", "contradicts fsdp_sharding_strategy", "keep one")
        strategy = str(reshard).upper()
    elif reshard is not None:
        r.fault(f"{_F}reshard_after_forward", "true and false are FSDP2's", "fsdp_version: 2, or a strategy's name")
    fields["zero"] = _ZERO[strategy]
    if strategy.startswith("HYBRID"):
        if processes is not None and processes % machines == 0:
            fields["dp_shard"] = processes // machines
        elif "dp_shard" not in r.given:
            remedy = "num_processes a multiple of num_machines, or --dp-shard N"
            r.fault(name, f"{strategy} shards over a machine's GPUs", remedy, (("--dp-shard", "8"),))
    before = r.choice(f"{_F}backward_prefetch", ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "None"))
    fields["backward_prefetch"] = 1 if before == "BACKWARD_PRE" else 0
    if before == "BACKWARD_POST":
        r.unmodelled(f"{_F}backward_prefetch", "BACKWARD_POST: no unit is gathered ahead")
    fields["forward_prefetch"] = int(bool(r.flag(f"{_F}forward_prefetch")))


def _fsdp2(r: Reading, fields: dict[str, Any], processes: int | None, machines: int) -> None:
    del processes, machines
    for key in ("sharding_strategy", "backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states"):
        r.overruled(f"{_F}{key}", "is FSDP1's: FSDP2 has no such setting")
    if str(r.entries.get(f"{_F}reshard_after_forward", _NONE).value).upper() in STRATEGIES:
        r.fault(f"{_F}reshard_after_forward", "a strategy's name is FSDP1's", "true or false, or fsdp_version: 1")
        r.raw(f"{_F}reshard_after_forward")
    elif r.flag(f"{_F}reshard_after_forward") is False:  # true is the default, which keeps the root
        fields["reshard_after_forward"] = False


def degrees(r: Reading, fields: dict[str, Any], leftover: Degree | None) -> Degree | None:
    """A `parallelism_config`: the degrees beside data parallelism, and those of it; which of them takes what is left."""
    found = {name: r.integer(f"{_P}{name}_size", plan_field=name) for name in ("dp_replicate", "dp_shard", "tp", "cp")}
    ulysses = r.integer(f"{_P}sp_size", plan_field="cp")
    strategy = r.choice(f"{_P}cp_comm_strategy", ("allgather", "alltoall")) or "allgather"
    if ulysses is not None and ulysses > 1:
        if (found["cp"] or 1) > 1:
            r.fault(f"{_P}sp_size", "contradicts parallelism_config_cp_size", "keep one")
        fields |= {"cp": ulysses, "cp_exchange": "all_to_all"}
        found["cp"] = None
    stated = {name: degree for name, degree in found.items() if degree is not None}
    beyond = [name for name, degree in stated.items() if degree > 1]
    if beyond and fields.get("data_parallel") == "fsdp1":
        r.fault(f"{_P}{beyond[0]}_size", "a parallelism_config is FSDP2's", "fsdp_version: 2")
    if (found["cp"] or 1) > 1 and strategy == "allgather":
        r.default_unmodelled(f"{_P}cp_comm_strategy", strategy, "keys and values are taken to pass round a ring")
    if stated.get("tp", 1) > 1:
        fields["vocab_parallel"] = False
        r.note(
            f"{_P}tp_size", "the model's own plan of splits: its blocks are taken to be split, embedding and head whole"
        )
    fields |= stated
    if found["dp_shard"] is None and found["dp_replicate"] is None:
        return leftover
    for name in ("dp_shard", "dp_replicate"):
        fields.setdefault(name, 1)
    return None


def _stack(r: Reading, kind: str) -> tuple[str, str]:
    backend = (r.text("dynamo_config.dynamo_backend") or "NO").upper()
    if kind == "MEGATRON_LM":
        return "megatron-core-2025", "the plugin does not state Megatron's version; Megatron-Core is taken"
    if kind == "DEEPSPEED":
        return "deepspeed-0.14", "the only DeepSpeed stack that ships"
    if backend == "INDUCTOR":
        return "torch-2.11-compiled", "dynamo_backend INDUCTOR: blocks are compiled"
    if backend != "NO":
        r.unmodelled("dynamo_config.dynamo_backend", "eager blocks are taken")
    return "torch-2.6-eager", "accelerate does not state PyTorch's version"
