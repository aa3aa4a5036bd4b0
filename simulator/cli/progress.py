"""Progress of long work on stderr."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final

import click

from simulator.base.progress import MEMORY, PLAY, WRITING, listened_by
from simulator.base.units import format_seconds

if TYPE_CHECKING:
    from simulator.spec.cluster import Cluster
    from simulator.spec.plan import Plan

_LIVE_S, _QUICK_S = 0.2, 1.0  # between two changes of a terminal's line
_LOG_S, _FIRST_S = 30.0, 10.0  # between two lines of a log, and to the first: what is quick leaves none


class StatusLine:
    """One line, rewritten on a terminal; in a file or a pipe one after ten seconds and every half minute."""

    def __init__(self, *, at_once: bool = True) -> None:
        """at_once: on a terminal; else what takes less than a second leaves no line there either."""
        self._live, self._shown = sys.stderr.isatty(), False
        self._next_s = time.monotonic() + (_FIRST_S if not self._live else 0.0 if at_once else _QUICK_S)

    def show(self, line: str, *, last: bool = False) -> None:
        """Show it, if it is time. last: the final one, which stays on a terminal."""
        now = time.monotonic()
        if now < self._next_s and not (last and self._live):
            return
        self._next_s, self._shown = now + (_LIVE_S if self._live else _LOG_S), True
        click.echo(f"\r\x1b[2K{line}" if self._live else line, nl=last or not self._live, err=True)

    def clear(self) -> None:
        """Clear the terminal's line."""
        if self._live and self._shown:
            click.echo("\r\x1b[2K", nl=False, err=True)


class CountLine:
    """Progress, rate and remaining time of so many things. unit: what they are, in plural."""

    def __init__(self, unit: str) -> None:
        self._unit, self._line, self._since = unit, StatusLine(), time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if done == 1:
            self._since = time.monotonic()
        rate = max(done, 1) / max(time.monotonic() - self._since, 1e-3)
        left = format_seconds((total - done) / rate)
        self._line.show(f"{done:,} of {total:,} {self._unit}, {rate:,.1f}/s, {left} left", last=done == total)


_WORDS: Final = {MEMORY: "memory of", PLAY: "playing", WRITING: "writing"}


@contextmanager
def told(what: str, expected: Mapping[str, int]) -> Iterator[None]:
    """Show the progress of what takes long: of each work that is reported, how much of how many of them is done."""
    line, last_s = StatusLine(at_once=False), time.monotonic()
    took_s, done = dict.fromkeys(_WORDS, 0.0), dict.fromkeys(_WORDS, 0.0)

    def show(work: str, part: float) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        took_s[work], last_s = took_s[work] + now_s - last_s, now_s
        done[work] += part
        # remedies come on top, and steps that do not settle
        wholes = {name: max(expected.get(name, 0), math.ceil(some - 1e-6)) for name, some in done.items()}
        share = done[work] / wholes[work]
        left_s = sum(took_s[name] * (wholes[name] / some - 1) for name, some in done.items() if some)
        of_it = "" if set(filter(expected.get, done)) <= set(filter(done.get, done)) else " of it"
        left = f", some {left_s:,.0f} s{of_it} left" if share > 0.01 else ""  # the first per cent is no estimate
        line.show(f"shardwise: {_WORDS[work]} {what}: {share:.0%}{left}")

    try:
        with listened_by(show):
            yield
    finally:
        line.clear()


def playing(plan: Plan, cluster: Cluster, *, times: int = 1) -> AbstractContextManager[None]:
    """Show the progress of simulating a step that takes long. times: as many of the like."""
    from simulator.predict.play import repeats_of

    plays = (2 if repeats_of(plan)[0] else 1) * (1 if cluster.num_nodes == 1 else 3)  # other networks are played too
    what = f"{plan.pp:,} stages" if plan.pp > 1 else "the step"
    return told(what, {MEMORY: times, PLAY: times * plays})
