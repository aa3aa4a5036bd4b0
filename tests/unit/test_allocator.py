from __future__ import annotations

import pytest

from simulator.memory.allocator import (
    AllocatorSettings,
    CachingAllocator,
    OutOfMemoryError,
    round_request,
    segment_bytes,
)

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("asked", "given"), [(0, 512), (1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_requests_round_to_512(asked: int, given: int) -> None:
    assert round_request(asked) == given
    assert CachingAllocator().malloc(asked).size <= max(given, 2 * MIB)


def test_requests_round_to_fractions_of_a_power_of_two() -> None:
    divisions = (4,) * 16
    assert round_request(1200 * KIB, divisions) == 1280 * KIB  # steps of 256 KiB between 1 and 2 MiB
    assert round_request(2 * MIB, divisions) == 2 * MIB


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB - 512, 12 * MIB),
    ],
)
def test_segments(block: int, segment: int) -> None:
    assert segment_bytes(block) == segment


def test_best_fit_takes_the_smallest_then_the_lowest() -> None:
    allocator = CachingAllocator()
    sizes = [64 * MIB, 32 * MIB, 48 * MIB, 32 * MIB]
    blocks = [allocator.malloc(size) for size in sizes]
    for block in blocks:
        allocator.free(block)
    low = min(blocks[1].address, blocks[3].address)
    assert allocator.malloc(31 * MIB).address == low
    assert allocator.malloc(40 * MIB).address == blocks[2].address


def test_a_large_rest_of_up_to_one_mib_stays_with_the_block() -> None:
    for rest, size in ((MIB, 32 * MIB), (MIB + 512, 31 * MIB - 512)):
        allocator = CachingAllocator()
        allocator.free(allocator.malloc(32 * MIB))
        assert allocator.malloc(32 * MIB - rest).size == size


def test_blocks_serve_their_own_stream_only() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(32 * MIB, stream=1))
    allocator.malloc(32 * MIB, stream=2)
    assert allocator.reserved_bytes == 64 * MIB
    allocator.malloc(32 * MIB, stream=1)
    assert allocator.reserved_bytes == 64 * MIB


def test_a_recorded_stream_delays_the_free() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(32 * MIB, stream=1)
    allocator.record_stream(block, 2)
    allocator.free(block)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 32 * MIB)
    other = allocator.malloc(32 * MIB, stream=1)
    assert other.address != block.address
    allocator.synchronize(2)
    assert allocator.active_bytes == 32 * MIB
    assert allocator.malloc(32 * MIB, stream=1).address == block.address


def test_neighbours_coalesce() -> None:
    allocator = CachingAllocator()
    first = allocator.malloc(5 * MIB)
    second = allocator.malloc(5 * MIB)
    allocator.free(first)
    allocator.free(second)
    assert allocator.malloc(9 * MIB).address == first.address
    assert allocator.reserved_bytes == 20 * MIB


def test_at_the_capacity_cached_segments_are_returned_and_counted() -> None:
    allocator = CachingAllocator(capacity_bytes=64 * MIB)
    allocator.free(allocator.malloc(48 * MIB))
    allocator.malloc(56 * MIB)
    assert (allocator.num_retries, allocator.reserved_bytes) == (1, 56 * MIB)


def test_what_does_not_fit_raises() -> None:
    allocator = CachingAllocator(capacity_bytes=64 * MIB)
    allocator.malloc(40 * MIB)
    with pytest.raises(OutOfMemoryError, match="do not fit"):
        allocator.malloc(40 * MIB)


def test_a_split_segment_survives_emptying_the_cache() -> None:
    allocator = CachingAllocator()
    kept, freed = allocator.malloc(4 * MIB), allocator.malloc(4 * MIB)
    allocator.free(freed)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_oversize_blocks_are_not_split_and_not_given_to_small_requests() -> None:
    settings = AllocatorSettings(max_split_size_bytes=100 * MIB)
    allocator = CachingAllocator(settings)
    allocator.free(allocator.malloc(200 * MIB))
    small = allocator.malloc(50 * MIB)
    assert allocator.reserved_bytes == 250 * MIB
    assert allocator.malloc(190 * MIB).size == 200 * MIB  # within 20 MiB of the request
    assert small.size == 50 * MIB


def test_expandable_segments_grow_by_pages_and_reuse_what_fragments() -> None:
    plain, growing = CachingAllocator(), CachingAllocator(AllocatorSettings(expandable_segments=True))
    for allocator in (plain, growing):
        for size in (30 * MIB, 50 * MIB, 90 * MIB):
            allocator.free(allocator.malloc(size))
    assert plain.reserved_bytes == (30 + 50 + 90) * MIB
    assert growing.reserved_bytes == 100 * MIB  # 90 MiB in pages of 20


def test_expandable_pages_return_when_the_cache_is_emptied() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    kept, freed = allocator.malloc(30 * MIB), allocator.malloc(70 * MIB)
    allocator.free(freed)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free(kept)
    assert allocator.malloc(100 * MIB).address == kept.address
    assert allocator.reserved_bytes == 100 * MIB


def test_garbage_collection_returns_idle_segments_before_asking_for_more() -> None:
    settings = AllocatorSettings(garbage_collection_threshold=0.5)
    allocator = CachingAllocator(settings, capacity_bytes=200 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.free(allocator.malloc(80 * MIB))
    allocator.malloc(90 * MIB)
    assert allocator.reserved_bytes < 200 * MIB
    assert allocator.num_retries == 0
