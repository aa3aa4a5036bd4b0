"""torchtune's recipe configuration (0.5 to 0.7: recipes/*.py, training/_distributed.py, modules/loss).

A file does not state its recipe, which its comments and paths name: on a single device nothing is sharded, else FSDP2
shards over all GPUs. Weights, gradients and states are in `dtype`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any, Final

from simulator.formats.readers.plans import trainer
from simulator.formats.readers.plans.draft import Degree, Draft
from simulator.formats.readers.plans.options import options_of, table_of
from simulator.formats.readers.plans.preferences import pairs_note
from simulator.formats.readers.plans.reading import Entry, Reading, Stated, flattened
from simulator.spec.model.files import preset_names

_DTYPES: Final = {"bf16": "bf16", "fp32": "fp32"}
_REFERENCE: Final = re.compile(r"\$\{([\w.]+)\}")
_BUILDER: Final = re.compile(r"^(lora_|qlora_)?(.*?)(_instruct|_base)?$")
_CHUNKED: Final = {"LinearCrossEntropyLoss": "linear_chunks", "CEWithChunkedOutputLoss": "output_chunks"}
_COMPILED: Final = {"blocks": "compiled", "norm": "fused", "norm_dtype": "compute", "rope": "fused"}
_OTHER_RECIPES: Final = {
    "quantizer": "quantisation-aware training", "teacher_model": "distillation", "reward_and_value_model": "rewards",
    "policy_model": "rewards", "ref_policy_checkpointer": "a reference model", "base_model_path": "a reference model",
}  # fmt: skip


def read_torchtune(stated: Stated) -> Draft:
    """The plan of a configuration that was read as plain data. Its `program` is the recipe's name, as `tune run` takes it."""
    file, recipe = stated.file, stated.program
    r = Reading(_entries(stated), file, stated.given, unset=stated.unset, auto=stated.auto, cures=stated.cures)
    fields: dict[str, Any] = {"optimizer_impl": "foreach"}
    changes: dict[str, tuple[object, str]] = {}
    assumed: dict[str, tuple[object, str]] = {}
    alone = "single_device" in recipe
    leftover = _sharding(r, fields, alone=alone)
    _batch(r, fields, assumed)
    paired = "dpo" in recipe or (r.text("loss._component_") or "").endswith("DPOLoss")
    fields["micro_batch_size"] *= 2 if paired else 1  # recipes/lora_dpo_single_device.py: concatenated_forward
    model, unknown = _model(r, fields)
    if "tp" in fields and (model or "").startswith("llama4"):
        fields["etp"] = fields["tp"]  # models/llama4/_parallelism.py: ExpertTensorParallel
    _optimizer(r, fields)
    _recompute(r, fields)
    _loss(r, changes)
    _compile(r, changes)
    for entry in flattened(stated.data, file).values():
        other = _REFERENCE.fullmatch(entry.value) if isinstance(entry.value, str) else None
        if other is not None:
            r.note(other[1], f"the value of {entry.name}")
    if "batch_size" not in r and "optimizer._component_" not in r:
        r.fault("batch_size", "and optimizer are not stated: no recipe that trains", "a training recipe's file")
    for name, purpose in _OTHER_RECIPES.items():
        if any(entry.partition(".")[0] == name and r.entries[entry].value is not None for entry in r.entries):
            r.fault(name, f"{purpose}: not modelled", "a recipe that fine-tunes: lora_finetune_distributed and its kin")
    r.sort_rest(options_of("torchtune"), typos=True)
    return Draft(
        format="torchtune",
        software="torchtune 0.7" + (f", {recipe}" if recipe else ""),
        file=file,
        fields=fields,
        places={"model": r.place("model._component_"), "micro_batch_size": r.place("batch_size")},
        leftover=leftover,
        model=model,
        model_unknown=unknown,
        num_devices=1 if alone else None,
        assumed=assumed,
        stack="torchtune-2024",
        stack_why="the recipe's own; a version is not stated",
        stack_changes=changes,
        settings=r.settings(),
        faults=tuple(r.faults),
        reference_forwards=int(paired),
        notes=(pairs_note(file, 1),) if paired else (),
    )


