"""DeepSpeed's JSON configuration, as of 0.18 (deepspeed/runtime/config.py, zero/config.py, zero/offload_config.py).

train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks of data parallelism; each of them
follows from the other two. Sequence length, checkpointing and the model belong to the training script.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from simulator.formats.readers.plans.draft import Degree, Draft
from simulator.formats.readers.plans.options import options_of
from simulator.formats.readers.plans.reading import AUTO, Entry, Reading, flattened
from simulator.spec.plan.compression import ONE_BIT_NAMES, ONE_BIT_SETTINGS
from simulator.spec.plan.order import MAX_SIZE

SOFTWARE: Final = "DeepSpeed 0.18"
_ZERO: Final = "zero_optimization."
_BESIDE: Final = "gradients are reduced beside the backward here; see --set stack.overlap"
_BATCH: Final = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "num_micro_batches",
}
_OPTIMIZERS: Final = {
    "adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw", "sgd": "sgd_momentum",
    "adam8bit": "adam8bit", "adamw8bit": "adam8bit", "lion": "lion", "lamb": "lamb",
}  # fmt: skip
_DEVICES: Final = {"none": "none", "cpu": "host", "nvme": "nvme"}
_OLD_NAMES: Final = {
    "bfloat16.enabled": "bf16.enabled",
    f"{_ZERO}prefetch_bucket_size": f"{_ZERO}stage3_prefetch_bucket_size",
    f"{_ZERO}param_persistence_threshold": f"{_ZERO}stage3_param_persistence_threshold",
    **{f"{_ZERO}max_{what}": f"{_ZERO}stage3_max_{what}" for what in ("live_parameters", "reuse_distance")},
    "zero_optimization": f"{_ZERO}stage",
    f"{_ZERO}cpu_offload": f"{_ZERO}offload_optimizer.device",
    **{f"{_ZERO}cpu_offload_{noun}": f"{_ZERO}offload_param.device" for noun in ("param", "params")},
}
_OLD_SWITCHES: Final = {f"{_ZERO}stage": (0, 1)} | dict.fromkeys(
    (f"{_ZERO}offload_optimizer.device", f"{_ZERO}offload_param.device"), ("none", "cpu")
)  # what false and true of an older name are


def read_deepspeed(data: Mapping[str, Any], file: str, given: Collection[str] = ()) -> Draft:
    """The plan of a configuration that was read as plain data. Faults are the draft's."""
    r = Reading(entries(data, file), file, given)
    fields, leftover, by_model = settings(r)
    total = r.integer("train_batch_size") if _stated(r, "train_batch_size") else None
    return Draft(
        format="deepspeed",
        software=SOFTWARE,
        file=file,
        fields=fields,
        places=places(r),
        leftover=leftover,
        global_batch_size=total,
        num_data_parallel=_implied(fields, total),
        assumed=assumed(fields, total, "bf16.enabled" in r or "fp16.enabled" not in r),
        by_model=by_model,
        stack="deepspeed-0.14",
        stack_why="the only DeepSpeed stack that ships",
        settings=_sorted(r),
        faults=tuple(r.faults),
    )


# What transformers' TrainingArguments hold where a command gives nothing (training_args.py), which its integration
# (transformers/integrations/deepspeed.py, trainer_config_process) fills in for "auto"; the length is this project's own.
# Precision is false for both there; a file that asks for mixed precision is taken to be launched with --bf16.
_ASSUMED: Final[Mapping[str, tuple[object, str]]] = {
    "micro_batch_size": (8, "TrainingArguments' per_device_train_batch_size"),
    "num_micro_batches": (1, "TrainingArguments' gradient_accumulation_steps"),
    "precision": ("bf16", "the mixed precision that the file leaves open"),
    "seq_len": (2048, "no file of this format states a length"),
    "recompute": ("none", "TrainingArguments' gradient_checkpointing is off"),
}


