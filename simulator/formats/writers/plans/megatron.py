"""Megatron-LM's arguments (core 0.14) as a training script with torchrun. docs/reference/plan-formats.md has the table."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import islice
from typing import Final

from simulator.formats.writers.plans import Job
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

_PER_LINE: Final = "    "


def megatron_script(job: Job) -> str:
    """A script that trains; data, learning rate and checkpoints are left to whoever starts it, as "$@"."""
    nodes, each = job.nodes
    lines = ["#!/bin/bash", "# Data, tokenizer, learning rate and checkpoints: as arguments of this script.", ""]
    if queues := hardware_queues(job.plan):
        lines += [f"export CUDA_DEVICE_MAX_CONNECTIONS={queues}", ""]
    if job.plan.memory.alloc_conf:
        lines += [f"export PYTORCH_CUDA_ALLOC_CONF={shlex.quote(job.plan.memory.alloc_conf)}", ""]
    for name, options in (
        ("MODEL", _model(job.plan, job.model)),
        ("PARALLEL", _parallel(job.plan, job.model, job.stack)),
        ("TRAINING", _training(job.plan, job.stack)),
    ):
        lines += [f"{name}=(", *(f"{_PER_LINE}{option}" for option in options), ")", ""]
    script = "pretrain_gpt.py" if job.model.pattern is None else "pretrain_mamba.py"
    launch = f"torchrun --nnodes {nodes} --nproc_per_node {each}"
    lines += [f'${{LAUNCH:-{launch}}} {script} "${{MODEL[@]}}" "${{PARALLEL[@]}}" "${{TRAINING[@]}}" "$@"']
    return "\n".join(lines) + "\n"


def hardware_queues(plan: Plan) -> int | None:
    """What Megatron-LM asks for (its training/arguments.py): more where experts' exchanges overlap, one beside tensor or context parallelism."""
    if plan.implementation != "megatron":
        return None
    return 32 if plan.experts.overlap else 1 if plan.tp * plan.cp > 1 else None


def _model(plan: Plan, model: Model) -> Iterator[str]:
    if model.pattern is None or not _unified(plan, model):
        yield f"--num-layers {model.num_layers}"
    yield f"--hidden-size {model.d_model}"
    yield f"--ffn-hidden-size {model.d_ff}"
    yield f"--num-attention-heads {model.num_heads}"
    if model.latent is None:
        yield f"--kv-channels {model.head_dim}"
        if model.num_kv_heads != model.num_heads:
            yield f"--group-query-attention --num-query-groups {model.num_kv_heads}"
    else:
        latent = model.latent
        yield f"--multi-latent-attention --kv-lora-rank {latent.kv_lora_rank}"
        if latent.q_lora_rank:
            yield f"--q-lora-rank {latent.q_lora_rank}"
        yield f"--qk-head-dim {latent.qk_nope_head_dim} --qk-pos-emb-head-dim {latent.qk_rope_head_dim}"
        yield f"--v-head-dim {latent.v_head_dim}"
    yield f"--padded-vocab-size {model.vocab_size}"
    yield f"--max-position-embeddings {model.max_positions}"
    yield f"--position-embedding-type {'learned_absolute' if model.positions == 'learned' else model.positions}"
    if model.rotary_fraction != 1:
        yield f"--rotary-percent {model.rotary_fraction}"
    yield f"--normalization {'RMSNorm' if model.norm == 'rms' else 'LayerNorm'}"
    yield from _flags(model)
    yield from _windows(model)
    yield from _hybrid(plan, model)
    yield from _experts(model)


def _flags(model: Model) -> Iterator[str]:
    if model.mlp in ("swiglu", "squared_relu"):
        yield f"--{model.mlp.replace('_', '-')}"
    if not model.mlp_bias:
        yield "--disable-bias-linear"
        if model.qkv_bias:
            yield "--add-qkv-bias"
    if model.qk_norm:
        yield "--qk-layernorm"
    if not model.tied_embeddings:
        yield "--untie-embeddings-and-output-weights"
    if model.mtp_layers and model.pattern is None:
        yield f"--mtp-num-layers {model.mtp_layers * model.mtp_passes}"
    if model.mtp_passes > 1:
        yield "--mtp-use-repeated-layer"


def _unified(plan: Plan, model: Model) -> bool:
    """The pattern says more than a letter for each layer: uneven stages, or modules of multi-token prediction."""
    uneven = plan.pipeline.stage_layers is not None or model.num_layers % (plan.pp * plan.pipeline.virtual_stages)
    return model.mtp_layers > 0 or (plan.pp > 1 and bool(uneven))


