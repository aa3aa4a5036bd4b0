"""A first and a steady step written as allocations and frees, and what is alive at each moment of the steady one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType

from simulator.base.progress import MEMORY, PLAYED, reported
from simulator.memory.allocator import AllocatorSettings, Block, CachingAllocator
from simulator.memory.allocator.blocks import MIN_BLOCK_BYTES, SMALL_BYTES
from simulator.memory.offloading import saved_bytes
from simulator.memory.step import StepWriter
from simulator.memory.tape import CATEGORIES, DONE, FREE, FREE_LATER, TAG, Event
from simulator.memory.tapes import layer_tape, record_tapes
from simulator.memory.writer import Mark, Writer
from simulator.parallel.model_shard import shard_of
from simulator.parallel.schedule_traits import filling
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import ModelBlocks
from simulator.work.script import implementation_of
from simulator.work.script.implementation import Library
from simulator.work.script.instructions import Free, Happened, Instruction, Issued, Storages

CUDA_GRANULARITY_BYTES = 512
_OF_FREE = 2  # kind, storage
# Layers and micro-batches that gpipe holds at once and that are written one by one, each up to 0.1 MB and 4 ms; more are as large as those
_MOST_WRITTEN, _FEWEST = 1024, 8


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
        """Event indices of the steady step between which nothing but one moment happens: two at least."""
        later = {len(self.events), *self.begins[bisect_right(self.begins, self.steady) :]}
        return [self.steady, *(sorted(later - {self.steady}) or [self.steady])]


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


def activation_bytes(model: Model, plan: Plan, stack: Stack, blocks: ModelBlocks) -> dict[str, int]:
    """Bytes of a micro-batch's activations that each layer sends off the GPU; none where the plan keeps them.

    The last layer's stay: its backward is the first.
    """
    if plan.offload.activations == "none":
        return {}
    tapes = record_tapes(blocks, plan, stack, keep_gradients=False)
    chain = [tapes.embedding, *(layer_tape(tapes, plan, kind, index) for index, kind in enumerate(model.body))]
    return {f"layer{i}": saved_bytes(chain[i + 1], chain[i]) for i in range(model.num_layers - 1)}


def write_history(  # noqa: PLR0913  what a history hangs on
    model: Model,
    plan: Plan,
    stack: Stack,
    blocks: ModelBlocks,
    workspaces: tuple[int, ...],
    *,
    steps: int = 2,
    library: Library = "nccl",
    stage: int = 0,
    lead: int = 0,
) -> History:
    """A step that creates the optimizer's state (if `steps` is 2), then a steady one.

    The first decides how later blocks lie: its peak is reserved before the optimizer's state exists. Two micro-batches
    stand for any number: what a second one finds, the third finds too; of a pipeline, as many as `filling` says. lead: passes of a
    layer by which the host runs ahead of the device.
    """
    shard, buffers = shard_of(stack.stored(model), plan, stage), implementation_of(plan).buffers(plan, library)
    step = StepWriter(shard, plan, stack, blocks, buffers, stage)
    early = plan.traits.states_when_built
    step.persistent(workspaces, optimizer_state=early or steps == 1)
    held = count = filling(plan.pipeline_schedule, plan.pp, plan.num_micro_batches)
    if plan.pipeline_schedule == "gpipe" and not plan.memory.compress:
        count = min(held, max(_FEWEST, _MOST_WRITTEN // max(len(shard.body), 1)))
    write = partial(step.step, step.script(count), count, beyond=held - count)
    if steps == 2:
        write(first=not early)
    step.writer.lead = lead  # no host is ahead in the first step, where kernels are loaded and the driver gives memory
    steady = len(step.writer.events)
    write()
    writer = step.writer
    return History(events=writer.events, marks=writer.marks, num_slots=writer.num_slots, steady=steady)


def script_history(
    script: Iterable[Instruction],
    before: Sequence[Sequence[int]] = (),
    categories: Mapping[int, str] = MappingProxyType({}),
    workspaces: Iterable[tuple[int, int]] = (),
) -> History:
    """The storages of a script written op by op, one steady step; moments are its launches and collectives.

    before: storages of what ran until then, as a capture's events, and the categories of these. workspaces: (how many of
    these precede it, bytes that a library holds from there on).
    """
    writer, slots = Writer(), dict[Hashable, int]()
    writer.at("before", 0, "", "start")
    tags = {storage: TAG[name] for storage, name in categories.items()}
    begin = 0
    for end, size in sorted(workspaces):
        _write(writer, slots, [Storages([*before[begin:end]])], tags)
        writer.alloc(size, "workspaces")
        begin = end
    _write(writer, slots, [Storages([*before[begin:]])], tags)
    steady = len(writer.events)
    writer.at("step", 0, "", "start")
    _write(writer, slots, script, tags)
    return History(events=writer.events, marks=writer.marks, num_slots=writer.num_slots, steady=steady)


def _write(writer: Writer, slots: dict[Hashable, int], script: Iterable[Instruction], tags: Mapping[int, int]) -> None:
    """tags: of a captured program's storages."""
    events, marks, slot, other = writer.events, writer.marks, writer.num_slots, TAG["temporaries"]
    for one in script:
        kind = type(one)
        if kind is Storages:
            for event in one.events:  # type: ignore[union-attr]  # millions of them: no method's call
                if len(event) == _OF_FREE:
                    events.append((slots.pop(event[1]), FREE, 0, 0))
                else:
                    _, storage, num_bytes, stream = event
                    slots[storage] = slot
                    events.append((slot, num_bytes, stream, tags.get(storage, other)))
                    slot += 1
        elif isinstance(one, Issued):
            phase, _, op = one.label.rpartition(": ")
            marks.append((len(events), phase or "step", 0, "", op))
        elif isinstance(one, Happened):
            writer.happened(one.event)
        elif isinstance(one, Free):
            events.append((slots.pop(one.storage), FREE_LATER, one.event, 0))
        else:
            raise TypeError(f"{kind.__name__} stands for a described model's units")
    writer.num_slots = slot


