"""Pool policies: laws that hold for all of them, and what each is for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.memory.allocator import AllocatorSettings, OutOfMemoryError
from simulator.memory.driver_costs import DriverCosts
from simulator.memory.policies import ACTIVATION, PERSISTENT, POLICIES, TEMPORARY, Pool, PoolInputs, make_pool
from simulator.memory.policies.base import FirstFitRange
from simulator.memory.requests import ALLOC, COMPLETE_FREE, EMPTY_CACHE, FREE, REQUEST_FREE, Request
from simulator.studies.replay import Sequence, compare, demand, play, repeated, varied

MIB = 2**20
NAMES = list(POLICIES)

STEPS = st.one_of(
    st.tuples(st.just("alloc"), st.integers(1, 64 * MIB), st.integers(0, 2)),
    st.tuples(st.just("alloc"), st.integers(1, 4096), st.integers(0, 2)),
    st.tuples(st.just("free"), st.integers(0, 100), st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 100), st.just(0)),
    st.tuples(st.just("later"), st.integers(0, 100), st.just(0)),
    st.tuples(st.just("done"), st.integers(0, 100), st.just(0)),
    st.tuples(st.just("empty"), st.just(0), st.just(0)),
)


@st.composite
def sequences(draw: st.DrawFn) -> list[Request]:
    """Requests that make sense: what is freed was allocated, once."""
    live: list[tuple[int, int]] = []
    waiting: list[int] = []
    requests: list[Request] = []
    for number, (what, value, stream) in enumerate(draw(st.lists(STEPS, max_size=60))):
        if what == "alloc":
            kind = draw(st.sampled_from([PERSISTENT, ACTIVATION, TEMPORARY]))
            live.append((number, stream))
            requests.append((ALLOC, number, value, stream, kind))
        elif what in ("free", "later") and live:
            block, owner = live.pop(value % len(live))
            if what == "later":
                waiting.append(block)
            requests.append((FREE if what == "free" else REQUEST_FREE, block, 0, owner, 0))
        elif what == "done" and waiting:
            requests.append((COMPLETE_FREE, waiting.pop(value % len(waiting)), 0, 0, 0))
        elif what == "empty":
            requests.append((EMPTY_CACHE, 0, 0, 0, 0))
    return requests


def needs(**parts: Any) -> PoolInputs:
    return PoolInputs(checkpoints=(0, 96 * MIB), **parts)


class Watched:
    """Plays a sequence and checks after each request what must always hold."""

    def __init__(self, pool: Pool[Any], calls: list[tuple[str, int]]) -> None:
        self.pool, self.calls = pool, calls
        self.handles: dict[int, Any] = {}
        self.asked: dict[int, int] = {}

    def run(self, requests: list[Request]) -> None:
        for request in requests:
            self.handles |= play([request] if request[0] == ALLOC else [], self.pool)
            self.other(request)
            self.check()

    def other(self, request: Request) -> None:
        what, number, num_bytes, _, _ = request
        if what == ALLOC:
            self.asked[number] = num_bytes
        elif what in (FREE, REQUEST_FREE):
            del self.asked[number]
            self.pool.request_free(self.handles[number])
        if what in (FREE, COMPLETE_FREE):
            self.pool.complete_free(self.handles.pop(number))
        elif what == EMPTY_CACHE:
            self.pool.empty_cache()

    def check(self) -> None:
        pool = self.pool
        live = sum(self.asked.values())
        assert pool.reserved_bytes >= pool.active_bytes >= pool.allocated_bytes >= live
        pieces = sorted(piece for handle in self.handles.values() for piece in pool.pieces(handle))
        assert all(start + size <= after for (start, size), (after, _) in pairwise(pieces))
        assert sum(size for _, size in pieces) == pool.active_bytes
        taken = sum(size for call, size in self.calls if call in ("segment_alloc", "segment_map"))
        given_back = sum(size for call, size in self.calls if call in ("segment_free", "segment_unmap"))
        assert taken - given_back == pool.reserved_bytes
        assert 0 <= pool.largest_free_bytes() <= pool.reserved_bytes - pool.active_bytes


def watched(name: str, **parts: Any) -> Watched:
    calls: list[tuple[str, int]] = []
    pool = make_pool(name, needs(**parts), lambda call, _, size: calls.append((call, size)))
    return Watched(pool, calls)


@pytest.mark.parametrize("name", NAMES)
@given(requests=sequences())
def test_reserved_covers_active_covers_allocated_covers_live_and_nothing_overlaps(
    name: str, requests: list[Request]
) -> None:
    watched(name).run(requests)


@pytest.mark.parametrize("name", NAMES)
@given(requests=sequences())
def test_what_was_allocated_is_freed_and_goes_back_to_the_driver(name: str, requests: list[Request]) -> None:
    run = watched(name)
    run.run(requests)
    for number in list(run.handles):
        if number in run.asked:
            run.other((REQUEST_FREE, number, 0, 0, 0))
        run.other((COMPLETE_FREE, number, 0, 0, 0))
    pool = run.pool
    assert pool.allocated_bytes == pool.active_bytes == 0
    pool.empty_cache()
    kept = 96 * MIB if name == "checkpoint_buffer" else 0  # its buffer is persistent
    assert pool.reserved_bytes == kept


@pytest.mark.parametrize("name", NAMES)
@given(sizes=st.lists(st.integers(1, 48 * MIB), min_size=1, max_size=12), seed=st.randoms(use_true_random=False))
def test_the_order_of_independent_frees_does_not_matter(name: str, sizes: list[int], seed: Any) -> None:
    """Blocks freed with nothing between: figures, and what the pool can serve afterwards, do not depend on the order."""
    requests: list[Request] = [(ALLOC, number, size, 0, TEMPORARY) for number, size in enumerate(sizes)]
    frees: list[Request] = [(FREE, number, 0, 0, 0) for number in range(len(sizes))]
    shuffled = list(frees)
    seed.shuffle(shuffled)
    outcomes = []
    for order in (frees, shuffled):
        run = watched(name)
        run.run([*requests, *order])
        again = [(ALLOC, 100 + number, size, 0, TEMPORARY) for number, size in enumerate(sizes)]
        before = run.pool.reserved_bytes, run.pool.active_bytes, run.pool.largest_free_bytes()
        run.run(again)
        outcomes.append((before, run.pool.reserved_bytes, run.pool.allocated_bytes))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("name", NAMES)
@given(requests=sequences())
def test_capacity_is_never_exceeded_and_more_of_it_never_hurts(name: str, requests: list[Request]) -> None:
    fits = []
    for capacity in (256 * MIB, 2**40):
        run = watched(name, capacity_bytes=capacity)
        try:
            for request in requests:
                run.handles |= play([request] if request[0] == ALLOC else [], run.pool)
                run.other(request)
                assert run.pool.reserved_bytes <= capacity
            fits.append(True)
        except OutOfMemoryError:
            fits.append(False)
    assert fits != [True, False]
    assert fits[1]


@pytest.mark.parametrize("name", NAMES)
@given(requests=sequences())
def test_the_same_requests_give_the_same_pieces(name: str, requests: list[Request]) -> None:
    first, second = (
        [pool.pieces(handle) for handle in play(requests, pool).values()]
        for pool in (make_pool(name, needs()), make_pool(name, needs()))
    )
    assert first == second


# --- what each is for


def pieces_of(name: str, requests: list[Request]) -> dict[int, tuple[int, int]]:
    pool = make_pool(name, needs())
    return {number: pool.pieces(handle)[0] for number, handle in play(requests, pool).items()}


def test_first_fit_takes_the_lowest_and_best_fit_the_smallest() -> None:
    holes: list[Request] = [(ALLOC, n, size * MIB, 0, 0) for n, size in enumerate((48, 64, 32))]
    frees: list[Request] = [(FREE, n, 0, 0, 0) for n in range(3)]
    asked: list[Request] = [(ALLOC, 9, 32 * MIB, 0, 0)]
    first, best = (pieces_of(name, [*holes, *frees, *asked])[9][0] for name in ("first_fit", "native"))
    assert best - first == (48 + 64) * MIB  # segments lie one after the other


def test_slabs_serve_one_size_only() -> None:
    run = watched("slab")
    run.run([(ALLOC, 0, 32 * MIB, 0, 0), (FREE, 0, 0, 0, 0), (ALLOC, 1, 31 * MIB, 0, 0)])
    assert run.pool.reserved_bytes == (32 + 32) * MIB  # 31 MiB take a segment of 32
    run.run([(ALLOC, 2, 32 * MIB, 0, 0)])
    assert run.pool.reserved_bytes == 64 * MIB


def test_fixed_blocks_never_lie_too_scattered() -> None:
    """20 blocks of 4 MiB, every other one freed: 40 MiB are free in pieces of 4, and serve one request of 40."""
    requests: list[Request] = [(ALLOC, n, 4 * MIB, 0, 0) for n in range(20)]
    requests += [(FREE, n, 0, 0, 0) for n in range(0, 20, 2)]
    run = watched("fixed")
    run.run(requests)
    before = run.pool.reserved_bytes
    run.run([(ALLOC, 99, 40 * MIB, 0, 0)])
    assert run.pool.reserved_bytes == before == 80 * MIB
    native = watched("native")
    native.run([*requests, (ALLOC, 99, 40 * MIB, 0, 0)])
    assert native.pool.reserved_bytes > before


def test_fixed_blocks_waste_the_rest_of_the_last_one() -> None:
    run = watched("fixed", block_bytes=16 * MIB)
    run.run([(ALLOC, 0, 17 * MIB, 0, 0)])
    assert run.pool.allocated_bytes == 32 * MIB


def test_millions_of_fixed_blocks_take_no_memory() -> None:
    """A trace may ask for 128 TiB: they are one run of neighbours, also when a part of them goes to somebody else."""
    pool = watched("fixed").pool
    handle = pool.malloc(2**47, 0, 0)
    assert len(pool.pieces(handle)) == 1
    pool.request_free(handle)
    pool.complete_free(handle)
    small = pool.malloc(3 * MIB, 0, 0)
    ((_, size),) = pool.pieces(small)
    assert size == 4 * MIB
    assert pool.reserved_bytes == 2**47
    assert pool.largest_free_bytes() == 2**47 - 4 * MIB


def test_an_arena_keeps_what_stays_apart_from_what_goes() -> None:
    kinds = (PERSISTENT, TEMPORARY, PERSISTENT, TEMPORARY)
    requests: list[Request] = [(ALLOC, n, 8 * MIB, 0, kind) for n, kind in enumerate(kinds)]
    where = pieces_of("arena", requests)
    assert where[2][0] - where[0][0] == 8 * MIB
    assert where[3][0] - where[1][0] == 8 * MIB


def test_checkpoints_leave_no_holes_between_temporaries() -> None:
    """A layer: a temporary of 24 MiB, a checkpoint of 8 beside it. Native blocks are cut by checkpoints, the buffer's not."""
    requests: list[Request] = []
    for layer in range(8):
        requests += [
            (ALLOC, 2 * layer, 24 * MIB, 0, TEMPORARY),
            (FREE, 2 * layer, 0, 0, 0),
            (ALLOC, 2 * layer + 1, 8 * MIB, 0, ACTIVATION),
        ]
    native, buffer = watched("native"), watched("checkpoint_buffer")
    native.run(requests)
    buffer.run(requests)
    assert buffer.pool.reserved_bytes == (96 + 24) * MIB
    assert native.pool.reserved_bytes >= buffer.pool.reserved_bytes - (96 - 64) * MIB


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 100)), max_size=60))
def test_a_shelf_is_one_free_slot_again_when_all_is_taken_off(steps: list[tuple[bool, int]]) -> None:
    first_fit = FirstFitRange(10_000)
    slots: list[tuple[int, int]] = []
    for put, value in steps:
        if put:
            offset = first_fit.put(value)
            assert offset is not None
            assert all(offset + value <= start or start + size <= offset for start, size in slots)
            slots.append((offset, value))
        elif slots:
            first_fit.take(slots.pop(value % len(slots)))
    for slot in slots:
        first_fit.take(slot)
    assert first_fit.free == [(0, 10_000)]