def assumed(fields: Mapping[str, Any], total: int | None, bf16: bool) -> dict[str, tuple[object, str]]:  # noqa: FBT001
    """What is taken for the fields that the training script decides. bf16: the file knows bf16."""
    found = {name: entry for name, entry in _ASSUMED.items() if name not in fields}
    if total is not None:  # it gives the one of these two that is missing
        found.pop("num_micro_batches" if "micro_batch_size" in fields else "micro_batch_size", None)
    if not bf16 and "precision" in found:
        found["precision"] = ("fp16", found["precision"][1])
    return found


def entries(data: Mapping[str, Any], file: str) -> dict[str, Entry]:
    """Settings by dotted name, older names as today's; `"offload_optimizer": {}` and its kin are tables without entries."""
    found = flattened(data, file)
    return {_OLD_NAMES.get(name, name): _today(_OLD_NAMES.get(name, ""), entry) for name, entry in found.items()}


def _today(name: str, entry: Entry) -> Entry:
    switch = _OLD_SWITCHES.get(name)
    return replace(entry, value=switch[entry.value]) if switch and isinstance(entry.value, bool) else entry


def _sorted(r: Reading) -> tuple[Any, ...]:
    r.sort_rest(options_of("deepspeed"))
    return r.settings()


def settings(r: Reading) -> tuple[dict[str, Any], Degree, dict[str, Any]]:
    """Plan's fields, the degree that takes the GPUs that are left, and what only the model decides."""
    stage = r.integer(f"{_ZERO}stage", least=0, plan_field="zero") or 0
    if stage > 3:
        r.fault(f"{_ZERO}stage", f"there is no stage {stage}", "0, 1, 2 or 3")
        stage = 0
    fields: dict[str, Any] = {"data_parallel": "deepspeed", "zero": stage}
    _batch(r, fields)
    _precision(r, fields)
    _optimizer(r, fields)
    _parallel(r, fields)
    by_model = _buckets(r, fields)
    offload = _offload(r, stage)
    if offload:
        fields["offload"] = offload
    overlaps = r.flag(f"{_ZERO}overlap_comm")
    if overlaps is None:
        default_overlap(r, stage)
    elif not overlaps and stage > 0:
        r.unmodelled(f"{_ZERO}overlap_comm", _BESIDE)
    zeropp, groups = _zeropp(r, stage), _mics(r, stage)
    fields |= ({"zeropp": zeropp} if zeropp else {}) | groups
    return fields, "dp_shard" if fields["zero"] and not groups else "dp_replicate", by_model


def default_overlap(r: Reading, stage: int) -> None:
    """Where nothing says so, stage 3 alone reduces gradients beside the backward (zero/config.py, overlap_comm_valid)."""
    if stage in (1, 2):
        r.default_unmodelled(f"{_ZERO}overlap_comm", "false", _BESIDE)


def places(r: Reading) -> dict[str, str]:
    """Where the fields that can contradict each other stand."""
    return {field: r.place(name) for name, field in _BATCH.items() if name in r}


def _stated(r: Reading, name: str) -> bool:
    return name in r and r.entries[name].value != AUTO


def _implied(fields: Mapping[str, Any], total: int | None) -> int | None:
    """Ranks of data parallelism, where all three numbers of the batch are stated."""
    parts = fields.get("micro_batch_size", 0) * fields.get("num_micro_batches", 0)
    return total // parts if total and parts and total % parts == 0 else None


def _batch(r: Reading, fields: dict[str, Any]) -> None:
    for name, field in tuple(_BATCH.items())[1:]:
        if name in r and not _stated(r, name):
            follows = all(_stated(r, other) for other in _BATCH if other != name)
            r.note(name, f"auto: {field} follows from the other two and the ranks" if follows else _auto(r, field))
            continue
        value = r.integer(name, plan_field=field)
        if value is not None:
            fields[field] = value
            r.note(name, f"{field} = {value}")
    if "train_batch_size" in r and not _stated(r, "train_batch_size"):
        r.note("train_batch_size", "auto: the product of the other two and the ranks")
    elif "gradient_accumulation_steps" not in r and "train_batch_size" not in r:
        fields["num_micro_batches"] = 1


def _auto(r: Reading, field: str) -> str:
    flag = f"--{field.replace('_', '-')}"
    return f"auto, given by {flag}" if field in r.given else f"auto: the training script's; {flag} gives it"


