"""Memory: what is alive when in a step, who owns it at the peak, and what the caching allocator reserves for it.

`simulate_memory` writes a first and a steady step as allocations and frees (`step`, `strategies`), sums the live bytes
and plays the same sequence through the caching allocator. There is no clock in here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from operator import itemgetter

from simulator.allocator import AllocatorSettings, Block, CachingAllocator
from simulator.device import Device
from simulator.memory.choice import Library, strategy_of
from simulator.memory.offloading import saved_bytes
from simulator.memory.outside import capacity_bytes, outside_torch_bytes, window_bytes, workspace_bytes
from simulator.memory.pressure import Pressure, under_pressure
from simulator.memory.step import Mark, StepWriter, layer_tape, record_tapes
from simulator.memory.tape import CATEGORIES, DONE, FREE, FREE_LATER, Event
from simulator.model import Model
from simulator.model_shard import shard_of
from simulator.ops import ModelBlocks, build_blocks
from simulator.plan import Plan
from simulator.stack import Stack
from simulator.trace import MemorySample, MemoryTrace

__all__ = [
    "History",
    "Library",
    "MemoryEvent",
    "MemoryUse",
    "Pressure",
    "StepLiveBytes",
    "activation_bytes",
    "capacity_bytes",
    "device_history",
    "label",
    "live_by_category",
    "memory_uses",
    "moment_of",
    "outside_torch_bytes",
    "simulate_memory",
    "step_events",
    "step_live_bytes",
    "step_reserved_bytes",
    "window_bytes",
    "write_history",
]

CUDA_GRANULARITY_BYTES = 512
ADDRESS_SPACE_BYTES = 2**59
# 19 plans measured on an H200 reserve 0.991 to 1.003 of the prediction; a plan's data loader, logging and evaluation
# fragment what those steps did not, and no plan on real communicators is among them, so the interval is wider.
RESERVED_LOW, RESERVED_HIGH = 0.95, 1.06


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent:
    """One allocation or free. `storage` names the pair; `moment` is (phase, micro-batch, unit, op)."""

    kind: str
    storage: int
    num_bytes: int
    tag: str
    stream: int
    moment: tuple[str, int, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Peak bytes of one rank class, as the three figures that users confuse, and who was alive at the peak.

    allocated: sum of live tensors; reserved: what the caching allocator took from the driver;
    outside_torch: CUDA context, communicators, libraries. capacity: what a process can get of the device.
    by_category: category -> bytes alive at the peak of allocated. peak_moment: label of the op that reached it.
    pressure: a step played where memory ends, if it may end too early.
    low_reserved_bytes, high_reserved_bytes: 90 % interval of reserved.
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
    peer_bytes: int = 0
    peer_capacity_bytes: int | None = None
    host_bytes: int = 0
    host_capacity_bytes: int | None = None
    nvme_bytes: int = 0
    nvme_capacity_bytes: int | None = None

    @property
    def used_bytes(self) -> int:
        return self.peak_reserved_bytes + self.outside_torch_bytes

    @property
    def fits_bare(self) -> bool:
        """Live tensors alone fit: an allocator without any waste would do."""
        return self.peak_allocated_bytes + self.outside_torch_bytes <= self.capacity_bytes

    @property
    def fits_surely(self) -> bool:
        """Even the upper end of reserved's interval fits."""
        return self.high_reserved_bytes + self.outside_torch_bytes <= self.capacity_bytes


@dataclass(frozen=True, kw_only=True)
class History:
    """Events of a first and a steady step; the steady one begins at `steady`."""

    events: list[Event]
    marks: list[Mark]
    num_slots: int
    steady: int

    @cached_property
    def begins(self) -> list[int]:
        """The event at which each mark's moment begins."""
        return [mark[0] for mark in self.marks]

    @cached_property
    def bounds(self) -> list[int]:
        """Event indices of the steady step between which nothing but one moment happens."""
        return sorted({self.steady, len(self.events), *(at for at in self.begins if at > self.steady)})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLiveBytes:
    """Live bytes over a steady step: the most of each moment and its event's index, what each leaves; before and after."""

    most: list[tuple[int, int]]
    ends: list[int]
    resident: int
    final: int

    @property
    def peak(self) -> tuple[int, int]:
        """(bytes, index of the event) of the first highest moment."""
        return max(self.most, key=itemgetter(0))


