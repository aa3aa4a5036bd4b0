"""Progress of a step's simulation, for a command that shows it; free without a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[float], None]  # gets what was done since the last call, as a part of one play of a step
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listened_by(listener: Listener) -> Iterator[None]:
    """Simulations inside report their progress to the listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(part: float) -> None:
    """So much more of a play is done."""
    if (listener := _listener.get()) is not None:
        listener(part)


def has_listener() -> bool:
    """A listener is set."""
    return _listener.get() is not None
