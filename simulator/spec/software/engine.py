"""What a serving engine's stack says of the engine: its defaults, and what of its work is its own."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, model_validator

from simulator.base.schema import Strict
from simulator.base.units import Bytes, Seconds


class OwnAllReduce(Strict):
    """`[engine.all_reduce]`: the engine's own kernel between GPUs of a node that all reach each other over NVLink or its like.

    t = latency_s + rank_s · n + 2 (n - 1) / n · bytes / (link_share · what one GPU's links carry one way); NCCL where that is
    faster, or where the message is larger than `largest`.
    """

    latency_s: Seconds = Field(ge=0, description="of a call")
    rank_s: Seconds = Field(ge=0, description="that each rank adds")
    link_share: float = Field(gt=0, le=1, description="of the links' speed, in both directions of a two-shot exchange")
    largest: Bytes = Field(gt=0, description="message; beyond it NCCL takes over")


class Engine(Strict):
    """`[engine]`: what an inference engine does, beyond what a serving plan says."""

    plan: dict[str, int | float | bool | str] = Field(
        default={}, description="defaults of a serving plan's keys: max_sequences, max_batched_tokens, and so on"
    )
    plan_on: dict[str, dict[str, int | float | bool | str]] = Field(
        default={}, description="others by the device's architecture (`ampere`)"
    )
    kv_cache_of: dict[str, str] = Field(
        default={},
        description="dtype of the cache by that of the weights (`fp8`), as checkpoints for the engine say it",
    )
    attention_on: dict[str, Literal["flash2", "flash3", "cudnn"]] = Field(
        default={}, description="the attention kernel by the device's architecture, where it is another"
    )
    reserved: float = Field(
        ge=0,
        le=1,
        default=0.0,
        description="part of its answer for which a sequence needs blocks of its own before it begins; 1: none is ever preempted",
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
        ge=0,
        le=100,
        default=0.0,
        description="requests wait until they, and those of them that fit a step, are so large a part of the sequences that run",
    )
    waiting_steps: int = Field(
        ge=0, le=2**20, default=0, description="or until so many steps have decoded since requests were last admitted"
    )
    sequence_s: Seconds = Field(
        ge=0,
        default=0.0,
        description="what each sequence of a step adds where its tokens are streamed to somebody, hidden by nothing; not where "
        "whole answers are collected",
    )
    fp8_prompts: bool = Field(default=False, description="attention of prompts runs in fp8 where the cache is in fp8")
    casts: Literal["separate", "fused"] = Field(
        default="separate",
        description="activations become fp8 in kernels of their own (scales of tokens or blocks), or in the kernels before them",
    )
    samples_in_place: bool = Field(
        default=False, description="sampling works on the logits as the product made them, without copies of them"
    )
    request_s: Seconds = Field(
        ge=0,
        default=0.0,
        description="of a request outside the queue: its way to the scheduler, tokens, and the first answer's way back",
    )
    launch_tokens: int | None = Field(
        ge=0,
        le=2**20,
        default=None,
        description="launches of benchmarks with so many users give a step one prompt, a token a user and these beyond (where that "
        "is less than `max_batched_tokens`)",
    )
    launch_plan: dict[str, int | float | bool | str] = Field(
        default={}, description="keys of a serving plan as benchmarks of maximum load (all requests at once) set them"
    )
    all_reduce: OwnAllReduce | None = Field(
        default=None, description="the engine's own kernel for small sums; else NCCL's"
    )

    @model_validator(mode="after")
    def _graphs_in_order(self) -> Self:
        sizes = self.graph_sizes
        if any(low >= high for low, high in pairwise((0, *sizes))):
            raise ValueError(f"graph_sizes {list(sizes)} are not sizes from 1 on that grow")
        return self
