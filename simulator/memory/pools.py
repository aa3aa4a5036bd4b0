"""The pool that a plan asks for: its policy, PyTorch's settings for it, and what a step costs of its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from typing import Any, Final

from simulator.base.progress import MEMORY, PLAYED, report, reported
from simulator.base.sums import summed
from simulator.memory.allocator import AllocatorSettings, OutOfMemoryError
from simulator.memory.history import History, moment_of
from simulator.memory.policies import BLOCK_BYTES, Pool, PoolInputs, make_pool
from simulator.memory.requests import (
    ALLOC,
    FREE,
    REQUEST_FREE,
    Request,
    Sequence,
    checkpoints,
    play,
    repeated,
    requests_of,
)  # fmt: skip
from simulator.memory.tape import TAG
from simulator.spec.plan import Plan
from simulator.spec.plan.alloc_conf import AllocConf
from simulator.spec.plan.memory import TIERED, MemoryPlan

NATIVE: Final = "native"
# of a plan -> of `POLICIES`, where they differ
_NAMES: Final = {"caching": NATIVE, **dict.fromkeys(TIERED, "expandable")}
_TAKES: Final = ("segment_alloc", "segment_map")
_GIVES: Final = ("segment_free", "segment_unmap")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Requests to the pool and calls of the driver in a steady step.

    allocations, frees: requests. calls, call_bytes: by name of the driver's call. host_s: an own allocator's time for them.
    refill: what a step behind one at whose end the cache was given back calls besides, count and bytes by name; refill_every: so
    many steps. compressed_bytes: of tensors that are compressed, before that; compress_s: what compressing and reading them takes.
    """

    policy: str
    allocations: int
    frees: int
    refill: dict[str, tuple[int, int]] = field(default_factory=dict)
    refill_every: int = 0
    compressed_bytes: int = 0
    compress_s: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    call_bytes: dict[str, int] = field(default_factory=dict)
    host_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A history on a pool. reserved: at the end of each moment of the steady step; empty where a request fails.

    peak_bytes: the most that is reserved in the steady step; where a request fails, what it needed. highest_bytes: in the
    first step too; refilled_bytes: in a step that begins with an empty cache. num_retries: how often the cache is given back in the steady step.
    """

    use: PoolUse
    reserved: list[int]
    peak_bytes: int
    highest_bytes: int
    refilled_bytes: int
    num_retries: int
    fails: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """How requests are served. name: of `POLICIES`."""

    policy: str = "caching"
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    block_bytes: int = BLOCK_BYTES

    @classmethod
    def of(cls, plan: Plan) -> Pools:
        """A plan's own."""
        memory = plan.memory
        return cls(policy=memory.policy, settings=settings_of(plan), block_bytes=memory.block_bytes)

    @property
    def name(self) -> str:
        return _NAMES.get(self.policy, self.policy)

    @property
    def looks_at_limit(self) -> bool:
        """Without a limit it would act otherwise even where the limit is never met."""
        return self.settings.garbage_collection_threshold > 0

    def inputs(self, capacity_bytes: int | None = None) -> PoolInputs:
        return PoolInputs(settings=self.settings, capacity_bytes=capacity_bytes, block_bytes=self.block_bytes)


def asks_for_pool(plan: Plan) -> bool:
    """The plan says how requests are served; else PyTorch's allocator with its defaults serves them."""
    memory = plan.memory
    non_default = memory.alloc_conf or memory.own_time or memory.refill_every or memory.compress
    return memory.policy != "caching" or bool(non_default)


def settings_of(plan: Plan) -> AllocatorSettings:
    """What the plan's PYTORCH_CUDA_ALLOC_CONF and policy say."""
    conf = plan.memory.conf
    if plan.memory.policy == "expandable" or plan.memory.tiered:
        conf = replace(conf, expandable_segments=True)
    return allocator_settings(conf, limited=conf.memory_fraction is not None or plan.memory_fraction < 1.0)


def allocator_settings(conf: AllocConf, *, limited: bool) -> AllocatorSettings:
    """A PYTORCH_CUDA_ALLOC_CONF as the simulated allocator has it.

    limited: a memory fraction is set; torch collects garbage only then (CUDACachingAllocator.cpp, malloc: `set_fraction`).
    """
    names = (
        "expandable_segments", "max_split_size_bytes", "max_non_split_rounding_bytes", "large_segment_bytes",
        "roundup_power2_divisions", "garbage_collection_threshold",
    )  # fmt: skip
    given = {name: value for name in names if (value := getattr(conf, name)) is not None}
    if not any(given.get("roundup_power2_divisions", ())):
        given.pop("roundup_power2_divisions", None)
    if not limited:
        given.pop("garbage_collection_threshold", None)
    return AllocatorSettings(**given)


