"""LitGPT's YAML, Unsloth's scripts and its Studio's YAML, xtuner's configs, ms-swift's and verl's options, by the Trainer's names.

litgpt 0.5 (finetune/lora.py, full.py, utils.py), unsloth 2024 to 2026 (models/llama.py: from_pretrained, get_peft_model;
studio/backend/assets/configs), xtuner 0.1 (model/sft.py, tools/train.py), ms-swift 3 and 4 (arguments/*.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from simulator.base.errors import PlanError
from simulator.formats.readers.plans import trainer
from simulator.formats.readers.plans.draft import Draft
from simulator.formats.readers.plans.options import table_of
from simulator.formats.readers.plans.preferences import pairs
from simulator.formats.readers.plans.python_settings import python_settings
from simulator.formats.readers.plans.reading import Reading, Stated
from simulator.formats.readers.plans.trainer import UNSLOTH, Job
from simulator.formats.readers.plans.transformers import answers
from simulator.formats.readers.yaml_document import read_yaml

_TRAINED: Final = {"lora_query": "q", "lora_key": "k", "lora_value": "v", "lora_projection": "out", "lora_mlp": "mlp", "lora_head": "lm_head"}  # fmt: skip
_QUANTISED: Final = {
    "bnb.nf4": "nf4", "bnb.nf4-dq": "nf4_double", "bnb.fp4": "nf4", "bnb.fp4-dq": "nf4_double", "bnb.int8-training": "int8",
}  # fmt: skip
_PREFERENCES: Final = ("dpo", "kto", "orpo", "simpo", "cpo")
_CONFIGS: Final = ("DPOConfig", "KTOConfig", "GRPOConfig", "PPOConfig", "RLOOConfig", "ORPOConfig", "RewardConfig")


def further_settings(form: str, text: str, file: str, define: Mapping[str, str]) -> dict[str, Any]:
    """A file's settings as plain data, of these formats; Python is read and never run."""
    if form == "xtuner":
        data = python_settings(text, file)[0]
        read = {key: data[key] for key in table_of("xtuner")["read"] if key in data}
        return read | ({"deepspeed": define["deepspeed"]} if define.get("deepspeed") else {})
    return script_settings(text, file) if file.endswith(".py") else read_yaml(text, file)


def read_litgpt(stated: Stated) -> Draft:
    """The plan of a fine-tuning configuration: LoRA where it has a rank; several GPUs shard by FSDP and checkpoint blocks."""
    if "initial_checkpoint_dir" in stated.data:
        why = "LitGPT's pretraining is not read: it compiles the model, shards it by FSDP1 in a node and recomputes nothing"
        raise PlanError.at(
            f"{stated.file}: initial_checkpoint_dir",
            why,
            "flags: --model NAME --data-parallel fsdp1 --stack torch-2.4-compiled",
        )
    job = trainer.begin(stated, "litgpt")
    r, fields, lora = job.r, job.fields, "lora_r" in job.r
    words = ("bf16-true", "bf16-mixed", "16-true", "16-mixed", "32-true")
    dtype, _, way = (r.choice("precision", words) or "bf16-true").partition("-")
    dtype = {"16": "fp16", "32": "fp32"}.get(dtype, dtype)
    job.mixed, job.loaded = (dtype, "fp32") if way == "mixed" else ("no", dtype)
    fields["precision"] = dtype
    gpus = (r.integer("devices") or 1) * (r.integer("num_nodes") or 1)
    fields |= {"data_parallel": ("fsdp2" if lora else "fsdp1") if gpus > 1 else "ddp", "zero": 3 if gpus > 1 else 0}
    fields |= {"recompute": "full" if gpus > 1 else "none", "micro_batch_size": r.integer("per_device_train_batch_size") or (1 if lora else 4)}  # fmt: skip
    fields["global_batch_size"] = r.integer("train.global_batch_size") or 16
    job.leftover = "dp_shard" if gpus > 1 else "dp_replicate"
    trainer.length(job, None)
    base = r.choice("quantize", _QUANTISED)
    if base is not None and gpus > 1:
        r.fault("quantize", "LitGPT does not quantise on several GPUs", "devices: 1, or without quantize")
    if lora:
        modules = tuple(
            word for name, word in _TRAINED.items() if r.flag(name) or (r.raw(name) is None and word in "qv")
        )
        trainer.adapters(job, _QUANTISED.get(base or ""), job.loaded, share=0.05, usual=modules or ("q", "v"))  # setup
        if not modules:
            r.fault("lora_query", "and all others are false: nothing is trained", "lora_query: true")
    else:
        trainer.weights(job, job.loaded)
    paged = "paged_adamw" if base else "adamw_torch"  # instantiate_bnb_optimizer
    trainer.optimizer(job, paged, table_of("litgpt")["optimizers"] | ({"adamw": paged} if base else {}))
    return replace(
        job.draft("litgpt", "LitGPT 0.5"), num_devices=gpus, stack="litgpt-2024", stack_why="the framework's own"
    )


