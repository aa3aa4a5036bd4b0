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
    older = any(word in row.source_location for word in ("_liger.csv", "_granite.csv"))
    settings["stack.loss"] = f"fp32_{'cast' if older else 'shifted'}{'_fused' if fused else ''}"
    if "liger" in config:
        settings["stack.loss"] = "fused_linear"
    if fused:
        settings |= {"stack.norm": "fused", "stack.norm_dtype": "compute", "stack.rope": "fused"}
        if base:
            settings["stack.adapters"] = "fused"
    return Tuned(replace(row, notes="", model_name=row.model_name.replace("-GPTQ", "")), settings)


def _finetune_py(row: RunRow) -> Tuned:
    """github:QwenLM/Qwen, finetune.py: rank 64, dropout 0.05, all linear layers.

    Pairs are in fp32, as peft 0.5 leaves them (tuners/lora.py: `self.to(self.weight.device)`; 0.6, of November 2023, casts them to the
    base's dtype, and the page's profile is of October); DeepSpeed's engine casts them. modeling_qwen.py: flash-attention's rotary
    kernel on fp32 copies, as many bytes as a complex product; 16-bit logits are copied without their last rows and not cast;
    autocast casts what nll_loss reads. Its norms are flash-attention's kernel where that is installed, as docker/Dockerfile does
    (csrc/layer_norm). Q-LoRA: GPTQ int4 in fp16 under DeepSpeed's ZeRO-2, also on one GPU, since errors came of
    torch's autocast (finetune_qlora_single_gpu.sh, ds_config_zero2.json), and so does LoRA over nodes (finetune_lora_ds.sh; README:
    LoRA without "emb" leaves embedding and head). All weights: ZeRO-3, also on one GPU (finetune_ds.sh, ds_config_zero3.json).
    """
    method = _noted(row, r"method=([^;]*)")
    half = "fp16" if method == "Q-LoRA" else "bf16"
    by_torch = method in ("LoRA", "LoRA (emb)")
    settings: Settings = {"stack.loss": "shifted_nll" if by_torch else "shifted", "plan.peft": "full"}
    settings |= {"stack.rope": "complex_fp32", "stack.norm": "fused", "stack.norm_dtype": "compute"}
    memory = None if row.mem_value is None else row.mem_value / (row.n_gpus or 1)  # the table's is the sum over GPUs
    name = row.model_name.replace("qwen1-", "qwen-")
    row = replace(row, notes="", framework="HF Trainer", model_name=name, mem_value=memory)
    row = replace(row, global_batch=row.global_batch or 8 * (row.n_gpus or 1))
    if method == "Full-parameter":
        return Tuned(replace(row, zero_or_fsdp="zero3"), {**settings, **_zero3(row.d_model or 0)})
    settings |= {
        "plan.peft": "qlora" if method == "Q-LoRA" else "lora",
        "plan.lora_rank": 64,
        "plan.lora_dropout": 0.05,
    }
    settings |= {"plan.master_dtype": half, "plan.optimizer_dtype": "bf16", "plan.optimizer_impl": "foreach"}
    if method == "LoRA (emb)":  # the copies of both are in bf16, as the model is
        settings |= {"plan.train_modules": ("embedding", "lm_head"), "plan.adapter_master_dtype": "fp32"}
    elif by_torch:
        settings |= {"plan.master_dtype": "fp32", "plan.optimizer_dtype": "fp32"}
    if method == "LoRA (multinode)":
        # The page says that all runs have batches of 1; finetune_lora_ds.sh, its script for several nodes, has 2, and the memory of
        # each of the six lengths is that of 2
        row = replace(row, micro_batch=2, global_batch=16 * (row.n_gpus or 1))
    if method == "Q-LoRA":
        settings |= {"plan.base_weights": "gptq", "stack.dequantised": "operators"}
    if method in ("Q-LoRA", "LoRA (multinode)"):
        settings |= {"plan.master_dtype": "fp32", "plan.optimizer_dtype": "fp32", "plan.optimizer_impl": "fused"}
        settings |= {"plan.data_parallel": "deepspeed", "plan.zero": 2}
        return Tuned(replace(row, zero_or_fsdp="zero2"), settings)
    return Tuned(replace(row, zero_or_fsdp=row.zero_or_fsdp or "ddp"), settings)


def _zero3(width: int) -> Settings:
    """Its file names AdamW, which DeepSpeed makes its fused one (runtime/engine.py), and leaves buckets to transformers: "auto".

    transformers/integrations/deepspeed.py (trainer_config_finalize): by the model's width.
    """
    buckets = {"reduce_bucket_numel": width**2, "prefetch_bucket_numel": int(0.9 * width**2)}
    engine = {f"plan.deepspeed.{name}": size for name, size in buckets.items()}
    engine["plan.deepspeed.param_persistence_numel"] = 10 * width
    return {"plan.data_parallel": "deepspeed", "plan.zero": 3, "plan.optimizer_impl": "fused", **engine}