class _Driver:
    """Counts calls, and what is reserved."""

    def __init__(self) -> None:
        self.calls, self.call_bytes = Counter[str](), Counter[str]()
        self.held = self.highest = 0

    def __call__(self, call: str, address: int, num_bytes: int) -> None:  # noqa: ARG002  as pools tell it
        self.calls[call] += 1
        self.call_bytes[call] += num_bytes
        self.held += num_bytes * ((call in _TAKES) - (call in _GIVES))
        self.highest = max(self.highest, self.held)

    def taken(self) -> tuple[dict[str, int], dict[str, int]]:
        """The calls that were made since it was asked last, and their bytes."""
        if not self.calls:
            return {}, {}
        seen, self.calls, self.call_bytes = (self.calls, self.call_bytes), Counter(), Counter()
        return seen


def play_pool(
    history: History, pools: Pools, plan: Plan, limit_bytes: int | None = None, *, briefly: bool = False
) -> Played:
    """Play a first and a steady step on the pool, and the steady one again, whose calls count.

    The one before it has also taken what the optimizer's state, new since the first, left no room for.
    limit_bytes: what the driver can give it; None: no limit. briefly: its calls count, as of a plan that no allocator makes fit.
    """
    run, needed = _PoolRun(history, plan), 0
    try:
        run.begin(pools, limit_bytes)
        tally, reserved = run.step(run.sequence)
    except OutOfMemoryError as exc:
        tally, reserved, needed = _Tally(plan, history), [], exc.needed_bytes
    peak, retries = run.driver.highest, run.num_retries - run.retries_before
    if reserved and not briefly:
        tally = run.settled() or tally
    return Played(
        use=tally.use(pools.policy, plan),
        reserved=reserved,
        peak_bytes=peak if reserved else needed,
        highest_bytes=max(run.first_highest, peak),
        refilled_bytes=run.driver.highest if tally.refill is not None else 0,
        num_retries=retries,
        fails=not reserved,
    )


class _PoolRun:
    """A history on a pool, step by step."""

    pool: Pool[Any]

    def __init__(self, history: History, plan: Plan) -> None:
        self.history, self.plan = history, plan
        requests, self._begins = requests_of(history)
        self.sequence = Sequence(name="", requests=tuple(requests), steady=self._begins[history.steady])
        self.driver, self.handles, self.first_highest, self.retries_before = _Driver(), dict[int, Any](), 0, 0

    @property
    def num_retries(self) -> int:
        return self.pool.num_retries if hasattr(self, "pool") else 0

    def begin(self, pools: Pools, limit_bytes: int | None) -> None:
        """The first step. Raises OutOfMemoryError."""
        requests = self.sequence.requests
        needs = pools.inputs(limit_bytes)
        if pools.name == "checkpoint_buffer":
            needs = replace(needs, checkpoints=checkpoints(requests))
        self.pool = make_pool(pools.name, needs, self.driver)
        play(requests[: self.sequence.steady], self.pool, handles=self.handles)
        report(PLAYED, MEMORY)
        self.retries_before, self.first_highest = self.pool.num_retries, self.driver.highest
        self.driver.highest = self.driver.held

    def step(self, sequence: Sequence) -> tuple[_Tally, list[int]]:
        """The last step of a sequence, and what is reserved at the end of each of its moments. Raises OutOfMemoryError."""
        tally, reserved = _Tally(self.plan, self.history), list[int]()
        self.driver.taken()
        for start, part in self._moments(sequence):
            play(part, self.pool, handles=self.handles)
            tally.add(start, part, self.driver.taken())
            reserved.append(self.pool.reserved_bytes)
        return tally, reserved

    def settled(self) -> _Tally | None:
        """Requests of a step after the steady one, and of one with an empty cache; None if the step does not repeat or fit."""
        if (again := repeated(self.sequence, 2)) is None:
            return None
        with suppress(OutOfMemoryError):
            tally, _ = self.step(again)
            if self.plan.memory.refill_every:
                self.driver.taken()
                self.pool.empty_cache()
                seen, self.driver.highest = self.driver.taken(), self.driver.held
                tally.refill, _ = self.step(repeated(self.sequence, 3) or again)  # what repeats once repeats twice
                tally.refill.add(self.history.steady, (), seen)
            return tally
        return None

    def _moments(self, sequence: Sequence) -> Iterator[tuple[int, tuple[Request, ...]]]:
        """(event at which it begins, requests) of each moment of a sequence's last step, which is the history's or repeats it."""
        begins, first = self._begins, self.history.steady
        shift = sequence.steady - begins[first]
        for start, end in reported([*pairwise([first, *self.history.bounds[1:]])], PLAYED, MEMORY):
            yield start, sequence.requests[begins[start] + shift : begins[end] + shift]


