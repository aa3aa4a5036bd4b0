"""When the allocator may reuse what a program frees while other streams still read it (`Tensor.record_stream`).

torch's caching allocator records an event on each such stream behind the work it has, and gives the room away once those
events have come. They have come when the host waits for that work, or for work behind it; without that, when the device has
begun what was launched later: its queue of launches is as long as the host can be ahead, and a capture has no clock to say
that it is less.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from operator import itemgetter

from simulator.work.captured.capture import Kind
from simulator.work.script.instructions import LAUNCH_QUEUE

_FIRST = 1 << 22  # numbers of these events: allocators keep them beside those of streams
_Clock = dict[int, int]  # stream -> the last of its launches that is known to be over


def delays(events: Sequence[Sequence[int]], steady: int) -> tuple[Mapping[int, int], Mapping[int, list[int]]]:
    """By index of event: frees that are late -> number, and what has come before an event -> numbers.

    Of the step that begins at `steady`, from where indices count. Nothing where no stream is recorded.
    """
    found = _Follower(steady)
    for index, event in enumerate(events if int(Kind.RECORD_STREAM) in map(itemgetter(0), events) else ()):
        found.see(index, event)
    return found.late, found.done


class _Follower:
    """Which launches of which streams the host knows to be over."""

    def __init__(self, steady: int) -> None:
        self.late, self.done = dict[int, int](), defaultdict[int, list[int]](list)
        self._steady, self._launches = steady, 0
        self._streams: dict[int, int] = {}  # of each storage: the one that it was allocated on
        self._users: dict[int, set[int]] = defaultdict(set)
        self._last: _Clock = {}
        self._known: dict[int, _Clock] = defaultdict(dict)  # by stream: what its next launch waits for
        self._recorded: dict[tuple[Kind, int], _Clock] = {}
        self._host: _Clock = {}
        self._waiting: deque[tuple[int, int, _Clock]] = deque()  # number, launches at its free, what must be over

    def see(self, index: int, event: Sequence[int]) -> None:
        match event:
            case [Kind.ALLOCATE, storage, _, stream]:
                self._streams[storage] = stream
                self._users.pop(storage, None)
            case [Kind.RECORD_STREAM, storage, stream]:
                self._users[storage].add(stream)
            case [Kind.FREE, storage]:
                self._free(index, storage)
            case [Kind.OPERATOR, _, stream, _, _]:
                self._launched(index, stream)
            case [Kind.COLLECTIVE, number, _, _, _, stream] | [Kind.MESSAGE, number, _, _, _, _, stream, _]:
                self._launched(index, stream)
                self._recorded[Kind.COLLECTIVE, number] = self._of(stream)
            case _:
                self._synchronised(index, event)

    def _launched(self, index: int, stream: int) -> None:
        self._launches += 1
        self._last[stream] = self._launches
        while self._waiting and self._launches - self._waiting[0][1] > LAUNCH_QUEUE:
            self.done[index - self._steady].append(self._waiting.popleft()[0])

    def _free(self, index: int, storage: int) -> None:
        others = self._users.pop(storage, set()) - {self._streams.get(storage, 0)}
        needed = {stream: self._last[stream] for stream in others if stream in self._last}
        if index >= self._steady and not self._over(needed):
            number = self.late[index - self._steady] = _FIRST + len(self.late)
            self._waiting.append((number, self._launches, needed))

    def _over(self, needed: _Clock) -> bool:
        return all(self._host.get(stream, 0) >= at for stream, at in needed.items())

    def _of(self, stream: int) -> _Clock:
        """What is over once all is over that a stream has been given."""
        return {**self._known[stream], stream: self._last.get(stream, 0)}

    def _synchronised(self, index: int, event: Sequence[int]) -> None:
        match event:
            case [Kind.RECORD, number, stream]:
                self._recorded[Kind.RECORD, number] = self._of(stream)
            case [Kind.WAIT_EVENT, stream, number]:
                _learn(self._known[stream], self._recorded.get((Kind.RECORD, number), {}))
            case [Kind.WAIT_STREAM, stream, other]:
                _learn(self._known[stream], self._of(other))
            case [Kind.WAIT_WORK, stream, number]:
                _learn(self._known[stream], self._recorded.get((Kind.COLLECTIVE, number), {}))
            case [Kind.SYNCHRONIZE, stream]:
                self._host_waits(index, self._last if stream < 0 else self._of(stream))
            case [Kind.WAIT_HOST, number]:
                self._host_waits(index, self._recorded.get((Kind.RECORD, number), {}))
            case _:
                pass

    def _host_waits(self, index: int, known: _Clock) -> None:
        _learn(self._host, known)
        if done := [number for number, _, needed in self._waiting if self._over(needed)]:
            self.done[index - self._steady] += done
            self._waiting = deque(one for one in self._waiting if not self._over(one[2]))


def _learn(known: _Clock, more: _Clock) -> None:
    for stream, at in more.items():
        known[stream] = max(known.get(stream, 0), at)