def _precision(r: Reading, fields: dict[str, Any]) -> None:
    names = {dtype: f"{dtype}.enabled" for dtype in ("bf16", "fp16")}
    dtypes = {dtype: bool(r.flag(name)) for dtype, name in names.items() if _stated(r, name)}
    open_ones = [name for name in names.values() if name in r and not _stated(r, name)]
    for name in open_ones:
        r.note(name, _auto(r, "precision"))
    if all(dtypes.get(dtype) for dtype in names):
        r.fault("fp16.enabled", "contradicts bf16.enabled", "enable one")
    if any(dtypes.values()) or not open_ones:
        fields["precision"] = next((dtype for dtype, on in dtypes.items() if on), "fp32")
    words = {"fp16": "fp16", "bfp16": "bf16", "bf16": "bf16", "fp32": "fp32"}
    reduce = r.choice("communication_data_type", tuple(words))
    if reduce is not None:
        fields["reduce_dtype"] = words[reduce]
    accumulated = r.choice("data_types.grad_accum_dtype", tuple(words))
    if (fields["zero"], fields.get("precision"), accumulated) == (0, "bf16", "fp32"):
        fields["zero"] = 1  # BF16_Optimizer (runtime/bf16_optimizer.py)
        r.note("data_types.grad_accum_dtype", "with bf16 DeepSpeed's own optimizer shards its states: zero = 1")
    elif accumulated is not None and words[accumulated] != fields.get("precision"):
        r.unmodelled("data_types.grad_accum_dtype", "gradients are kept in the dtype in which they travel here")


def _optimizer(r: Reading, fields: dict[str, Any]) -> None:
    name = r.text("optimizer.type")
    if name is None:
        return  # the script's own: Plan's default, adamw
    found = _OPTIMIZERS.get(name.lower())
    kind = next((kind for kind, word in ONE_BIT_NAMES.items() if word.lower() == name.lower()), None)
    if kind is not None:
        given = {field: r.number(f"optimizer.params.{word}") for field, word in ONE_BIT_SETTINGS[kind].items()}
        fields["one_bit"] = {"kind": kind} | {field: int(value) for field, value in given.items() if value is not None}
        found = "adamw"
    if found is None and "optimizer" not in r.given:
        remedy = "--optimizer, the nearest of adamw, sgd, adam8bit, lion, lamb"
        r.fault("optimizer.type", f"{name} is not modelled", remedy, (("--optimizer", "adamw"),))
    elif found is not None:
        decoupled = r.flag("optimizer.params.adam_w_mode") is not False or name.lower() == "adamw"
        fields["optimizer"] = "adam" if found == "adamw" and not decoupled else found
        if found == "sgd_momentum" and not r.number("optimizer.params.momentum"):
            fields["optimizer"] = "sgd"
    torch = r.flag("optimizer.params.torch_adam")
    fields["optimizer_impl"] = "foreach" if torch else "fused"


def _parallel(r: Reading, fields: dict[str, Any]) -> None:
    tp = r.integer("tensor_parallel.autotp_size", least=0, plan_field="tp")
    if tp is not None and tp > 1:
        fields |= {"tp": tp, "vocab_parallel": False}
    cp = r.integer("sequence_parallel_size", plan_field="cp")
    if cp is not None and cp > 1:
        fields |= {"cp": cp, "cp_exchange": "all_to_all"}


def _buckets(r: Reading, fields: dict[str, Any]) -> dict[str, Any]:
    """Sizes in elements. "auto" is what transformers' and accelerate's integrations fill in from the hidden size."""
    filled = {
        "reduce_bucket_size": ("reduce_bucket_numel", lambda model, _: model.d_model**2),
        "stage3_prefetch_bucket_size": ("prefetch_bucket_numel", lambda model, _: int(0.9 * model.d_model**2)),
        "stage3_param_persistence_threshold": ("param_persistence_numel", lambda model, _: 10 * model.d_model),
    }
    by_model: dict[str, Any] = {}
    for key, (field, make) in filled.items():
        name = f"{_ZERO}{key}"
        if name in r and not _stated(r, name):
            r.note(name, f"auto: {field} from the model's width")
            by_model[field] = make
            continue
        value = r.integer(name, least=0 if "threshold" in key else 1, plan_field=field)
        if value is not None:
            fields[field] = value
    return by_model