def _entries(stated: Stated) -> dict[str, Entry]:
    """Settings by dotted name; a value that refers to another one is that one's."""
    found = flattened(stated.data, stated.file, places=stated.places)
    for name, entry in found.items():
        other = _REFERENCE.fullmatch(entry.value) if isinstance(entry.value, str) else None
        if other is not None and other[1] in found:
            found[name] = replace(entry, value=found[other[1]].value)
    return found


def _sharding(r: Reading, fields: dict[str, Any], *, alone: bool) -> Degree | None:
    dtype = r.choice("dtype", tuple(_DTYPES)) or "bf16"
    fields["precision"] = dtype
    if dtype != "fp32":
        fields |= {"master_dtype": dtype, "optimizer_dtype": dtype}
    if r.flag("enable_fp8_training"):
        fields["precision"] = "fp8"
        recipe = r.choice("fp8_recipe_name", ("tensorwise", "rowwise", "rowwise_with_gw_hp"))
        fields["fp8_recipe"] = "tensorwise" if recipe == "tensorwise" else "rowwise"
    if alone:
        fields |= {"data_parallel": "ddp", "zero": 0}
        return "dp_replicate"
    fields |= {"data_parallel": "fsdp2", "zero": 3, **({"reduce_dtype": dtype} if dtype != "fp32" else {})}
    if r.flag("fsdp_reshard_after_forward") is False:
        fields["reshard_after_forward"] = False
    if r.flag("fsdp_cpu_offload"):
        fields["offload"] = {"optimizer": "host", "parameters": "host"}
    dims = {"tp": "tensor_parallel", "cp": "context_parallel", "dp_replicate": "data_parallel_replicate"}
    fields |= r.integers({name: f"{axis}_dim" for name, axis in dims.items()}, above=1)
    shard = r.integer("data_parallel_shard_dim", least=-1, plan_field="dp_shard")
    if shard is not None and shard > 0:
        fields |= {"dp_shard": shard, "dp_replicate": fields.get("dp_replicate", 1)}
        return None
    return "dp_shard"


def _batch(r: Reading, fields: dict[str, Any], assumed: dict[str, tuple[object, str]]) -> None:
    fields["micro_batch_size"] = r.integer("batch_size", plan_field="micro_batch_size") or 1
    fields["num_micro_batches"] = r.integer("gradient_accumulation_steps", plan_field="num_micro_batches") or 1
    seq_len = r.integer("tokenizer.max_seq_len", plan_field="seq_len")
    if seq_len is None:
        assumed["seq_len"] = (2048, "tokenizer.max_seq_len is not set: samples are as long as they are")
    else:
        fields["seq_len"] = seq_len
    trainer.packs(r, "dataset.packed", on=bool(r.flag("dataset.packed")))


def _model(r: Reading, fields: dict[str, Any]) -> tuple[str | None, str]:
    """The builder's preset; a builder of LoRA says what is trained."""
    name = r.text("model._component_")
    if name is None:
        return None, ""
    found = _BUILDER.match(name.rpartition(".")[2])
    prefix, plain = (found[1] or "", found[2]) if found else ("", "")
    if prefix or "model.lora_rank" in r:
        _adapters(r, fields, four_bits=prefix == "qlora_" or bool(r.flag("model.quantize_base")))
    preset = _presets().get(re.sub(r"[^a-z0-9]", "", plain))
    r.note("model._component_", f"model {preset}" if preset else f"{plain} is not a preset")
    return preset, "" if preset else f"{plain} is not a preset; --model NAME, or its config.json"


