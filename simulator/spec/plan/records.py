"""The records of a plan: what belongs to its pipeline, its experts, its precision, its recomputation, or one implementation."""

from __future__ import annotations

import re
from typing import Final, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from simulator.base.schema import Strict
from simulator.base.units import Bytes
from simulator.spec.plan.compression import NO_HOOK, NO_ONE_BIT, NO_ZEROPP, CommHook, OneBit, ZeroPlusPlus
from simulator.spec.plan.optimizers import Kind
from simulator.spec.plan.order import MAX_COUNT, MAX_SIZE
from simulator.spec.plan.schedules import Schedule

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "nvfp4"]
Fp8Recipe = Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]
RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "moe_act", "mlp", "moe", "shared_experts"]


class PipelinePlan(Strict):
    """`[plan.pipeline]`: the order in which a stage works, and which layers it holds."""

    schedule: Schedule | None = Field(
        default=None,
        description="the order in which a pipeline stage works ([background](../background/pipeline.md)); "
        "not set: `1f1b`, or `interleaved` with `virtual_stages`",
    )
    virtual_stages: int = Field(
        ge=1, le=MAX_COUNT, default=1, description="chunks of layers that a pipeline stage holds"
    )
    first_stage_layers: int | None = Field(
        ge=0, le=MAX_COUNT, default=None, description="layers of the first stage; not set: an equal share"
    )
    last_stage_layers: int | None = Field(
        ge=0, le=MAX_COUNT, default=None, description="layers of the last stage; not set: an equal share"
    )
    stage_layers: tuple[int, ...] | None = Field(
        default=None, strict=False, description="layers of every virtual stage, in order; not set: equal shares"
    )
    embedding_as_layer: bool = Field(
        default=False,
        description="the first virtual stage has one layer less, as if the embedding were one; layers and such ends "
        "divide by pp × virtual_stages",
    )
    head_as_layer: bool = Field(
        default=False, description="the last virtual stage has one layer less, as if head and loss were one"
    )

    @field_validator("stage_layers", mode="before")
    @classmethod
    def _numbers(cls, value: object) -> object:
        """A flag's text, "3,4,4,3", as the list that a file has."""
        if isinstance(value, str) and re.fullmatch(r"\s*\d{1,18}(\s*,\s*\d{1,18})*\s*", value):
            return [int(number) for number in value.split(",")]
        return value


class ExpertsPlan(Strict):
    """`[plan.experts]`: how rows reach their experts, and how evenly."""

    etp: int = Field(
        ge=1,
        le=MAX_COUNT,
        default=1,
        description="ranks that each expert is split over: 1 or `tp`. `ep · etp` divides `dp_shard · cp · tp` (with `zero = 0` "
        "also `dp_replicate`); what is left are an expert's replicas, over which its states are sharded "
        "([background](../background/experts.md)). Megatron and FSDP2",
    )
    dispatcher: Literal["all_to_all", "all_gather", "deep_ep"] = Field(
        default="all_to_all",
        description="how rows reach their experts: each on its own way; every token to all ranks of `ep`, which pick "
        "theirs; or a token once to each node (or rank inside a node) that has one of its experts (DeepEP, HybridEP)",
    )
    overlap: bool = Field(
        default=False,
        description="[exchanges of experts run beside another micro-batch's compute](../background/experts.md), layer by "
        "layer; in a pipeline with `virtual_stages` or a DualPipe",
    )
    capacity_factor: PositiveFloat | None = Field(
        le=1000,
        default=None,
        description="rows that an expert takes of a micro-batch, over the mean, padded or dropped to it; not set: whatever "
        "comes (dropless)",
    )
    imbalance: float = Field(
        ge=1,
        le=1000,
        default=1.0,
        description="rows of the busiest rank over the mean; the others wait for it. 1 is balanced, as benchmarks force it",
    )
    imbalance_sigma: NonNegativeFloat = Field(
        le=10,
        default=0.0,
        description="one sigma of that, relative; the prediction's interval grows by what it moves the step",
    )


