"""Listening to ranks: what they report, when they hang or die, and which of their troubles is the cause."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from simulator.base.errors import finite_number
from validate.supervise.peers import Peers
from validate.supervise.processes import TICK_S, Rank, resident_bytes, signal_name
from validate.supervise.verdict import PRIORITY, Deadlines, Kind, Verdict, cause_of

STACK = b"(most recent call first):"  # what faulthandler writes above frames
MAX_LINE_BYTES = 8 * 2**20
_TAIL_BYTES = 16 * 2**10
_MEMORY_EVERY_S = 0.5
_ANSWER_S = 0.5  # for a rank that hangs to write its stack
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
_WAITING = re.compile(
    r"\b(wait|barrier|synchronize|broadcast|i?send|i?recv|\w*(gather|reduce|scatter|all_to_all)\w*)\("
)
_LAST_READS = 32  # of 64 KiB; a pipe holds one or a few
_MOST_S = 31_557_600  # a year: no phase plans for longer


class Watch:
    """Reads what ranks report until all are done, one is in trouble, or time is up."""

    def __init__(
        self,
        ranks: list[Rank],
        deadlines: Deadlines,
        memory_bytes: int | None,
        progress: Callable[[int, str], None] | None,
        samples: Callable[[int, dict[str, Any]], None] | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.peers = peers
        self.ranks, self.deadlines, self.memory_bytes = ranks, deadlines, memory_bytes
        self.progress, self.samples = progress, samples
        self.trouble: Verdict | None = None
        self.asked = False
        self.selector = selectors.DefaultSelector()
        self._next_memory_s = 0.0

    def run(self) -> Verdict:
        """Listen until the verdict."""
        started = time.monotonic()
        for rank in self.ranks:
            self._listen(rank, started)
        until = started + self.deadlines.total_s
        settling = False
        while any(rank.process.poll() is None or (rank.open_pipes and rank.result is None) for rank in self.ranks):
            now = time.monotonic()
            if now >= until:
                break
            self._read(min(TICK_S, until - now))
            self._check(now)
            if not settling and (self._peer_troubles() or any(rank.trouble for rank in self.ranks)):
                settling, until = True, min(until, now + self.deadlines.settle_s)
            if settling and self._ask_where():
                until = max(until, now + _ANSWER_S)
        return self._verdict(timed_out=not settling and time.monotonic() >= until)

    def _listen(self, rank: Rank, now: float) -> None:
        rank.since_s = now
        assert rank.process.stderr is not None
        for descriptor in (rank.report, rank.process.stderr.fileno()):
            os.set_blocking(descriptor, False)
            self.selector.register(descriptor, selectors.EVENT_READ, rank)

    def _read(self, timeout_s: float) -> None:
        if not self.selector.get_map():
            time.sleep(timeout_s)
        for key, _ in self.selector.select(timeout_s):
            self._take(key.fd, key.data)

    def _take(self, descriptor: int, rank: Rank) -> bool:
        """Read once; whether there may be more."""
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        if not data:
            self.selector.unregister(descriptor)
            rank.open_pipes -= 1
        elif descriptor == rank.report:
            self._lines(rank, data)
        else:
            rank.tail = (rank.tail + data)[-_TAIL_BYTES:]
        return bool(data)

    def drain(self) -> None:
        """Read what dead ranks left in their pipes, and close everything."""
        for key in list(self.selector.get_map().values()):
            for _ in range(2 * MAX_LINE_BYTES // 65536):
                if not self._take(key.fd, key.data):
                    break
        self.selector.close()
        for rank in self.ranks:
            os.close(rank.report)
            for pipe in (rank.process.stdin, rank.process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _lines(self, rank: Rank, data: bytes) -> None:
        """Whole lines are taken, the rest waits; only what is new is searched, so a long line costs its length."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._line(rank, bytes(rank.pending + line))
            rank.pending.clear()
        rank.pending += rest
        if len(rank.pending) > MAX_LINE_BYTES:
            rank.pending.clear()
            self._blame(rank, "bad_report", f"a line of more than {MAX_LINE_BYTES} bytes")

    def _line(self, rank: Rank, line: bytes) -> None:
        try:
            message = json.loads(line, parse_constant=finite_number, parse_float=finite_number)
            ((key, value),) = message.items()
        except (ValueError, AttributeError, RecursionError):
            self._blame(rank, "bad_report", f"not a report: {line[:80]!r}")
            return
        if key == "phase" and (phase := _phase_of(value)) is not None:
            rank.phase, rank.own_s = phase
            rank.since_s = time.monotonic()
            if self.progress is not None:
                self.progress(rank.index, rank.phase)
        elif key == "sample" and isinstance(value, dict) and self.samples is not None:
            self.samples(rank.index, value)
        elif key == "answers":
            rank.answers = value is True
        elif key == "partial" and isinstance(value, dict):
            rank.partial |= value
        elif key == "result" and isinstance(value, dict) and rank.result is None:
            rank.result = value
        elif key == "fault" and isinstance(value, dict) and value.get("kind") in PRIORITY:
            self._blame(rank, value["kind"], str(value.get("detail", "")))
        else:
            self._blame(rank, "bad_report", f"not a report: {line[:80]!r}")

    # --- judging

    def _peer_troubles(self) -> list[Verdict]:
        """Of ranks that have parents of their own; this rank's is told to them."""
        if self.peers is None:
            return []
        own = [rank.trouble for rank in self.ranks if rank.trouble is not None]
        if own:
            self.peers.tell(own[0])
        return self.peers.elsewhere()

    def _ask_where(self) -> bool:
        """Where one hangs all say in what (`validate.report`): several hang together, and all but one wait for it."""
        others = self.peers.troubles if self.peers is not None else ()
        troubles = (*(rank.trouble for rank in self.ranks), *others)
        if self.asked or not any(one is not None and one.kind == "hung" for one in troubles):
            return False
        self.asked = True
        for rank in self.ranks:
            if rank.answers:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.process.pid, signal.SIGUSR1)
        return True

    def _where(self, rank: Rank) -> Verdict | None:
        """A rank's trouble; of one that hangs with the place where it stands.

        Inside torch it most likely waits for another rank. One that others wait for may have time left by its own count.
        """
        trouble = rank.trouble
        if not self.asked or not rank.answers or (trouble is not None and trouble.kind != "hung"):
            return trouble
        stack = rank.tail.rpartition(STACK)[2].decode(errors="replace") if STACK in rank.tail else ""
        frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
        waits = bool(frames) and _waits(frames[0])
        if trouble is None and (waits or rank.result is not None):
            return None
        verdict = trouble or Verdict(kind="hung", detail="others wait for it", rank=rank.index, phase=rank.phase)
        where = f"in {_frame(frames)}" if frames else "it does not answer: stopped, or inside a driver's call"
        return replace(verdict, detail=f"{verdict.detail}; {where}", waits=waits)

    def _blame(self, rank: Rank, kind: Kind, detail: str) -> None:
        if rank.trouble is None:
            rank.trouble = Verdict(kind=kind, detail=detail, rank=rank.index, phase=rank.phase)

    def _check(self, now: float) -> None:
        for rank in self.ranks:
            status = rank.process.poll()
            if status is None:
                limit_s = rank.own_s + self.deadlines.of(rank.phase)
                if now - rank.since_s > limit_s:
                    self._blame(rank, "hung", f"not done after {limit_s:.3g} s")
            else:
                self._ended(rank, status)
        if self.memory_bytes is not None and now >= self._next_memory_s:
            self._next_memory_s = now + _MEMORY_EVERY_S
            self._check_memory(self.memory_bytes)

    def _ended(self, rank: Rank, status: int) -> None:
        while rank.trouble is None and self._take_report(rank):  # a fault or a result may still lie in the pipe
            pass
        if status and rank.trouble is None:
            self._take_last_words(rank)
        if status < 0:
            # libraries abort where another rank is gone: an echo, not the cause
            kind: Kind = "failed" if -status == signal.SIGABRT else "killed"
            self._blame(rank, kind, f"by {signal_name(-status)}{_who_kills(-status)}")
        elif status:
            self._blame(rank, "failed", f"exit status {status}{_last_line(rank.tail)}")
        elif rank.result is None:
            self._blame(rank, "no_result", "ended without a result")

    def _take_last_words(self, rank: Rank) -> None:
        """What lies in the pipe of its standard error; a child may hold it open and go on writing."""
        assert rank.process.stderr is not None
        descriptor = rank.process.stderr.fileno()
        for _ in range(_LAST_READS):
            if descriptor not in self.selector.get_map() or not self._take(descriptor, rank):
                return

    def _take_report(self, rank: Rank) -> bool:
        return rank.report in self.selector.get_map() and self._take(rank.report, rank)

    def _check_memory(self, limit: int) -> None:
        resident = {rank.index: resident_bytes(rank.process.pid) for rank in self.ranks}
        if sum(resident.values()) > limit:
            largest = max(self.ranks, key=lambda rank: resident[rank.index])
            self._blame(largest, "out_of_memory", f"the ranks hold {sum(resident.values())} of {limit} bytes allowed")

    def _verdict(self, *, timed_out: bool) -> Verdict:
        troubles = [one for one in map(self._where, self.ranks) if one is not None]
        if self.peers is not None:
            troubles = [*map(self.peers.own, troubles)] or self._peer_troubles()
        if troubles:
            return cause_of(troubles)
        if timed_out:
            slowest = min(self.ranks, key=lambda rank: (rank.result is not None, rank.since_s))
            detail = f"the run took more than {self.deadlines.total_s:g} s"
            return Verdict(kind="hung", detail=detail, rank=slowest.index, phase=slowest.phase)
        return Verdict(kind="ok")