def simulate_memory(
    model: Model,
    plan: Plan,
    stack: Stack,
    blocks: ModelBlocks,
    device: Device,
    settings: AllocatorSettings | None = None,
    stages: Sequence[int] | None = None,
    *,
    quick: bool = False,
) -> tuple[MemoryUse, MemoryTrace]:
    """Memory of one rank: peaks of allocated and reserved bytes, categories at the peak, and the course of a step.

    stages: pipeline stages that have ranks on such a device; None: all. quick: the peaks without the course, and where
    live tensors alone do not fit, the allocator is not asked what it would reserve for them.
    """
    history, live = _fullest(model, plan, stack, blocks, device, stages)
    outside = outside_torch_bytes(device, plan, stack=stack) + window_bytes(model, plan, stack)
    hopeless = quick and live.peak[0] + outside > capacity_bytes(device, plan, outside)
    reserved = [most for most, _ in live.most] if hopeless else _reserved(history, live, settings)
    use = _use(history, live, max(reserved), plan, device, outside)
    if use.fits_bare and not use.fits_surely:
        limit = use.capacity_bytes - use.outside_torch_bytes
        use = replace(use, pressure=under_pressure(history.events, history.steady, limit, settings))
    per_moment = () if quick else zip(live.most, reserved, strict=True)
    samples = tuple(
        MemorySample(label=label(moment_of(history, index)), allocated_bytes=highest, reserved_bytes=held)
        for (highest, index), held in per_moment
    )
    peak_index = live.most.index(live.peak)
    return use, MemoryTrace(samples=samples, peak_index=peak_index, by_category=use.by_category)


def memory_uses(
    model: Model,
    plan: Plan,
    stack: Stack,
    blocks: ModelBlocks,
    device: Device,
    settings: Iterable[AllocatorSettings | None],
) -> Iterator[MemoryUse]:
    """The peaks alone under each of the settings, without the course of the step, and not played where memory ends."""
    history, live = _fullest(model, plan, stack, blocks, device)
    outside = outside_torch_bytes(device, plan, stack=stack) + window_bytes(model, plan, stack)
    for one in settings:
        yield _use(history, live, max(_reserved(history, live, one)), plan, device, outside)


def _fullest(
    model: Model,
    plan: Plan,
    stack: Stack,
    blocks: ModelBlocks,
    device: Device,
    stages: Sequence[int] | None = None,
) -> tuple[History, StepLiveBytes]:
    """The history of the rank whose live bytes reach highest, among the pipeline's stages."""
    write = partial(write_history, model, plan, stack, blocks, workspace_bytes(device), library=_library(device))
    found = (write(stage=stage) for stage in _candidates(model, plan, stages))
    return max(((one, step_live_bytes(one)) for one in found), key=lambda pair: pair[1].peak[0])


def _candidates(model: Model, plan: Plan, stages: Sequence[int] | None = None) -> list[int]:
    """Stages that may hold most: the ends, and the first of those with the most layers in flight.

    Stages between hold fewer micro-batches (or as many of fewer layers), and neither the embedding nor the logits.
    """
    if plan.pp == 1:
        return [0]
    among = sorted(stages) if stages else list(range(plan.pp))
    first, middle, last = among[0], among[1:-1], among[-1]
    held = {stage: shard_of(model, plan, stage).num_layers for stage in (first, *middle, last)}
    longest = max(held.values())
    inside = [stage for stage in middle if held[stage] == longest > held[first]]
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


def _reserved(history: History, live: StepLiveBytes, settings: AllocatorSettings | None) -> list[int]:
    """What the allocator holds at the end of each moment. Beyond any address space it is not asked: what is alive."""
    if live.peak[0] > ADDRESS_SPACE_BYTES:
        return [most for most, _ in live.most]
    return step_reserved_bytes(history, CachingAllocator(settings))


def activation_bytes(model: Model, plan: Plan, stack: Stack, blocks: ModelBlocks) -> dict[str, int]:
    """Bytes of a micro-batch's activations that each layer sends off the GPU; none where the plan keeps them.

    The last layer's stay: its backward is the first.
    """
    if plan.offload.activations == "none":
        return {}
    tapes = record_tapes(blocks, plan, stack, keep_gradients=False)
    chain = [tapes.embedding, *(layer_tape(tapes, plan, kind, index) for index, kind in enumerate(model.body))]
    return {f"layer{i}": saved_bytes(chain[i + 1], chain[i]) for i in range(model.num_layers - 1)}


def step_events(
    model: Model, plan: Plan, stack: Stack, blocks: ModelBlocks, *, library: Library = "nccl"
) -> tuple[MemoryEvent, ...]:
    """Persistent state, then one steady step, in host order; bytes as asked for, before any rounding."""
    history = write_history(model, plan, stack, blocks, (), steps=1, library=library)
    made: dict[int, tuple[int, str, int]] = {}
    events: list[MemoryEvent] = []
    for index, (slot, num_bytes, stream, tag) in enumerate(history.events):
        if num_bytes >= 0:
            made[slot] = (num_bytes, CATEGORIES[tag], stream)
        elif num_bytes == DONE:
            continue
        size, name, owner = made[slot]
        kind = "alloc" if num_bytes >= 0 else "free"
        moment = moment_of(history, index)
        events.append(MemoryEvent(kind=kind, storage=slot, num_bytes=size, tag=name, stream=owner, moment=moment))
    return tuple(events)


