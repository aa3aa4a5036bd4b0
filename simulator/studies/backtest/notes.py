"""Settings stated only in a row's name and notes: adapters, offload, 16-bit weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from simulator.base.errors import ArgumentError
from simulator.spec.plan.peft import PeftPlan
from simulator.spec.software.described import torch_in
from simulator.studies.backtest.rows import RunRow, YesNo

Settings = Mapping[str, Any]
# Clauses that speak of the table or of what it leaves out, not of this run
_REMARK: Final = re.compile(r"\brows?\b|\bnot in (?:the )?table\b|\bnot (?:re)?stated\b", re.IGNORECASE)
# "without optimizer offload", "activation_offload: false"
_DENIED: Final = re.compile(r"\b(?:no|not|without)[- ](?:[\w-]+ )?$", re.IGNORECASE)
_SET_OFF: Final = re.compile(r"\w*\s*[=:]\s*(?:0|false|none|no|off|n|disabled|unknown)\b", re.IGNORECASE)
# Training by its name, the first that is named; DeepSeek's ranks (q_lora_rank, kv_lora) are none
_METHOD: Final = re.compile(
    r"(?P<full>\bfull[- _]?(?:parameters?|fine-?tun\w*|sft)\b)|(?<![a-z_])(?P<quantised>q-?)?lora\b(?![-_]rank)",
    re.IGNORECASE,
)
_RANK: Final = re.compile(r"\b(?:lora[-_ ]?)?(?:rank|r) ?[=:]? ?([1-9]\d{0,3})\b", re.IGNORECASE)
_TARGETS: Final = re.compile(r"\btargets?(?: |=|: ?)(all[- ]linear|[a-z]\w*(?: ?[,/+] ?[a-z]\w*)+)", re.IGNORECASE)
_GPTQ: Final = re.compile(r"\bgptq|\bint4\b", re.IGNORECASE)
_NF4: Final = re.compile(r"\bnf4|\bload_in_4bit\b", re.IGNORECASE)
_DOUBLE: Final = re.compile(r"\bnf4[-_ ]?(?:dq|double)|double[-_ ]quant", re.IGNORECASE)
_ENDS_TRAINED: Final = re.compile(r"\bembeddings? and (?:output|head|lm_head)\b[^;,]*\btrained\b", re.IGNORECASE)
_ALL_NARROW: Final = re.compile(
    r"\bpure (?:16-bit|bf16|fp16)\b|\b(?:16-bit|bf16|fp16) everything\b|\bbf16-true\b", re.IGNORECASE
)
# Modules by names that a plan does not read, as they are one layer's in one model and another's in the next: GPT-2's and Qwen's
# c_proj is both output projections; w1 and w2 are inputs of Qwen's MLP, and of Llama's own code w1 and w3
_MODULES: Final = {"o": "out", "c_proj": "out down", "w1": "gate", "w2": "up", "w3": "down"}
# peft's own defaults (LoraConfig, and TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING of Llama); and the QLoRA paper's way (arXiv
# 2305.14314: all linear layers, dropout 0.05), which launchers of fine-tuning took over (LLaMA-Factory: lora_target = all, xtuner,
# Megatron-Bridge) and which stands first
_EVERYWHERE: Final[Settings] = {"plan.lora_rank": 64, "plan.lora_targets": ("all",), "plan.lora_dropout": 0.05}
_ADAPTED: Final = (_EVERYWHERE, {"plan.lora_rank": 8, "plan.lora_targets": ("q", "v")})
# Compilers, tiled attention and Transformer Engine's layers by their usual names
_COMPILED: Final = re.compile(r"(?:\btorch[._ ])?\bcompiled?\b(?![- ](?:time|caches?)\b)|\binductor\b", re.IGNORECASE)
_FLASH: Final = re.compile(r"\bflash[-_ ]?att(?:ention|n)|\bFA-?[23]\b", re.IGNORECASE)
# Data parallelism that stands in a framework's name: "Lightning, FSDP strategy", "DeepSpeed ZeRO-3", "ZeRO++" (which is of stage 3)
_SHARDED: Final = re.compile(
    r"(?<![a-z0-9])(?:(hsdp|ddp|fsdp)[12]?|zero(?:[- ]?stage)?[- ]?(?:([123])|\+\+))(?![a-z0-9])", re.IGNORECASE
)
_FUSED: Final = re.compile(r"\btransformer[-_ ]?engine\b|\bTE ?v?\d", re.IGNORECASE)
# (what is written, what it means): FSDP's CPUOffload keeps parameters, gradients and moments in host memory; torch's asynchronous
# tensor parallelism sends through symmetric memory; dropping tokens caps experts at their mean; configurations of models say whether
# the LM head is the embedding
_TECHNIQUES: Final[tuple[tuple[re.Pattern[str], Settings], ...]] = (
    (re.compile(r"\bact(?:ivations?)?[- _]offload", re.IGNORECASE), {"plan.offload.activations": "host"}),
    (re.compile(r"\bcpu[- _]?offload\w* ?= ?(?:params?|parameters?|true|yes|y)\b", re.IGNORECASE),
     {"plan.offload.parameters": "host", "plan.offload.optimizer": "host"}),
    (re.compile(r"\boptim\w*(?: states?)?[- _]offload", re.IGNORECASE), {"plan.offload.optimizer": "host"}),
    (re.compile(r"\basync(?:hronous)?[- ]?tp\b", re.IGNORECASE), {"stack.tp_overlap": "symmetric_memory"}),
    (re.compile(r"\bulysses\b", re.IGNORECASE), {"plan.cp_exchange": "all_to_all"}),
    (re.compile(r"\bno comm(?:unication)? overlap\b", re.IGNORECASE), {"stack.overlap": False, "stack.tp_overlap": "none"}),
    (re.compile(r"\btied?[-_ ](?:word[-_ ])?embeddings?\b", re.IGNORECASE), {"model.tied_embeddings": True}),
    (re.compile(r"\btie_word_embeddings ?[=:] ?false\b|\buntied?[-_ ](?:word[-_ ])?embeddings?\b", re.IGNORECASE),
     {"model.tied_embeddings": False}),
    (re.compile(r"\btoken[- ]?drop(?:ping)?\b", re.IGNORECASE), {"plan.expert_capacity_factor": 1.0}),
)  # fmt: skip


def worded(row: RunRow) -> RunRow:
    """The row with `compile` and `flash_attn` as its framework's name and notes say them, and with the sharding that the name says.

    PyTorch has a tiled attention kernel of its own since 2.0.
    """
    text, release = f"{row.framework}; {note_text(row)}", torch_in(row.framework)
    flash = _state_of(_FLASH, text) or ("n" if release and release < (2,) else None)
    word, compiled = row.zero_or_fsdp or _sharded(row.framework), row.compile or _state_of(_COMPILED, text)
    return replace(row, compile=compiled, flash_attn=row.flash_attn or flash, zero_or_fsdp=word)


def _sharded(framework: str) -> str:
    """The one kind of data parallelism that the text names, as a table's word; else nothing."""
    named = {found[1].casefold() if found[1] else f"zero{found[2] or 3}" for found in _SHARDED.finditer(framework)}
    return {"fsdp": "fsdp_full"}.get(word := "".join(named), word) if len(named) == 1 else ""


