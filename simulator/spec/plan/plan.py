"""Plan: how a model is placed and run. What contradicts itself, or does not fit, `simulator.parallel.legality` says."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from simulator.base.kernels import Dtype
from simulator.base.schema import Strict, nearest
from simulator.base.units import Bytes
from simulator.base.value_errors import OneOf
from simulator.spec.plan.compression import NO_HOOK, NO_ZEROPP, CommHook, ZeroPlusPlus
from simulator.spec.plan.offload import NOTHING_OFFLOADED, Offload
from simulator.spec.plan.order import AXES, MAX_COUNT, MAX_SIZE, ordered
from simulator.spec.plan.schedules import Schedule, Split
from simulator.spec.plan.traits import Traits, default_implementation, implementation_names, traits_of

DataParallel: TypeAlias = Annotated[str, OneOf(implementation_names)]
ShardingStrategy = Literal["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "nvfp4"]
Fp8Recipe = Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"]

RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "moe_act", "mlp", "moe", "shared_experts"]

# What one CUDA graph holds of a layer, in Megatron's words (--cuda-graph-modules); or of a step, forward and backward
CudaGraph = Literal["attn", "mamba", "mlp", "moe", "moe_router", "moe_preprocess", "full_iteration"]

_STRATEGY_ZERO = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3}


class Plan(Strict):
    """One way to train a model on a number of devices.

    dp_replicate × dp_shard × cp × tp × pp = devices. `zero` says what is sharded over dp_shard: 0 nothing, 1 optimizer
    state, 2 gradients too, 3 parameters too. `data_parallel` says whose implementation runs it (empty: the usual one
    for the stage: ddp, zero_redundancy, fsdp2, fsdp2).

    micro_batch_size is sequences per rank and micro-batch; num_micro_batches accumulates gradients.
    precision is the compute dtype; master_dtype what the optimizer sees; reduce_dtype what gradients travel in
    (empty: PyTorch's default for the implementation).
    """

    dp_replicate: int = Field(ge=1, le=MAX_COUNT, default=1)
    dp_shard: int = Field(ge=1, le=MAX_COUNT, default=1)
    cp: int = Field(ge=1, le=MAX_COUNT, default=1)
    # ring: keys and values pass every rank of cp; all_to_all: each rank gets its part of the heads, all of the sequence
    cp_exchange: Literal["ring", "all_to_all"] = "ring"
    tp: int = Field(ge=1, le=MAX_COUNT, default=1)
    pp: int = Field(ge=1, le=MAX_COUNT, default=1)
    # Experts are dealt to ep ranks, each of them split by columns and rows over etp: groups of neighbours inside a stage
    # and, with zero > 0, inside a shard group. What is left are the replicas of an expert.
    ep: int = Field(ge=1, le=MAX_COUNT, default=1)
    etp: int = Field(ge=1, le=MAX_COUNT, default=1)
    # How rows reach their experts: each on its own way; every token to all ranks, which pick theirs; or a token once to each
    # node (inside a node: rank) that has one of its experts, where it is copied (DeepEP, HybridEP)
    dispatcher: Literal["all_to_all", "all_gather", "deep_ep"] = "all_to_all"
    # Their exchanges run beside another micro-batch's compute: a forward and a backward at once, layer by layer
    expert_overlap: bool = False
    # Rows that an expert takes of a micro-batch over the mean, padded or dropped to it; None: whatever comes (dropless)
    expert_capacity_factor: float | None = Field(gt=0, le=1000, default=None)
    # Rows of the busiest rank over the mean, which all others wait for. 1: balanced, as benchmarks force it
    expert_imbalance: float = Field(ge=1, le=1000, default=1.0)
    # One sigma of that, relative: the interval of a prediction grows by what it moves. 0: known
    expert_imbalance_sigma: float = Field(ge=0, le=10, default=0.0)
    # Which axes neighbouring ranks differ in, innermost first, as Megatron writes it. dp: dp_shard inside dp_replicate
    rank_order: str = "tp-cp-ep-dp-pp"

    zero: int = Field(ge=0, le=3, default=3)
    data_parallel: DataParallel | None = None
    sharding_strategy: ShardingStrategy | None = None  # FSDP's own word for zero; given instead of it

    # Pipeline schedule (None: 1f1b, or interleaved where stages are virtual) and what its stages hold
    schedule: Schedule | None = None
    virtual_stages: int = Field(ge=1, le=MAX_COUNT, default=1)  # chunks of layers a stage
    first_stage_layers: int | None = Field(ge=0, le=MAX_COUNT, default=None)
    last_stage_layers: int | None = Field(ge=0, le=MAX_COUNT, default=None)
    stage_layers: tuple[int, ...] | None = Field(default=None, strict=False)  # of every virtual stage, in order
    # Layers are dealt as if the embedding were one of the first virtual stage, head and loss one of the last
    embedding_as_layer: bool = False
    head_as_layer: bool = False

    micro_batch_size: int = Field(ge=1, le=MAX_COUNT, default=1)
    num_micro_batches: int = Field(ge=1, le=MAX_COUNT, default=1)
    seq_len: int = Field(ge=1, le=MAX_COUNT, default=2048)
    # Between the regions that tp splits by columns, each of its ranks holds a part of the tokens (arXiv 2205.05198)
    sequence_parallel: bool = False
    vocab_parallel: bool = True  # tp splits the embedding and the LM head too, by vocabulary

    precision: Precision = "bf16"
    # How fp8 products are scaled: by tensor from past maxima or this one's, by row, by blocks of 128 (weights 128 × 128), or by
    # blocks of 32; None: the stack's habit
    fp8_recipe: Fp8Recipe | None = None
    fp8_all_gather: bool = (
        False  # matrices of layers are gathered in fp8 (torchao with FSDP2; Megatron's fp8-param-gather)
    )
    # Layers at the ends of the model whose products stay in bf16, where the others' are narrower
    first_layers_bf16: int = Field(ge=0, le=MAX_COUNT, default=0)
    last_layers_bf16: int = Field(ge=0, le=MAX_COUNT, default=0)
    master_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    optimizer: Literal["adamw", "adam", "sgd", "sgd_momentum", "adam8bit"] = "adamw"
    optimizer_impl: Literal["foreach", "fused", "loop"] = "fused"
    optimizer_dtype: Literal["fp32", "bf16"] = "fp32"

    recompute: Literal["none", "full", "selective", "every_k"] = "none"
    recompute_every: int = Field(ge=1, le=MAX_COUNT, default=1)  # every_k: each k-th block is checkpointed
    # What selective recomputation of hand-fused stacks runs again, in Megatron's words (--recompute-modules)
    recompute_modules: tuple[RecomputeModule, ...] = Field(default=("core_attn",), strict=False)

    # Captured once and launched whole, which costs the host one call: moe_router with what comes before it (norm, shared
    # experts), moe_preprocess (the dispatcher's counts) with moe_router, moe with all of that and the experts
    cuda_graphs: tuple[CudaGraph, ...] = Field(default=(), strict=False)

    reshard_after_forward: bool | int | None = None  # FSDP2; None: all groups but the root
    forward_prefetch: int = Field(ge=0, le=MAX_COUNT, default=0)
    backward_prefetch: int = Field(ge=0, le=MAX_COUNT, default=1)
    limit_all_gathers: bool = True  # FSDP1: at most two all-gathers in flight
    # Reduce gradients in every micro-batch, or only in the last (no_sync). None: the implementation's habit.
    sync_every_micro_batch: bool | None = None
    gradient_as_bucket_view: bool = False  # DDP
    bucket_bytes: Bytes = Field(gt=0, le=MAX_SIZE, default=25 * 2**20)  # DDP
    reduce_bucket_numel: int = Field(gt=0, le=MAX_SIZE, default=500_000_000)  # DeepSpeed, elements
    prefetch_bucket_numel: int = Field(gt=0, le=MAX_SIZE, default=50_000_000)  # DeepSpeed stage 3, elements
    param_persistence_numel: int = Field(ge=0, le=MAX_SIZE, default=100_000)  # DeepSpeed stage 3, elements
    comm_hook: CommHook = NO_HOOK  # DDP
    # Replicas take so many steps alone, then average their parameters (local SGD), or take an outer Nesterov step along
    # their mean change (DiLoCo, arXiv 2311.08105). 1: gradients are reduced in every step
    sync_every_steps: int = Field(ge=1, le=MAX_COUNT, default=1)
    outer_optimizer: Literal["average", "nesterov"] = "average"
    zeropp: ZeroPlusPlus = NO_ZEROPP  # DeepSpeed stage 3
    # DeepSpeed stage 3 with replicas is MiCS; its gathers in groups of several nodes: between nodes, then inside them
    hierarchical_gather: bool = False
    offload: Offload = NOTHING_OFFLOADED
    memory_fraction: float = Field(gt=0, le=1, default=1.0)  # of the device, at most, for the caching allocator

    stack: str = "torch-2.6-eager"

    @field_validator("rank_order")
    @classmethod
    def _names_axes_once(cls, value: str) -> str:
        names = ordered(value)
        known = (*AXES, "dp", "ep")
        wrong = [name for name in value.split("-") if name not in known]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no axis: {nearest(wrong[0], known) or 'for example tp-cp-ep-dp-pp'}")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} in two places: name each axis once (dp is dp_shard and dp_replicate)")
        return value

    @field_validator("stage_layers", mode="before")
    @classmethod
    def _numbers(cls, value: object) -> object:
        """A flag's text, "3,4,4,3", as the list that a file has."""
        if isinstance(value, str) and re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", value):
            return [int(number) for number in value.split(",")]
        return value

    @field_validator("recompute_modules", "cuda_graphs", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        """A flag's text, "moe_act,layernorm", as the list that a file has."""
        return [word.strip() for word in value.split(",")] if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _strategy_is_an_alias(cls, data: object) -> object:
        word = data.get("sharding_strategy") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(word, str) or word not in _STRATEGY_ZERO:
            return data
        stage = _STRATEGY_ZERO[word]
        if data.get("zero", stage) != stage:
            msg = f"sharding_strategy {word} means zero = {stage}, not {data['zero']}: give one"
            raise ValueError(msg)
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
        return (self.ep, self.etp) != (1, self.tp)

    @property
    def acts_in_order(self) -> bool:
        """Micro-batches pass in the order of a schedule: in a pipeline, or where a backward runs beside a forward."""
        return self.pp > 1 or self.expert_overlap

    @property
    def pipeline_schedule(self) -> Schedule:
        """The order in which a stage issues its work."""
        if self.schedule is not None:
            return self.schedule
        return "interleaved" if self.virtual_stages > 1 else "1f1b"

    @property
    def sums_replicas(self) -> bool:
        """Replicas reduce their gradients in every step."""
        return self.dp_replicate > 1 and self.sync_every_steps == 1

    @property
    def split(self) -> Split:
        """How layers are dealt to stages."""
        return Split(
            first=self.first_stage_layers,
            last=self.last_stage_layers,
            explicit=self.stage_layers,
            embedding_as_layer=self.embedding_as_layer,
            head_as_layer=self.head_as_layer,
            even=self.embedding_as_layer or self.head_as_layer,  # who counts so refuses the rest
        )

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
    def reshard_ranks(self) -> int | None:
        """Neighbours in the shard group that keep a block between them after its forward; None: all, or each the whole.

        torch takes 1 for False and the size of the group for True. ZeRO++'s secondary copy is gathered again likewise.
        """
        if self.zeropp.secondary_ranks > 1:
            return None if self.zeropp.secondary_ranks == self.dp_shard * self.cp else self.zeropp.secondary_ranks
        reshard = self.reshard_after_forward
        if reshard is None or isinstance(reshard, bool) or reshard in (1, self.dp_shard * self.cp):
            return None
        return reshard

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
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        if self.comm_hook.dtype is not None:
            return self.comm_hook.dtype
        if self.sums_in_fp32:
            return "fp32"
        habits = {"master": self.master_dtype, "compute": self.compute_dtype, "fp32": "fp32"}
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
        return self.precision in ("fp8", "nvfp4")

    @property
    def product_dtype(self) -> Dtype:
        """Of the operands of layers' products: what the device's peaks are called by."""
        return "fp4" if self.precision == "nvfp4" else self.precision

    @property
    def compute_dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """Dtype of activations and of gathered parameters (narrower products keep bf16 activations)."""
        if self.precision in ("fp32", "tf32"):
            return "fp32"
        return "fp16" if self.precision == "fp16" else "bf16"