class PrecisionPlan(Strict):
    """`[plan.precision]`: dtypes. `precision = "fp8"` alone sets `compute`."""

    compute: Precision = Field(
        default="bf16",
        description="dtype of the products, for which the GPU needs matrix units; a study or search that gives none takes "
        "`fp16` on GPUs without bf16 (V100, T4); `nvfp4` (Transformer Engine's recipe) needs a hand-fused stack",
    )
    fp8_recipe: Fp8Recipe | None = Field(
        default=None,
        description="how fp8 products are scaled ([background](../background/ops.md)): by tensor from past maxima or this "
        "one's, by row, by blocks of 128 (weights 128 × 128; Hopper or Blackwell, a hand-fused stack), by blocks of 32 "
        "(Blackwell); not set: the stack's habit",
    )
    fp8_all_gather: bool = Field(
        default=False,
        description="matrices of layers are gathered in fp8: FSDP2 (torchao's `enable_fsdp_float8_all_gather`, scaled by "
        "tensor), Megatron with `zero = 1` (`--fp8-param-gather`)",
    )
    first_layers_bf16: NonNegativeInt = Field(
        le=MAX_COUNT,
        default=0,
        description="layers at the model's beginning whose products stay in bf16 while the others' are narrower",
    )
    last_layers_bf16: int = Field(ge=0, le=MAX_COUNT, default=0, description="the same at the model's end")
    master: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="dtype that the optimizer sees")
    reduce: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="dtype that gradients travel in; not set: the implementation's"
    )


class OptimizerPlan(Strict):
    """`[plan.optimizer]`: which optimizer steps. `optimizer = "adamw"` alone sets `kind`."""

    kind: Kind = Field(
        default="adamw",
        description="the optimizer: also bitsandbytes' with states of 8 bits (`adam8bit`, `lion8bit`), "
        "or in unified memory whose pages go to the host where the GPU has no room (`paged_…`), and torchao's of 8 and 4 "
        "(`torchao_adam8bit`, `adam4bit`); transformers' `adafactor`; `muon`, which orthogonalises the moment of each matrix of a layer (torch's: five "
        "Newton-Schulz steps) and leaves all else to AdamW; DeepSpeed's `lamb`, whose steps are scaled by the norms of each tensor; `galore`, whose moments are of gradients projected to `galore_rank` "
        "(the decomposition that finds the projection every 200 steps is not counted)",
    )
    impl: Literal["foreach", "fused", "loop"] = Field(
        default="fused", description="its kernels: one for lists of tensors, one for all, or tensor by tensor"
    )
    dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="dtype of the moments")
    galore_rank: int = Field(ge=1, le=MAX_COUNT, default=128, description="of `galore`'s projections")
    wide_embedding: bool = Field(
        default=False,
        description="states of 8 bits beside an embedding whose own stay in fp32, as transformers' Trainer asks of bitsandbytes; "
        "where GPUs hold whole parameters and all states (`ddp`, `zero = 0`)",
    )
    in_backward: bool = Field(
        default=False,
        description="each parameter is stepped as its gradient appears, which goes at once (hooks of torch's tutorial, torchtune, "
        "LOMO); DDP's implementation on one GPU, one micro-batch",
    )


