"""Streams and events of torch.cuda that write down what they are asked, for a machine without CUDA."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from simulator.work.captured.capture import Kind
from validate.capture.log import Log

_BACKWARD = (
    "where the backward of what ran beside the default stream runs: on the default one, not beside it as on a GPU"
)
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
    beside: ClassVar[
        list[tuple[int, int]]
    ]  # of autograd's numbers of nodes: from, to those made beside the default stream

    @classmethod
    def begin(cls, log: Log) -> None:
        """A new program. The default stream is number 0."""
        cls.log, Stream.made, Event.made, cls.works = log, 0, 0, {}
        cls.stack, cls.beside = [Stream()], []

    @classmethod
    def write(cls, kind: Kind, *values: int) -> None:
        if cls.log.detailed:
            cls.log.add(kind, *values)

    @classmethod
    def backward(cls) -> None:
        """A kernel of the backward: a GPU runs it on the stream of its forward, which is not played."""
        if cls.beside and (node := torch._C._current_autograd_node()) is not None:
            number = node._sequence_nr()
            if (at := bisect_right(cls.beside, (number + 1,))) and number < cls.beside[at - 1][1]:
                cls.log.answer("backward of what ran beside the default stream: on that one, not beside it as on a GPU")


class Stream:
    """torch.cuda.Stream, numbered in the order in which programs make them."""

    made: ClassVar[int] = 0

    def __init__(self, *_: object, **__: object) -> None:
        self.number = Stream.made
        Stream.made += 1
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
        self._node = torch._C._autograd._get_sequence_nr()
        return self

    def __exit__(self, *_: object) -> None:
        Recorder.stack.pop()
        after = torch._C._autograd._get_sequence_nr()
        if self.number and Recorder.log.detailed and self._node < after:
            Recorder.beside.append((self._node, after))


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