def step_live_bytes(history: History, granularity_bytes: int = CUDA_GRANULARITY_BYTES) -> StepLiveBytes:
    """Sum of live bytes over the steady step, each storage rounded up to `granularity_bytes`, a power of two."""
    sizes = [0] * history.num_slots
    events, up, down = history.events, granularity_bytes - 1, -granularity_bytes
    live = 0
    most: list[tuple[int, int]] = []
    ends: list[int] = []
    for start, end in pairwise([0, *history.bounds]):
        highest, at = live, start
        for index, (slot, num_bytes, _, _) in enumerate(events[start:end], start):
            if num_bytes >= 0:
                sizes[slot] = size = (num_bytes + up) & down
                live += size
                if live > highest:
                    highest, at = live, index
            elif num_bytes != DONE:
                live -= sizes[slot]
        most.append((highest, at))
        ends.append(live)
    still = [(live, len(events) - 1)]  # of a step that allocates nothing
    return StepLiveBytes(most=most[1:] or still, ends=ends[1:] or [live], resident=ends[0], final=live)


def live_by_category(history: History, at: int, granularity_bytes: int = CUDA_GRANULARITY_BYTES) -> dict[str, int]:
    """Category -> live bytes just after event `at`."""
    alive: dict[int, Event] = {}
    for event in history.events[: at + 1]:
        if event[1] >= 0:
            alive[event[0]] = event
        elif event[1] != DONE:
            del alive[event[0]]
    totals = dict.fromkeys(CATEGORIES, 0)
    for _, num_bytes, _, tag in alive.values():
        totals[CATEGORIES[tag]] += -(-num_bytes // granularity_bytes) * granularity_bytes
    return {name: size for name, size in totals.items() if size}


def step_reserved_bytes(
    history: History, allocator: CachingAllocator, at_steady: Callable[[], None] | None = None
) -> list[int]:
    """Bytes the allocator has reserved at the end of each moment of the steady step. at_steady: called where that begins."""
    usual = allocator.settings == AllocatorSettings()
    play = partial(_played_usually, merged=list[Block]()) if usual else played
    blocks: dict[int, Block] = {}
    reserved: list[int] = []
    for start, end in reported([*pairwise([0, *history.bounds])], 3 * PLAYED, MEMORY):
        play(history.events[start:end], allocator, blocks)
        if not reserved and at_steady is not None:
            at_steady()
        reserved.append(allocator.reserved_bytes)
    return reserved[1:] or reserved


def played(events: Iterable[Event], allocator: CachingAllocator, blocks: dict[int, Block]) -> None:
    """Play events on an allocator. blocks: of the storages that are alive. Raises OutOfMemoryError where one does not fit."""
    for slot, num_bytes, stream, _ in events:
        if num_bytes >= 0:
            blocks[slot] = allocator.malloc(num_bytes, stream)
        elif num_bytes == FREE:
            allocator.free(blocks.pop(slot))
        elif num_bytes == FREE_LATER:
            block = blocks.pop(slot)
            allocator.record_stream(block, stream)
            allocator.free(block)
        else:
            allocator.synchronize(stream)


def _played_usually(  # noqa: C901  one loop is what it is for
    events: Iterable[Event], allocator: CachingAllocator, blocks: dict[int, Block], merged: list[Block]
) -> None:
    """The same under PyTorch's defaults: `malloc` and `free` in one place, as a prediction makes ten thousand calls.

    Of the allocator's figures only what is reserved is counted. merged: blocks that became part of others, to be used again.
    """
    for event in events:
        slot, num_bytes, stream, _ = event
        if num_bytes >= 0:
            size = (num_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES or MIN_BLOCK_BYTES
            small = size <= SMALL_BYTES
            pool = allocator.pools.get((stream, small)) or allocator.new_pool(stream, small=small)
            free = pool.free
            at = bisect_left(free, (size,))
            block = free.pop(at)[2] if at < len(free) else allocator.from_driver(pool, size)
            left = block.size - size
            if left > (0 if small else SMALL_BYTES):
                address, after = block.address + size, block.next
                if merged:
                    rest = merged.pop()
                    rest.address, rest.size, rest.pool = address, left, pool
                else:
                    rest = Block(address, left, pool)
                block.size, block.next, rest.prev, rest.next = size, rest, block, after
                if after is not None:
                    after.prev = rest
                insort(free, (left, address, rest))
            block.used = True
            blocks[slot] = block
        elif num_bytes == FREE and not (block := blocks[slot]).uses:
            del blocks[slot]
            block.used = False
            free, before, after = block.pool.free, block.prev, block.next
            if before is not None and not before.used:
                del free[bisect_left(free, (before.size, before.address))]
                before.size += block.size
                before.next = after
                if after is not None:
                    after.prev = before
                merged.append(block)
                block = before
            if after is not None and not after.used:
                del free[bisect_left(free, (after.size, after.address))]
                block.size += after.size
                block.next = after.next
                if after.next is not None:
                    after.next.prev = block
                merged.append(after)
            insort(free, (block.size, block.address, block))
        else:
            played((event,), allocator, blocks)


def moment_of(history: History, index: int) -> tuple[str, int, str, str]:
    """(phase, micro-batch, unit, op) of an event."""
    return history.marks[bisect_right(history.begins, index) - 1][1:]


def label(moment: tuple[str, int, str, str]) -> str:
    """A moment as text: "backward layer3 mb0: norm_1"."""
    phase, micro_batch, unit, op = moment
    return f"{phase} {unit} mb{micro_batch}: {op}" if unit else f"{phase}: {op}"
