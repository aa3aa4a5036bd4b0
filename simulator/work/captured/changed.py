"""What would change in a captured program: its repeated modules checkpointed, or what they save kept in host memory.

Nothing is run again: the modules' boundaries in the capture say which storages a forward leaves for the backward, and the
capture is written anew as the changed program would have been captured. What it rests on: of the storages that outlive a
module's forward, the last that it made is its result, which stays; its backward begins with the operator behind which the
first of the others goes. Operators on other streams (gathers of parameters) are where they were.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from simulator.work.captured.capture import Capture, Kind, Phase
from simulator.work.captured.cost import KernelCost

_NUMBERED = re.compile(r"^((?:.*?\.)?)(\d{1,18})(?=\.|$)")
_COPY_STREAM = 1 << 20  # of copies to and from the host; a number that no program has


@dataclass(slots=True)
class Forward:
    """One forward of a numbered module in the recorded step: events from `begin` to before `end`.

    saved: storages that it leaves for the backward, its result aside -> bytes. back: the event at which its backward begins.
    """

    group: str
    number: int
    begin: int
    end: int
    born: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    back: int = -1

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved.values())


def forwards(capture: Capture) -> list[Forward]:
    """Forwards of the repeated modules that save most, in order; empty if nothing is repeated or saved."""
    found: dict[str, list[Forward]] = defaultdict(list)
    for one in _runs(capture):
        found[one.group].append(one)
    ends, backward = _ends(capture), _first_backward(capture)
    for one in (one for group in found.values() for one in group):
        _save(one, capture, ends, next((at for at in backward if at >= one.end), len(capture.events)))
    best = max(found.values(), key=lambda group: sum(one.saved_bytes for one in group), default=[])
    return [one for one in best if one.saved]


def _runs(capture: Capture) -> Iterator[Forward]:
    """Unbroken stretches of one numbered module's forward."""
    names = [_NUMBERED.match(name) for name in capture.names]
    one: Forward | None = None
    for index in range(capture.steady, len(capture.events)):
        match capture.events[index]:
            case [Kind.OPERATOR, _, _, module, phase]:
                found = names[module] if phase == Phase.FORWARD else None
                key = (found.group(1), int(found.group(2))) if found else ("", -1)
                if one is not None and key != (one.group, one.number):
                    yield one
                    one = None
                if found and one is None:
                    one = Forward(*key, begin=index, end=index)
            case [Kind.ALLOCATE, storage, size, _] if one is not None:
                if capture.categories.get(storage, "") == "activations":
                    one.born[storage] = size
        if one is not None:
            one.end = index + 1
    if one is not None:
        yield one


def _ends(capture: Capture) -> dict[int, list[int]]:
    """Storage -> events of the recorded step at which it ends."""
    found: dict[int, list[int]] = defaultdict(list)
    for index in range(capture.steady, len(capture.events)):
        if capture.events[index][0] == Kind.FREE:
            found[capture.events[index][1]].append(index)
    return found


def _first_backward(capture: Capture) -> list[int]:
    """Events at which a backward begins behind a forward."""
    found, before = [], Phase.FORWARD
    for index in range(capture.steady, len(capture.events)):
        if capture.events[index][0] == Kind.OPERATOR:
            phase = Phase(capture.events[index][4])
            if phase == Phase.BACKWARD != before:
                found.append(index)
            before = phase
    return found


def _save(one: Forward, capture: Capture, ends: dict[int, list[int]], backward: int) -> None:
    """What outlives the forward until the backward, which begins at `backward`, and where its own part of that begins."""
    left = {
        storage: next((end for end in ends[storage] if end >= backward), -1)
        for storage in one.born
        if not any(one.begin <= end < backward for end in ends[storage])
    }
    saved = [storage for storage in left if left[storage] >= 0][:-1]
    one.saved = {storage: one.born[storage] for storage in saved}
    if saved:
        one.back = _operator_before(capture, min(left[storage] for storage in saved))
        if one.back < one.end:
            one.saved = {}


def _operator_before(capture: Capture, index: int) -> int:
    """The operator behind which a storage went, with what was allocated for it."""
    while index > capture.steady and capture.events[index][0] != Kind.OPERATOR:
        index -= 1
    return index


# -- checkpoints


def checkpointed(capture: Capture, every: int = 1, found: Sequence[Forward] | None = None) -> Capture | None:
    """One rank with every `every`-th of its repeated modules checkpointed; None where that frees nothing.

    Behind the forward what it saved goes; before its backward its operators run again, and make it again. found: its
    `forwards`, where they are known.
    """
    chosen = (forwards(capture) if found is None else found)[::every]
    if not chosen:
        return None
    more: dict[int, list[list[int]]] = defaultdict(list)  # before this event
    fresh = max(capture.categories, default=0) + 1
    categories = dict(capture.categories)
    for one in chosen:
        more[one.end] += [[Kind.FREE, storage] for storage in one.saved]
        again, made = _again(one, capture, fresh)
        more[one.back] += again
        categories |= dict.fromkeys(range(fresh, fresh + made), "temporaries")
        fresh += made
    return rewritten(capture, more, categories=categories)


