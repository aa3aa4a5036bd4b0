"""Scripts around transformers' Trainer and trl's trainers: the arguments of their calls, by the Trainer's names.

transformers 4.46 to 5 (TrainingArguments, from_pretrained, BitsAndBytesConfig), peft 0.17 (LoraConfig), trl 0.8 to 1 (configs, trainers).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from simulator.formats.readers.plans.python_settings import python_settings

_PROGRAMS: Final = ("SFT", "DPO", "KTO", "GRPO", "ORPO")
_CONFIGS: Final = ("TrainingArguments", "Seq2SeqTrainingArguments", *(f"{name}Config" for name in _PROGRAMS))
CALLS: Final = re.compile(rf"\b(?:{'|'.join(_CONFIGS)})\(")
# Settings of other calls -> the names that arguments of trl's command line have for them
_LORA: Final = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
                "layers_to_transform": "lora_layers_to_transform", "rank_pattern": "lora_rank_pattern",
                "target_parameters": "lora_target_parameters"}  # fmt: skip
_LORA_AS_IT_IS: Final = ("lora_dropout", "use_dora")
_LOADED: Final = {"torch_dtype": "dtype", "dtype": "dtype"}
_LOADED_AS_IT_IS: Final = ("load_in_4bit", "load_in_8bit", "attn_implementation", "bnb_4bit_quant_type")
_TRAINER: Final = ("packing", "max_length", "max_seq_length", "beta")  # of trainers before trl 0.13
_QUANTISED: Final = {"bnb_4bit_use_double_quant": "use_bnb_nested_quant"}


def program_of(text: str) -> str:
    """The trainer of trl's that a script makes: `sft`, `dpo`, …; empty for transformers' own."""
    return next((name.lower() for name in _PROGRAMS if re.search(rf"\b{name}(?:Trainer|Config)\(", text)), "")


def trainer_settings(text: str, file: str) -> dict[str, Any]:
    """Arguments of a script's calls, which is never run. Raises PlanError where the file is no Python."""
    calls = python_settings(text, file)[1]
    loaded, trainer = dict(calls.get("from_pretrained", {})), _trainer(calls)
    found = {
        "model_name_or_path": loaded.get("pretrained_model_name_or_path")
        or loaded.get("")
        or trainer.get("model")
        or trainer.get("")
    }
    found |= _renamed(loaded, _LOADED, _LOADED_AS_IT_IS) | {name: trainer[name] for name in _TRAINER if name in trainer}
    found |= _renamed(calls.get("BitsAndBytesConfig", {}), _QUANTISED, _LOADED_AS_IT_IS)
    if "LoraConfig" in calls:
        found |= {"use_peft": True, "lora_r": 8, "lora_dropout": 0.0}  # peft's own
        found |= _renamed(calls["LoraConfig"], _LORA, _LORA_AS_IT_IS)
    if "prepare_model_for_kbit_training" in calls:
        found |= {"prepare_model_for_kbit_training": True, "gradient_checkpointing": True}
    for name in _CONFIGS:
        found |= {key: value for key, value in calls.get(name, {}).items() if key}
    if any(not isinstance(found.get(name, True), bool) for name in ("bf16", "fp16")):  # the GPU decides
        found = {name: value for name, value in found.items() if name not in ("bf16", "fp16")} | {"bf16": True}
    if "max_seq_length" in found:
        found["max_length"] = found.pop("max_seq_length")
    return {name: value for name, value in found.items() if value is not None}


def _trainer(calls: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The arguments of the trainer's call."""
    return next((calls[name] for name in (*(f"{one}Trainer" for one in _PROGRAMS), "Trainer") if name in calls), {})


def _renamed(given: Mapping[str, Any], names: Mapping[str, str], same: tuple[str, ...]) -> dict[str, Any]:
    known = {**names, **{name: name for name in same}}
    return {known[name]: value for name, value in given.items() if name in known}
