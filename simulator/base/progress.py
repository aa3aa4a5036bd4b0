"""Progress of a prediction, for a command that shows it; free without a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeVar

PLAY, MEMORY, WRITING = "play", "memory", "file"
WRITTEN, PLAYED = 0.4, 0.2  # of a memory's whole: its history, and each step of it that a pool plays
_REPORT_EVERY: Final = 1024
ItemT = TypeVar("ItemT")
Listener = Callable[[str, float], None]  # gets what was done since the last call: of which work, as a part of one
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listened_by(listener: Listener) -> Iterator[None]:
    """Work inside reports its progress to the listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(part: float, work: str = PLAY) -> None:
    """So much more of a work is done."""
    if (listener := _listener.get()) is not None:
        listener(work, part)


def reported(items: Sequence[ItemT], whole: float, work: str) -> Iterator[ItemT]:
    """The items one after another, which together are so much of a work."""
    for start in range(0, len(items), _REPORT_EVERY):
        part = items[start : start + _REPORT_EVERY]
        yield from part
        report(whole * len(part) / len(items), work)
