"""How a step's requests for device memory are served: the pool's policy, PyTorch's settings, and a user's own allocator."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, NonNegativeInt, field_validator

from simulator.base.schema import Strict, nearest
from simulator.base.units import Bytes, BytesPerS, Seconds
from simulator.spec.plan.alloc_conf import AllocConf, parse_alloc_conf
from simulator.spec.plan.order import MAX_COUNT, MAX_SIZE

Policy = Literal[
    "caching", "expandable", "first_fit", "arena", "slab", "checkpoint_buffer", "defrag", "fixed", "tiered", "unified", "overcommit"
]  # fmt: skip
TIERED: Final = ("tiered", "unified", "overcommit")  # HBM is the first of several tiers
KINDS: Final = (
    *("parameters", "gradients", "optimizer_state", "buckets", "buffers", "inputs", "workspaces", "activations"),
    *("unsharded_parameters", "all_gather", "reduce_scatter", "loss", "temporaries"),
)
BLOCK_BYTES: Final = 2**21  # the smallest that CUDA's driver maps


class MemoryPlan(Strict):
    """`[plan.memory]`: how requests for device memory are served."""

    policy: Policy = Field(
        default="caching",
        description="PyTorch's caching allocator; the same with expandable segments; with the first block that fits; or a pool "
        "that is not PyTorch's ([policies](replay.md#what-if)), whose calls of the driver go into the step; or one whose tensors leave "
        "for idle peers, host and NVMe where HBM is full ([tiers](../guides/memory.md#more-than-hbm-holds)): by copies (`tiered`), "
        "mapped anew (`overcommit`), or by page faults to the host (`unified`)",
    )
    evict: Literal["lru", "cost", "belady"] = Field(
        default="lru",
        description="what a pool with tiers sends down: what was used longest ago, what costs least a byte, or what is needed last",
    )
    prefetch: bool = Field(
        default=False, description="a pool with tiers brings tensors up one use ahead; `unified`: without page faults"
    )
    alloc_conf: str = Field(
        default="",
        description="`PYTORCH_CUDA_ALLOC_CONF` or `PYTORCH_ALLOC_CONF`, as `expandable_segments:True,max_split_size_mb:128`; "
        "all keys of torch 2.13 are known",
    )
    block_bytes: Bytes = Field(
        ge=BLOCK_BYTES,
        le=MAX_SIZE,
        multiple_of=BLOCK_BYTES,
        default=BLOCK_BYTES,
        description="of a block of the policy `fixed`",
    )
    alloc_s: Seconds = Field(
        ge=0,
        le=1,
        default=0.0,
        description="host time that an allocator of one's own takes for an allocation beyond PyTorch's; it is exposed where "
        "the host is no longer ahead of the device",
    )
    free_s: Seconds = Field(ge=0, le=1, default=0.0, description="the same of a free")

    refill_every: NonNegativeInt = Field(
        le=MAX_COUNT,
        default=0,
        description="after so many steps the pool's cache is given back and taken again, as where a time slice or MIG instance is "
        "pre-empted; 0: never",
    )
    compress: dict[str, float] = Field(
        default={},
        description="ratio to which hardware compresses tensors of a kind, as `{ activations = 2 }`: kinds are those of the "
        "report's memory (`parameters`, `activations`, `optimizer_state`, ...)",
    )
    compress_bytes_per_s: BytesPerS | None = Field(
        gt=0,
        default=None,
        description="rate at which kernels or copy engines compress, and decompress, bytes of compressed kinds, once each a step; not "
        "set: where memory is read and written, at no cost",
    )

    def __hash__(self) -> int:
        """As of every part of a plan; `compress` is a table."""
        return hash(tuple(tuple(sorted(value.items())) if isinstance(value, dict) else value for _, value in self))

    @field_validator("compress")
    @classmethod
    def _ratios_are_known(cls, value: dict[str, float]) -> dict[str, float]:
        faults = [f"{name!r} is no kind of tensor: {nearest(name, KINDS)}" for name in value if name not in KINDS]
        faults += [
            f"{name} = {ratio:g} is no ratio, from 1 to 100" for name, ratio in value.items() if not 1 <= ratio <= 100
        ]
        if faults:
            raise ValueError("; ".join(faults))
        return value

    @field_validator("alloc_conf")
    @classmethod
    def _is_readable(cls, value: str) -> str:
        parse_alloc_conf(value)
        return value

    @property
    def conf(self) -> AllocConf:
        """`alloc_conf`, parsed."""
        return parse_alloc_conf(self.alloc_conf)

    @property
    def tiered(self) -> bool:
        """What HBM has no room for lies in tiers below it."""
        return self.policy in TIERED

    @property
    def own_time(self) -> bool:
        """Whether a user's own allocator takes time."""
        return self.alloc_s > 0 or self.free_s > 0


USUAL_MEMORY: Final = MemoryPlan()