def write_history(
    model: Model,
    plan: Plan,
    stack: Stack,
    blocks: ModelBlocks,
    workspaces: tuple[int, ...],
    *,
    steps: int = 2,
    library: Library = "nccl",
    stage: int = 0,
) -> History:
    """A step that creates the optimizer's state (if `steps` is 2), then a steady one.

    The first decides how later blocks lie: its peak is reserved before the optimizer's state exists. Two micro-batches
    stand for any number: what a second one finds, the third finds too; of a pipeline, as many as fill it twice.
    """
    step = StepWriter(shard_of(model, plan, stage), plan, stack, blocks, strategy_of(plan, library), stage)
    early = plan.implementation in ("deepspeed", "megatron")  # their optimizers make their state when they are built
    step.persistent(workspaces, optimizer_state=early or steps == 1)
    count = min(plan.num_micro_batches, 2 * plan.pp)
    if steps == 2:
        step.step(count, first=not early)
    steady = len(step.writer.events)
    step.step(count)
    writer = step.writer
    return History(events=writer.events, marks=writer.marks, num_slots=writer.num_slots, steady=steady)


def device_history(model: Model, plan: Plan, stack: Stack, device: Device) -> History:
    """The history of the fullest rank on a device, the workspaces of its libraries included."""
    return _fullest(model, plan, stack, build_blocks(model, stack, plan), device)[0]


def _library(device: Device) -> Library:
    """What the collectives of a device are."""
    return "gloo" if device.architecture == "cpu" else "nccl"


def step_live_bytes(history: History, granularity_bytes: int = CUDA_GRANULARITY_BYTES) -> StepLiveBytes:
    """Sum of live bytes over the steady step, each storage rounded up to `granularity_bytes`."""
    sizes = [0] * history.num_slots
    up = granularity_bytes - 1
    live = 0
    most: list[tuple[int, int]] = []
    ends: list[int] = []
    for start, end in pairwise([0, *history.bounds]):
        highest, at = live, start
        for index, (slot, num_bytes, _, _) in enumerate(history.events[start:end], start):
            if num_bytes >= 0:
                sizes[slot] = size = (num_bytes + up) // granularity_bytes * granularity_bytes
                live += size
                if live > highest:
                    highest, at = live, index
            elif num_bytes != DONE:
                live -= sizes[slot]
        most.append((highest, at))
        ends.append(live)
    return StepLiveBytes(most=most[1:], ends=ends[1:], resident=ends[0], final=live)


def live_by_category(history: History, at: int, granularity_bytes: int = CUDA_GRANULARITY_BYTES) -> dict[str, int]:
    """Category -> live bytes just after event `at`."""
    alive: dict[int, tuple[int, int]] = {}
    for slot, num_bytes, _, tag in history.events[: at + 1]:
        if num_bytes >= 0:
            alive[slot] = (num_bytes, tag)
        elif num_bytes != DONE:
            del alive[slot]
    totals = dict.fromkeys(CATEGORIES, 0)
    for num_bytes, tag in alive.values():
        totals[CATEGORIES[tag]] += -(-num_bytes // granularity_bytes) * granularity_bytes
    return {name: size for name, size in totals.items() if size}


def step_reserved_bytes(history: History, allocator: CachingAllocator) -> list[int]:
    """Bytes the allocator has reserved at the end of each moment of the steady step."""
    malloc, free = allocator.malloc, allocator.free
    blocks: dict[int, Block] = {}
    reserved: list[int] = []
    for start, end in pairwise([0, *history.bounds]):
        for slot, num_bytes, stream, _ in history.events[start:end]:
            if num_bytes >= 0:
                blocks[slot] = malloc(num_bytes, stream)
            elif num_bytes == FREE:
                free(blocks.pop(slot))
            elif num_bytes == FREE_LATER:
                block = blocks.pop(slot)
                allocator.record_stream(block, stream)
                free(block)
            else:
                allocator.synchronize(stream)
        reserved.append(allocator.reserved_bytes)
    return reserved[1:]


def moment_of(history: History, index: int) -> tuple[str, int, str, str]:
    """(phase, micro-batch, unit, op) of an event."""
    return history.marks[bisect_right(history.begins, index) - 1][1:]


def label(moment: tuple[str, int, str, str]) -> str:
    """A moment in words: "backward layer3 mb0: norm_1"."""
    phase, micro_batch, unit, op = moment
    return f"{phase} {unit} mb{micro_batch}: {op}" if unit else f"{phase}: {op}"