def _hybrid(plan: Plan, model: Model) -> Iterator[str]:
    """Pattern and mixers. Chunks of the convolution and the scan have no arguments: what differs is reported on reading back."""
    if model.pattern is None:
        return
    yield "--is-hybrid-model --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
    if not _unified(plan, model):
        yield f'--hybrid-override-pattern="{model.pattern}"'
    else:
        share, rest = divmod(model.num_layers, plan.pp * plan.pipeline.virtual_stages)
        equal = tuple(share + (part < rest) for part in range(plan.pp * plan.pipeline.virtual_stages))
        letters, modules = (
            iter(model.pattern),
            ("/*E" if model.experts else "/*-") * model.mtp_layers * model.mtp_passes,
        )
        stages = ("".join(islice(letters, count)) for count in plan.pipeline.stage_layers or equal)
        yield f'--hybrid-layer-pattern="{"|".join(stages)}{modules}"'
    if model.mamba is not None:
        mamba = model.mamba
        yield f"--mamba-num-heads {mamba.num_heads} --mamba-head-dim {mamba.head_dim}"
        yield f"--mamba-num-groups {mamba.num_groups} --mamba-state-dim {mamba.state_dim}"


def _windows(model: Model) -> Iterator[str]:
    if model.sliding_window is not None:
        yield f"--window-size {model.sliding_window - 1},0"
        if model.global_every:
            yield f"--window-attn-skip-freq {model.global_every}"
    if model.attention_sinks:
        yield "--softmax-type learnable"
    if model.gate_clamp:
        yield f"--activation-func-clamp-value {model.gate_clamp}"


def _experts(model: Model) -> Iterator[str]:
    experts = model.experts
    if experts is None:
        return
    yield f"--num-experts {experts.num_experts} --moe-router-topk {experts.top_k}"
    yield f"--moe-ffn-hidden-size {experts.d_ff or model.d_ff}"
    if experts.latent_dim:
        yield f"--moe-latent-size {experts.latent_dim}"
    if experts.shared_d_ff:
        yield f"--moe-shared-expert-intermediate-size {experts.shared_d_ff}"
    if experts.first_dense_layers:
        rest = model.num_layers - experts.first_dense_layers
        pattern = ",".join(["1", *["0"] * (experts.every - 1)])
        quotient, part = divmod(rest, experts.every)
        tail = f"+[{','.join(pattern.split(',')[:part])}]*1" if part else ""
        yield f'--moe-layer-freq "([0]*{experts.first_dense_layers}+[{pattern}]*{quotient}{tail})"'
    elif experts.every > 1:
        yield f"--moe-layer-freq {experts.every}"
    yield f"--moe-router-score-function {experts.score}"
    if experts.router_dtype == "fp32":
        yield "--moe-router-dtype fp32"
    yield "--moe-grouped-gemm"


def _parallel(plan: Plan, model: Model, stack: Stack) -> Iterator[str]:
    yield f"--tensor-model-parallel-size {plan.tp}"
    yield f"--pipeline-model-parallel-size {plan.pp}"
    if plan.cp > 1:
        kind = "a2a" if plan.cp_exchange == "all_to_all" else "p2p"
        yield f"--context-parallel-size {plan.cp} --cp-comm-type {kind}"
    if plan.ep > 1:
        yield f"--expert-model-parallel-size {plan.ep}"
    if model.experts is not None:
        words = {"all_to_all": "alltoall", "all_gather": "allgather", "deep_ep": "flex --moe-enable-deepep"}
        yield f"--moe-token-dispatcher-type {words[plan.experts.dispatcher]}"
        yield f"--expert-tensor-parallel-size {plan.experts.etp}"
        if plan.experts.overlap:
            yield "--overlap-moe-expert-parallel-comm"
        if plan.experts.capacity_factor is not None:
            yield f"--moe-expert-capacity-factor {plan.experts.capacity_factor}"
    if plan.pp > 1 and plan.axis_order.index("pp") > plan.axis_order.index("dp_shard"):
        yield "--use-tp-pp-dp-mapping"
    if plan.tp > 1 and plan.sequence_parallel:
        yield "--sequence-parallel"
        if stack.overlap.tp == "userbuffers":
            words = {"all_gather": "ag", "reduce_scatter": "rs"}
            yield " ".join(
                ("--tp-comm-overlap", *(f"--disable-tp-comm-overlap-{words[kind]}" for kind in stack.overlap.tp_whole))
            )
    yield from _data_parallel(plan, stack)
    if plan.pp > 1:
        yield from _stages(plan, model)


