"""Fine-tuning runs: what their sources' notes mean, as columns of a plan and a stack.

What a table's row does not say is taken from the public code that ran it, named beside each rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from simulator.studies.backtest.rows import RunRow

Settings = dict[str, Any]


class Tuned(NamedTuple):
    """A row without notes, as a plain run of its framework is read, and what of it the notes say."""

    row: RunRow
    settings: Settings


_PURE: Final[Settings] = {"plan.master_dtype": "bf16", "plan.optimizer_dtype": "bf16"}
_HALF: Final[Settings] = {"plan.master_dtype": "fp16", "plan.optimizer_dtype": "fp32"}


def tuned(row: RunRow) -> Tuned | None:
    """What a fine-tuning row means; None for other rows."""
    found = next((read for pattern, read in _SOURCES if re.search(pattern, f"{row.source} {row.framework}")), None)
    return None if found is None else found(row)


def _noted(row: RunRow, pattern: str) -> str:
    found = re.search(pattern, row.notes)
    return found[1] if found else ""


def _sft_trainer(row: RunRow) -> Tuned:
    """github:foundation-model-stack/fms-acceleration@876e2ed: SFTTrainer, plugins accelerated-peft and fused-ops-and-kernels.

    scripts/benchmarks: weights in 16 bits (torch_dtype), lora_dropout 0.1 (scenarios*.yaml), transformers 4.48.1 or, for the
    tables of Liger and Granite, 4.45.2 (refs/requirements*.txt), whose logits go once they are cast. Adapters are fp32 (peft,
    autocast_adapter_dtype); products are cast by autocast where the Trainer's bf16 or fp16 is on. foak: norms, RoPE and
    cross-entropy in Triton, and autograd functions of LoRA's projections where weights are quantised. baseline-peft-bnb
    leaves preparation to TRL on one GPU, which casts what is not quantised to fp32 (framework_plugin_bnb.py).
    """
    config, adapts = _noted(row, r"framework_config=([^;]*)"), "PEFT LoRA" in row.notes
    half = row.precision == "fp16"
    settings: Settings = {**_PURE, "plan.optimizer_impl": "foreach", "plan.peft": "full"}
    base = "nf4_double" if "bnb" in config else "gptq" if "gptq" in config else ""
    if adapts:
        settings |= {
            "plan.peft": "lora",
            "plan.lora_rank": 16,
            "plan.lora_targets": ("attention",),
            "plan.lora_dropout": 0.1,
        }
        settings |= {"plan.master_dtype": "fp32", "plan.optimizer_dtype": "fp32"}
        if base:
            settings |= {"plan.peft": "qlora", "plan.base_weights": base}
        elif "mixed_precision no" in row.notes:
            settings["plan.adapter_dtype"] = "fp32"
        if config == "baseline-peft-bnb" and row.n_gpus == 1:
            settings["plan.upcast_frozen"] = True
    if half and not adapts:
        settings |= _HALF
    fused = "foak" in config
    older = any(word in row.id for word in ("_liger-", "_granite-"))
    settings["stack.loss"] = f"fp32_{'cast' if older else 'shifted'}{'_fused' if fused else ''}"
    if "liger" in config:
        settings["stack.loss"] = "fused_linear"
    if fused:
        settings |= {"stack.norm": "fused", "stack.norm_dtype": "compute", "stack.rope": "fused"}
        if base:
            settings["stack.adapters"] = "fused"
    return Tuned(replace(row, notes="", model_name=row.model_name.replace("-GPTQ", "")), settings)


_SOURCES: Final[tuple[tuple[str, Callable[[RunRow], Tuned | None]], ...]] = (("fms-acceleration", _sft_trainer),)
