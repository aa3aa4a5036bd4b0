"""Pool policies: ways to serve the same requests from device memory, for comparison with PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from simulator.memory.allocator import AllocatorSettings
from simulator.memory.allocator.blocks import UNLIMITED_BYTES, OnDriver, ignore_call
from simulator.memory.policies.arena import ArenaPool
from simulator.memory.policies.base import ACTIVATION, PERSISTENT, TEMPORARY, Pool
from simulator.memory.policies.buffer import BufferPool, buffer_bytes
from simulator.memory.policies.caching import CachingPool, FirstFitAllocator
from simulator.memory.policies.defrag import DefragPool
from simulator.memory.policies.fixed import BLOCK_BYTES, FixedPool
from simulator.memory.policies.slab import SlabPool

__all__ = [
    "ACTIVATION", "BLOCK_BYTES", "PERSISTENT", "POLICIES", "TEMPORARY", "Pool", "PoolInputs", "buffer_bytes",
    "make_pool",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolInputs:
    """What the policies may ask for. checkpoints: (stream, bytes) of the buffer that holds all activations."""

    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    capacity_bytes: int | None = None
    block_bytes: int = BLOCK_BYTES
    checkpoints: tuple[int, int] = (0, 0)


Maker = Callable[[PoolInputs, OnDriver], Pool[Any]]


_POLICIES: dict[str, tuple[Maker, str]] = {
    "native": (lambda of, on_driver: CachingPool(of.settings, of.capacity_bytes, on_driver), "PyTorch's caching allocator: best fit in cached segments"),
    "expandable": (lambda of, on_driver: CachingPool(replace(of.settings, expandable_segments=True), of.capacity_bytes, on_driver), "PyTorch's expandable segments: one growing range a stream"),
    "first_fit": (lambda of, on_driver: CachingPool(replace(of.settings, expandable_segments=False), of.capacity_bytes, on_driver, kind=FirstFitAllocator), "as native, but the fitting block at the lowest address"),
    "arena": (lambda of, on_driver: ArenaPool(of.capacity_bytes, on_driver), "a region each for what is persistent, activations and temporaries"),
    "slab": (lambda of, on_driver: SlabPool(of.capacity_bytes, on_driver), "slots of exactly one size, reused for that size only"),
    "checkpoint_buffer": (lambda of, on_driver: BufferPool(*of.checkpoints[::-1], of.settings, of.capacity_bytes, on_driver), "activations in a buffer taken once, all else native"),
    "defrag": (lambda of, on_driver: DefragPool(replace(of.settings, expandable_segments=False, max_split_size_bytes=UNLIMITED_BYTES), of.capacity_bytes, on_driver), "native, and live blocks move out of sparse segments beside the program"),
    "fixed": (lambda of, on_driver: FixedPool(of.capacity_bytes, on_driver, block_bytes=of.block_bytes), "whole blocks of one size, mapped together; up to 1 MiB native"),
}  # fmt: skip
POLICIES: Mapping[str, tuple[Maker, str]] = MappingProxyType(_POLICIES)


def make_pool(name: str, needs: PoolInputs, on_driver: OnDriver = ignore_call) -> Pool[Any]:
    """The pool of a policy by its name in `POLICIES`. Raises OutOfMemoryError where it cannot even begin."""
    return POLICIES[name][0](needs, on_driver)