# --- sequences and scores


def experts(num_layers: int = 6) -> Sequence:
    """A step: per layer an activation and two large temporaries; all that is left at its end is what it began with."""
    requests: list[Request] = [(ALLOC, 0, 64 * MIB, 0, PERSISTENT)]
    number = 1
    kept = []
    for _ in range(num_layers):
        requests += [(ALLOC, number, 12 * MIB, 0, ACTIVATION), (ALLOC, number + 1, 40 * MIB, 0, TEMPORARY)]
        requests += [(FREE, number + 1, 0, 0, 0)]
        kept.append(number)
        number += 2
    requests += [(FREE, block, 0, 0, 0) for block in reversed(kept)]
    return Sequence(name="experts", requests=tuple(requests), steady=1)


def test_a_demand_is_what_was_written_down() -> None:
    asked = demand(experts())
    assert asked.peak_live_bytes == (64 + 6 * 12 + 40) * MIB
    assert (asked.num_allocations, asked.num_frees) == (12, 12)
    assert asked.share_below_256_mb == asked.share_of_bytes_below_256_mb == 1.0


def test_the_share_of_small_requests_counts_256_mb_as_large() -> None:
    requests = ((ALLOC, 0, 256 * 10**6, 0, 0), (ALLOC, 1, 256 * 10**6 - 1, 0, 0))
    asked = demand(Sequence(name="", requests=requests, steady=0))
    assert asked.share_below_256_mb == 0.5