def read_unsloth(stated: Stated) -> Draft:
    """The plan of a Studio's configuration, or of a script's arguments (`script_settings`)."""
    job = trainer.begin(stated, "unsloth")
    data, file = stated.data, stated.file
    r = job.r
    trainer.precision(job, default=True)
    job.by_gpu = "bf16" not in r
    job.loaded = job.mixed if job.mixed != "no" else "bf16"
    trainer.parallelism(job)
    trainer.batch(job, micro=2 if "training" in data else 8)
    trainer.length(job, 2048)
    trainer.recompute(job, default=True)
    if "gradient_checkpointing" not in r:  # "unsloth": kept inputs go to the host
        job.fields["offload"] = {"activations": "host"}
    full = r.flag("full_finetuning") or r.text("training.training_type") in ("full", "cpt-full")
    if full:
        for name in ("load_in_4bit", "load_in_8bit", "use_dora"):
            r.overruled(name, "all weights are trained")
        trainer.weights(job)
    else:
        base = "int8" if r.flag("load_in_8bit") else None if r.flag("load_in_4bit") is False else "nf4_double"
        trainer.adapters(job, base, "fp32", rank=16, usual=_finetuned(r))
    trainer.optimizer(job, "adamw_8bit" if "training" in data else "adamw_torch")
    trainer.kernels(job)
    job.changes |= {name: (value, f"{file} (default)") for name, value in UNSLOTH.items()}
    stage = r.text("stage")
    if stage == "GRPOConfig":
        answers(job, "stage")
    elif stage in ("DPOConfig", "KTOConfig"):
        pairs(job, "stage", unpaired=stage == "KTOConfig")
    elif stage is not None:
        r.fault("stage", f"{stage}: generation and rewards are not modelled", "SFTConfig: the policy's own step")
    return job.draft("unsloth", "Unsloth")


def _finetuned(r: Reading) -> tuple[str, ...]:
    """What `finetune_…` leaves of a model's linear layers, where no modules are named (unsloth_zoo: get_peft_regex)."""
    parts = {f"finetune_{word}_modules": word for word in ("attention", "mlp")}
    left = tuple(word for name, word in parts.items() if r.flag(name) is not False)
    if r.flag("finetune_language_layers") is False or not left:
        r.fault("finetune_language_layers", "nothing of the language model is trained", "finetune_language_layers=True")
    return ("all",) if len(left) == len(parts) else left


def script_settings(text: str, file: str) -> dict[str, Any]:
    """Arguments of Unsloth's and TRL's calls in a script, under the names of `read_unsloth`; a script's calls in a table."""
    _, calls = python_settings(text, file)
    loaded, tuned = (dict(calls.get(name, {})) for name in ("from_pretrained", "get_peft_model"))
    tuned.pop("", None)
    loaded["model_name"] = loaded.get("model_name", loaded.pop("", None))
    found: dict[str, Any] = {"from_pretrained": loaded, "get_peft_model": tuned}
    for name in ("TrainingArguments", "SFTConfig", *_CONFIGS):
        if name in calls:
            found |= {key: value for key, value in calls[name].items() if key}
            found |= {"stage": name} if name in _CONFIGS else {}
    for name in ("bf16", "fp16"):  # is_bfloat16_supported(): the GPU decides
        if not isinstance(found.get(name), bool):
            found.pop(name, None)
    return found


