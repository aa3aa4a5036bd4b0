"""Streams and events of torch.cuda that write down what they are asked, for a machine without CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from simulator.work.captured.capture import Kind
from validate.capture.log import Log
from validate.players.guard import Streams

_ELAPSED_MS = 1.0  # what an event answers that is asked for a time: none has passed, and programs divide by it


@dataclass(frozen=True, slots=True)
class Pending:
    """What a handle stands for: collectives and messages by number, tensors it keeps alive, what waiting for it does.

    results: of a collective, which it does not keep alive.
    """

    work: object
    numbers: tuple[int, ...]
    tensors: tuple[object, ...] = ()
    arrive: tuple[Callable[[], None], ...] = ()
    results: tuple[Callable[[], object], ...] = ()


class Recorder:
    """Which stream is current, and where it is written."""

    log: ClassVar[Log]
    stack: ClassVar[list[Stream]]
    works: ClassVar[dict[int, Pending]]
    heard: ClassVar[bool]  # autograd's engine says on which stream it runs a node; not where CUDA's own guard is in use

    @classmethod
    def begin(cls, log: Log, used: Callable[[int, int], None]) -> None:
        """A new program. The default stream is number 0. used: a storage, as `_cdata` has it, is used on a stream."""
        cls.log, Stream.every, Event.made, cls.works = log, [], 0, {}
        cls.stack = [Stream()]
        cls.heard = Streams.hear(cls._becomes, cls._recorded, cls._blocked, used)

    @classmethod
    def write(cls, kind: Kind, *values: int) -> None:
        if cls.log.detailed:
            cls.log.add(kind, *values)

    @classmethod
    def set(cls, stream: Stream) -> None:
        """The current stream becomes another one."""
        cls.stack[-1] = stream
        Streams.set_current(stream.number)

    @classmethod
    def _becomes(cls, number: int) -> None:
        """Autograd's engine runs a node on the stream of its forward, and goes back."""
        cls.stack[-1] = Stream.every[number]

    @classmethod
    def _recorded(cls, stream: int) -> int:
        return Event().record(Stream.every[stream]).number + 1

    @classmethod
    def _blocked(cls, stream: int, event: int) -> None:
        cls.write(Kind.WAIT_EVENT, stream, event - 1)


class Stream:
    """torch.cuda.Stream, numbered in the order in which programs make them."""

    every: ClassVar[list[Stream]] = []  # by number

    def __init__(self, *_: object, **__: object) -> None:
        self.number = len(Stream.every)
        Stream.every.append(self)
        self.device = torch.device("cuda", 0)
        self.device_index = self.priority = 0
        self.stream_id = self.cuda_stream = self.number
        self.device_type = 1

    def wait_stream(self, other: Stream) -> None:
        Recorder.write(Kind.WAIT_STREAM, self.number, other.number)

    def wait_event(self, event: Event) -> None:
        Recorder.write(Kind.WAIT_EVENT, self.number, event.number)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        Recorder.write(Kind.SYNCHRONIZE, self.number)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Self:
        Recorder.stack.append(self)
        Recorder.set(self)
        self._node = torch._C._autograd._get_sequence_nr()
        return self

    def __exit__(self, *_: object) -> None:
        made = self._node < torch._C._autograd._get_sequence_nr()
        if self.number and made and Recorder.log.detailed and not Recorder.heard:
            Recorder.log.answer(
                "backward of what ran beside the default stream: on that one, not beside it as on a GPU"
            )
        Recorder.stack.pop()
        Recorder.set(Recorder.stack[-1])


class Event:
    """torch.cuda.Event."""

    made: ClassVar[int] = 0

    def __init__(self, *_: object, **__: object) -> None:
        self.number = Event.made
        Event.made += 1

    def record(self, stream: Stream | None = None) -> Event:
        Recorder.write(Kind.RECORD, self.number, (stream or Recorder.stack[-1]).number)
        return self

    def wait(self, stream: Stream | None = None) -> None:
        Recorder.write(Kind.WAIT_EVENT, (stream or Recorder.stack[-1]).number, self.number)

    def synchronize(self) -> None:
        Recorder.write(Kind.WAIT_HOST, self.number)

    def elapsed_time(self, _: Event) -> float:
        Recorder.log.answer("Event.elapsed_time: 1 ms")
        return _ELAPSED_MS

    def query(self) -> bool:
        return True


class NoStream:
    """`torch.cuda.stream(None)`: nothing changes."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def entered(stream: Stream | None) -> Any:
    """What torch.cuda.stream(stream) gives."""
    return NoStream() if stream is None else stream
