"""The CUDA caching allocator of PyTorch, driven by an ordered sequence of requests. It has no clock."""

from simulator.memory.allocator.blocks import AllocatorSettings, Block, round_request, segment_bytes
from simulator.memory.allocator.caching import CachingAllocator, OutOfMemoryError

__all__ = ["AllocatorSettings", "Block", "CachingAllocator", "OutOfMemoryError", "round_request", "segment_bytes"]
