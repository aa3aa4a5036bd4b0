"""A program's memory requests without addresses: one sequence that every policy can play."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from simulator.memory.history import History
from simulator.memory.policies import ACTIVATION, PERSISTENT, TEMPORARY, Pool, buffer_bytes
from simulator.memory.tape import CATEGORIES, DONE, FREE_LATER
from simulator.memory.tape import FREE as HISTORY_FREE

ALLOC, FREE, REQUEST_FREE, COMPLETE_FREE, EMPTY_CACHE = range(5)

# (what, id of the block, bytes, stream, kind)
Request = tuple[int, int, int, int, int]

KIND_OF = {
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


def of_history(history: History, name: str) -> Sequence:
    """The requests of a predicted first and steady step."""
    requests, begins = requests_of(history)
    steady = begins[history.steady]
    return Sequence(name=name, requests=tuple(requests), steady=steady, notes=("a first step, then a steady one",))


def requests_of(history: History) -> tuple[list[Request], list[int]]:
    """The requests of a history, and before each of its events, and behind the last, how many there are."""
    ids: dict[int, int] = {}
    waiting: dict[int, list[int]] = defaultdict(list)
    requests: list[Request] = []
    begins: list[int] = []
    number = 0
    for slot, num_bytes, stream, tag in history.events:
        begins.append(len(requests))
        if num_bytes >= 0:
            ids[slot] = number
            requests.append((ALLOC, number, num_bytes, stream, KIND_OF[CATEGORIES[tag]]))
            number += 1
        elif num_bytes == HISTORY_FREE:
            requests.append((FREE, ids.pop(slot), 0, 0, 0))
        elif num_bytes == FREE_LATER:  # the event's number stands in the stream's place
            waiting[stream].append(ids[slot])
            requests.append((REQUEST_FREE, ids.pop(slot), 0, 0, 0))
        elif num_bytes == DONE:
            requests.extend((COMPLETE_FREE, block, 0, 0, 0) for block in waiting.pop(stream, ()))
    return requests, [*begins, len(requests)]


def repeated(sequence: Sequence, times: int) -> Sequence | None:
    """The step `times` times, the last of them measured; None where it does not end with the blocks it began with.

    Blocks stand for each other if they have equal bytes, stream and kind.
    """
    attributes: dict[int, tuple[int, int, int]] = {}
    before = _live(sequence.requests[: sequence.steady], attributes)
    after = _live(sequence.step, attributes, before)
    if Counter(attributes[number] for number in before) != Counter(attributes[number] for number in after):
        return None
    successors: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number in after:
        if number not in before:
            successors[attributes[number]].append(number)
    successor = {number: number if number in after else successors[attributes[number]].pop(0) for number in before}
    requests = list(sequence.requests)
    steady = sequence.steady
    offset = 1 + max(attributes, default=0)
    names = {number: number for number in attributes}  # of the step before
    for copy in range(1, times):
        steady = len(requests)
        last = names
        names = {
            number: last[successor[number]] if number in successor else number + copy * offset for number in attributes
        }
        requests += [(r[0], names.get(r[1], 0), *r[2:]) for r in sequence.step]
    return replace(sequence, requests=tuple(requests), steady=steady)


def _live(
    requests: Iterable[Request], attributes: dict[int, tuple[int, int, int]], before: Iterable[int] = ()
) -> dict[int, None]:
    """Ids of the blocks in use after `requests`, in order; how each looks is noted down."""
    live = dict.fromkeys(before)
    for action, number, num_bytes, stream, kind in requests:
        if action == ALLOC:
            live[number] = None
            attributes[number] = (num_bytes, stream, kind)
        elif action in (FREE, COMPLETE_FREE):
            del live[number]
    return live


def checkpoints(requests: Iterable[Request]) -> tuple[int, int]:
    """(stream, bytes) of a buffer for the activations of the stream that has most of them."""
    by_stream: Counter[int] = Counter()
    stream_of: dict[int, int] = {}
    for action, number, num_bytes, stream, kind in requests:
        if action == ALLOC and kind == ACTIVATION:
            by_stream[stream] += num_bytes
            stream_of[number] = stream
    if not by_stream:
        return 0, 0
    main = by_stream.most_common(1)[0][0]
    rows = (
        (action == ALLOC, number, num_bytes)
        for action, number, num_bytes, _, _ in requests
        if stream_of.get(number) == main and action in (ALLOC, FREE, COMPLETE_FREE)
    )
    return main, buffer_bytes(rows)


def play(
    requests: Iterable[Request],
    pool: Pool[Any],
    watch: Callable[[int], None] | None = None,
    handles: dict[int, Any] | None = None,
) -> dict[int, Any]:
    """Play requests on a pool; the handles of what is still in use. watch: called with each index after its request.

    handles: of what is in use before, by id.
    """
    handles = {} if handles is None else handles
    for index, (action, number, num_bytes, stream, kind) in enumerate(requests):
        if action == ALLOC:
            handles[number] = pool.malloc(num_bytes, stream, kind)
        elif action == FREE:
            handle = handles.pop(number)
            pool.request_free(handle)
            pool.complete_free(handle)
        elif action == REQUEST_FREE:
            pool.request_free(handles[number])
        elif action == COMPLETE_FREE:
            pool.complete_free(handles.pop(number))
        elif action == EMPTY_CACHE:
            pool.empty_cache()
        if watch is not None:
            watch(index)
    return handles