def _waits(frame: str) -> bool:
    """Whether the innermost frame is in torch, or in a line that calls a method of torch's that waits."""
    found = _FRAME.match(frame)
    return "/torch/" in frame or (
        found is not None and _WAITING.search(linecache.getline(found[1], int(found[2]))) is not None
    )


def _frame(frames: list[str]) -> str:
    """The innermost frame, and the innermost one outside of torch if that is another: `file.py:12 name`."""
    outer = next((frame for frame in frames if "/torch/" not in frame), frames[0])
    names = []
    for frame in dict.fromkeys((frames[0], outer)):
        found = _FRAME.match(frame)
        names.append(f"{os.path.basename(found[1])}:{found[2]} {found[3]}" if found else frame)  # noqa: PTH119
    return ", called by ".join(names)


def _phase_of(value: object) -> tuple[str, float] | None:
    """A phase's name, and the seconds that the rank said it would take; None if this is no phase."""
    if isinstance(value, str):
        return value, 0.0
    match value:
        case {"name": str(name), "seconds": int() | float() as seconds, **rest} if not rest and 0 <= seconds < _MOST_S:
            return name, float(seconds)
    return None


def _who_kills(number: int) -> str:
    return " (by hand, or the machine ran out of memory)" if number == signal.SIGKILL else ""


def _last_line(tail: bytes) -> str:
    lines = [line.strip() for line in tail.decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""
