"""What a plan does to its data-parallel traffic beyond sharding: quantised, kept near, in two hops, of low rank.

ZeRO++: arXiv 2306.10209, as DeepSpeed 0.18 runs it (runtime/zero/partition_parameters.py, runtime/comm/
coalesced_collectives.py). One-bit optimizers: arXiv 2102.02888, 2104.06069, 2202.06009. MiCS: arXiv 2205.00119, DeepSpeed's runtime/zero/mics.py. Hooks of DDP: torch 2.13,
distributed/algorithms/ddp_comm_hooks; PowerSGD: arXiv 1905.13727. docs/background/compression.md.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, NonNegativeInt

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


class OneBit(Strict):
    """`[plan.deepspeed.one_bit]`: 1-bit Adam, 1-bit LAMB, 0/1 Adam. The step predicted is of the last phase."""

    kind: Literal["none", "adam", "lamb", "zero_one"] = Field(
        default="none",
        description="1-bit Adam, 1-bit LAMB or 0/1 Adam: signs with one scale travel instead of gradients",
    )
    freeze_step: NonNegativeInt = Field(
        le=2**31,
        default=100_000,
        description="steps until the variance stays as it is; until then `adam` and `lamb` sum gradients (`freeze_step`, "
        "`var_freeze_step`)",
    )
    interval: int = Field(
        ge=1,
        le=2**30,
        default=1,
        description="`zero_one`: steps between two sums; those between take none (local steps)",
    )
    variance_scaler: int = Field(
        ge=1, le=2**31, default=16, description="`zero_one`: updates of the variance until their interval doubles"
    )
    local_step_scaler: int = Field(
        ge=1, le=2**31, default=32678, description="`zero_one`: steps until the interval of sums doubles"
    )
    local_step_clipper: int = Field(ge=1, le=2**20, default=16, description="`zero_one`: the longest interval of sums")
    run_steps: int | None = Field(
        ge=1, le=10**9, default=None, description="of the run, whose phases and mean step are then reported"
    )

    @property
    def any(self) -> bool:
        return self.kind != "none"


NO_ONE_BIT: Final = OneBit()
# DeepSpeed's names: of each optimizer, and of its settings by our fields
ONE_BIT_NAMES: Final = {"adam": "OneBitAdam", "lamb": "OneBitLamb", "zero_one": "ZeroOneAdam"}
ONE_BIT_SETTINGS: Final = {
    "adam": {"freeze_step": "freeze_step"},
    "lamb": {"freeze_step": "freeze_step"},
    "zero_one": {
        "freeze_step": "var_freeze_step",
        "variance_scaler": "var_update_scaler",
        "local_step_scaler": "local_step_scaler",
        "local_step_clipper": "local_step_clipper",
    },
}


class CommHook(Strict):
    """`[plan.ddp.comm_hook]`: what DDP does with a bucket instead of an all-reduce (`register_comm_hook`)."""

    kind: Literal["none", "fp16_compress", "bf16_compress", "powersgd"] = Field(
        default="none",
        description="the bucket travels in 16 bits (`precision.reduce` in other words); or, of each matrix, two factors of low "
        "rank (PowerSGD)",
    )
    rank: int = Field(
        ge=1, le=2**20, default=1, description="PowerSGD: columns of a matrix' factors (`matrix_approximation_rank`)"
    )
    min_compression_rate: float = Field(gt=0, le=1e9, default=2.0, description="a matrix that saves less travels whole")
    error_feedback: bool = Field(default=True, description="what a step lost is kept and added in the next")
    warm_start: bool = Field(default=True, description="factors are kept and begin the next step")
    start_step: NonNegativeInt = Field(
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