def read_xtuner(stated: Stated) -> Draft:
    """The plan of a config's names; `deepspeed` among them is what `xtuner train --deepspeed` is given, DDP without."""
    job = trainer.begin(stated, "xtuner")
    r, fields = job.r, job.fields
    dtype = (r.text("dtype") or "bfloat16").rpartition(".")[2]
    job.mixed = "fp16" if dtype == "float16" else "bf16"
    fields["precision"] = job.mixed
    trainer.parallelism(job)
    trainer.batch(job, micro=1)
    trainer.length(job, 2048)
    trainer.ulysses(job)
    trainer.recompute(job, default=True)
    if any(name.startswith("model.lora") for name in r.entries) or "lora_r" in r:
        four, eight = r.flag("load_in_4bit"), r.flag("load_in_8bit")
        base = trainer.quantised(four, eight, r.flag("use_bnb_nested_quant") is True)
        trainer.adapters(job, base, "fp32", usual=("all",))
        if job.engine == "ddp":  # prepare_model_for_kbit_training; DeepSpeed's engine casts all to 16 bits again
            fields |= {"upcast_frozen": True, **({} if base else {"base_weights": "fp32"})}
    else:
        trainer.weights(job, "fp32")
    trainer.optimizer(job, "adamw_torch", table_of("xtuner")["optimizers"])
    trainer.kernels(job)
    if r.flag("use_triton_kernel"):
        job.change("use_triton_kernel", norm="fused", norm_dtype="compute")
    # model/dpo.py, orpo.py: pairs; llava.py, internvl.py, reward.py: others
    kind = r.text("model.type") or "SupervisedFinetune"
    if kind in ("DPO", "ORPO"):
        pairs(job, "model.type", alone=kind == "ORPO")
    elif kind != "SupervisedFinetune":
        r.fault("model.type", f"{kind}: its tower or its rewards are not modelled", "SupervisedFinetune, DPO or ORPO")
    return job.draft("xtuner", "xtuner 0.1")


