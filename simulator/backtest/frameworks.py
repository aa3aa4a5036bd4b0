"""Which software a framework's name stands for, and what its documents say where a row is silent.

docs/reference/runs-table.md states the list in words; a test holds the two together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from simulator.plan import DataParallel
from simulator.readers.runs_table import RunRow

FlopConvention = Literal["full_attention", "hardware_2021"]
OptimizerImpl = Literal["foreach", "fused", "loop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRule:
    """What a framework's name says about a run.

    pattern: found in the `framework` column, case ignored; the first rule that matches holds.
    flag: found in the notes too, if given.
    eager, compiled: stack names, chosen by the `compile` column (blank: eager).
    sharded, replicated: whose implementation plays FSDP words (fsdp_full, hsdp, zero2, zero3) and ddp / zero1.
    sharding, recompute: what a blank zero_or_fsdp or act_ckpt means; None refuses the row.
        "products" keeps products and attention whatever a table's "selective" means for the framework.
    sequence_parallel: what a blank seq_parallel means where tp > 1.
    reduce_dtype: what gradients travel in where the notes do not say; None: the implementation's default.
    flop_convention: what the framework's own TFLOP/s count; None refuses rows measured so.
    counts_ends: layers that do not divide over the stages do so with embedding and loss, or the run would not start.
    splits_experts: experts are cut by tp too (Megatron-Core before expert tensor parallelism had a degree of its own).
    """

    pattern: str
    eager: str
    compiled: str
    flag: str = ""
    sharded: DataParallel = "fsdp2"
    replicated: DataParallel | None = None
    sharding: str | None = None
    recompute: Literal["none", "full", "products"] | None = None
    reduce_dtype: Literal["bf16", "fp32"] | None = None
    sequence_parallel: bool = False
    optimizer_impl: OptimizerImpl = "fused"
    flop_convention: FlopConvention | None = None
    splits_experts: bool = False
    counts_ends: bool = False

    def matches(self, row: RunRow) -> bool:
        named = re.search(self.pattern, row.framework, re.IGNORECASE)
        return bool(named and re.search(self.flag, row.notes, re.IGNORECASE))

    def stack(self, *, compiled: bool) -> str:
        return self.compiled if compiled else self.eager


def _megatron(
    pattern: str,
    stack: str,
    *,
    flag: str = "",
    reduce_dtype: Literal["fp32"] | None = None,
    splits_experts: bool = False,
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
        sequence_parallel=True,  # their recipes switch it on wherever tp > 1
        reduce_dtype=reduce_dtype,
        splits_experts=splits_experts,
        counts_ends=True,
    )


FRAMEWORKS: tuple[FrameworkRule, ...] = (
    FrameworkRule(
        pattern=r"llm-foundry|composer",
        eager="llm-foundry-2023",
        compiled="torch-2.11-compiled",
        sharded="fsdp1",
        optimizer_impl="loop",
    ),
    FrameworkRule(
        pattern=r"torchtitan.*2024-0[1-6]",
        eager="torchtitan-2024-04",
        compiled="torchtitan-2024-compiled",
        optimizer_impl="foreach",
    ),
    FrameworkRule(
        pattern=r"torchtitan.*2024",
        eager="torchtitan-2024-eager",
        compiled="torchtitan-2024-compiled",
        optimizer_impl="foreach",
    ),
    FrameworkRule(pattern=r"torchtitan", eager="torchtitan-2025-eager", compiled="torchtitan-2025-compiled"),
    _megatron(r"nemo 24", "nemo-24", splits_experts=True),
    _megatron(r"megatron", "megatron-core-2025-exposed", flag=r"no comm overlap"),
    FrameworkRule(
        pattern=r"megatron-lm \(selene\)",
        eager="megatron-2021",
        compiled="megatron-2021",
        replicated="megatron",
        flop_convention="hardware_2021",
    ),
    FrameworkRule(
        pattern=r"megatron-style gpt",
        eager="megatron-style-2023",
        compiled="megatron-style-2023",
        replicated="megatron",
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
    # Megatron-LM adds and sends gradients in fp32 unless told otherwise (training/arguments.py); NeMo's and Bridge's
    # recipes for speed send bf16
    _megatron(r"megatron-lm|megatron-core ci", "megatron-core-2025", reduce_dtype="fp32"),
    _megatron(r"megatron|nemo", "megatron-core-2025"),
    FrameworkRule(
        pattern=r"internevo",
        eager="internevo-2023",
        compiled="internevo-2023",
        replicated="deepspeed",
    ),
    FrameworkRule(
        pattern=r"maxtext",
        eager="maxtext-2024",
        compiled="maxtext-2024",
        # configs/models/gpu/llama2_7b.yml: remat_policy minimal_flash keeps products and attention
        recompute="products",
        # the partial sums of a product are reduced in its own dtype, before the cast to the weights' fp32
        reduce_dtype="bf16",
        flop_convention="full_attention",
    ),
    FrameworkRule(
        pattern=r"lit-gpt|litgpt",
        eager="llm-lit",
        compiled="llm-lit",
        sharded="fsdp1",
        sharding="fsdp_full",
    ),
    FrameworkRule(
        pattern=r"deepspeed",
        eager="deepspeed-0.14",
        compiled="deepspeed-0.14",
        sharded="deepspeed",
        replicated="deepspeed",
    ),
    # Anything else is taken for plain PyTorch.
    FrameworkRule(pattern=r"", eager="torch-2.6-eager", compiled="torch-2.11-compiled", optimizer_impl="foreach"),
)


def framework_rule(row: RunRow) -> FrameworkRule:
    """The first rule whose pattern and flag the row shows; the last one always does."""
    return next(rule for rule in FRAMEWORKS if rule.matches(row))
