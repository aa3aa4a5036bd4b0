"""What a plan does to its data-parallel traffic beyond sharding: quantised, kept near, in two hops, of low rank.

ZeRO++: arXiv 2306.10209, as DeepSpeed 0.18 runs it (runtime/zero/partition_parameters.py, runtime/comm/
coalesced_collectives.py). MiCS: arXiv 2205.00119, DeepSpeed's runtime/zero/mics.py. Hooks of DDP: torch 2.13,
distributed/algorithms/ddp_comm_hooks; PowerSGD: arXiv 1905.13727. docs/background/compression.md.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from simulator.base.schema import Strict

MAX_RANKS: Final = 2**31


class ZeroPlusPlus(Strict):
    """`[plan.deepspeed.zeropp]`: ZeRO++, of DeepSpeed's stage 3 without groups."""

    quantized_weights: bool = Field(
        default=False,
        description="qwZ: parameters are gathered as int8 with a scale a block (`zero_quantized_weights`)",
    )
    secondary_ranks: int = Field(
        ge=1,
        le=MAX_RANKS,
        default=1,
        description="hpZ: neighbours, a divisor of `dp_shard · cp`, that keep a second copy of the parameters between them, where "
        "all gathers after the first forward stay (`zero_hpz_partition_size`); 1: none",
    )
    quantized_gradients: bool = Field(
        default=False,
        description="qgZ: gradients as int4 by all-to-all inside nodes, then between them (`zero_quantized_gradients`); "
        "`tp = cp = pp = 1`",
    )

    @property
    def any(self) -> bool:
        return self.quantized_weights or self.quantized_gradients or self.secondary_ranks > 1


NO_ZEROPP: Final = ZeroPlusPlus()


class CommHook(Strict):
    """`[plan.ddp.comm_hook]`: what DDP does with a bucket instead of an all-reduce (`register_comm_hook`)."""

    kind: Literal["none", "fp16_compress", "bf16_compress", "powersgd"] = Field(
        default="none",
        description="the bucket travels in 16 bits (`precision.reduce` in other words); or, of each matrix, two factors of low "
        "rank (PowerSGD)",
    )
    rank: int = Field(
        ge=1,
        le=2**20,
        default=1,
        description="PowerSGD: columns of a matrix' factors (`matrix_approximation_rank`)",
    )
    min_compression_rate: float = Field(gt=0, le=1e9, default=2.0, description="a matrix that saves less travels whole")
    error_feedback: bool = Field(default=True, description="what a step lost is kept and added in the next")
    warm_start: bool = Field(default=True, description="factors are kept and begin the next step")
    start_step: int = Field(
        ge=0,
        le=2**31,
        default=1000,
        description="steps with a plain all-reduce before (`start_powerSGD_iter`); the step predicted comes after them, and the "
        "report says so",
    )

    @property
    def dtype(self) -> Literal["fp16", "bf16"] | None:
        """What it makes buckets travel in; None: what they are in."""
        return {"fp16_compress": "fp16", "bf16_compress": "bf16"}.get(self.kind)  # type: ignore[return-value]


NO_HOOK: Final = CommHook()
