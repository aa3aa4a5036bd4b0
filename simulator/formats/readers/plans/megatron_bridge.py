"""Megatron-Bridge's ConfigContainer (0.5): a recipe of its package, an override's or a saved run's YAML, options of its runner.

training/config.py, training/mixed_precision.py, peft/{lora,dora}.py, scripts/training/run_recipe.py. Settings that Megatron-Core has are
read as Megatron-LM's arguments. Mixed precision sets gradients' dtype over ddp's; one of ddp and the optimizer that asks for
distributed states decides for both; the dataset's length is the model's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from simulator.base.errors import Fault, PlanError
from simulator.base.schema import merged, nearest
from simulator.formats.readers.plans import trainer
from simulator.formats.readers.plans.draft import Draft
from simulator.formats.readers.plans.megatron import read_arguments, read_stack
from simulator.formats.readers.plans.megatron_hybrid import with_layers_counted
from simulator.formats.readers.plans.options import megatron_arguments, table_of
from simulator.formats.readers.plans.reading import Entry, Reading, Stated, flattened
from simulator.spec.model import Model
from simulator.spec.model.families import preset_of

_TABLE: Final = table_of("megatron-bridge")
_SECTIONS: Final = ("model.", "train.", "ddp.", "optimizer.", "comm_overlap.")
_PRECISION: Final = re.compile(r"(?:[a-z0-9]+_(?:h|3_super)_|nanov2_)?(bf16|fp16)_(?:(with_\w+?)_)?mixed")
CONTAINED: Final[Mapping[str, str]] = _TABLE["contained"]  # options of run_recipe.py
_GPUS: Final = re.compile(r"_(\d+)gpu_")
_SHAPE: Final = ("num_layers", "hidden_size", "num_attention_heads")
_LORA: Final = {"LoRA": "lora", "DoRA": "dora", "CanonicalLoRA": "lora"}


def recipe_settings(name: str) -> tuple[dict[str, Any] | None, str]:
    """(a recipe's settings, its full name); None: there is none of that name for a model that is a preset."""
    table = table_of("megatron-bridge-recipes")
    full = table["aliases"].get(name, name)
    full = full if full in table["recipes"] else table["aliases"].get(f"{name}_config", f"{name}_config")
    found = table["recipes"].get(full)
    return (None if found is None else dict(found)), full


def recipe_over(name: str, data: Mapping[str, Any], place: str) -> tuple[str, dict[str, Any], list[Fault]]:
    """(a recipe's full name, its settings with `data` over them, faults); "": there is none, and data states a model's shape or not."""
    shaped = isinstance(data.get("model"), Mapping) and all(key in data["model"] for key in _SHAPE)
    if not name and shaped:
        return "", dict(data), []
    found, full = recipe_settings(name) if name else (None, "")
    if found is not None:
        return full, found, []
    names = list(table_of("megatron-bridge-recipes")["aliases"])
    near = nearest(name, names) or f"for example {names[0]}"
    problem = (
        f"{name[:60]} is no recipe of a model that is a preset" if name else "does not say over which recipe it stands"
    )
    return (
        "",
        dict(data),
        [
            Fault(
                place=place,
                problem=problem,
                remedy=f"{near}; or --define recipe=NAME",
                flags=(("--define", "recipe=llama31_8b_peft_config"),),
            )
        ],
    )


def stated_over(stated: Stated, recipe: str) -> Stated:
    """A YAML file's settings over its recipe's, whose name the caller gives; a saved run has them all."""
    full, base, faults = recipe_over(recipe, stated.data, stated.file)
    PlanError.raise_for(faults)
    places = {name: (entry.name, entry.place) for name, entry in flattened(stated.data, stated.file).items()}
    return replace(stated, data=merged(base, stated.data), program=full, places=places)


def read_megatron_bridge(stated: Stated) -> Draft:
    """The plan of settings that were read as plain data, a recipe's under them. Their `program` is the recipe's name."""
    found, faults_of = _entries(stated)
    spelled = {_argument(name): name for name in stated.unset}
    unset = {name: stated.unset[own] for name, own in spelled.items()}
    cures = {name: stated.cures[own] for name, own in spelled.items() if own in stated.cures}
    r = Reading(found, stated.file, stated.given, unset=unset, auto=stated.auto, cures=cures)
    for name, problem, remedy in faults_of:
        r.fault(name, problem, remedy)
    fields: dict[str, Any] = {"data_parallel": "megatron", "optimizer_impl": "fused"}
    stack: dict[str, tuple[object, str]] = {}
    path = r.text("model.hf_path")
    preset = preset_of(path) if path else None
    shape = all(f"--{key.replace('_', '-')}" in r for key in _SHAPE)
    made, leftover = read_arguments(r, fields, stack, named=not shape)
    read_stack(r, stack)
    _adapters(r, fields)
    total = r.integer("--global-batch-size")
    trainer.packs(r, "dataset.seq_length", on=True)
    gpus = _GPUS.search(stated.program)
    options = megatron_arguments().among(found)
    r.sort_rest(replace(options, no_effect=options.no_effect | set(_TABLE["no_effect"])), typos=True)
    return Draft(
        format="megatron-bridge",
        software="Megatron-Bridge 0.5" + (f", {stated.program}" if stated.program else ""),
        file=stated.file,
        fields=fields,
        places={"global_batch_size": r.place("--global-batch-size"), "seq_len": r.place("--seq-length")},
        leftover=leftover,
        model=made or preset,
        model_unknown=f"{path} is not a preset; --model NAME, or its config.json" if path and preset is None else "",
        num_devices=int(gpus[1]) if gpus else None,
        global_batch_size=total,
        stack="megatron-bridge-package-2025",
        stack_why="recipes of its package",
        stack_changes=stack,
        settings=r.settings(),
        faults=tuple(r.faults),
    )


def _argument(name: str) -> str:
    """Megatron's argument for a setting; its own name where there is none, or the setting has no say in a step."""
    section = next((one for one in _SECTIONS if name.startswith(one)), "")
    argument = _TABLE["renamed"].get(name) or (f"--{name.removeprefix(section).replace('_', '-')}" if section else name)
    arguments = megatron_arguments()
    known = argument in arguments.known | arguments.flags or argument in arguments.off
    return argument if known or not (name.startswith(tuple(_TABLE["no_effect"])) or name == "model.hf_path") else name


def _entries(stated: Stated) -> tuple[dict[str, Entry], list[tuple[str, str, str]]]:
    """Megatron's arguments by their names; what has none keeps its own. And faults: (name, problem, remedy)."""
    found: dict[str, Entry] = {}
    faults: list[tuple[str, str, str]] = []
    for name, entry in flattened(stated.data, stated.file, places=stated.places).items():
        key, inverted = name.removeprefix("model."), table_of("megatron")["yaml"]["inverted"]
        own, dtype = name.removesuffix("._target_"), _dtype(entry.value)  # a saved run has a table of it
        if name.startswith("model.") and key in inverted:  # what is on unless it is switched off
            found[f"--{inverted[key]}"] = replace(entry, value=True if entry.value is False else None)
        elif dtype and _argument(own) in megatron_arguments().known:
            found[_argument(own)] = replace(entry, value=dtype)
        elif name.startswith("peft.") or not name.endswith(("._target_", "._call_")):
            found[_argument(name)] = entry
    _synced(found, stated)
    _precision(found, stated, faults)
    return with_layers_counted(found), faults


def _dtype(value: object) -> str | None:
    """`torch.bfloat16` in Megatron's words; None: it is none."""
    word = value if isinstance(value, str) and value.startswith("torch.") else ""
    return {"uint8": "fp8", **trainer.DTYPES}.get(word.removeprefix("torch."))


def _synced(found: dict[str, Entry], stated: Stated) -> None:
    """What the container settles between its tables (config.py), and what Megatron's defaults are not."""

    def put(name: str, value: object, place: str) -> None:
        found.setdefault(name, Entry(name=name, value=value, place=place))

    own, ddp = (
        table.get("use_distributed_optimizer") if isinstance(table := stated.data.get(key), Mapping) else None
        for key in ("optimizer", "ddp")
    )
    own = bool(stated.program) if own is None else own  # of recipes: distributed_fused_adam_with_cosine_annealing
    if True in (own, ddp):
        name = "--use-distributed-optimizer"
        found[name] = Entry(name=name, value=True, place=f"{stated.file}: optimizer, ddp")
    model, dataset = (
        table if isinstance(table := stated.data.get(key), Mapping) else {} for key in ("model", "dataset")
    )
    if model.get("seq_length") and not dataset.get("seq_length"):
        put("--seq-length", model["seq_length"], f"{stated.file}: model.seq_length")
    for dropout in ("--attention-dropout", "--hidden-dropout"):
        put(dropout, 0.0, f"{stated.file} (default)")
    for key, argument, applies in (
        ("share_embeddings_and_output_weights", "--untie-embeddings-and-output-weights", model.get("share_embeddings_and_output_weights") is False),
        ("num_query_groups", "--group-query-attention", bool(model.get("num_query_groups"))),
    ):  # fmt: skip
        if applies:
            put(argument, value=True, place=f"{stated.file}: model.{key}")
    preset = preset_of(str(model["hf_path"])) if model.get("hf_path") else None
    if preset is not None:
        shape = Model.load(preset)
        put("--num-layers", shape.num_layers, f"{stated.file}: model {preset}")
        if shape.experts is not None:
            put("--num-experts", shape.experts.num_experts, f"{stated.file}: model {preset}")


def _precision(found: dict[str, Entry], stated: Stated, faults: list[tuple[str, str, str]]) -> None:
    """Mixed precision by its recipe's name, or as the table that it makes."""
    entry = found.get("mixed_precision")
    place = entry.place if entry is not None else f"{stated.file} (default)"
    flags: dict[str, object] = {}
    table = {name.partition(".")[2]: one for name, one in found.items() if name.startswith("mixed_precision.")}
    if table:
        values = {name: one.value for name, one in table.items()}
        flags = {
            "--bf16": values.get("bf16"),
            "--fp16": values.get("fp16"),
            "--fp8-format": values.get("fp8"),
            "--fp4-format": values.get("fp4"),
        }
        flags |= {
            "--fp8-recipe": values.get("fp8_recipe") if values.get("fp8") else None,
            "--fp8-param-gather": values.get("fp8_param_gather"),
        }
        wide = values.get("grad_reduce_in_fp32", True)
        for name, one in table.items():
            found[f"mixed_precision.{name}"] = Entry(name=one.name, value=None, place=one.place)
    else:
        word = str(entry.value if entry is not None else "bf16_mixed").replace("-", "_")
        made = _PRECISION.fullmatch(word)
        if made is None or (made[2] or "") not in ("", *_TABLE["narrow"]):
            faults.append(
                (
                    "mixed_precision",
                    f"{word[:60]} is not read",
                    "bf16_mixed, bf16_with_fp8_current_scaling_mixed, bf16_with_mxfp8_mixed, bf16_with_nvfp4_mixed, …",
                )
            )
            made = _PRECISION.fullmatch("bf16_mixed")
        dtype, kind = (made[1], made[2] or "") if made else ("bf16", "")
        flags = {f"--{dtype}": True, **_TABLE["narrow"].get(kind, {})}
        wide = dtype == "bf16"
        if entry is not None:
            found["mixed_precision"] = Entry(name=entry.name, value=None, place=entry.place)
    flags["--grad-reduce-in-bf16"] = None if wide or flags.get("--fp16") else True
    for name, value in flags.items():
        if value not in (None, False):
            found[name] = Entry(name=name, value=value, place=place)
    if "--grad-reduce-in-fp32" in found:  # ddp's, which mixed precision sets
        found["--grad-reduce-in-fp32"] = replace(found["--grad-reduce-in-fp32"], value=None)


def _adapters(r: Reading, fields: dict[str, Any]) -> None:
    """Pairs beside Megatron's joint layers (peft/lora.py: rank 32, all four of a layer)."""
    if not any(name.startswith("peft.") and r.entries[name].value is not None for name in r.entries):
        return
    target = (r.text("peft._target_") or "LoRA").rpartition(".")[2]
    method = _LORA.get(target)
    if method is None:
        r.fault("peft._target_", f"{target} is not modelled", "megatron.bridge.peft.lora.LoRA")
    elif target == "CanonicalLoRA":
        r.unmodelled("peft._target_", "pairs of Q, K and V of their own: taken beside the joint layer")
    fields |= {"peft": method or "lora", "lora_rank": r.integer("peft.dim", plan_field="lora_rank") or 32}
    fields |= trainer.dropout(r, "peft.dropout")
    words = r.raw("peft.target_modules")
    listed = [words] if isinstance(words, str) else words if isinstance(words, list) else []
    targets = tuple(filter(None, (_target(r, str(word)) for word in listed)))
    fields["lora_targets"] = targets or ("qkv", "out", "mlp")
    if r.raw("peft.exclude_modules"):
        r.fault("peft.exclude_modules", "adapters beside all but some modules are not read", "peft.target_modules")


_TARGETS: Final = {"linear_qkv": "qkv", "linear_proj": "out", "linear_fc1": "gate_up", "linear_fc2": "down", "linear_q": "q", "linear_k": "k", "linear_v": "v", "linear_fc1_up": "up", "linear_fc1_gate": "gate"}  # fmt: skip


def _target(r: Reading, word: str) -> str:
    """`*.layers.0.*.linear_qkv` is `layers.0.qkv`."""
    layer, name = re.search(r"\.layers\.(\d+)\.", word), word.rpartition(".")[2]
    if name not in _TARGETS or (layer is None and "*" in word):
        r.fault(
            "peft.target_modules", f"{word[:60]} is not read", f"of {', '.join(_TARGETS)}, or *.layers.N.*.linear_qkv"
        )
        return ""
    return f"layers.{layer[1]}.{_TARGETS[name]}" if layer else _TARGETS[name]