def _counts(plan: Plan, history: History) -> Callable[[int], int]:
    """How often what begins at an event counts over all micro-batches, of which the history plays at most two.

    What the last of those does forward and backward, each that is left out does too.
    """
    last = max((mark[2] for mark in history.marks), default=0)
    left_out = max(0, plan.num_micro_batches - 1 - last)

    def times(event: int) -> int:
        phase, micro_batch, _, _ = moment_of(history, event)
        return 1 + left_out * (phase in ("forward", "backward") and micro_batch == last)

    return times


class _Tally:
    """Requests and calls of a steady step over all micro-batches."""

    def __init__(self, plan: Plan, history: History) -> None:
        self._times = _counts(plan, history)
        self.refill: _Tally | None = None
        self._requests, self.calls, self.sizes = Counter[str](), Counter[str](), Counter[str]()

    def add(self, event: int, requests: Iterable[Request], seen: tuple[dict[str, int], dict[str, int]]) -> None:
        times, kinds = self._times(event), [one[0] for one in requests]
        asked = {"allocations": kinds.count(ALLOC), "frees": kinds.count(FREE) + kinds.count(REQUEST_FREE)}
        for total, found in ((self._requests, asked), (self.calls, seen[0]), (self.sizes, seen[1])):
            for name, count in found.items():
                total[name] += times * count

    def use(self, policy: str, plan: Plan) -> PoolUse:
        allocations, frees = self._requests["allocations"], self._requests["frees"]
        return PoolUse(
            policy=policy,
            allocations=allocations,
            frees=frees,
            refill=self._besides(),
            refill_every=plan.memory.refill_every,
            calls=dict(sorted(self.calls.items())),
            call_bytes=dict(sorted(self.sizes.items())),
            host_s=allocations * plan.memory.alloc_s + frees * plan.memory.free_s,
        )

    def _besides(self) -> dict[str, tuple[int, int]]:
        """What the step behind an emptied cache calls more than this one."""
        if self.refill is None:
            return {}
        more, sizes = self.refill.calls - self.calls, self.refill.sizes - self.sizes
        return {name: (more[name], sizes[name]) for name in sorted(more)}


def compressed(history: History, memory: MemoryPlan) -> History:
    """The history with tensors of each kind as large as the hardware keeps them; rounded up to whole bytes."""
    ratios = {TAG[name]: ratio for name, ratio in memory.compress.items() if ratio > 1}
    if not ratios:
        return history
    events = [
        (slot, ceil(size / ratios[tag]) if size > 0 and tag in ratios else size, stream, tag)
        for slot, size, stream, tag in history.events
    ]
    return replace(history, events=events)


def compression(history: History, plan: Plan) -> tuple[int, float]:
    """(bytes before compression, seconds) of a step's compressed tensors: what it makes of them, and what stays, once each way.

    history: as it is compressed. Micro-batches that it leaves out count as its last one does.
    """
    ratios = {TAG[name]: ratio for name, ratio in plan.memory.compress.items() if ratio > 1}
    times, found, kept_seconds = _counts(plan, history), 0.0, dict[int, float]()
    for index, (slot, size, _, tag) in enumerate(history.events):
        if size >= 0 and tag in ratios:
            kept_seconds[slot] = size * ratios[tag]
            if index >= history.steady:
                found += kept_seconds[slot] * times(index)
        elif size < 0 and index < history.steady:
            kept_seconds.pop(slot, None)
        if index == history.steady - 1:
            found += summed(kept_seconds.values())
    rate = plan.memory.compress_bytes_per_s
    return round(found), 2 * found / rate if rate else 0.0
