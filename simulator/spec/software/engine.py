"""The engine's part of a serving stack: its defaults and its own work."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from simulator.base.schema import Strict
from simulator.base.units import Bytes, Seconds
from simulator.spec.cluster.device import Device

PlanKeys = dict[str, int | float | bool | str]  # of a serving plan


class OwnAllReduce(Strict):
    """`[engine.all_reduce]`: the engine's own kernel between GPUs of a node that all reach each other over NVLink or its like.

    t = latency_s + rank_s · n + 2 (n - 1) / n · bytes / (link_share · what one GPU's links carry one way); NCCL where that is
    faster, or where the message is larger than `largest`.
    """

    latency_s: Seconds = Field(ge=0, description="of a call")
    rank_s: Seconds = Field(ge=0, description="that each rank adds")
    link_share: float = Field(gt=0, le=1, description="of the links' speed, in both directions of a two-shot exchange")
    largest: Bytes = Field(gt=0, description="message; beyond it NCCL takes over")


class PlanOn(Strict):
    """`[[engine.plan_on]]`: what an engine sets by itself on some GPUs; of all entries the first that holds."""

    architecture: str | None = Field(default=None, description="of the device (`ampere`); any")
    memory: Bytes | None = Field(gt=0, default=None, description="of a GPU by its driver, below which it holds; any")
    tp: int | None = Field(ge=1, default=None, description="below which it holds; any")
    longer_than: int | None = Field(
        ge=1, default=None, description="tokens, where a sequence may have more than so many; any"
    )
    plan: PlanKeys = Field(default={}, description="keys of a serving plan, before `plan`'s")
    largest_graph: int | None = Field(ge=1, default=None, description="of `graph_sizes` that is captured")

    def holds(self, device: Device, tp: int, longest: int) -> bool:
        """Whether it does on such GPUs. longest: tokens that a sequence may have."""
        if self.longer_than is not None and longest <= self.longer_than:
            return False
        small = self.memory is None or device.memory_bytes < self.memory
        return small and self.architecture in (None, device.architecture) and (self.tp is None or tp < self.tp)


class SetAside(Strict):
    """`[engine.set_aside]`: GPU memory outside of `gpu_memory_utilization`, if that is not set."""

    fixed: Bytes = Field(ge=0, default=0, description="for anything")
    token: Bytes = Field(ge=0, default=0, description="for each token of the largest step")
    graph: Bytes = Field(ge=0, default=0, description="for each sequence of the largest CUDA graph")
    gpu: Bytes = Field(ge=0, default=0, description="for each GPU of an engine")
    least: Bytes = Field(ge=0, default=0, description="of all this, on GPUs with more than six times as much")


class Engine(Strict):
    """`[engine]`: behaviour of an inference engine that a serving plan does not state."""

    plan: PlanKeys = Field(
        default={}, description="defaults of a serving plan's keys: max_sequences, max_batched_tokens, and so on"
    )
    plan_on: tuple[PlanOn, ...] = Field(default=(), strict=False, description="others on some GPUs")
    set_aside: SetAside | None = Field(default=None, description="makes the default of `gpu_memory_utilization`")
    kv_cache_of: dict[str, str] = Field(
        default={},
        description="dtype of the cache by that of the weights (`fp8`), as checkpoints for the engine say it",
    )
    attention_on: dict[str, Literal["flash2", "flash3", "cudnn"]] = Field(
        default={}, description="the attention kernel by the device's architecture, where it is another"
    )
    reserved: float = Field(
        ge=0, le=1, default=0.0, description="part of an answer whose blocks must be free to begin; 1: no preemption"
    )
    overlapped: bool = Field(
        default=False,
        description="the host prepares the next step while the GPU computes this one: `step_overhead_s` only counts beyond that",
    )
    graph_sizes: tuple[int, ...] = Field(
        default=(),
        strict=False,
        description="sequences for which a CUDA graph is captured, in order; a step runs in the next larger one, beyond the last in "
        "none. Empty: 1, 2, 4 and multiples of 8 up to 512",
    )
    prompt_s: Seconds | None = Field(
        gt=0,
        default=None,
        description="`max_batched_tokens` is what the engine's GPUs multiply in so long at their sheet's 16-bit speed, where nothing "
        "says it; at most the model's positions",
    )
    alternates: bool = Field(
        default=False,
        description="a step that admits requests is followed by one that admits none, where anything decodes",
    )
    waiting_ratio: float = Field(
        ge=0, le=100, default=0.0, description="requests wait until those that fit are such a part of those that run"
    )
    waiting_steps: int = Field(
        ge=0, le=2**20, default=0, description="or until so many steps have decoded since requests were last admitted"
    )
    prompts_apart: bool = Field(
        default=False,
        description="a step computes all prompts that wait, but for the last token of each, in passes of their own; then it decodes "
        "these tokens with all others. `max_batched_tokens` bounds a pass alone",
    )
    sequence_s: Seconds = Field(
        ge=0, default=0.0, description="what a sequence whose tokens are streamed adds to a step, hidden by nothing"
    )
    stream_s: Seconds = Field(
        ge=0,
        default=0.0,
        description="what a streamed token takes the front end, one process, where it waits for others",
    )
    accept_s: Seconds = Field(ge=0, default=0.0, description="what a request takes it on its way in, likewise")
    fp8_prompts: bool = Field(default=False, description="attention of prompts runs in fp8 where the cache is in fp8")
    casts: Literal["separate", "fused"] = Field(
        default="separate",
        description="activations become fp8 in kernels of their own (scales of tokens or blocks), or in the kernels before them",
    )
    expert_rows: Literal["indexed", "expanded"] = Field(
        default="indexed",
        description="rows of a mixture's experts: read by their product where tokens lie, or written by expert before",
    )
    samples_in_place: bool = Field(
        default=False, description="sampling works on the logits as the product made them, without copies of them"
    )
    request_s: Seconds = Field(
        ge=0, default=0.0, description="of a request outside the queue: the way in, tokens, the first answer's way out"
    )
    token_s: Seconds = Field(ge=0, default=0.0, description="a token of the prompt adds to that: it is tokenised")
    launch_tokens: NonNegativeInt | None = Field(
        le=2**20,
        default=None,
        description="launches of benchmarks with so many users give a step one prompt, a token a user and these beyond (where that "
        "is less than `max_batched_tokens`)",
    )
    launch_plan: PlanKeys = Field(
        default={}, description="keys of a serving plan as benchmarks of maximum load (all requests at once) set them"
    )
    users_plan: PlanKeys = Field(default={}, description="the same of benchmarks with so many users")
    all_reduce: OwnAllReduce | None = Field(
        default=None, description="the engine's own kernel for small sums; else NCCL's"
    )
    nccl_factor: PositiveFloat = Field(
        le=100,
        default=1.0,
        description="time of NCCL's collectives inside a step over that of their sweeps alone",
    )

    @model_validator(mode="after")
    def _graphs_in_order(self) -> Self:
        sizes = self.graph_sizes
        if any(low >= high for low, high in pairwise((0, *sizes))):
            raise ValueError(f"graph_sizes {list(sizes)} are not sizes from 1 on that grow")
        if not sizes and any(one.largest_graph for one in self.plan_on):
            raise ValueError("plan_on: largest_graph is one of graph_sizes, and there are none")
        return self

    def on(self, device: Device, tp: int, longest: int = 0) -> PlanOn:
        """The entry of `plan_on` that holds there, for sequences of at most so many tokens; an empty one."""
        return next((one for one in self.plan_on if one.holds(device, tp, longest)), PlanOn())

    def graphs(self, device: Device, tp: int) -> tuple[int, ...]:
        """Sequences for which a CUDA graph is captured there."""
        most = self.on(device, tp).largest_graph
        return tuple(size for size in self.graph_sizes if most is None or size <= most)
