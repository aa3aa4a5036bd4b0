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


def _native(needs: PoolInputs, on_driver: OnDriver) -> Pool[Any]:
    return CachingPool(needs.settings, needs.capacity_bytes, on_driver)


def _expandable(needs: PoolInputs, on_driver: OnDriver) -> Pool[Any]:
    settings = replace(needs.settings, expandable_segments=True)
    return CachingPool(settings, needs.capacity_bytes, on_driver)


def _first_fit(needs: PoolInputs, on_driver: OnDriver) -> Pool[Any]:
    settings = replace(needs.settings, expandable_segments=False)
    return CachingPool(settings, needs.capacity_bytes, on_driver, kind=FirstFitAllocator)


def _arena(needs: PoolInputs, on_driver: OnDriver) -> Pool[Any]:
    return ArenaPool(needs.capacity_bytes, on_driver)


def _slab(needs: PoolInputs, on_driver: OnDriver) -> Pool[Any]:
    return SlabPool(needs.capacity_bytes, on_driver)


def _buffer(needs: PoolInputs, on_driver: OnDriver) -> Pool[Any]:
    stream, num_bytes = needs.checkpoints
    return BufferPool(num_bytes, stream, needs.settings, needs.capacity_bytes, on_driver)


def _defrag(needs: PoolInputs, on_driver: OnDriver) -> Pool[Any]:
    settings = replace(needs.settings, expandable_segments=False, max_split_size_bytes=UNLIMITED_BYTES)
    return DefragPool(settings, needs.capacity_bytes, on_driver)


def _fixed(needs: PoolInputs, on_driver: OnDriver) -> Pool[Any]:
    return FixedPool(needs.capacity_bytes, on_driver, block_bytes=needs.block_bytes)


POLICIES: Mapping[str, tuple[Maker, str]] = MappingProxyType(
    {
        "native": (_native, "PyTorch's caching allocator: best fit in cached segments"),
        "expandable": (_expandable, "PyTorch's expandable segments: one growing range a stream"),
        "first_fit": (_first_fit, "as native, but the fitting block at the lowest address"),
        "arena": (_arena, "a region each for what is persistent, activations and temporaries"),
        "slab": (_slab, "slots of exactly one size, reused for that size only"),
        "checkpoint_buffer": (_buffer, "activations in a buffer taken once, all else native"),
        "defrag": (_defrag, "native, and live blocks move out of sparse segments beside the program"),
        "fixed": (_fixed, "whole blocks of one size, mapped together; up to 1 MiB native"),
    }
)


def make_pool(name: str, needs: PoolInputs, on_driver: OnDriver = ignore_call) -> Pool[Any]:
    """The pool of a policy by its name in `POLICIES`. Raises OutOfMemoryError where it cannot even begin."""
    return POLICIES[name][0](needs, on_driver)