def _again(one: Forward, capture: Capture, fresh: int) -> tuple[list[list[int]], int]:
    """The forward's own operators and storages as its backward runs them; how many storages are new."""
    found: list[list[int]] = []
    names: dict[int, int] = {}
    on, last = _main_stream(one, capture), _last_saved(one, capture)
    for event in capture.events[one.begin : last + 1]:
        match event:
            case [Kind.OPERATOR, signature, stream, module, _]:
                if stream == on and not capture.signatures[signature][0].startswith("fsdp."):
                    found.append([Kind.OPERATOR, signature, stream, module, Phase.BACKWARD])
            case [Kind.ALLOCATE, storage, size, stream] if storage in one.born:
                if storage not in one.saved:
                    names[storage] = fresh + len(names)
                found.append([Kind.ALLOCATE, names.get(storage, storage), size, stream])
            case [Kind.FREE, storage] if storage in names:
                found.append([Kind.FREE, names.pop(storage)])
                names[-storage - 1] = -1  # counts, and is gone
            case _:
                pass
    return found + [[Kind.FREE, name] for name in names.values() if name >= 0], len(names)


def _last_saved(one: Forward, capture: Capture) -> int:
    """The event behind which nothing more is made that the backward needs: there recomputation stops (torch's early stop)."""
    made = (i for i in range(one.begin, one.end) if capture.events[i][0] == Kind.ALLOCATE)
    return max(index for index in made if capture.events[index][1] in one.saved)


def _main_stream(one: Forward, capture: Capture) -> int:
    streams = [event[2] for event in capture.events[one.begin : one.end] if event[0] == Kind.OPERATOR]
    return max(set(streams), key=lambda stream: (streams.count(stream), -stream))


# -- activations in host memory


def offloaded(
    capture: Capture, d2h_bytes_per_s: float, h2d_bytes_per_s: float, found: Sequence[Forward] | None = None
) -> Capture | None:
    """One rank with what its repeated modules save in host memory, but for the last one; None where that frees nothing.

    A copy of its own on a stream of its own leaves behind each forward, and must have left when the next one is over; it is
    back before its backward, sent for when the backward before begins. What is needed again before that stays. found: its
    `forwards`, where they are known.
    """
    chosen = list(_leaving(forwards(capture) if found is None else found))
    if not chosen:
        return None
    more: dict[int, list[list[int]]] = defaultdict(list)
    signatures, costs = list(capture.signatures), dict(capture.costs)
    event = 1 + max((one[1] for one in capture.events if one[0] == Kind.RECORD), default=0)
    for one, after, sent in chosen:
        main = _main_stream(one, capture)
        seconds = one.saved_bytes / d2h_bytes_per_s, one.saved_bytes / h2d_bytes_per_s
        out, back = (_copy(signatures, costs, each) for each in seconds)
        more[one.end] += _beside(event, main, out)
        more[after.end] += [[Kind.WAIT_EVENT, main, event + 1], *([Kind.FREE, one_] for one_ in one.saved)]
        begins = [[Kind.ALLOCATE, storage, size, main] for storage, size in one.saved.items()]
        more[sent] += [*begins, *_beside(event + 2, main, back)]
        more[one.back] = [[Kind.WAIT_EVENT, main, event + 3], *more[one.back]]
        event += 4
    return replace(rewritten(capture, more), signatures=signatures, costs=costs)


def _copy(signatures: list[tuple[str, object, object]], costs: dict[int, KernelCost], seconds: float) -> int:
    """A signature of a copy that takes so long."""
    costs[len(signatures)] = KernelCost(seconds=seconds, category="offload")
    signatures.append(("host.copy.default", ((), ()), ()))
    return len(signatures) - 1


def _beside(event: int, main: int, signature: int) -> list[list[int]]:
    """A copy that waits for what the main stream has been given; event + 1 is its end."""
    copy = [Kind.OPERATOR, signature, _COPY_STREAM, 0, Phase.FORWARD]
    begin = [[Kind.RECORD, event, main], [Kind.WAIT_EVENT, _COPY_STREAM, event]]
    return [*begin, copy, [Kind.RECORD, event + 1, _COPY_STREAM]]


def offloaded_bytes(found: Sequence[Forward]) -> int:
    """What `offloaded` keeps in host memory of one rank with these forwards, at most."""
    return sum(one.saved_bytes for one, _, _ in _leaving(found))


def _leaving(chosen: Sequence[Forward]) -> Iterator[tuple[Forward, Forward, int]]:
    """Forwards whose saved part leaves, each with the next forward, and the event of the backward before its own.

    With one micro-batch that backward is the next forward's; micro-batches of a pipeline come back in the order they went.
    """
    for one, after in pairwise(chosen):
        sent = max((each.back for each in chosen if after.end <= each.back < one.back), default=None)
        if sent is not None:
            yield one, after, sent


def rewritten(capture: Capture, more: dict[int, list[list[int]]], **changes: object) -> Capture:
    """The capture with events before others of its step. Of the steps before, which ran unchanged, only what they left stays."""
    events = list(capture.standing().values())
    steady = len(events)
    for index in range(capture.steady, len(capture.events)):
        events += [*more.get(index, ()), capture.events[index]]
    return replace(capture, events=events, steady=steady, **changes)  # type: ignore[arg-type]
