"""What a program asks of its memory, free of addresses: one sequence of requests that every policy can play."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from simulator.memory import History
from simulator.memory.allocator.blocks import SMALL_BYTES
from simulator.memory.policies import ACTIVATION, PERSISTENT, TEMPORARY
from simulator.memory.tape import CATEGORIES, DONE, FREE_LATER
from simulator.memory.tape import FREE as HISTORY_FREE
from simulator.studies.replay.initial_state import InitialState
from simulator.studies.replay.recording import (
    ALLOC as RECORDED_ALLOC,
)
from simulator.studies.replay.recording import (
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_FREE,
    SEGMENT_UNMAP,
    Recording,
)

ALLOC, FREE, REQUEST_FREE, COMPLETE_FREE, EMPTY_CACHE = range(5)
SHORT = 64  # a block freed within so many requests is a temporary; recordings do not say what a block is for

# (what, id of the block, bytes, stream, kind)
Request = tuple[int, int, int, int, int]

_KIND_OF = {
    **dict.fromkeys(CATEGORIES, TEMPORARY),
    **dict.fromkeys(
        ("parameters", "gradients", "optimizer_state", "buckets", "buffers", "inputs", "workspaces"), PERSISTENT
    ),
    "activations": ACTIVATION,
}


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Requests in order; what comes before `steady` prepares, what follows is one step that is measured."""

    name: str
    requests: tuple[Request, ...]
    steady: int
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> tuple[Request, ...]:
        return self.requests[self.steady :]


def of_recording(recording: Recording) -> Sequence:
    """The requests of a recording; first the blocks that are in use before it, in order of address.

    Kinds are told from lifetimes: what is in use before the first or after the last event is persistent, what is freed
    within `SHORT` requests temporary.
    """
    start = InitialState(recording)
    requests: list[Request] = []
    ids: dict[int, int] = {}
    for number, (address, stream) in enumerate(start.owners()):
        ids[address] = number
        live = start.live[address]
        requests.append((ALLOC, number, live.requested_bytes, stream, PERSISTENT))
        if live.awaiting:
            requests.append((REQUEST_FREE, number, 0, stream, PERSISTENT))
    steady = len(requests)
    requested = {address for address in ids if start.live[address].awaiting}
    requests.extend(_requests(recording, ids, requested))
    once = Sequence(name=recording.name, requests=_with_kinds(requests, steady), steady=steady)
    twice = repeated(once, 2)
    note = "first the blocks in use before the recording, in order of address; then its events"
    if twice is None:
        return replace(once, notes=(f"{note}, once: other blocks are in use after them than before",))
    return replace(twice, notes=(f"{note}, twice: they end as they began, so the second time is a steady step",))


def of_history(history: History, name: str) -> Sequence:
    """The requests of a predicted first and steady step."""
    ids: dict[int, int] = {}
    waiting: dict[int, list[int]] = defaultdict(list)
    requests: list[Request] = []
    steady = number = 0
    for index, (slot, num_bytes, stream, tag) in enumerate(history.events):
        if index == history.steady:
            steady = len(requests)
        if num_bytes >= 0:
            ids[slot] = number
            requests.append((ALLOC, number, num_bytes, stream, _KIND_OF[CATEGORIES[tag]]))
            number += 1
        elif num_bytes == HISTORY_FREE:
            requests.append((FREE, ids.pop(slot), 0, 0, 0))
        elif num_bytes == FREE_LATER:  # the event's number stands in the stream's place
            waiting[stream].append(ids[slot])
            requests.append((REQUEST_FREE, ids.pop(slot), 0, 0, 0))
        elif num_bytes == DONE:
            requests.extend((COMPLETE_FREE, block, 0, 0, 0) for block in waiting.pop(stream, ()))
    return Sequence(name=name, requests=tuple(requests), steady=steady, notes=("a first step, then a steady one",))


