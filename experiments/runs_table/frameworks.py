"""Which software a framework's name stands for, and what its documents say where a row is silent.

docs/reference/runs-table.md states the list in words; a test holds the two together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from simulator.spec.plan import DataParallel
from simulator.studies.backtest.rows import RunRow

FlopConvention = Literal["full_attention", "half_attention_all_weights", "hardware_2021"]
OptimizerImpl = Literal["foreach", "fused", "loop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRule:
    """What a framework's name says about a run.

    pattern: found in the `framework` column, case ignored; the first rule that matches holds.
    flag: found in the notes too, if given.
    one_node: only runs whose GPUs are one node's.
    eager, compiled: stack names, chosen by the `compile` column (blank: eager).
    compiles: what a blank `compile` means.
    sharded, replicated: whose implementation plays FSDP words (fsdp_full, hsdp) and ddp / zero1.
    partitioned: whose plays zero2 and zero3; None: as FSDP words.
    sharding, recompute, micro_batch, global_batch: what a blank zero_or_fsdp, act_ckpt, micro_batch or global_batch means by
        the framework's documents; None: they say nothing. "products" keeps products and attention whatever a table's "selective" means for it.
    recomputes: what was recomputed, whatever act_ckpt says; the rule says how that is known.
    keys: further keys of the plan, by the framework's code.
    untrained: tables of its are of some twenty steps from random weights, which route as they like.
    sequence_parallel: what a blank seq_parallel means where tp > 1.
    reduce_dtype: what gradients travel in where the notes do not say; None: the implementation's default.
    master_dtype: of parameters and optimizer states, where a run in 16 bits keeps none in fp32.
    flop_convention: what the framework's own TFLOP/s count.
    parts: into what a pipeline cuts a rank's whole batch, where that is what stands as its micro-batch: as many as there are
        stages, or single sequences.
    layer_a_stage: a blank vpp in a pipeline means a layer a virtual stage.
    counts_ends: layers that do not divide over the stages do so with embedding and loss, or the run would not start.
    splits_experts: experts are cut by tp too (Megatron-Core before expert tensor parallelism had a degree of its own).
    expert_capacity: rows of an expert over its even share to which its recipes pad it, dropping the rest.
    """

    pattern: str
    eager: str
    compiled: str
    flag: str = ""
    one_node: bool = False
    sharded: DataParallel = "fsdp2"
    replicated: DataParallel | None = None
    partitioned: DataParallel | None = None
    sharding: str | None = None
    recompute: Literal["none", "full", "products"] | None = None
    recomputes: Literal["none"] | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    reduce_dtype: Literal["bf16", "fp32"] | None = None
    master_dtype: Literal["bf16"] | None = None
    keys: tuple[tuple[str, bool], ...] = ()
    untrained: bool = False
    sequence_parallel: bool = False
    compiles: bool = False
    optimizer_impl: OptimizerImpl = "fused"
    flop_convention: FlopConvention = "full_attention"
    splits_experts: bool = False
    parts: Literal["stages", "sequences"] | None = None
    layer_a_stage: bool = False
    counts_ends: bool = False
    expert_capacity: float | None = None

    def matches(self, row: RunRow) -> bool:
        if self.one_node and (row.n_gpus or 1) > (row.gpus_per_node or 1):
            return False
        named = re.search(self.pattern, row.framework, re.IGNORECASE)
        return bool(named and re.search(self.flag, row.notes, re.IGNORECASE))

    def stack(self, row: RunRow) -> str:
        """The stack's name, by the row's `compile`."""
        compiled = row.compile == "y" if row.compile else self.compiles
        return self.compiled if compiled else self.eager


def _megatron(
    pattern: str,
    stack: str,
    *,
    flag: str = "",
    reduce_dtype: Literal["fp32"] | None = None,
    splits_experts: bool = False,
    sequence_parallel: bool = True,
    micro_batch: int | None = None,
    global_batch: int | None = None,
) -> FrameworkRule:
    """Megatron and its children: fused blocks whatever `compile` says; a distributed optimizer where not stated."""
    return FrameworkRule(
        pattern=pattern,
        flag=flag,
        eager=stack,
        compiled=stack,
        sharded="megatron",
        replicated="megatron",
        sharding="zero1",
        recompute="none",
        sequence_parallel=sequence_parallel,  # most children's recipes switch it on wherever tp > 1
        micro_batch=micro_batch,
        global_batch=global_batch,
        reduce_dtype=reduce_dtype,
        splits_experts=splits_experts,
        counts_ends=True,
    )


# Frameworks without a measured coefficient; docs/reference/runs-table.md has the sources of their defaults.
OTHERS: tuple[FrameworkRule, ...] = (
    FrameworkRule(
        pattern=r"nanotron",
        eager="nanotron-2025",
        compiled="nanotron-2025",
        replicated="nanotron",
        recompute="none",
        reduce_dtype="fp32",
        sequence_parallel=True,
    ),
    FrameworkRule(
        pattern=r"kempnerforge",
        eager="kempnerforge-2026-eager",
        compiled="kempnerforge-2026-compiled",
        sharding="fsdp_full",
        reduce_dtype="fp32",
        master_dtype="bf16",
        sequence_parallel=True,
        keys=(("sync_every_micro_batch", False), ("reshard_after_forward", True)),
        untrained=True,
    ),
    FrameworkRule(
        pattern=r"gpt-?neox",
        eager="gpt-neox-2023",
        compiled="gpt-neox-2023",
        sharded="deepspeed",
        replicated="deepspeed",
        sharding="zero1",
    ),
    FrameworkRule(
        pattern=r"coloss",
        eager="colossalai-2024",
        compiled="colossalai-2024",
        sharded="fsdp1",
        partitioned="deepspeed",
        replicated="deepspeed",
    ),
    FrameworkRule(
        pattern=r"torchtune",
        eager="torchtune-2024",
        compiled="torch-2.11-compiled",
        sharding="fsdp_full",
        recompute="full",
        micro_batch=2,
        reduce_dtype="bf16",
        master_dtype="bf16",
    ),
    FrameworkRule(
        pattern=r"fms|foundation.model.stack|\bibm\b",
        eager="torch-2.6-eager",
        compiled="fms-fsdp-2024",
        compiles=True,
        sharded="fsdp1",
        sharding="hsdp",
        recompute="none",
        micro_batch=2,
        reduce_dtype="bf16",
        optimizer_impl="foreach",
    ),
    FrameworkRule(
        pattern=r"olmo.?core",
        eager="torchtitan-2025-eager",
        compiled="torchtitan-2025-compiled",
        sharding="fsdp_full",
    ),
    FrameworkRule(
        pattern=r"olmo",
        eager="olmo-2024",
        compiled="torchtitan-2024-compiled",
        sharded="fsdp1",
        sharding="fsdp_full",
        recompute="none",
        reduce_dtype="fp32",
        optimizer_impl="foreach",
    ),
    FrameworkRule(
        pattern=r"litgpt|lightning",
        eager="litgpt-2024",
        compiled="torchtitan-2024-compiled",
        compiles=True,
        sharded="fsdp1",
        sharding="hsdp",
        recompute="none",
        optimizer_impl="foreach",
    ),
    FrameworkRule(
        pattern=r"\bswift\b",
        eager="transformers-2024",
        compiled="torch-2.11-compiled",
        sharded="fsdp1",
        partitioned="deepspeed",
        replicated="deepspeed",
        recompute="full",
        micro_batch=1,
        global_batch=16,  # gradient_accumulation_steps reaches it unless given
        optimizer_impl="foreach",
    ),
    FrameworkRule(
        pattern=r"hugging|\btransformers\b|accelerate|axolotl|llama.?factory|\btrl\b|unsloth|\bhf\b|aws fsdp",
        eager="transformers-2024",
        compiled="torch-2.11-compiled",
        sharded="fsdp1",
        partitioned="deepspeed",
        replicated="deepspeed",
        optimizer_impl="foreach",
    ),
    # arXiv 2407.21783, section 3.3.2: gradients gathered and summed in fp32, no recomputation at 8K tokens, interleaved
    # stages with a layer less in the first and the last, which the embedding and the head even out
    FrameworkRule(
        pattern=r"^(?!.*fsdp).*(\bmeta\b|llama.?3)",
        eager="torch-2.6-eager",
        compiled="torch-2.11-compiled",
        sequence_parallel=True,
        recompute="none",
        reduce_dtype="fp32",
        layer_a_stage=True,
        counts_ends=True,
    ),
)
_MAXTEXT = FrameworkRule(
    pattern=r"maxtext|\bjax\b|levanter|axlearn|paxml|praxis|t5x|easylm|haliax",
    eager="maxtext-2024",
    compiled="maxtext-2024",
    # configs/models/gpu/llama2_7b.yml: remat_policy minimal_flash keeps products and attention
    recompute="products",
    sharding="fsdp_full",  # configs/base.yml: ici_fsdp_parallelism takes what no other axis does
    # the partial sums of a product are reduced in its own dtype, before the cast to the weights' fp32
    reduce_dtype="bf16",
)
FRAMEWORKS: tuple[FrameworkRule, ...] = (
    # Its benchmark script writes the precision as it is told ("bf16") and PURE for the sweep of April 2023, in images of torch
    # 1.13.1; "amp_bf16" and DEFAULT from October 2023 on
    FrameworkRule(
        pattern=r"llm-foundry|composer",
        flag=r"^(?!.*amp_bf16).*(precision=bf16\b|mixed_precision=PURE)",
        eager="llm-foundry-2023-04",
        compiled="torch-2.11-compiled",
        sharded="fsdp1",
        reduce_dtype="bf16",  # DEFAULT sets no reduce_dtype before Composer 0.16, which is that of the parameters
        optimizer_impl="loop",
    ),
    FrameworkRule(
        pattern=r"llm-foundry|composer",
        eager="llm-foundry-2023",
        compiled="torch-2.11-compiled",
        sharded="fsdp1",
        reduce_dtype="fp32",  # Composer 0.16's mixed_precision DEFAULT
        optimizer_impl="loop",
    ),
    FrameworkRule(
        pattern=r"torchtitan.*2024-0[1-6]",
        eager="torchtitan-2024-04",
        compiled="torchtitan-2024-compiled",
        sharding="fsdp_full",  # data_parallel_shard_degree is -1: all ranks that no other degree takes
        parts="stages",  # pipeline_parallel_microbatches is the degree unless given
        optimizer_impl="foreach",
    ),
    FrameworkRule(
        pattern=r"torchtitan.*2024",
        eager="torchtitan-2024-eager",
        compiled="torchtitan-2024-compiled",
        sharding="fsdp_full",  # data_parallel_shard_degree is -1: all ranks that no other degree takes
        parts="stages",  # pipeline_parallel_microbatches is the degree unless given
        optimizer_impl="foreach",
    ),
    FrameworkRule(
        pattern=r"torchtitan",
        eager="torchtitan-2025-eager",
        compiled="torchtitan-2025-compiled",
        sharding="fsdp_full",
        parts="sequences",  # pipeline_parallel_microbatch_size is 1 from April 2025 on
    ),
    # recipes of mixtures for speed drop tokens: MegatronTokenDropCallback (NeMo, nemo/lightning/pytorch/callbacks), and
    # dgxc-benchmarking, grok1/grok1_314b.yaml: moe_expert_capacity_factor 1.0, moe_pad_expert_input_to_capacity
    replace(_megatron(r"nemo 2[2-4]", "nemo-24", splits_experts=True), expert_capacity=1.0),
    replace(_megatron(r"nemo 25", "megatron-core-2025"), expert_capacity=1.0),
    _megatron(r"megatron", "megatron-core-2025-exposed", flag=r"no comm overlap"),
    FrameworkRule(
        pattern=r"megatron-lm \(selene\)",
        flag=r"2205\.05198",  # its paper, with sequence parallelism; the other rows are of arXiv 2104.04473
        eager="megatron-2022",
        compiled="megatron-2022",
        replicated="megatron",
        flop_convention="hardware_2021",
    ),
    FrameworkRule(
        pattern=r"megatron-lm \(selene\)",
        eager="megatron-2021",
        compiled="megatron-2021",
        replicated="megatron",
        flop_convention="hardware_2021",
    ),
    # Sums of one layer's and the head's times, to the last digit linear in layers and micro-batches, of a layer that runs
    # once each way: docs/background/host.md
    FrameworkRule(
        pattern=r"megatron-style gpt",
        one_node=True,
        eager="megatron-style-2023-by-layer",
        compiled="megatron-style-2023-by-layer",
        replicated="megatron",
        recomputes="none",
    ),
    # "All data points here are collected using Megatron-DeepSpeed": data/README.md of the authors
    FrameworkRule(
        pattern=r"megatron-style gpt",
        eager="megatron-deepspeed-2022",
        compiled="megatron-deepspeed-2022",
        replicated="deepspeed",
    ),
    FrameworkRule(
        pattern=r"megatron-deepspeed",
        flag=r"CUDA_LAUNCH_BLOCKING",
        eager="megatron-deepspeed-2022-blocking",
        compiled="megatron-deepspeed-2022-blocking",
        sharded="deepspeed",
        replicated="deepspeed",
    ),
    FrameworkRule(
        pattern=r"megatron-deepspeed",
        eager="megatron-deepspeed-2022",
        compiled="megatron-deepspeed-2022",
        sharded="deepspeed",
        replicated="deepspeed",
    ),
    replace(
        _megatron(r"megatron.*\b20(19|2[0-2])\b", "megatron-2021", sequence_parallel=False),
        flop_convention="hardware_2021",
    ),
    _megatron(r"megatron.*\b202[34]\b", "nemo-24", reduce_dtype="fp32", splits_experts=True),
    # docs/source_en/Megatron-SWIFT/Command-line-parameters.md: sequence_parallel and overlap_grad_reduce are off by default,
    # micro_batch_size is 1
    _megatron(
        r"megatron.*swift|swift.*megatron",
        "megatron-core-2025-exposed",
        sequence_parallel=False,
        micro_batch=1,
        global_batch=16,
    ),
    # Megatron-LM adds and sends gradients in fp32 unless told otherwise (training/arguments.py); NeMo's and Bridge's
    # recipes for speed send bf16
    _megatron(r"megatron-lm|megatron-core ci", "megatron-core-2025", reduce_dtype="fp32"),
    _megatron(r"megatron-bridge 0\.\d", "megatron-bridge-package-2025"),
    _megatron(
        r"megatron-bridge \d\d\.\d\d", "megatron-bridge-2025"
    ),  # releases of NeMo's containers: recipes for speed
    _megatron(r"megatron|nemo|megascale|mindspeed", "megatron-core-2025"),
    FrameworkRule(
        pattern=r"internevo",
        eager="internevo-2023",
        compiled="internevo-2023",
        replicated="internevo",
    ),
    # the table of src/maxtext/configs/gpu/a3/llama_2_7b/README.md is of 2024-04-09
    replace(_MAXTEXT, flag=r'"Expected performance results" A3 VMs', flop_convention="half_attention_all_weights"),
    _MAXTEXT,
    FrameworkRule(
        pattern=r"lit-gpt",  # LitGPT's earlier name, and TinyLlama's fork
        eager="llm-lit",
        compiled="llm-lit",
        sharded="fsdp1",
        sharding="fsdp_full",
    ),
    *OTHERS,
    FrameworkRule(
        pattern=r"deepspeed",
        eager="deepspeed-0.14",
        compiled="deepspeed-0.14",
        sharded="deepspeed",
        replicated="deepspeed",
    ),
    # Anything else is taken for plain PyTorch, whose FSDP is the first one unless it is called FSDP2.
    FrameworkRule(
        pattern=r"fsdp(?! ?v?2)",
        eager="torch-2.6-eager",
        compiled="torch-2.11-compiled",
        sharded="fsdp1",
        sharding="fsdp_full",
        optimizer_impl="foreach",
    ),
    FrameworkRule(pattern=r"", eager="torch-2.6-eager", compiled="torch-2.11-compiled", optimizer_impl="foreach"),
)


def framework_rule(row: RunRow) -> FrameworkRule:
    """The first rule whose pattern and flag the row shows; the last one always does."""
    return next(rule for rule in FRAMEWORKS if rule.matches(row))