def test_a_steady_step_asks_the_driver_for_nothing_under_cached_segments() -> None:
    again = repeated(experts(), 2)
    assert again is not None
    score = compare(again, ["native"], PoolInputs(), DriverCosts.of())[0]
    assert score.calls == {}
    assert score.calls_s == 0
    assert score.all_calls["segment_alloc"] > 0
    assert score.fragmentation_bytes == score.peak_reserved_bytes - demand(again).peak_live_bytes


def test_a_step_that_keeps_something_cannot_be_repeated() -> None:
    requests = ((ALLOC, 0, 512, 0, 0),)
    assert repeated(Sequence(name="", requests=requests, steady=0), 2) is None


def test_what_is_replaced_in_a_step_is_replaced_again_in_the_next() -> None:
    """The step frees the block it found and leaves an equal one."""
    requests = ((ALLOC, 0, 512, 0, 0), (FREE, 0, 0, 0, 0), (ALLOC, 1, 512, 0, 0))
    again = repeated(Sequence(name="", requests=requests, steady=1), 3)
    assert again is not None
    assert len(play(again.requests, make_pool("native", PoolInputs()))) == 1


def test_sizes_that_change_scatter_cached_segments_but_not_fixed_blocks() -> None:
    """Experts with changing tokens: exact-size slots are useless, fixed blocks stay near what is alive."""
    plain = repeated(experts(), 8)
    changing = varied(experts(), 0.5, 8)
    assert plain is not None
    assert changing is not None
    policies = ["native", "slab", "fixed"]
    steady = {s.policy: s for s in compare(plain, policies, PoolInputs(), DriverCosts.of())}
    moving = {s.policy: s for s in compare(changing, policies, PoolInputs(), DriverCosts.of())}
    alive = demand(changing).peak_live_bytes
    assert moving["slab"].peak_reserved_bytes > 2 * steady["slab"].peak_reserved_bytes
    assert moving["slab"].calls
    assert moving["fixed"].peak_allocated_bytes <= alive + 2 * MIB * 8  # a block a large tensor is the most it wastes
    assert moving["fixed"].peak_reserved_bytes < moving["native"].peak_reserved_bytes