def _litgpt(row: RunRow) -> Tuned:
    """github:Lightning-AI/litgpt@8641822, finetune/lora.py: bf16-true, rank 8 on queries and values, dropout 0.05, chunks of the head.

    The page names this commit: it prints max_memory_allocated, and each rank adds the gradients of 128 sequences up without a
    reduction. Blocks are FSDP's units, with their pairs; since #1538 they are not.
    """
    base = {"bnb.nf4": "nf4", "bnb.nf4-dq": "nf4_double"}.get(_noted(row, r"quantize=([^;]*)"))
    settings: Settings = {**_PURE, "plan.peft": "lora", "plan.lora_rank": 8, "plan.lora_targets": ("q", "v")}
    settings |= {"plan.lora_dropout": 0.05, "stack.loss": "fused", "plan.optimizer_impl": "foreach"}
    # model.py: one product of Q, K and V, of which V is a view; rmsnorm.py: operators in 16 bits keep what one kernel keeps
    settings |= {
        "model.fused_qkv": True,
        "stack.norm": "fused",
        "stack.norm_dtype": "compute",
        "stack.holds_logits": True,
    }
    if base:
        settings |= {"plan.peft": "qlora", "plan.base_weights": base, "stack.quantised_keeps_input": True}
    several = (row.n_gpus or 1) > 1
    if several:
        settings |= {"plan.mixed_units": True, "plan.sync_every_micro_batch": False}
    if row.mem_value is not None:
        row = replace(
            row, mem_metric="peak_allocated_gib", mem_metric_detail="", mem_value=row.mem_value * 10**9 / 2**30
        )
    again = "full" if several else "none"  # FSDPStrategy(activation_checkpointing_policy={Block})
    return Tuned(replace(row, notes="", act_ckpt=again, global_batch=128 * (row.n_gpus or 1)), settings)


def _fsdp_qlora(row: RunRow) -> Tuned:
    """github:AnswerDotAI/fsdp_qlora, train.py: bf16, rank 64, dropout 0.1, FSDP1 with adapters as units of their own."""
    settings: Settings = {**_PURE, "plan.peft": "lora", "plan.lora_rank": 64, "plan.lora_dropout": 0.1}
    settings |= {"plan.lora_targets": ("q", "k", "v", "gate", "up", "down"), "stack.loss": "fp32_cast"}
    if "method=QLoRA" in row.notes:
        settings |= {"plan.peft": "qlora", "plan.base_weights": "nf4_double"}
    if "cpu_offload=param+grad" in row.notes:
        settings |= {"plan.offload.parameters": "host", "plan.offload.optimizer": "host"}
    gpu = row.gpu.replace("RTX3090-24GB", "rtx-3090").replace("RTX4090-24GB", "rtx-4090")
    return Tuned(replace(row, notes="", gpu=gpu), settings)


_LADDER: Final = ("baseline", "+packed", "+compile", "+chunked CE", "+activation checkpointing", "+optimizer in backward",
                  "+activation offloading", "+8-bit AdamW", "LoRA", "QLoRA")  # fmt: skip


def _torchtune(row: RunRow) -> Tuned:
    """github:pytorch/torchtune, README: a ladder of options on one GPU.

    recipes/configs/llama3_2/3B_lora_single_device.yaml: adapters of rank 64 on queries, values, outputs and the MLP.
    """
    step = _LADDER.index(_noted(row, r"technique cumulative: ([^;]*)"))
    settings: Settings = {
        **_PURE,
        "plan.peft": "full",
        "plan.optimizer_impl": "fused",
        "plan.offload.activations": "none",
    }
    settings["stack.loss"] = "output_chunks" if step >= 3 else "fp32_cast"
    if 5 <= step <= 7:
        settings["plan.optimizer_in_backward"] = True
    if step >= 6:
        settings["plan.offload.activations"] = "host"
    if step == 7:
        settings["plan.optimizer"] = "torchao_adam8bit"  # memory_optimizations.rst of that day names it first
    if step >= 8:
        settings |= {"plan.peft": "lora" if step == 8 else "qlora", "plan.lora_rank": 64}
        settings["plan.lora_targets"] = ("q", "v", "out", "mlp")
        settings |= {} if step == 8 else {"plan.base_weights": "nf4_double"}
    if step >= 2:
        settings |= {
            "stack.blocks": "compiled",
            "stack.norm": "fused",
            "stack.norm_dtype": "compute",
            "stack.rope": "fused",
        }
    return Tuned(replace(row, notes="", compile="n"), settings)


def _xtuner(row: RunRow) -> Tuned:
    """github:InternLM/xtuner of April 2024, configs of the two READMEs: a step adds up 16 batches, times the ranks of a sequence.

    Speeds are those of an iteration of one batch (engine/hooks/throughput_hook.py), so one in sixteen has the update. Its Triton
    norm needs USE_TRITON_KERNEL (model/modules/dispatch), which no command or page of it sets.
    """
    return Tuned(replace(row, global_batch=16 * (row.dp or 1) * (row.cp or 1)), {"plan.peft": "full"})


def _bridge(row: RunRow) -> Tuned:
    """Rank 32 (github:NVIDIA-NeMo/Megatron-Bridge, peft/lora.py), in performance recipes beside linear_qkv alone (github:NVIDIA/NeMo)."""
    settings: Settings = {"plan.peft": "full"}
    if "LoRA Performance" in row.notes:
        settings = {"plan.peft": "lora", "plan.lora_rank": 32, "plan.lora_targets": ("qkv",)}
    return Tuned(replace(row, notes=""), settings)


_SOURCES: Final[tuple[tuple[str, Callable[[RunRow], Tuned | None]], ...]] = (
    ("fms-acceleration", _sft_trainer),
    ("QwenLM/Qwen", _finetune_py),
    ("litgpt tables", _litgpt),
    ("fsdp_qlora", _fsdp_qlora),
    ("torchtune README", _torchtune),
    (r"Megatron-Bridge \(SFT", _bridge),
    ("InternLM/xtuner", _xtuner),
)
