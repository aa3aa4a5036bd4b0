"""LLaMA-Factory's YAML (0.9 and later: hparams/*.py, model/adapter.py, model/model_utils/checkpointing.py)."""

from __future__ import annotations

from math import gcd
from typing import Final

from simulator.base.errors import Fault
from simulator.formats.readers.peft_words import scoped
from simulator.formats.readers.plans import trainer
from simulator.formats.readers.plans.draft import Draft
from simulator.formats.readers.plans.preferences import ALONE, pairs
from simulator.formats.readers.plans.reading import Reading, Stated
from simulator.formats.readers.plans.trainer import UNSLOTH, Job
from simulator.spec.model import Model

# What other trainers of LLaMA-Factory read, and a way around (src/llamafactory/v1/config; train/mca, its Megatron-Core)
_V1 = ("LLaMA-Factory 1", "a file of 0.9 (finetuning_type, lora_rank), or flags")
_MEGATRON = (
    "its Megatron trainer",
    "Megatron's own arguments, or flags (--tp, --pp, --ep, --stack megatron-core-2025)",
)
_OF_OTHERS: Final = {
    **dict.fromkeys(("dist_config", "kernel_config", "model_class", "peft_config", "quant_config"), _V1),
    **dict.fromkeys([f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert")], _MEGATRON),
}
_STAGES: Final = ("pt", "sft", "rm", "ppo", "dpo", "kto")
# Optimizers by switches of their own; {}: which word of TrainingArguments that is
_SWITCHES: Final = {"use_galore": "galore_adamw", "use_apollo": "apollo_adamw", "use_badam": "badam", "use_adam_mini": "adam_mini", "use_muon": "muon"}  # fmt: skip


def read_llama_factory(stated: Stated) -> Draft:
    """The plan of a configuration that was read as plain data."""
    job = trainer.begin(stated, "llama-factory")
    r = job.r
    other = next((name for name in r.entries if name.partition(".")[0] in _OF_OTHERS), None)
    if other is not None:
        whose, remedy = _OF_OTHERS[other.partition(".")[0]]
        r.fault(other, f"is a setting of {whose}, whose files are not read", remedy)
    trainer.precision(job)
    pure = bool(r.flag("pure_bf16"))
    if pure:
        job.mixed = "no"
    # infer_optim_dtype (extras/misc.py), of what checkpoints are in
    job.loaded = job.mixed if job.mixed != "no" else "bf16"
    trainer.parallelism(job)
    trainer.batch(job, micro=8)
    stage = r.choice("stage", _STAGES) or "sft"
    trainer.length(job, 2048, _packing(r, stage))
    trainer.recompute(job, default=not r.flag("disable_gradient_checkpointing"))
    if r.flag("use_reentrant_gc") is False and job.fields["recompute"] == "full":
        job.change("use_reentrant_gc", early_stop=True)
    if r.flag("use_unsloth_gc"):
        job.fields["offload"] = {**job.fields.get("offload", {}), "activations": "host"}
    _trained(job, pure=pure)
    trainer.optimizer(job, _optimizer(job))
    trainer.kernels(job)
    if r.flag("use_unsloth"):
        job.change("use_unsloth", **UNSLOTH)
    if stage in ("dpo", "kto"):
        pairs(job, "stage", unpaired=stage == "kto", alone=r.text("pref_loss") in ALONE)
    elif stage not in ("pt", "sft"):
        r.fault("stage", f"{stage}: its generation or rewards are not modelled", "sft: the policy's own step")
    return job.draft("llama-factory", "LLaMA-Factory 0.9")


def _packing(r: Reading, stage: str) -> str:
    """The setting that enables packing: packing, neat_packing, or pretraining unless disabled (hparams/parser.py)."""
    neat = r.flag("neat_packing")
    if neat and stage != "sft":
        r.fault("neat_packing", f"LLaMA-Factory takes it for sft alone, not for {stage}", "packing")
    return "neat_packing" if neat else "stage" if stage == "pt" and r.raw("packing") is None else "packing"


def _optimizer(job: Job) -> str:
    """A switch's word, or the usual one."""
    r = job.r
    on = [word for name, word in _SWITCHES.items() if r.flag(name)]
    for name, word in _SWITCHES.items():
        if on and word == on[0] and r.flag(name) and "optim" in r:
            r.overruled("optim", f"{name} decides")
    if on and on[0] == "galore_adamw":
        job.fields["galore_rank"] = r.integer("galore_rank", plan_field="galore_rank") or 16
        return "galore_adamw_layerwise" if r.flag("galore_layerwise") else on[0]
    return on[0] if on else "adamw_torch"


def _base(job: Job, bits: int | None) -> str | None:
    """The dtype of the weights below adapters, where it is not that of training."""
    if bits is not None:
        _quantised(job, bits)
        return trainer.quantised(bits != 8, bits == 8, job.r.flag("double_quantization") is not False)
    return "gptq" if "gptq" in (job.r.text("model_name_or_path") or "").lower() else None


def _trained(job: Job, *, pure: bool) -> None:
    """What is trained is cast to fp32, unless in pure bf16 (model/adapter.py)."""
    r = job.r
    kind = r.choice("finetuning_type", ("lora", "full", "freeze", "oft")) or "lora"
    bits = r.integer("quantization_bit")
    if kind in ("full", "freeze"):
        if bits is not None:
            r.fault("quantization_bit", "needs adapters", "finetuning_type: lora")
        if kind == "freeze":
            _freeze(job)
        trainer.weights(job, "bf16" if pure else "fp32")
        return
    if kind != "lora":
        r.fault("finetuning_type", f"{kind} is not modelled", "lora, freeze or full")
    trainer.adapters(job, _base(job, bits), "bf16" if pure else "fp32", usual=("all",))


def _freeze(job: Job) -> None:
    """The last layers are trained (of a negative number: the first), or some of their modules, and what else is named."""
    r = job.r
    count = r.raw("freeze_trainable_layers")
    if isinstance(count, bool) or not isinstance(count, int | None) or count == 0:
        r.fault("freeze_trainable_layers", f"{count} is no number of layers", "2: the last two; -2: the first two")
        return
    modules, more = (
        {word.strip() for word in str(r.raw(key) or usual).split(",") if word.strip()}
        for key, usual in (("freeze_trainable_modules", "all"), ("freeze_extra_modules", ""))
    )
    for key, words, known in (
        ("freeze_trainable_modules", modules, {"all", *_PARTS}),
        ("freeze_extra_modules", more, _AROUND),
    ):
        if words - set(known):
            r.fault(key, f"{', '.join(sorted(words - set(known)))[:60]} is not read", f"of {', '.join(known)}")
    ends = [word for name, words in _AROUND.items() if name not in more for word in words]
    parts = [] if "all" in modules else [word for name, word in _PARTS.items() if name not in modules]
    spread = bool(r.flag("use_llama_pro"))
    rest = (*ends, *parts)
    frozen = {"freeze_modules": lambda model, _: _frozen(model, count or 2, spread=spread, rest=rest)}
    job.by_model = {**job.by_model, **frozen}


# LLaMA-Factory's names -> words of freeze_modules
_PARTS: Final = {"self_attn": "attention", "mlp": "mlp", "input_layernorm": "norm_1.*", "post_attention_layernorm": "norm_2.*"}  # fmt: skip
_AROUND: Final = {"embed_tokens": ("embedding", "positions", "embedding_norm.*"), "norm": ("norm.*",), "lm_head": ("lm_head",)}  # fmt: skip


def _frozen(model: Model, count: int, *, spread: bool, rest: tuple[str, ...]) -> object:
    """What is not trained: layers, and `rest`. spread: each n-th layer is, as LLaMA-Pro adds them (model/adapter.py)."""
    layers, num = range(model.num_layers), min(abs(count), model.num_layers)
    if spread and model.num_layers % num:
        problem = f"use_llama_pro: {model.num_layers} layers are not a multiple of freeze_trainable_layers {num}"
        return Fault(place="freeze_trainable_layers", problem=problem, remedy=f"{gcd(model.num_layers, num)}")
    stride = model.num_layers // num
    tuned = layers[stride - 1 :: stride] if spread else layers[-num:] if count > 0 else layers[:num]
    return (*scoped([""], [number for number in layers if number not in tuned]), *rest)


def _quantised(job: Job, bits: int) -> None:
    r = job.r
    if bits not in (4, 8):
        r.fault("quantization_bit", f"{bits} bits are not modelled", "4 or 8")
    if (r.text("quantization_method") or "bnb") not in ("bnb", "bitsandbytes"):
        r.fault("quantization_method", "only bitsandbytes' kernels are modelled", "bnb")