def _data_parallel(plan: Plan, stack: Stack) -> Iterator[str]:
    if plan.implementation == "fsdp2":
        yield "--use-torch-fsdp2 --no-gradient-accumulation-fusion"
        if plan.zero == 2 or plan.fsdp.reshard_after_forward is False:
            yield "--torch-fsdp2-no-reshard-after-forward"
        return
    if plan.zero:
        yield "--use-distributed-optimizer"
        if plan.zero == 3:
            yield "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
        if plan.dp_replicate > 1:
            yield f"--num-distributed-optimizer-instances {plan.dp_replicate}"
    if stack.overlap.communication and not stack.overlap.late_gradients:
        gathers = plan.zero and not stack.overlap.late_parameters
        yield "--overlap-grad-reduce --overlap-param-gather" if gathers else "--overlap-grad-reduce"


def _stages(plan: Plan, model: Model) -> Iterator[str]:
    """What each stage holds; a layout where the layers do not divide evenly."""
    split, parts = plan.split, plan.pp * plan.pipeline.virtual_stages
    if model.pattern is not None and _unified(plan, model):
        return  # the pattern parts them
    named = [
        f"--decoder-{end}-pipeline-num-layers {count}"
        for end, count in (("first", split.first), ("last", split.last))
        if count is not None
    ]
    counted = {"embedding": split.embedding_as_layer, "loss": split.head_as_layer}
    named += [f"--account-for-{word}-in-pipeline-split" for word, counts in counted.items() if counts]
    if split.explicit is None and (named or model.num_layers % parts == 0):
        yield from named
        if plan.pipeline.virtual_stages > 1:
            yield f"--num-virtual-stages-per-pipeline-rank {plan.pipeline.virtual_stages}"
        return
    share, rest = divmod(model.num_layers, parts)
    counts = split.explicit or tuple(share + (part < rest) for part in range(parts))
    yield f'--pipeline-model-parallel-layout "E{"|".join("t" * count for count in counts)}L"'


def _training(plan: Plan, stack: Stack) -> Iterator[str]:
    yield f"--micro-batch-size {plan.micro_batch_size}"
    yield f"--global-batch-size {plan.global_batch_size}"
    yield f"--seq-length {plan.seq_len}"
    yield from _dtypes(plan)
    if plan.recompute.mode == "selective":
        default = plan.recompute.modules == ("core_attn",)
        modules = " ".join(plan.recompute.modules)
        selective = f"--recompute-granularity selective --recompute-modules {modules}"
        yield "--recompute-activations" if default else selective
    elif plan.recompute.mode == "full":
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if plan.cuda_graphs == ("full_iteration",):
        yield "--cuda-graph-impl full_iteration"
    elif plan.cuda_graphs:
        yield f"--cuda-graph-impl transformer_engine --cuda-graph-modules {' '.join(plan.cuda_graphs)}"
    if not stack.kernels.dropout:
        yield "--attention-dropout 0.0 --hidden-dropout 0.0"
    if stack.kernels.loss not in ("fp32_eager", "fp32_in_place"):
        yield "--cross-entropy-loss-fusion"


def _dtypes(plan: Plan) -> Iterator[str]:
    """Precision of products, gradients and the optimizer."""
    if plan.precision.compute != "fp32":
        fp8 = f"--bf16 --fp8-format hybrid --fp8-recipe {plan.precision.fp8_recipe or 'delayed'}"
        fp4 = "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4"
        yield {"bf16": "--bf16", "fp16": "--fp16", "nvfp4": fp4}.get(plan.precision.compute, fp8)
    if plan.narrow and plan.precision.first_layers_bf16 + plan.precision.last_layers_bf16:
        yield "--first-last-layers-bf16"
        yield f"--num-layers-at-start-in-bf16 {plan.precision.first_layers_bf16} --num-layers-at-end-in-bf16 {plan.precision.last_layers_bf16}"
    if plan.precision.fp8_all_gather:
        yield "--fp8-param-gather"
    if plan.compute_dtype == "bf16" and plan.gradient_dtype == "bf16":
        yield "--grad-reduce-in-bf16"
    if plan.compute_dtype == "fp16" and plan.gradient_dtype == "fp32":
        yield "--accumulate-allreduce-grads-in-fp32"
    if plan.optimizer.kind.startswith("sgd"):
        yield f"--optimizer sgd --sgd-momentum {0.9 if plan.optimizer.kind == 'sgd_momentum' else 0}"
    if plan.optimizer.dtype == "bf16" or plan.precision.master == "fp16":
        yield "--use-precision-aware-optimizer"
    if plan.optimizer.dtype == "bf16":
        yield "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    if plan.precision.master == "fp16":
        yield "--main-params-dtype fp16"
