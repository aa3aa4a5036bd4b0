"""Loaded by the server that worker processes are forked from: one that starts while its parent leaves has nothing to say."""

import sys
from types import TracebackType

from simulator.base.room import load_arrays_within


def _said(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
    """The parent's semaphores and pipes are gone; one that lives hears of the death."""
    if not issubclass(kind, OSError | EOFError):
        sys.__excepthook__(kind, exc, trace)


sys.excepthook = _said
load_arrays_within()