def read_swift(stated: Stated) -> Draft:
    """The plan of ms-swift's options; its program: sft, pt or rlhf. Weights stay in the dtype of the run (base_args/model_args.py)."""
    if stated.data.get("fsdp") == "fsdp2":  # config/fsdp2.json
        stated = replace(stated, data={**stated.data, "fsdp": "full_shard", "fsdp_config": {"version": 2}})
    job = trainer.begin(stated, "ms-swift")
    r, fields = job.r, job.fields
    fields["precision"] = job.loaded = trainer.DTYPES[r.choice("dtype", trainer.DTYPES) or "bfloat16"]
    job.mixed = job.loaded if job.loaded != "fp32" else "no"
    trainer.parallelism(job)
    trainer.batch(job, micro=1)
    if "gradient_accumulation_steps" not in r and "num_micro_batches" not in r.given:  # trainers/arguments.py
        fields["num_micro_batches"] = max(1, -(-16 // (fields["micro_batch_size"] * (job.devices[0] or 16))))
    trainer.length(job, None)
    trainer.ulysses(job)
    trainer.recompute(job, default=True)
    if r.choice("tuner_type", ("lora", "full")) == "full":
        trainer.weights(job)
    else:
        bits = r.choice("quant_bits", ("4", "8")) if r.choice("quant_method", ("bnb",)) else None
        base = trainer.quantised(bits == "4", bits == "8", r.flag("use_bnb_nested_quant") is not False)
        trainer.adapters(job, base, "fp32", share=0.05, usual=("all",))
    trainer.optimizer(job, "adamw_torch")
    trainer.kernels(job)
    stage = r.choice("rlhf_type", (*_PREFERENCES, "grpo")) or ("dpo" if stated.program == "rlhf" else None)
    if stage == "grpo":
        answers(job, "rlhf_type")
    elif stage is not None:
        pairs(job, "rlhf_type", unpaired=stage == "kto", alone=stage in ("orpo", "simpo", "cpo"))
    return job.draft("ms-swift", "ms-swift 4")


def _mini_batch(job: Job) -> None:
    """Sequences of an update and of a micro-batch; by their tokens the most that divide a rank's share."""
    r, fields, ranks = job.r, job.fields, job.fields.get("cp", 1)
    total = fields["global_batch_size"] = (r.integer("ppo_mini_batch_size") or 256) * (r.integer("answers") or 1)
    tokens = (r.integer("ppo_max_token_len_per_gpu") or 16384) * ranks
    one = r.integer("per_device_train_batch_size", plan_field="micro_batch_size")
    if r.flag("use_dynamic_bsz"):
        share = max(1, total * ranks // (job.devices[0] or ranks))
        most = min(max(1, tokens // fields["seq_len"]), share, 2**16)
        one = next(size for size in range(most, 0, -1) if share % size == 0)
        r.note("use_dynamic_bsz", f"{one} sequences of {fields['seq_len']:,} tokens a micro-batch")
    elif one is None and "micro_batch_size" not in r.given:
        r.fault("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "is not stated", "it, or use_dynamic_bsz=True")
    fields["micro_batch_size"] = one or 1


def read_verl(stated: Stated) -> Draft:
    """The policy's own update under FSDP: one mini-batch of prompts with all their answers, prompts and answers as long as they may be.

    Gradients are reduced in fp32 in each micro-batch, for backwards run without `no_sync`; weights stay in fp32, frozen ones
    too; log-probabilities are flash-attention's kernel's (verl 0.7: workers/fsdp_workers.py, workers/actor/dp_actor.py).
    """
    job = trainer.begin(stated, "verl")
    r, fields = job.r, job.fields
    job.engine, job.mixed, job.leftover = "fsdp", "bf16", "dp_shard"
    implementation = {"fsdp": "fsdp1", "fsdp2": "fsdp2"}[r.choice("strategy", ("fsdp", "fsdp2")) or "fsdp"]
    fields |= {"precision": "bf16", "data_parallel": implementation, "zero": 3, "reduce_dtype": "fp32"}
    fields |= {"sync_every_micro_batch": True, "forward_prefetch": int(r.flag("prefetches") or False)}
    job.loaded = trainer.DTYPES[r.choice("dtype", ("fp32", "bf16")) or "fp32"]
    if r.raw("fsdp_size") not in (None, -1) and (shard := r.integer("fsdp_size", plan_field="dp_shard")):
        fields["dp_shard"], job.leftover = shard, "dp_replicate"
    if r.flag("offload_policy"):
        fields["offload"] = {"optimizer": "host", "parameters": "host"}
    if r.flag("reshards") is False and implementation == "fsdp2":
        fields["reshard_after_forward"] = False
    fields["seq_len"] = sum(r.integer(f"max_{part}_length") or 512 for part in ("prompt", "response"))
    trainer.ulysses(job, "ulysses_sequence_parallel_size")
    _mini_batch(job)
    trainer.recompute(job, default=True)
    if "lora_r" in r and r.raw("lora_r") != 0:
        trainer.adapters(job, "fp32" if job.loaded == "fp32" else None, "fp32", usual=("all",))
    else:
        trainer.weights(job, job.loaded)
    trainer.optimizer(job, "adamw_torch")
    job.change("strategy", loss="fused_linear" if r.flag("use_fused_kernels") else "fused")
    trainer.kernels(job)
    r.default_unmodelled("rollout", "no", "the policy's own update; --rollout FILE adds what comes before and after it")
    return job.draft("verl", "verl 0.7")


READERS: Final[Mapping[str, Callable[[Stated], Draft]]] = {
    "litgpt": read_litgpt, "unsloth": read_unsloth, "xtuner": read_xtuner, "ms-swift": read_swift, "verl": read_verl,
}  # fmt: skip
