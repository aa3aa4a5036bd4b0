"""How long work shows on stderr that it goes on."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

_LIVE_S = 0.2  # between two changes of a terminal's line
_LOG_S = 30.0  # between two lines of a log


class StatusLine:
    """One line, rewritten on a terminal; a new one every half minute where stderr is a file or a pipe."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._told = 0.0 if self._live else time.monotonic()  # what is quick leaves no line in a log

    def tell(self, line: str, *, last: bool = False) -> None:
        """Show it, if it is time. last: the final one, which stays on a terminal."""
        now = time.monotonic()
        if now - self._told < (_LIVE_S if self._live else _LOG_S) and not (last and self._live):
            return
        self._told = now
        click.echo(f"\r\x1b[2K{line}" if self._live else line, nl=last or not self._live, err=True)


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """A batch system that ends the job gets what is known by then, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
