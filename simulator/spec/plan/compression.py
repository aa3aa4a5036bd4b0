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
    """ZeRO++, of DeepSpeed's stage 3.

    quantized_weights (qwZ): parameters are gathered as int8 with a scale a block. secondary_ranks (hpZ): neighbours that
    keep a second copy of the parameters between them from the first forward to the optimizer, where all later gathers
    stay; 1: none. quantized_gradients (qgZ): gradients are exchanged as int4, inside the nodes and then between them.
    """

    quantized_weights: bool = False
    secondary_ranks: int = Field(ge=1, le=MAX_RANKS, default=1)
    quantized_gradients: bool = False

    @property
    def any(self) -> bool:
        return self.quantized_weights or self.quantized_gradients or self.secondary_ranks > 1


NO_ZEROPP: Final = ZeroPlusPlus()


class CommHook(Strict):
    """What DDP does with a bucket instead of an all-reduce (`register_comm_hook`).

    kind: fp16_compress, bf16_compress: the bucket travels in 16 bits. powersgd: of each matrix travel two factors of `rank`
    columns (matrix_approximation_rank), where that saves more than min_compression_rate; the rest whole. error_feedback:
    what a step lost is added in the next. warm_start: factors begin where those of the step before ended.
    start_step: PowerSGD begins after so many steps with a plain all-reduce (start_powerSGD_iter); one after that is predicted.
    """

    kind: Literal["none", "fp16_compress", "bf16_compress", "powersgd"] = "none"
    rank: int = Field(ge=1, le=2**20, default=1)
    min_compression_rate: float = Field(gt=0, le=1e9, default=2.0)
    error_feedback: bool = True
    warm_start: bool = True
    start_step: int = Field(ge=0, le=2**31, default=1000)

    @property
    def dtype(self) -> Literal["fp16", "bf16"] | None:
        """What it makes buckets travel in; None: what they are in."""
        return {"fp16_compress": "fp16", "bf16_compress": "bf16"}.get(self.kind)  # type: ignore[return-value]


NO_HOOK: Final = CommHook()