def _requests(recording: Recording, ids: dict[int, int], requested: set[int]) -> Iterator[Request]:
    """The recorded events without addresses. ids: of the blocks in use; requested: addresses whose free is under way."""
    events = recording.events
    number = len(ids)
    emptied = False
    for index, (action, address, size, stream, _) in enumerate(events):
        if action in (SEGMENT_FREE, SEGMENT_UNMAP):
            if not emptied:
                yield EMPTY_CACHE, 0, 0, 0, 0
            emptied = True
            continue
        emptied = False
        if action == RECORDED_ALLOC:
            ids[address] = number
            yield ALLOC, number, size, stream, TEMPORARY
            number += 1
        elif action == FREE_REQUESTED:
            if index + 1 < len(events) and events[index + 1][:2] == (FREE_COMPLETED, address):
                continue  # both at once: one free
            requested.add(address)
            yield REQUEST_FREE, ids[address], 0, stream, 0
        elif action == FREE_COMPLETED:
            what = COMPLETE_FREE if address in requested else FREE
            requested.discard(address)
            yield what, ids.pop(address), 0, stream, 0


def _with_kinds(requests: list[Request], steady: int) -> tuple[Request, ...]:
    born: dict[int, int] = {}
    kinds: dict[int, int] = {}
    for index, (what, number, _, _, _) in enumerate(requests):
        if what == ALLOC:
            born[number], kinds[number] = index, PERSISTENT
        elif what in (FREE, COMPLETE_FREE) and born[number] >= steady:
            kinds[number] = TEMPORARY if index - born[number] <= SHORT else ACTIVATION
    return tuple((*request[:4], kinds.get(request[1], 0)) if request[0] == ALLOC else request for request in requests)


def repeated(sequence: Sequence, times: int) -> Sequence | None:
    """The step `times` times, the last of them measured; None where it does not end with the blocks it began with.

    Blocks stand for each other if they have equal bytes, stream and kind.
    """
    looks: dict[int, tuple[int, int, int]] = {}
    before = _live(sequence.requests[: sequence.steady], looks)
    after = _live(sequence.step, looks, before)
    if Counter(looks[number] for number in before) != Counter(looks[number] for number in after):
        return None
    heirs: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number in after:
        if number not in before:
            heirs[looks[number]].append(number)
    heir = {number: number if number in after else heirs[looks[number]].pop(0) for number in before}
    requests = list(sequence.requests)
    steady = sequence.steady
    offset = 1 + max(looks, default=0)
    names = {number: number for number in looks}  # of the step before
    for copy in range(1, times):
        steady = len(requests)
        last = names
        names = {number: last[heir[number]] if number in heir else number + copy * offset for number in looks}
        requests += [(r[0], names.get(r[1], 0), *r[2:]) for r in sequence.step]
    return replace(sequence, requests=tuple(requests), steady=steady)


def _live(
    requests: Iterable[Request], looks: dict[int, tuple[int, int, int]], before: Iterable[int] = ()
) -> dict[int, None]:
    """Ids of the blocks in use after `requests`, in order; how each looks is noted down."""
    live = dict.fromkeys(before)
    for what, number, num_bytes, stream, kind in requests:
        if what == ALLOC:
            live[number] = None
            looks[number] = (num_bytes, stream, kind)
        elif what in (FREE, COMPLETE_FREE):
            del live[number]
    return live


def varied(sequence: Sequence, spread: float, times: int) -> Sequence | None:
    """The step `times` times, each time with other sizes: 1 ± `spread`, evenly drawn, of large blocks that come and go.

    So do the activations of experts whose tokens change with every batch. None where the step cannot be repeated.
    """
    again = repeated(sequence, times)
    if again is None:
        return None
    draw = random.Random(0)  # noqa: S311  sizes, not secrets
    requests = [
        (what, number, round(num_bytes * draw.uniform(1 - spread, 1 + spread)), stream, kind)
        if what == ALLOC and kind != PERSISTENT and num_bytes > SMALL_BYTES
        else (what, number, num_bytes, stream, kind)
        for what, number, num_bytes, stream, kind in again.requests
    ]
    note = f"sizes above 1 MiB vary by {spread:.0%} over {times} steps"
    return replace(again, requests=tuple(requests), notes=(*again.notes, note))
