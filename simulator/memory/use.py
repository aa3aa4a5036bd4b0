"""Peak bytes of a rank: live tensors, what the caching allocator reserves for them, and who was alive at the peak."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from simulator.base.fit import Fit, fit_of
from simulator.base.progress import MEMORY, WRITTEN, reported
from simulator.base.remembered import recent
from simulator.memory.allocator import AllocatorSettings, CachingAllocator
from simulator.memory.history import (
    History,
    StepLiveBytes,
    label,
    live_by_category,
    moment_of,
    step_live_bytes,
    step_reserved_bytes,
    write_history,
)
from simulator.memory.outside import capacity_bytes, outside_torch_bytes, window_bytes, workspace_bytes
from simulator.memory.pools import Pools, PoolUse, asks_for_pool, compressed, compression, play_pool
from simulator.memory.pressure import DriverCalls, Pressure, pressure_of, under_pressure
from simulator.parallel.model_shard import shard_of
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import ModelBlocks, build_blocks
from simulator.work.script.implementation import Library
from simulator.work.trace import MemorySample, MemoryTrace

ADDRESS_SPACE_BYTES = 2**59


# 19 plans measured on an H200 reserve 0.991 to 1.003 of the prediction; a plan's data loader, logging and evaluation
# fragment what those steps did not, and no plan on real communicators is among them, so the interval is wider.
RESERVED_LOW, RESERVED_HIGH = 0.95, 1.06


class Room(NamedTuple):
    """What is needed of one kind of memory, and what there is of it."""

    name: str
    needed_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Peak bytes of one rank class, as the three figures that users confuse, and who was alive at the peak.

    allocated: sum of live tensors; peak_reserved: what the caching allocator takes from the driver without a limit;
    low_reserved_bytes, high_reserved_bytes: its 90 % interval. outside_torch: CUDA context, communicators, libraries.
    capacity: what a process can get of the device.
    by_category: category -> bytes alive at the peak of allocated. peak_moment: label of the op that reached it.
    pressure: a step played where memory ends, if it may end too early; it says what is then reserved.
    pool: what a pool that the plan asks for does in a step; None: PyTorch's allocator with its defaults.
    spilled_bytes: of a pool with tiers, what lies below HBM at the peak, and is in none of the figures above.
    Of a node's idle GPUs, host memory and drives, what all its ranks take, and what there is (None: nothing is offloaded).
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    low_reserved_bytes: int
    high_reserved_bytes: int
    outside_torch_bytes: int
    capacity_bytes: int
    resident_bytes: int
    by_category: dict[str, int]
    peak_moment: str
    pressure: Pressure | None = None
    pool: PoolUse | None = None
    spilled_bytes: int = 0
    peer_bytes: int = 0
    peer_capacity_bytes: int | None = None
    host_bytes: int = 0
    host_capacity_bytes: int | None = None
    nvme_bytes: int = 0
    nvme_capacity_bytes: int | None = None

    @property
    def reserved_bytes(self) -> int:
        """The best estimate of what the allocator holds at its peak, where memory ends as it does.

        Where a request fails: what would be held without a limit, or if the limit alone is to blame, what was needed.
        """
        if self.pressure is None or (self.pressure.fails and self._beyond):
            return self.peak_reserved_bytes
        return self.pressure.peak_reserved_bytes

    @property
    def _beyond(self) -> bool:
        """Without a limit more would be held than there is."""
        return self.peak_reserved_bytes + self.outside_torch_bytes > self.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.reserved_bytes + self.outside_torch_bytes

    @property
    def live_tensors_fit(self) -> bool:
        """Live tensors alone fit: an allocator without any waste would do."""
        return self.peak_allocated_bytes + self.outside_torch_bytes <= self.capacity_bytes

    @property
    def retries(self) -> bool:
        """It fits, though only after the allocator gave its cache back."""
        pressure = self.pressure
        return pressure is not None and self.fit.runs and (self._beyond or pressure.num_retries > 0)

    @property
    def below(self) -> tuple[Room, ...]:
        """What all ranks of a node keep below HBM, of each kind of memory that there is."""
        kinds = (
            ("idle GPUs' memory", self.peer_bytes, self.peer_capacity_bytes),
            ("host memory", self.host_bytes, self.host_capacity_bytes),
            ("NVMe", self.nvme_bytes, self.nvme_capacity_bytes),
        )
        return tuple(Room(name, needed, there) for name, needed, there in kinds if there is not None)

    @property
    def binding(self) -> Room:
        """What decides whether it fits: the first kind of memory below that is too small, else the GPU's."""
        short = [one for one in self.below if one.needed_bytes > one.capacity_bytes]
        return short[0] if short else Room("", self.used_bytes, self.capacity_bytes)

    @property
    def fit(self) -> Fit:
        """The verdict; what is offloaded must fit below HBM."""
        if self.binding.name:
            return Fit.DOES_NOT_FIT
        outside = self.outside_torch_bytes
        return fit_of(
            live_bytes=self.peak_allocated_bytes + outside,
            best_bytes=self.used_bytes,
            upper_bytes=self.high_reserved_bytes + outside,
            capacity_bytes=self.capacity_bytes,
        )


