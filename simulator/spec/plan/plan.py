"""Plan: how a model is placed and run. `simulator.parallel.legality` checks it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveFloat, field_validator, model_validator

from simulator.base.kernels import Dtype
from simulator.base.presets import facts
from simulator.base.records import Nested
from simulator.base.schema import more_than_once, nearest
from simulator.base.value_errors import OneOf
from simulator.spec.plan.memory import USUAL_MEMORY, MemoryPlan
from simulator.spec.plan.order import AXES, MAX_COUNT, ordered
from simulator.spec.plan.peft import NO_PEFT, PeftPlan
from simulator.spec.plan.records import (
    NO_RECOMPUTE,
    NOTHING_OFFLOADED,
    USUAL_DDP,
    USUAL_DEEPSPEED,
    USUAL_EXPERTS,
    USUAL_FSDP,
    USUAL_OPTIMIZER,
    USUAL_PIPELINE,
    USUAL_PRECISION,
    DdpPlan,
    DeepSpeedPlan,
    ExpertsPlan,
    Fp8Recipe,
    FsdpPlan,
    Offload,
    OptimizerPlan,
    PipelinePlan,
    PrecisionPlan,
    RecomputeModule,
    RecomputePlan,
    words_of,
)
from simulator.spec.plan.schedules import Schedule, Split
from simulator.spec.plan.traits import Traits, default_implementation, implementation_names, traits_of

__all__ = ["CudaGraph", "DataParallel", "Fp8Recipe", "Plan", "RecomputeModule", "ShardingStrategy"]

DataParallel: TypeAlias = Annotated[str, OneOf(implementation_names)]
ShardingStrategy = Literal["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"]

# What one CUDA graph holds of a layer, in Megatron's words (--cuda-graph-modules); or of a step, forward and backward
CudaGraph = Literal["attn", "mamba", "mlp", "moe", "moe_router", "moe_preprocess", "full_iteration"]

FUSED_STACK = "fused-2025"  # of implementations whose layers are Megatron-Core's
_STRATEGY_ZERO = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3}


class Plan(Nested):
    """One way to train a model on a number of devices: dp_replicate × dp_shard × cp × tp × pp of them.

    Fields stand in records (`plan.pipeline.virtual_stages`); keywords, flags and reports also know them by flat names
    (`Plan(virtual_stages=4)`, `plan.copy_with(virtual_stages=4)`).
    """

    flat_names: ClassVar = facts(__file__, "flat_names")

    dp_replicate: int = Field(ge=1, le=MAX_COUNT, default=1, description="data-parallel degree that replicates")
    dp_shard: int = Field(ge=1, le=MAX_COUNT, default=1, description="data-parallel degree that shards")
    cp: int = Field(ge=1, le=MAX_COUNT, default=1, description="context-parallel degree")
    cp_exchange: Literal["ring", "all_to_all"] = Field(
        default="ring",
        description="keys and values pass every rank of `cp`; or each rank gets its part of the heads and the whole sequence "
        "around attention (Ulysses; Megatron's `cp_comm_type` `p2p`, `a2a`)",
    )
    tp: int = Field(ge=1, le=MAX_COUNT, default=1, description="tensor-parallel degree")
    pp: int = Field(ge=1, le=MAX_COUNT, default=1, description="pipeline-parallel degree: stages")
    ep: int = Field(
        ge=1,
        le=MAX_COUNT,
        default=1,
        description="expert-parallel degree: ranks that a layer's experts are dealt to, neighbours inside a stage and, with "
        "`zero` above 0, inside a shard group",
    )
    rank_order: str = Field(
        default="tp-cp-ep-dp-pp",
        description="axes joined by `-`, innermost first: which ranks are neighbours, and so who shares a node "
        "([below](#rank-order))",
    )
    zero: NonNegativeInt = Field(
        le=3,
        default=3,
        description="what is sharded over `dp_shard`: nothing; optimizer state; gradients too; parameters too",
    )
    data_parallel: DataParallel | None = Field(
        default=None,
        description="whose implementation runs; `megatron` with `zero = 3` is Megatron-FSDP; not set: by `zero` `ddp`, "
        "`zero_redundancy`, `fsdp2`, `fsdp2`",
    )
    sharding_strategy: ShardingStrategy | None = Field(
        default=None, description="FSDP1's word for `zero`, instead of it"
    )
    pipeline: PipelinePlan = Field(default=USUAL_PIPELINE, description="schedule and stages of a pipeline")
    experts: ExpertsPlan = Field(default=USUAL_EXPERTS, description="how rows reach their experts, and how evenly")
    micro_batch_size: int = Field(ge=1, le=MAX_COUNT, default=1, description="sequences a rank and micro-batch")
    num_micro_batches: int = Field(
        ge=1, le=MAX_COUNT, default=1, description="micro-batches a step (gradient accumulation)"
    )
    seq_len: int = Field(ge=1, le=MAX_COUNT, default=2048, description="tokens a sequence")
    document_len: int | None = Field(
        ge=1,
        le=MAX_COUNT,
        default=None,
        description="tokens of a document in packed sequences whose attention stays inside documents (`cu_seqlens`, varlen): "
        "where lengths differ, the sum of their squares over their sum. Tiled kernels alone; not set: attention over all of "
        "`seq_len`",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="between the regions that `tp` splits by columns, its ranks split the tokens (arXiv 2205.05198)",
    )
    vocab_parallel: bool = Field(
        default=True, description="`tp` splits the embedding and the LM head too, by vocabulary"
    )
    precision: PrecisionPlan = Field(
        default=USUAL_PRECISION, description="dtypes; a word alone is that of the products"
    )
    optimizer: OptimizerPlan = Field(default=USUAL_OPTIMIZER, description="which optimizer; a word alone is its kind")
    peft: PeftPlan = Field(
        default=NO_PEFT, description="fine-tuning: adapters, frozen weights; a word alone is the method"
    )
    recompute: RecomputePlan = Field(
        default=NO_RECOMPUTE, description="activation checkpointing; a word alone is its mode"
    )
    cuda_graphs: tuple[CudaGraph, ...] = Field(
        default=(),
        strict=False,
        description="what [the host](../background/host.md) launches as one graph of Megatron's (`--cuda-graph-modules`): "
        "parts of each layer (`moe_router` with what comes before it, `moe_preprocess` with `moe_router`, `moe` with all of "
        "that and the experts), or `full_iteration`",
    )
    fsdp: FsdpPlan = Field(default=USUAL_FSDP, description="when FSDP gathers and frees parameters")
    sync_every_micro_batch: bool | None = Field(
        default=None,
        description="gradients are reduced in every micro-batch, not only in the last (`no_sync`); not set: with `zero` 2 and 3",
    )
    ddp: DdpPlan = Field(default=USUAL_DDP, description="buckets of DDP")
    deepspeed: DeepSpeedPlan = Field(default=USUAL_DEEPSPEED, description="buckets and gathers of DeepSpeed")
    sync_every_steps: int = Field(
        ge=1,
        le=MAX_COUNT,
        default=1,
        description="replicas (`dp_replicate`) take so many steps alone and then agree on their parameters; the step predicted "
        "is the mean of that many. DDP and FSDP2 ([background](../background/compression.md))",
    )
    outer_optimizer: Literal["average", "nesterov"] = Field(
        default="average",
        description="how they agree: local SGD, or DiLoCo's outer step (arXiv 2311.08105), whose two tensors stay on the GPU",
    )
    offload: Offload = Field(default=NOTHING_OFFLOADED, description="what leaves the GPU's memory")
    memory_fraction: PositiveFloat = Field(
        le=1,
        default=1.0,
        description="of the device, at most, for the caching allocator (`set_per_process_memory_fraction`)",
    )
    memory: MemoryPlan = Field(default=USUAL_MEMORY, description="how requests for device memory are served")
    stack: str = Field(default="torch-2.6-eager", description="the software that runs: a stack's name or its .toml")

    @field_validator("rank_order")
    @classmethod
    def _names_axes_once(cls, value: str) -> str:
        names = ordered(value)
        known = (*AXES, "dp", "ep")
        wrong = [name for name in value.split("-") if name not in known]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not an axis: {nearest(wrong[0], known) or 'for example tp-cp-ep-dp-pp'}")
        if twice := sorted(more_than_once(names)):
            raise ValueError(f"{', '.join(twice)} in two places: name each axis once (dp is dp_shard and dp_replicate)")
        return value

    @field_validator("cuda_graphs", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        return words_of(value)

    @model_validator(mode="before")
    @classmethod
    def _strategy_is_an_alias(cls, data: object) -> object:
        word = data.get("sharding_strategy") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(word, str) or word not in _STRATEGY_ZERO:
            return data
        stage = _STRATEGY_ZERO[word]
        if data.get("zero", stage) != stage:
            raise ValueError(f"sharding_strategy {word} means zero = {stage}, not {data['zero']}: give one")
        return {**data, "zero": stage, "data_parallel": data.get("data_parallel") or "fsdp1"}

    @property
    def num_devices(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def axis_order(self) -> tuple[str, ...]:
        """The axes of the mesh, outermost first; those of one rank that the order leaves out come first."""
        named = [name for name in reversed(ordered(self.rank_order)) if name != "ep"]
        return (*(axis for axis in AXES if axis not in named), *named)

    @property
    def num_expert_ranks(self) -> int:
        """Ranks among which a stage's experts are dealt, split and, in what is left, sharded or replicated."""
        return self.dp_shard * self.cp * self.tp * (1 if self.zero else self.dp_replicate)

    @property
    def experts_apart(self) -> bool:
        """Experts are sharded and reduced in other groups than the rest of the model."""
        return (self.ep, self.experts.etp) != (1, self.tp)

    @property
    def acts_in_order(self) -> bool:
        """Micro-batches pass in the order of a schedule: in a pipeline, or where a backward runs beside a forward."""
        return self.pp > 1 or self.experts.overlap

    @property
    def pipeline_schedule(self) -> Schedule:
        """The order in which a stage issues its work."""
        if self.pipeline.schedule is not None:
            return self.pipeline.schedule
        return "interleaved" if self.pipeline.virtual_stages > 1 else "1f1b"

    @property
    def sums_replicas(self) -> bool:
        """Replicas reduce their gradients in every step."""
        return self.dp_replicate > 1 and not self.agrees_apart

    @property
    def with_equal_shards(self) -> Plan:
        """The same where all GPUs have the same memory, and so hold the same."""
        return self if self.fsdp.shard_sizes == "equal" else self.copy_with(shard_sizes="equal")

    @property
    def agrees_apart(self) -> bool:
        """Replicas sum no gradients in the backward, but agree behind the optimizer, every `agrees_every` steps."""
        return self.sync_every_steps > 1 or self.deepspeed.one_bit.any

    @property
    def agrees_every(self) -> int:
        return self.deepspeed.one_bit.interval if self.deepspeed.one_bit.any else self.sync_every_steps

    @property
    def split(self) -> Split:
        """How layers are dealt to stages."""
        return Split(
            first=self.pipeline.first_stage_layers,
            last=self.pipeline.last_stage_layers,
            explicit=self.pipeline.stage_layers,
            embedding_as_layer=self.pipeline.embedding_as_layer,
            head_as_layer=self.pipeline.head_as_layer,
            even=self.pipeline.embedding_as_layer or self.pipeline.head_as_layer,  # who counts so refuses the rest
        )

    @property
    def attended_len(self) -> int:
        """Tokens that attend to each other: a sequence, or a document in it."""
        return min(self.seq_len, self.document_len or self.seq_len)

    @property
    def num_data_parallel(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def global_batch_size(self) -> int:
        """Sequences a step."""
        return self.num_data_parallel * self.micro_batch_size * self.num_micro_batches

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len

    @property
    def implementation(self) -> DataParallel:
        """Whose data parallelism runs."""
        if self.data_parallel is not None:
            return self.data_parallel
        return default_implementation(self.zero)

    @property
    def traits(self) -> Traits:
        """What its data parallelism does."""
        return traits_of(self.implementation)

    @property
    def software(self) -> str:
        """The stack that runs: as named, else of the implementation's layers, which are torch's or fused by hand."""
        return FUSED_STACK if self.traits.core_layers and "stack" not in self.model_fields_set else self.stack

    @property
    def recomputes_adapted(self) -> bool:
        """Recomputation beside what is frozen, under which layers below the adapters have a backward too: not inside Megatron's."""
        inside = self.traits.core_layers and self.recompute.mode == "selective"
        return self.peft.any and self.recompute.mode != "none" and not inside

    @property
    def adapters_apart(self) -> bool:
        """FSDP1 wraps adapters as units of their own, as peft's policy has it."""
        return self.traits.wraps_adapters and self.peft.adds and not self.fsdp.mixed_units

    @property
    def mixes_units(self) -> bool:
        """FSDP1 makes gradients of all parameters of a unit that has some to train."""
        return self.traits.wraps_adapters and self.peft.any and not self.adapters_apart

    @property
    def reshard_ranks(self) -> int | None:
        """Neighbours in the shard group that keep a block between them after its forward; None: all, or each the whole.

        torch takes 1 for False and the size of the group for True. ZeRO++'s secondary copy is gathered again likewise.
        """
        near = self.fsdp.reshard_after_forward if self.traits.hooks_modules else self.deepspeed.zeropp.secondary_ranks
        return None if near is None or isinstance(near, bool) or near in (1, self.dp_shard * self.cp) else near

    @property
    def gathers(self) -> bool:
        """Parameters are gathered for use in every micro-batch (FSDP, ZeRO-3)."""
        return self.zero >= self.traits.gathers_from

    @property
    def syncs_every_micro_batch(self) -> bool:
        """FSDP and DeepSpeed's stages 2 and 3 reduce in every micro-batch; the others accumulate locally first."""
        if self.sync_every_micro_batch is not None:
            return self.sync_every_micro_batch
        return self.zero >= 2

    @property
    def gradient_dtype(self) -> str:
        """What gradients travel in: the reduce dtype, or the implementation's default."""
        if self.precision.reduce is not None:
            return self.precision.reduce
        if self.ddp.comm_hook.dtype is not None:
            return self.ddp.comm_hook.dtype
        if self.sums_in_fp32:
            return "fp32"
        habits = {"master": self.precision.master, "compute": self.compute_dtype, "fp32": "fp32"}
        return habits[self.traits.gradient_dtype]

    @property
    def sums_in_fp32(self) -> bool:
        """DeepSpeed's pipelines add bf16 gradients up in fp32 buffers beside them (runtime/bf16_optimizer.py)."""
        return (
            self.traits.sums_in_fp32
            and self.compute_dtype == "bf16"
            and self.pp > 1
            and self.zero < 2
            and self.offload.optimizer == "none"
        )

    @property
    def narrow(self) -> bool:
        """Products of layers have operands of 8 or 4 bits, cast from 16."""
        return self.precision.compute in ("fp8", "nvfp4")

    @property
    def product_dtype(self) -> Dtype:
        """Of the operands of layers' products: what the device's peaks are called by."""
        return "fp4" if self.precision.compute == "nvfp4" else self.precision.compute

    @property
    def compute_dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """Dtype of activations and of gathered parameters (narrower products keep bf16 activations)."""
        if self.precision.compute in ("fp32", "tf32"):
            return "fp32"
        return "fp16" if self.precision.compute == "fp16" else "bf16"
