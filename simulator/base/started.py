"""Loaded by the server that worker processes are forked from: one that starts while its parent leaves has nothing to say."""

import sys
from types import TracebackType


def _said(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
    """The parent's semaphores and pipes are gone; one that lives hears of the death."""
    if not issubclass(kind, OSError | EOFError):
        sys.__excepthook__(kind, exc, trace)


sys.excepthook = _said