def simulate_memory(  # noqa: PLR0913  what memory hangs on
    model: Model,
    plan: Plan,
    stack: Stack,
    blocks: ModelBlocks,
    device: Device,
    settings: AllocatorSettings | None = None,
    stages: Sequence[int] | None = None,
    *,
    quick: bool = False,
    lead: int = 0,
) -> tuple[MemoryUse, MemoryTrace]:
    """Memory of one rank: peaks of allocated and reserved bytes, categories at the peak, and the course of a step.

    stages: pipeline stages that have ranks on such a device; None: all. quick: the peaks without the course, and where
    live tensors alone do not fit, the allocator is not asked what it would reserve for them. lead: passes of a layer by which
    the host runs ahead of the device.
    """
    history, live = _fullest(
        model, plan, stack, blocks, device, stages, lead, live_of=_live_alike if quick else step_live_bytes
    )
    outside = outside_torch_bytes(device, plan, stack=stack) + window_bytes(model, plan, stack)
    return history_memory(history, live, plan, device, outside, settings, quick=quick)


def history_memory(
    history: History,
    live: StepLiveBytes,
    plan: Plan,
    device: Device,
    outside: int,
    settings: AllocatorSettings | None = None,
    *,
    quick: bool = False,
) -> tuple[MemoryUse, MemoryTrace]:
    """The same of a history, with so many bytes outside torch. Of the plan only its part of the device's memory counts."""
    use, reserved = history_use(history, live, plan, device, outside, settings, quick=quick)
    return use, memory_trace(history, live, reserved, use, quick=quick)


def history_use(
    history: History,
    live: StepLiveBytes,
    plan: Plan,
    device: Device,
    outside: int,
    settings: AllocatorSettings | None = None,
    *,
    quick: bool = False,
) -> tuple[MemoryUse, list[int]]:
    """The peaks of a history, and what is reserved at the end of each moment."""
    exceeds = quick and live.peak[0] + outside > capacity_bytes(device, plan, outside)
    if settings is None and asks_for_pool(plan) and not exceeds:
        return _on_pool(history, live, plan, device, outside)
    play = _alone_alike if quick and settings is None and not exceeds else _alone
    reserved, allocator, calls = play(history, live, settings, exceeds)
    use = _use(history, live, max(reserved), plan, device, outside)
    if use.live_tensors_fit and use.fit is not Fit.FITS:
        limit = use.capacity_bytes - use.outside_torch_bytes
        if _never_meets(allocator, limit):
            found, reserved_then = calls.pressure(use.peak_reserved_bytes), reserved
        else:
            found, reserved_then = under_pressure(history, limit, settings)
        use, reserved = replace(use, pressure=found), reserved_then or reserved
        use = replace(use, low_reserved_bytes=min(use.low_reserved_bytes, use.reserved_bytes))  # retries give back
    return use, reserved


def _alone(
    history: History,
    live: StepLiveBytes,
    settings: AllocatorSettings | None,
    exceeds: bool,  # noqa: FBT001  remembered
) -> tuple[list[int], CachingAllocator, DriverCalls]:
    """What is reserved at the end of each moment without a limit, and who was asked for it; exceeds: as much as is alive."""
    calls = DriverCalls()
    allocator = CachingAllocator(settings, on_driver=calls)
    reserved = [most for most, _ in live.most] if exceeds else _reserved(history, live, allocator, calls.clear)
    return reserved, allocator, calls


# Of plans one after another in whose steps the same tensors live, as those of a search often are
_live_alike = recent(2)(step_live_bytes)
_alone_alike = recent(1)(_alone)


def _on_pool(
    history: History, live: StepLiveBytes, plan: Plan, device: Device, outside: int
) -> tuple[MemoryUse, list[int]]:
    """The same on the pool that the plan asks for, and what it has reserved at the end of each moment."""
    pools = Pools.of(plan)
    exceeds = live.peak[0] + outside > capacity_bytes(device, plan, outside)
    lasting = plan.memory.refill_every or plan.memory.tiered  # whose calls of later steps take time all the same
    free = play_pool(history, pools, plan, briefly=exceeds and not lasting)
    size, seconds = compression(history, plan)
    with_compression = partial(replace, compressed_bytes=size, compress_s=seconds)
    use = replace(
        _use(history, live, max(*free.reserved, free.refilled_bytes), plan, device, outside),
        pool=with_compression(free.use),
    )
    limit = use.capacity_bytes - use.outside_torch_bytes
    if not use.live_tensors_fit or (use.fit is Fit.FITS and not pools.looks_at_limit):
        return use, free.reserved
    bound = play_pool(history, pools, plan, limit) if free.highest_bytes > limit or pools.looks_at_limit else free
    found = pressure_of(bound.use.calls, bound.use.call_bytes, bound.peak_bytes, bound.num_retries, fails=bound.fails)
    return replace(use, pressure=found, pool=with_compression(bound.use)), bound.reserved or free.reserved