@cache
def _presets() -> dict[str, str]:
    """Presets by their letters and digits alone, as `llama318b`."""
    also = {
        "phi3mini": "phi-3-mini", "phi414b": "phi-4", "llama3370b": "llama3.1-70b", "smollm217b": "smollm2-1.7b",
        "llama4scout17b16e": "llama4-scout", "llama4maverick17b128e": "llama4-maverick",
    }  # fmt: skip
    return {re.sub(r"[^a-z0-9]", "", name): name for name in preset_names()} | {
        name: preset for name, preset in also.items() if preset in preset_names()
    }


def _adapters(r: Reading, fields: dict[str, Any], *, four_bits: bool) -> None:
    """The builders' arguments (models/*/_model_builders.py)."""
    modules = r.raw("model.lora_attn_modules")
    words = tuple(map(str, modules)) if isinstance(modules, list) else ()
    if not words:
        r.fault("model.lora_attn_modules", "is not stated", "['q_proj', 'v_proj', 'output_proj']")
    words += ("mlp",) if r.flag("model.apply_lora_to_mlp") else ()
    words += ("lm_head",) if r.flag("model.apply_lora_to_output") else ()
    fields |= {"peft": "dora" if r.flag("model.use_dora") else "lora", "lora_targets": words or ("q", "v")}
    fields["lora_rank"] = r.integer("model.lora_rank", plan_field="lora_rank") or 8
    fields |= trainer.dropout(r, "model.lora_dropout")
    if four_bits:
        fields["base_weights"] = "nf4_double"


def _optimizer(r: Reading, fields: dict[str, Any]) -> None:
    name = r.text("optimizer._component_")
    known = table_of("torchtune")["optimizers"]
    kind = known.get(name or "torch.optim.AdamW")
    if kind is None and "optimizer" not in r.given:
        remedy = f"one of {', '.join(known)}; or --optimizer"
        r.fault("optimizer._component_", f"{name} is not modelled", remedy, (("--optimizer", "adamw"),))
    fields["optimizer"] = kind or "adamw"
    if r.flag("optimizer.fused") or (name or "").startswith(("bitsandbytes", "torchao")):
        fields["optimizer_impl"] = "fused"
    momentum = r.number("optimizer.momentum")
    if kind == "sgd" and momentum:
        fields["optimizer"] = "sgd_momentum"
    if r.flag("optimizer_in_bwd"):
        fields["optimizer_in_backward"] = True
        if fields["num_micro_batches"] > 1:
            r.fault("optimizer_in_bwd", "accumulates no gradients", "gradient_accumulation_steps: 1")


def _recompute(r: Reading, fields: dict[str, Any]) -> None:
    mode, every = r.choice("ac_mode", ("full", "selective")), r.raw("ac_option")
    again = bool(r.flag("enable_activation_checkpointing", plan_field="recompute"))
    fields["recompute"] = "full" if again or mode == "full" else "none"
    if mode == "selective":
        number = r.integer("ac_option") if every != "op" else None
        fields |= {"recompute": "selective"} if number is None else {"recompute": "every_k", "recompute_every": number}
    if r.flag("enable_activation_offloading"):
        fields["offload"] = {**fields.get("offload", {}), "activations": "host"}
        if not again:
            r.fault("enable_activation_offloading", "needs checkpointing", "enable_activation_checkpointing: True")


def _loss(r: Reading, changes: dict[str, tuple[object, str]]) -> None:
    name = (r.text("loss._component_") or "LinearCrossEntropyLoss").rpartition(".")[2]
    changes["loss"] = (_CHUNKED.get(name, "fp32_cast"), r.place("loss._component_"))
    if name not in (*_CHUNKED, "CrossEntropyLoss", "DPOLoss"):
        r.unmodelled("loss._component_", "cross entropy of whole logits is taken")


def _compile(r: Reading, changes: dict[str, tuple[object, str]]) -> None:
    if any(name == "compile" or name.startswith("compile.") for name in r.entries):
        parts = [bool(r.flag(name)) for name in r.entries if name in ("compile", "compile.model")]
        if any(parts):
            place = r.place("compile") if "compile" in r else r.place("compile.model")
            changes |= {key: (value, place) for key, value in _COMPILED.items()}