class RecomputePlan(Strict):
    """`[plan.recompute]`: activation checkpointing. `recompute = "full"` alone sets `mode`."""

    mode: Literal["none", "full", "selective", "every_k"] = Field(
        default="none", description="which activations are computed again in the backward"
    )
    every: int = Field(ge=1, le=MAX_COUNT, default=1, description="`every_k`: each k-th block is checkpointed")
    modules: tuple[RecomputeModule, ...] = Field(
        default=("core_attn",),
        strict=False,
        description="what selective recomputation of hand-fused stacks runs again, in Megatron's words "
        "(`--recompute-modules`)",
    )

    @field_validator("modules", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        return words_of(value)


class FsdpPlan(Strict):
    """`[plan.fsdp]`: when FSDP gathers and frees parameters."""

    reshard_after_forward: bool | int | None = Field(
        default=None,
        description="FSDP2: parameters are freed after the forward, or kept between that many neighbours, a divisor of "
        "`dp_shard`; not set: all groups but the root",
    )
    forward_prefetch: int = Field(ge=0, le=MAX_COUNT, default=0, description="groups gathered ahead in the forward")
    backward_prefetch: int = Field(ge=0, le=MAX_COUNT, default=1, description="groups gathered ahead in the backward")
    limit_all_gathers: bool = Field(default=True, description="FSDP1: at most two gathers in flight")
    mixed_units: bool = Field(
        default=False,
        description="FSDP1 with `use_orig_params`: adapters stand in their layer's flat vector instead of units of their own, so "
        "that gradients are made, kept and reduced of the frozen weights too",
    )
    shard_sizes: Literal["equal", "by_memory"] = Field(
        default="equal",
        description="what each rank holds of the shards: equal parts, or parts in proportion to its GPU's free memory where "
        "GPUs differ ([background](../background/heterogeneous.md#uneven-shards))",
    )
    shard_reserve_bytes: Bytes = Field(
        ge=0,
        le=MAX_SIZE,
        default=0,
        description="`by_memory`: of each GPU, what is left for activations and not counted",
    )
    shard_share: PositiveFloat = Field(
        le=1e6,
        default=1.0,
        description="of an equal part, what a rank holds; `by_memory` sets it for each kind of GPU",
    )


class DdpPlan(Strict):
    """`[plan.ddp]`: the buckets of DDP, and of torch's ZeRO-1 on top of it."""

    gradient_as_bucket_view: bool = Field(default=False, description="gradients are views of the buckets")
    bucket_bytes: Bytes = Field(gt=0, le=MAX_SIZE, default=25 * 2**20, description="bytes of a bucket")
    comm_hook: CommHook = Field(default=NO_HOOK, description="what is done with a bucket instead of an all-reduce")


class DeepSpeedPlan(Strict):
    """`[plan.deepspeed]`: buckets and gathers of DeepSpeed's stages."""

    reduce_bucket_numel: int = Field(
        gt=0, le=MAX_SIZE, default=500_000_000, description="elements of a bucket of gradients"
    )
    prefetch_bucket_numel: int = Field(
        gt=0, le=MAX_SIZE, default=50_000_000, description="stage 3: elements gathered ahead"
    )
    param_persistence_numel: int = Field(
        ge=0,
        le=MAX_SIZE,
        default=100_000,
        description="stage 3, exported and not modelled: smaller parameters stay whole",
    )
    zeropp: ZeroPlusPlus = Field(default=NO_ZEROPP, description="ZeRO++, of stage 3")
    one_bit: OneBit = Field(default=NO_ONE_BIT, description="an optimizer that sends signs, of stage 0")
    hierarchical_gather: bool = Field(
        default=False,
        description="MiCS: groups of several nodes gather between the nodes, then inside them. MiCS itself is stage 3 with "
        "`dp_shard` ranks a group and `dp_replicate` groups ([background](../background/compression.md))",
    )


def words_of(value: object) -> object:
    """A flag's text, "moe_act,layernorm", as the list that a file has."""
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


USUAL_PIPELINE: Final = PipelinePlan()
USUAL_EXPERTS: Final = ExpertsPlan()
USUAL_PRECISION: Final = PrecisionPlan()
USUAL_OPTIMIZER: Final = OptimizerPlan()
NO_RECOMPUTE: Final = RecomputePlan()
USUAL_FSDP: Final = FsdpPlan()
USUAL_DDP: Final = DdpPlan()
USUAL_DEEPSPEED: Final = DeepSpeedPlan()


class Offload(Strict):
    """`[plan.offload]`: what leaves HBM, and how it travels."""

    optimizer: Literal["none", "host", "nvme"] = Field(
        default="none", description="master weights, moments and fp32 gradients; CPU Adam updates them"
    )
    parameters: Literal["none", "host", "nvme"] = Field(
        default="none", description="the shards that blocks are gathered from"
    )
    activations: Literal["none", "peer", "host"] = Field(
        default="none",
        description="what a block saves for its backward; `peer`: to the node's `idle_gpus`, over NVLink",
    )
    prefetch: NonNegativeInt = Field(
        le=MAX_COUNT,
        default=1,
        description="blocks that NVMe reads and activations come ahead of use; 0: on demand, parameters too",
    )
    pinned: bool = Field(
        default=True, description="host memory is page-locked; else copies are staged, and nothing runs beside them"
    )
    sub_group_numel: PositiveInt = Field(
        le=MAX_SIZE,
        default=10**9,
        description="DeepSpeed stage 3: elements that one round of the optimizer updates",
    )
    buffer_count: int = Field(
        ge=4, le=64, default=4, description="fp32 buffers of a sub-group in host memory, with states on NVMe"
    )
    overlap: bool = Field(
        default=True, description="sub-groups are read, updated and written at the same time, in three sets of buffers"
    )
    delayed: bool = Field(
        default=False,
        description="CPU Adam uses the gradients of the step before, beside this step's forward and backward (DeepSpeed, "
        "optimizer on the host; ZeRO-Offload's one-step delay); training sees one stale update",
    )
    migration: Literal["copy", "fault", "prefetch"] = Field(
        default="copy", description="explicit copies, or unified memory by faults or by prefetch"
    )

    @property
    def any(self) -> bool:
        return {self.optimizer, self.parameters, self.activations} != {"none"}


NOTHING_OFFLOADED = Offload()
