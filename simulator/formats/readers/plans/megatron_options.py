"""Megatron-LM's arguments that no field of Model or Plan takes, as of core 0.14 (megatron/training/arguments.py)."""

from __future__ import annotations

import re
from typing import Final

from simulator.formats.readers.plans.reading import Off

# What a step neither waits for nor keeps: data, learning rate, seeds, logging, checkpoints (asked for as [checkpoint]),
# evaluation, fault tolerance of the job, launchers' addresses. Clipping and its norm are in every measured stack.
NO_EFFECT: Final = re.compile(
    r"""(log|tensorboard|wandb|one-logger|timing|profile|straggler|inprocess|retro(?!-add)|vocab-(file|extra)|merge-file
    |tokenizer|tiktoken|data-(path|args|cache|impl)|dataloader|split$|train-(iters|samples|data)|valid-data|test-data|per-split|lr|min-lr|warmup|weight-decay
    |start-weight|end-weight|adam-|adlr|clip-grad|seed|init-method|embedding-init|save|load|ckpt|dist-ckpt|eval|exit|seed
    |non-persistent|async-save|auto-detect-ckpt|replication|use-checkpoint-opt|use-dist-ckpt|use-persistent|finetune
    |pretrained-checkpoint|override-opt|decoupled|initial-loss|min-loss|loss-scale|hysteresis|rotary-(base|scaling)
    |rope-scaling|use-rope-scaling|norm-epsilon|mid-level|num-workers|num-dataset|object-storage|eod-mask|reset-
    |distributed-(backend|timeout)|local-rank|master|node-rank|rdzv|tee$|max-restarts|role$|manual-gc|rerun|error-inj
    |result-rejected|iterations-to-skip|check-for|no-check-for|no-save|no-load|no-create-attention-mask|fsdp-manual-registration|no-one-logger|no-log|no-mmap|no-bert
    |no-initialization|no-strict|mock-data|bert-|ict-|biencoder|titles|query-in|evidence|block-data|embedding-path
    |indexer|retriever|img-|num-classes|num-channels|patch-dim|dino|vision|classes-fraction|mask-|short-seq|sample-rate
    |moe-(aux|z)-loss|moe-router-(enable-expert-bias|bias-update|topk-scaling|pre-softmax|num-groups|group-topk)
    |moe-(input-jitter|per-layer-logging|upcycling|use-upcycling)|full-validation|multiple-validation|test-mode|msc
    |disable-msc|app-tag|config-logger|enable-ft|calc-ft|run-workload|record-memory|memory-snapshot|use-pytorch-prof
    |mtp-loss|apply-layernorm-1p|rampup-end|use-mcore-models|te-rng|inference|max-tokens-to-oom|output-bert
    |cuda-graph-warmup|no-use-tokenizer|no-manual-gc|barrier|no-barrier|disable-straggler|mscale|kitchen-recipe
    |exit-on-missing|ckpt-convert|data-parallel-random-init|train-sync|use-cpu-init|no-position-embedding
    |high-priority|nccl-communicator|fp8-(margin|interval|amax)|onnx-safe|enable-one-logger|sft-tokenizer|skip-train
    |node_rank|master_addr|master_port|rdzv_|max_restarts|log_dir|use-tokenizer|make-vocab|tokenizer_|no-gloo
    |disable-gloo|deepspeed-activation-checkpointing|standalone|start-method|monitor|redirects|pipeline-model-parallel-comm-backend)""",
    re.VERBOSE,
)

