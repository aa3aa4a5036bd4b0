"""TrainingArguments as JSON or YAML, with trl's SFTConfig and ModelConfig beside them (transformers 4.46 to 5, trl 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from simulator.formats.readers.plans import trainer
from simulator.formats.readers.plans.draft import Draft
from simulator.formats.readers.plans.preferences import pairs
from simulator.formats.readers.plans.reading import Stated
from simulator.formats.readers.plans.trainer import DTYPES, Job

_OF_TRL: Final = ("packing", "dataset_text_field", "completion_only_loss", "assistant_only_loss", "use_peft", "load_in_4bit")  # fmt: skip
# What trl's command line launches with (trl/accelerate_configs)
_LAUNCHERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "single_gpu": {},
    "multi_gpu": {},
    **{
        f"zero{stage}": {"deepspeed": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}}
        for stage in (1, 2, 3)
    },
    **{f"fsdp{v}": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": v}} for v in (1, 2)},
}
_PAIRS: Final = ("beta", "precompute_ref_log_probs", "ref_model_sync_steps")  # of trl's DPOConfig

_UNPAIRED: Final = ("desirable_weight", "undesirable_weight")  # of its KTOConfig
_ANSWER: Final = 512  # tokens of an answer, and of its prompt (trl/trainer/grpo_config.py)


def read_transformers(stated: Stated) -> Draft:
    """The plan of arguments that were read as plain data. Their `program` is a trainer of trl's."""
    launcher = stated.data.get("accelerate_config")
    job = trainer.begin(replace(stated, data={**_LAUNCHERS.get(str(launcher), {}), **stated.data}), "transformers")
    r = job.r
    if launcher is not None and r.text("accelerate_config") not in _LAUNCHERS:
        remedy = f"one of {', '.join(_LAUNCHERS)}; or fsdp, deepspeed"
        r.fault("accelerate_config", "a file of accelerate's is not read here", remedy)
    program = stated.program.removeprefix("script")  # a script with words of its own for adapters is none of trl's
    of_trl = bool(program) or (
        not stated.program and any(name in r for name in (*_OF_TRL, *_PAIRS, *_UNPAIRED, "num_generations"))
    )
    trainer.precision(job, default=(of_trl and not r.flag("fp16")) or None)  # trl/trainer/base_config.py: _BaseConfig
    dtype = r.text("dtype")
    job.loaded = DTYPES.get((dtype or "float32").rpartition(".")[2], "fp32")
    trainer.parallelism(job)
    trainer.batch(job, micro=8)
    trainer.length(job, 1024 if of_trl else None)
    trainer.recompute(job, default=of_trl)
    _frozen(job)
    if dtype is None and job.engine == "ddp" and "peft" not in job.fields:
        why = "the script's from_pretrained decides; trl's trainers load float32"
        job.assumed["master_dtype"] = ("fp32", why)
    trainer.optimizer(job, "adamw_torch")
    trainer.kernels(job)
    _preferences(job, program, of_trl=of_trl)
    return job.draft("transformers", f"trl's {program}" if program else "transformers' TrainingArguments")


def _preferences(job: Job, program: str, *, of_trl: bool) -> None:
    """What is trained on beside plain text: by the trainer that a command names, or by its own arguments."""
    r = job.r
    paired = next((name for name in _PAIRS if r.raw(name) is not None), None)
    weighed = next((name for name in _UNPAIRED if r.raw(name) is not None), None)
    if program in ("", "sft", "dpo", "kto", "grpo", "orpo"):
        if program == "grpo" or (not program and r.raw("num_generations") is not None):
            answers(job, "num_generations")
        elif program in ("dpo", "kto", "orpo") or (not program and (weighed or paired)):
            kind = {"unpaired": program == "kto" or weighed is not None, "alone": program == "orpo"}
            pairs(job, weighed or paired or "beta", **kind)
        else:
            _loss(job, of_trl=of_trl)
    else:
        r.fault(program, "its rewards or losses are not modelled", "trl sft, dpo, orpo, kto or grpo")


def _loss(job: Job, *, of_trl: bool) -> None:
    """Of plain text (trl/trainer/sft_config.py): from 1.10 on `chunked_nll` unless Liger's kernels make it."""
    r = job.r
    kind = r.text("loss_type")
    if kind == "chunked_nll" and r.flag("use_liger_kernel"):
        r.fault("loss_type", "chunked_nll goes without Liger's kernels", "use_liger_kernel: false, or loss_type: nll")
    elif kind == "chunked_nll":
        job.change("loss_type", loss="chunked")
    elif kind not in (None, "nll"):
        why = "the loss of plain text, nll, is taken; trl dpo and its kin in a launch line name their trainer"
        r.unmodelled("loss_type", why)
    elif kind is None and of_trl and not r.flag("use_liger_kernel"):
        r.default_unmodelled("loss_type", "chunked_nll", "TRL 1.10 and later: --set stack.loss=chunked; nll is taken")


def _frozen(job: Job) -> None:
    """Trl's ModelConfig: LoRA, beside quantised weights in bf16 (sft_trainer.py)."""
    r, four, eight = job.r, job.r.flag("load_in_4bit"), job.r.flag("load_in_8bit")
    if not (r.flag("use_peft") or four or eight):
        trainer.weights(job)
        return
    if four and eight:
        r.fault("load_in_8bit", "contradicts load_in_4bit", "one of the two")
    double = r.flag("use_bnb_nested_quant")
    if r.choice("bnb_4bit_quant_type", ("nf4", "fp4")) == "fp4":
        r.note("bnb_4bit_quant_type", "as many bytes as nf4")
    base = trainer.quantised(four, eight, bool(double))
    dtype = "bf16" if base and job.mixed == "bf16" else "fp32"
    trainer.adapters(job, base, dtype, rank=16, share=0.05)
    if r.flag("prepare_model_for_kbit_training"):  # of peft, which a script calls
        job.fields |= {"upcast_frozen": True, **({} if base else {"base_weights": "fp32"})}


def answers(job: Job, name: str) -> None:
    """The policy's own step of GRPO: single answers behind their prompts, both as long as they may be (trl's GRPOTrainer)."""
    job.fields["seq_len"] = sum(job.r.integer(key) or _ANSWER for key in ("max_prompt_length", "max_completion_length"))
    job.r.unmodelled(name, "the policy's own step; --rollout FILE adds answers, log-probabilities and new weights")
