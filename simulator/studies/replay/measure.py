"""One sequence of requests on one policy: what it reserves, how it fragments, what the driver is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from simulator.base.fit import Fit
from simulator.memory.allocator import OutOfMemoryError
from simulator.memory.driver_costs import DriverCosts
from simulator.memory.policies import Pool, PoolInputs, make_pool
from simulator.memory.requests import ALLOC, FREE, REQUEST_FREE, Sequence, checkpoints, play

SMALL_REQUEST_BYTES = 256 * 10**6  # what the share of small requests counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The requests of a sequence's step, independent of the policy. peak_at: index in the whole sequence.

    share_below_256_mb: of the step's allocations; share_of_bytes_below_256_mb: of their bytes.
    """

    peak_live_bytes: int
    peak_at: int
    num_allocations: int
    num_frees: int
    share_below_256_mb: float
    share_of_bytes_below_256_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A policy's answer. Peaks are of the measured step; the other figures hold at the moment of most live bytes.

    fragmentation_bytes: reserved - allocated. external_fragmentation: 1 - largest free block / all that is free, of
    blocks that may be reused. calls, calls_s: the driver's, in the measured step; all_calls, all_calls_s: before it too.
    moved_bytes: of what the policy moves beside the program in the measured step.
    out_of_memory: where the capacity was not enough; the figures then hold until there.
    """

    policy: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    fragmentation_bytes: int
    free_bytes: int
    largest_free_bytes: int
    external_fragmentation: float
    calls: dict[str, int]
    calls_s: float
    all_calls: dict[str, int]
    all_calls_s: float
    out_of_memory: str | None
    moved_bytes: int = 0

    @property
    def fit(self) -> Fit:
        """A recorded sequence is exact, so it is never tight."""
        return Fit.FITS if self.out_of_memory is None else Fit.DOES_NOT_FIT


def demand(sequence: Sequence) -> Demand:
    """What is asked for: the most bytes alive, and the sizes."""
    sizes: dict[int, int] = {}
    live = 0
    peak, peak_at = 0, sequence.steady
    for index, (action, number, num_bytes, _, _) in enumerate(sequence.requests):
        if action == ALLOC:
            sizes[number] = num_bytes
            live += num_bytes
            if live > peak and index >= sequence.steady:
                peak, peak_at = live, index
        elif action in (FREE, REQUEST_FREE):
            live -= sizes[number]
    requested = [r[2] for r in sequence.step if r[0] == ALLOC]
    small = [num_bytes for num_bytes in requested if num_bytes < SMALL_REQUEST_BYTES]
    return Demand(
        peak_live_bytes=peak,
        peak_at=peak_at,
        num_allocations=len(requested),
        num_frees=sum(r[0] in (FREE, REQUEST_FREE) for r in sequence.step),
        share_below_256_mb=len(small) / len(requested) if requested else 0.0,
        share_of_bytes_below_256_mb=sum(small) / sum(requested) if sum(requested) else 0.0,
    )


def compare(sequence: Sequence, policies: Iterable[str], needs: PoolInputs, costs: DriverCosts) -> list[Score]:
    """The same sequence on each policy."""
    needs = replace(needs, checkpoints=checkpoints(sequence.requests))
    peak_at = demand(sequence).peak_at
    return [measure(sequence, name, needs, costs, peak_at) for name in policies]


@dataclass(slots=True)
class _Driver:
    """Counts and prices calls."""

    costs: DriverCosts
    calls: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    moved: int = 0

    def __call__(self, call: str, address: int, num_bytes: int) -> None:  # noqa: ARG002  as pools tell it
        self.moved += num_bytes * (call == "move")
        self.calls[call] += 1
        self.seconds += self.costs.seconds(call, num_bytes)


def measure(sequence: Sequence, policy: str, needs: PoolInputs, costs: DriverCosts, peak_at: int) -> Score:
    """Play and measure. peak_at: index of the request at which fragmentation is looked at."""
    driver = _Driver(costs)
    out_of_memory = None
    peaks = [0, 0]
    moment = (0, 0, 0)  # reserved - allocated, free, largest free
    before, before_s, moved_before = Counter[str](), 0.0, 0
    pool: Pool[Any] | None = None

    def watch(index: int) -> None:
        nonlocal moment, before, before_s, moved_before
        assert pool is not None
        if index == sequence.steady - 1:
            before, before_s, moved_before = driver.calls.copy(), driver.seconds, driver.moved
        if index >= sequence.steady:
            peaks[0] = max(peaks[0], pool.allocated_bytes)
            peaks[1] = max(peaks[1], pool.reserved_bytes)
        if index == peak_at:
            free = pool.reserved_bytes - pool.active_bytes
            moment = (pool.reserved_bytes - pool.allocated_bytes, free, min(free, pool.largest_free_bytes()))

    try:
        pool = make_pool(policy, needs, driver)
        before, before_s = driver.calls.copy(), driver.seconds
        play(sequence.requests, pool, watch)
    except OutOfMemoryError as exc:
        out_of_memory = str(exc)
    fragmentation, free, largest = moment
    return Score(
        policy=policy,
        peak_allocated_bytes=peaks[0],
        peak_reserved_bytes=peaks[1],
        fragmentation_bytes=fragmentation,
        free_bytes=free,
        largest_free_bytes=largest,
        external_fragmentation=1 - largest / free if free else 0.0,
        calls=dict(sorted((driver.calls - before).items())),
        calls_s=driver.seconds - before_s,
        all_calls=dict(sorted(driver.calls.items())),
        all_calls_s=driver.seconds,
        out_of_memory=out_of_memory,
        moved_bytes=driver.moved - moved_before,
    )