OFF: Final = {
    "--rampup-batch-size": Off("the step of the full batch is predicted"),
    "--distribute-saved-activations": Off("checkpoints are kept whole on each tensor-parallel rank here"),
    "--no-overlap-p2p-communication": Off("messages between stages run beside compute here where the schedule allows"),
    "--overlap-p2p-communication-warmup-flush": Off("overlap of messages in warm-up and flush"),
    "--microbatch-group-size-per-virtual-pipeline-stage": Off("groups of pp micro-batches are taken"),
    "--defer-embedding-wgrad-compute": Off("the head's weight gradients are computed where they arise here"),
    "--delay-wgrad-compute": Off("weight gradients are computed where they arise here"),
    "--ddp-bucket-size": Off("one reduction a unit is taken"),
    "--ddp-num-buckets": Off("one reduction a unit is taken"),
    "--ddp-pad-buckets-for-high-nccl-busbw": Off("padding of buckets"),
    "--overlap-param-gather-with-optimizer-step": Off("the gather begins after the optimizer here"),
    "--no-align-grad-reduce": Off("when each stage reduces"),
    "--no-align-param-gather": Off("when each stage gathers"),
    "--no-scatter-gather-tensors-in-pipeline": Off("messages between stages are split over tensor-parallel ranks here"),
    "--use-nccl-ub": Off("user buffers of NCCL"),
    "--use-sharp": Off("reductions in the switches"),
    "--fsdp-double-buffer": Off("buffers of Megatron-FSDP"),
    "--suggested-communication-unit-size": Off("units of Megatron-FSDP"),
    "--keep-fp8-transpose-cache": Off("transposed fp8 weights"),
    "--enable-full-sharding-in-hsdp": Off("optimizer states sharded over replicas"),
    "--hierarchical-context-parallel-sizes": Off("two levels of context parallelism"),
    "--optimizer-cpu-offload": Off("Megatron's optimizer in host memory: predicted as if in HBM"),
    "--optimizer-offload-fraction": Off("a fraction of the optimizer in host memory", ("1.0", 1.0)),
    "--use-torch-optimizer-for-cpu-offload": Off("which CPU optimizer"),
    "--overlap-cpu-optimizer-d2h-h2d": Off("copies of an optimizer in host memory"),
    "--no-pin-cpu-grads": Off("pinned gradients"),
    "--no-pin-cpu-params": Off("pinned parameters"),
    "--fp32-residual-connection": Off("the residual stream is kept in the compute dtype here"),
    "--fp16-lm-cross-entropy": Off("the loss is computed in fp32 here"),
    "--attention-softmax-in-fp32": Off("softmax in fp32"),
    "--apply-query-key-layer-scaling": Off("softmax in fp32"),
    "--disable-bf16-reduced-precision-matmul": Off("sums of products in fp32"),
    "--reuse-grad-buf-for-mxfp8-param-ag": Off("buffers of fp8 weights"),
    "--no-fp8-wgrad": Off("weight gradients run in fp8 here"),
    "--no-masked-softmax-fusion": Off("an unfused softmax"),
    "--no-bias-gelu-fusion": Off("unfused bias and GELU"),
    "--no-bias-swiglu-fusion": Off("an unfused SwiGLU"),
    "--no-bias-dropout-fusion": Off("unfused bias and dropout"),
    "--no-rope-fusion": Off("unfused rotary embeddings"),
    "--no-persist-layer-norm": Off("another layer-norm kernel"),
    "--use-fused-weighted-squared-relu": Off("a fused activation of experts"),
    "--tp-comm-overlap-rs-dgrad": Off("part of the tensor-parallel overlap"),
    "--disable-tp-comm-bulk-dgrad": Off("part of the tensor-parallel overlap"),
    "--disable-tp-comm-bulk-wgrad": Off("part of the tensor-parallel overlap"),
    "--disable-tp-comm-split-ag": Off("part of the tensor-parallel overlap"),
    "--disable-tp-comm-split-rs": Off("part of the tensor-parallel overlap"),
    "--tp-comm-overlap-cfg": Off("how the overlap is cut"),
    "--tp-comm-bootstrap-backend": Off("who sets the overlap up", ("nccl", "mpi", "gloo")),
    "--no-async-tensor-model-parallel-allreduce": Off("tensor-parallel reductions beside the backward"),
    "--empty-unused-memory-level": Off("the cache is emptied between steps", ("0", 0)),
    "--deterministic-mode": Off("deterministic kernels"),
    "--calculate-per-token-loss": Off("one more reduction"),
    "--check-weight-hash-across-dp-replicas-interval": Off("checks of weights"),
    "--moe-shared-expert-overlap": Off("shared experts beside the exchange"),
    "--moe-layer-recompute": Off("checkpoints of the experts"),
    "--moe-use-legacy-grouped-gemm": Off("other kernels of the experts"),
    "--moe-pad-expert-input-to-capacity": Off(
        "inputs are padded or dropped to the capacity factor, where there is one", (True, False)
    ),
    "--moe-token-drop-policy": Off("which tokens are dropped", ("probs",)),
    "--moe-router-load-balancing-type": Off(
        "sinkhorn rounds until it converges, and the host waits for each",
        ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    ),
    "--moe-router-fusion": Off("a fused router"),
    "--moe-router-padding-for-fp8": Off("padding of experts' tokens"),
    "--moe-deepep-num-sms": Off("DeepEP's kernels"),
    "--moe-permute-fusion": Off("fused permutation"),
    "--moe-apply-probs-on-input": Off("where probabilities are applied"),
    "--moe-extended-tp": Off("experts over tensor and data parallel ranks"),
    "--qk-l2-norm": Off("a norm without weights over Q and K"),
    "--no-rope-freq": Off("layers without positions"),
    "--heterogeneous-layers-config-path": Off("layers that differ"),
    "--heterogeneous-layers-config-encoded-json": Off("layers that differ"),
    "--spec": Off("a layer's make-up of its own"),
    "--yaml-cfg": Off("a second file of settings"),
    "--retro-add-retriever": Off("retrieval"),
    "--encoder-num-layers": Off("an encoder"),
    "--decoder-num-layers": Off("an encoder and a decoder"),
    "--apply-residual-connection-post-layernorm": Off("residuals after the norm"),
    "--use-checkpoint-args": Off("the checkpoint's own arguments"),
    "--use-mp-args-from-checkpoint-args": Off("the checkpoint's own degrees"),
    "--sft": Off("sequences of several lengths"),
    "--no-gradient-reduce-div-fusion": Off("a division of gradients"),
    "--ddp-average-in-collective": Off("a division of gradients"),
    "--use-ring-exchange-p2p": Off("other messages between stages"),
    "--symmetric-ar-type": Off("other all-reduces"),
    "--use-legacy-models": Off("models before Megatron-Core"),
    "--init-model-with-meta-device": Off("how memory is first filled"),
    "--moe-router-force-load-balancing": Off("equal loads of experts"),
    "--kitchen-config-file": Off("another quantisation"),
    "--cpu-offload": Off("Megatron-DeepSpeed's optimizer in host memory"),
    "--deepspeed_config": Off("DeepSpeed's own file: what it says beyond --zero-stage is not read with the script"),
    "--partition-activations": Off("checkpoints are kept whole on each tensor-parallel rank"),
    "--no-pipeline-parallel": Off("DeepSpeed's other engine"),
    "--embed-layernorm": Off("a norm behind the embedding"),
    "--sync-tp-duplicated-parameters": Off("copies of parameters that are kept in step"),
}