def test_a_capacity_too_small_is_told_and_not_raised() -> None:
    scores = compare(experts(), NAMES, PoolInputs(capacity_bytes=100 * MIB), DriverCosts.of())
    assert all(score.out_of_memory for score in scores)


def test_costs_are_a_part_a_call_and_a_part_a_byte() -> None:
    costs = DriverCosts.of()
    assert "assumed" in costs.source
    one, two = costs.seconds("segment_alloc", MIB), costs.seconds("segment_alloc", 2 * MIB)
    assert two - one == pytest.approx(MIB * costs.malloc.s_per_byte)
    assert costs.seconds("segment_free", 0) == costs.free.call_s


def test_expandable_is_what_the_setting_makes_of_native() -> None:
    settings = AllocatorSettings(expandable_segments=True)
    sequence = experts()
    told, named = (
        compare(sequence, [name], PoolInputs(settings=options), DriverCosts.of())[0]
        for name, options in (("native", settings), ("expandable", AllocatorSettings()))
    )
    assert told.peak_reserved_bytes == named.peak_reserved_bytes


def test_defragmentation_empties_the_sparsest_segment_into_another() -> None:
    """By hand, in MiB: x (40) lies alone in a segment of 100 while 50 are free in the other. A request of 200 finds 110 of 400 free."""
    sizes = [100, 100, 50, 30, 40, 200]  # a, b, y, z, x, w
    order = [(ALLOC, 0), (ALLOC, 1), (FREE, 0), (FREE, 1), (ALLOC, 2), (ALLOC, 3), (ALLOC, 4), (FREE, 3), (ALLOC, 5)]
    requests = tuple((what, n, sizes[n] * MIB if what == ALLOC else 0, 0, TEMPORARY) for what, n in order)
    calls: list[tuple[str, int]] = []
    pool = make_pool("defrag", PoolInputs(), lambda call, _, size: calls.append((call, size // MIB)))
    play(requests[:-1], pool)
    assert (pool.reserved_bytes, pool.active_bytes) == (200 * MIB, 90 * MIB)
    handles = play(
        requests, pool := make_pool("defrag", PoolInputs(), lambda call, _, size: calls.append((call, size // MIB)))
    )
    assert calls[-3:] == [("segment_alloc", 200), ("move", 40), ("segment_free", 100)]
    assert (pool.reserved_bytes, pool.active_bytes) == (300 * MIB, 290 * MIB)
    (low, high), (start, end) = (
        (at, at + size) for ((at, size),) in (pool.pieces(handles[number]) for number in (2, 4))
    )
    assert start == high  # x now lies behind y
    assert end - low == 90 * MIB
    (score,) = compare(Sequence(name="", requests=requests, steady=0), ["defrag"], PoolInputs(), DriverCosts.of())
    assert score.moved_bytes == 40 * MIB


def test_what_waits_for_other_streams_is_never_moved() -> None:
    sizes = [100, 100, 50, 30, 40, 200]
    order = [
        (ALLOC, 0),
        (ALLOC, 1),
        (FREE, 0),
        (FREE, 1),
        (ALLOC, 2),
        (ALLOC, 3),
        (ALLOC, 4),
        (FREE, 3),
        (REQUEST_FREE, 4),
        (ALLOC, 5),
    ]
    calls: list[tuple[str, int]] = []
    pool = make_pool("defrag", PoolInputs(), lambda call, _, size: calls.append((call, size // MIB)))
    play(((what, n, sizes[n] * MIB if what == ALLOC else 0, 0, TEMPORARY) for what, n in order), pool)
    assert calls[-2:] == [("move", 50), ("segment_free", 100)]  # y to x's segment, though that is sparser
    assert pool.active_bytes == 290 * MIB