def _offload(r: Reading, stage: int) -> dict[str, Any]:
    """What is offloaded from HBM."""
    found: dict[str, Any] = {}
    for key, field in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        name = f"{_ZERO}{key}."
        device = r.choice(f"{name}device", tuple(_DEVICES)) or "none"
        if device != "none":
            found[field] = _DEVICES[device]
        pinned = r.flag(f"{name}pin_memory")
        if device != "none":
            found["pinned"] = found.get("pinned", True) and bool(pinned)
    if "parameters" in found and stage < 3:
        r.fault(f"{_ZERO}offload_param.device", f"stage {stage} keeps its parameters", "stage = 3, or none")
    if "optimizer" in found and stage == 0:
        r.fault(f"{_ZERO}offload_optimizer.device", "ZeRO stage 0 cannot offload anything", "stage = 1, 2 or 3")
    _offload_details(r, found)
    return found


def _offload_details(r: Reading, found: dict[str, Any]) -> None:
    group = r.integer(f"{_ZERO}sub_group_size", least=0)
    count = r.integer(f"{_ZERO}offload_optimizer.buffer_count", least=0)
    reads, writes = (r.flag(f"{_ZERO}offload_optimizer.pipeline_{way}") for way in ("read", "write"))
    ratio = r.number(f"{_ZERO}offload_optimizer.ratio")
    if not found:
        r.note(f"{_ZERO}sub_group_size", "no effect: nothing is offloaded")
        return
    if group:
        found["sub_group_numel"] = min(group, MAX_SIZE)  # more than any model has is one group
    elif group == 0:  # _create_fp16_sub_groups of stage3.py closes a group behind each parameter
        r.unmodelled(f"{_ZERO}sub_group_size", "a group for each parameter: groups of 1e9 elements are taken")
    if found.get("optimizer") == "nvme":
        found["overlap"] = bool(reads and writes)
        if reads != writes:
            r.unmodelled(f"{_ZERO}offload_optimizer.pipeline_read", "reading and writing are both beside, or neither")
        if count is not None:
            found["buffer_count"] = max(count, 4)
    if ratio is not None and ratio != 1:
        r.unmodelled(f"{_ZERO}offload_optimizer.ratio", "all of the optimizer is taken to be on the host")


def _zeropp(r: Reading, stage: int) -> dict[str, Any]:
    """ZeRO++, which acts in stage 3 alone."""
    found: dict[str, Any] = {}
    near = r.integer(f"{_ZERO}zero_hpz_partition_size", least=0)
    if near is not None and near > 1:
        found["secondary_ranks"] = near
    for key in ("quantized_weights", "quantized_gradients"):
        if r.flag(f"{_ZERO}zero_{key}"):
            found[key] = True
    if r.flag(f"{_ZERO}zero_quantized_nontrainable_weights"):
        r.note(f"{_ZERO}zero_quantized_nontrainable_weights", "no effect: every parameter is trained")
    if stage == 3:
        return found
    names = {"secondary_ranks": "zero_hpz_partition_size"}
    for name in found:
        r.unmodelled(f"{_ZERO}{names.get(name, f'zero_{name}')}", "ZeRO++ needs stage 3")
    return {}


def _mics(r: Reading, stage: int) -> dict[str, Any]:
    """MiCS: stage 3 inside groups of so many ranks, each of which has all parameters."""
    size = r.integer(f"{_ZERO}mics_shard_size", least=-1)
    two_stages = r.flag(f"{_ZERO}mics_hierarchical_params_gather")
    if size is None or size < 1:
        return {}
    if stage != 3:
        r.fault(f"{_ZERO}mics_shard_size", f"MiCS is of stage 3, not {stage}", "stage = 3, or mics_shard_size = -1")
        return {}
    return {"dp_shard": size} | ({"hierarchical_gather": True} if two_stages else {})