def memory_trace(
    history: History, live: StepLiveBytes, reserved: list[int], use: MemoryUse, *, quick: bool
) -> MemoryTrace:
    """What is alive and reserved over the steady step; quick: without its moments."""
    steady = history.marks[bisect_left(history.begins, history.steady) :]
    latest = {} if quick else {mark[0]: mark[1:] for mark in steady}
    moments = () if quick else zip(history.bounds[:-1], live.most, reserved, strict=True)
    samples = tuple(
        MemorySample(label(latest.get(start) or moment_of(history, start)), highest, reserved_bytes)
        for start, (highest, _), reserved_bytes in moments
    )
    peak_index = live.most.index(live.peak)
    return MemoryTrace(samples=samples, peak_index=peak_index, by_category=use.by_category)


def _never_meets(allocator: CachingAllocator, limit_bytes: int) -> bool:
    """What was played without a limit goes the same way under this one: nothing in it looks at the limit."""
    settings = allocator.settings
    depends_on_limit = settings.expandable_segments or settings.garbage_collection_threshold > 0
    return allocator.peak_reserved_bytes <= limit_bytes and not depends_on_limit


def memory_uses(
    model: Model,
    plan: Plan,
    stack: Stack,
    blocks: ModelBlocks,
    device: Device,
    settings: Iterable[AllocatorSettings | None],
) -> Iterator[MemoryUse]:
    """The peaks alone under each of the settings, without the course of the step, and not played where memory ends.

    Where live tensors alone do not fit, no allocator is asked what it would reserve for them.
    """
    history, live = _fullest(model, plan, stack, blocks, device)
    outside = outside_torch_bytes(device, plan, stack=stack) + window_bytes(model, plan, stack)
    at_least = _use(history, live, live.peak[0], plan, device, outside)
    for one in settings:
        if not at_least.live_tensors_fit:
            yield at_least
        elif one is None and asks_for_pool(plan):
            yield _on_pool(history, live, plan, device, outside)[0]
        else:
            yield _use(history, live, max(_reserved(history, live, CachingAllocator(one))), plan, device, outside)


def _fullest(
    model: Model,
    plan: Plan,
    stack: Stack,
    blocks: ModelBlocks,
    device: Device,
    stages: Sequence[int] | None = None,
    lead: int = 0,
    live_of: Callable[[History], StepLiveBytes] = step_live_bytes,
) -> tuple[History, StepLiveBytes]:
    """The history of the rank whose live bytes reach highest, among the pipeline's stages."""
    library: Library = "gloo" if device.architecture == "cpu" else "nccl"
    write = partial(write_history, model, plan, stack, blocks, workspace_bytes(device), library=library, lead=lead)
    among = reported(_candidates(model, plan, stages), WRITTEN, MEMORY)
    found = (compressed(write(stage=stage), plan.memory) for stage in among)
    return max(((one, live_of(one)) for one in found), key=lambda pair: pair[1].peak[0])


def _candidates(model: Model, plan: Plan, stages: Sequence[int] | None = None) -> list[int]:
    """Stages that may hold most: the ends, and the first of those with the most layers in flight.

    Stages between hold fewer micro-batches (or as many of fewer layers), and neither the embedding nor the logits.
    """
    if plan.pp == 1:
        return [0]
    among = sorted(stages) if stages else list(range(plan.pp))
    first, middle, last = among[0], among[1:-1], among[-1]
    layer_counts = {stage: shard_of(model, plan, stage).num_layers for stage in (first, *middle, last)}
    longest = max(layer_counts.values())
    inside = [stage for stage in middle if layer_counts[stage] == longest > layer_counts[first]]
    return list(dict.fromkeys([first, *inside[:1], last]))


def _use(history: History, live: StepLiveBytes, reserved: int, plan: Plan, device: Device, outside: int) -> MemoryUse:
    peak, at = live.peak
    return MemoryUse(
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        low_reserved_bytes=max(peak, int(RESERVED_LOW * reserved)),
        high_reserved_bytes=int(RESERVED_HIGH * reserved),
        outside_torch_bytes=outside,
        capacity_bytes=capacity_bytes(device, plan, outside),
        resident_bytes=live.resident,
        by_category=live_by_category(history, at),
        peak_moment=label(moment_of(history, at)),
    )


def _reserved(
    history: History, live: StepLiveBytes, allocator: CachingAllocator, at_steady: Callable[[], None] | None = None
) -> list[int]:
    """What the allocator holds at the end of each moment. Beyond any address space it is not asked: what is alive."""
    if live.peak[0] > ADDRESS_SPACE_BYTES:
        return [most for most, _ in live.most]
    return step_reserved_bytes(history, allocator, at_steady)


def device_history(model: Model, plan: Plan, stack: Stack, device: Device, lead: int = 0) -> History:
    """The history of the fullest rank on a device, the workspaces of its libraries included. lead: see `simulate_memory`."""
    return _fullest(model, plan, stack, build_blocks(model, stack, plan), device, lead=lead)[0]
