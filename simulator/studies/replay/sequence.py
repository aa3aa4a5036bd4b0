"""Recordings as sequences of requests that every policy can play; steps repeated, and with other sizes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from simulator.memory.allocator.blocks import SMALL_BYTES
from simulator.memory.policies import ACTIVATION, PERSISTENT, TEMPORARY
from simulator.memory.requests import ALLOC, COMPLETE_FREE, EMPTY_CACHE, FREE, REQUEST_FREE, Request, Sequence, repeated
from simulator.studies.replay.initial_state import InitialState
from simulator.studies.replay.recording import ALLOC as RECORDED_ALLOC
from simulator.studies.replay.recording import FREE_COMPLETED, FREE_REQUESTED, SEGMENT_FREE, SEGMENT_UNMAP, Recording

SHORT = 64  # a block freed within so many requests is a temporary; recordings do not say what a block is for


def of_recording(recording: Recording) -> Sequence:
    """The requests of a recording; first the blocks that are in use before it, in order of address.

    Kinds are inferred from lifetimes: what is in use before the first or after the last event is persistent, what is freed
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


def _requests(recording: Recording, ids: dict[int, int], requested: set[int]) -> Iterator[Request]:
    """The recorded events without addresses. ids: of the blocks in use; requested: addresses whose free is under way."""
    events = recording.events
    number = len(ids)
    cache_emptied = False
    for index, (action, address, size, stream, _) in enumerate(events):
        if action in (SEGMENT_FREE, SEGMENT_UNMAP):
            if not cache_emptied:
                yield EMPTY_CACHE, 0, 0, 0, 0
            cache_emptied = True
            continue
        cache_emptied = False
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
            request = COMPLETE_FREE if address in requested else FREE
            requested.discard(address)
            yield request, ids.pop(address), 0, stream, 0


def _with_kinds(requests: list[Request], steady: int) -> tuple[Request, ...]:
    allocated_at: dict[int, int] = {}
    kinds: dict[int, int] = {}
    for index, (action, number, _, _, _) in enumerate(requests):
        if action == ALLOC:
            allocated_at[number], kinds[number] = index, PERSISTENT
        elif action in (FREE, COMPLETE_FREE) and allocated_at[number] >= steady:
            kinds[number] = TEMPORARY if index - allocated_at[number] <= SHORT else ACTIVATION
    return tuple((*request[:4], kinds.get(request[1], 0)) if request[0] == ALLOC else request for request in requests)


def varied(sequence: Sequence, spread: float, times: int) -> Sequence | None:
    """The step `times` times, each time with other sizes: 1 ± `spread`, evenly drawn, of large blocks that come and go.

    So do the activations of experts whose tokens change with every batch. None where the step cannot be repeated.
    """
    again = repeated(sequence, times)
    if again is None:
        return None
    draw = random.Random(0)  # noqa: S311  sizes, not secrets
    requests = [
        (action, number, round(num_bytes * draw.uniform(1 - spread, 1 + spread)), stream, kind)
        if action == ALLOC and kind != PERSISTENT and num_bytes > SMALL_BYTES
        else (action, number, num_bytes, stream, kind)
        for action, number, num_bytes, stream, kind in again.requests
    ]
    note = f"sizes above 1 MiB vary by {spread:.0%} over {times} steps"
    return replace(again, requests=tuple(requests), notes=(*again.notes, note))