def shows_fused(row: RunRow) -> bool:
    """The framework's name or the notes name layers of hand-written kernels."""
    return states(_FUSED, f"{row.framework}; {note_text(row)}") is not None


def _state_of(pattern: re.Pattern[str], text: str) -> YesNo | None:
    if states(pattern, text):
        return "y"
    return "n" if pattern.search(text) else None


def note_text(row: RunRow) -> str:
    """The notes without clauses that are about the table."""
    return ";".join(clause for clause in row.notes.split(";") if not _REMARK.search(clause))


def states(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The first match of the pattern that is not negated."""
    places = pattern.finditer(text)
    return next((m for m in places if not (_DENIED.search(text[: m.start()]) or _SET_OFF.match(text, m.end()))), None)


def trained(row: RunRow) -> tuple[Settings, ...]:
    """Possible readings of what is trained: adapters of a stated or usual shape; one empty reading if the row names none."""
    text = f"{row.model_name} {row.framework} {note_text(row)}"
    found = None if "peft" in row.of("plan") else states(_METHOD, text)
    if found is None:
        return (_narrow(row, text),)
    if found["full"]:
        return ({"plan.peft": "full", **_narrow(row, text)},)
    kept = (
        {"plan.master_dtype": row.precision} if row.precision in ("bf16", "fp16") else {}
    )  # below adapters no fp32 copy
    every = {**_method(text, quantised=bool(found["quantised"])), **kept}
    every |= {"plan.train_modules": ("embedding", "lm_head")} if states(_ENDS_TRAINED, text) else {}
    rank = {"plan.lora_rank": int(stated[1])} if (stated := _RANK.search(text)) else {}
    targets = _targets(text)
    usual = [{**_EVERYWHERE, "plan.lora_targets": targets}] if targets else _ADAPTED
    return tuple({**each, **every, **rank} for each in usual)


def techniques(row: RunRow) -> Settings:
    """What the framework's name and notes say was done, of which no column speaks: what leaves the device, what overlaps, what is tied."""
    stated, text, found = dict(row.settings), f"{row.framework}; {note_text(row)}", dict[str, Any]()
    for pattern, settings in _TECHNIQUES:
        if settings.keys() & stated.keys() or ("plan.expert_capacity_factor" in settings and (row.n_experts or 1) == 1):
            continue
        if states(pattern, text):
            found |= settings
    return found


def _method(text: str, *, quantised: bool) -> Settings:
    """LoRA beside weights in 16 bits, or in 4 where the method's name or the weights' says so."""
    if not (quantised or states(_NF4, text) or states(_GPTQ, text)):
        return {"plan.peft": "lora"}
    weights = "gptq" if states(_GPTQ, text) else "nf4_double" if states(_DOUBLE, text) else "nf4"
    return {"plan.peft": "qlora", "plan.base_weights": weights}


def _narrow(row: RunRow, text: str) -> Settings:
    """Weights and moments in the precision of the run, where the notes say so."""
    stated = row.of("plan")
    if not states(_ALL_NARROW, text) or row.precision not in ("bf16", "fp16"):
        return {}
    return {f"plan.{name}": row.precision for name in ("master_dtype", "optimizer_dtype") if name not in stated}


def _targets(text: str) -> tuple[str, ...]:
    """Modules with adapters, as a plan names them; none where a word is no module's."""
    found = _TARGETS.search(text)
    if found is None:
        return ()
    if found[1].casefold().startswith("all"):
        return ("all",)
    names = re.split(r" ?[,/+] ?", found[1])
    inputs = {**_MODULES, "w2": "down", "w3": "up"} if "w3" in names else _MODULES
    words = tuple(word for name in names for word in inputs.get(name, name).split())
    try:
        PeftPlan(method="lora", targets=words)
    except ArgumentError:  # a sentence about something else
        return ()
    return words
