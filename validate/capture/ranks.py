"""Ranks: a process for each captured rank, forked from one that has loaded torch, started as they turn out to be needed.

A rank that sends to or receives from another one needs it captured too, so a pipeline's stages find one another; one whose
shards are not the last rank's asks for that rank. What all ranks do is then known as far as they follow one of these.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from validate.capture.channel import Channel
from validate.report import RankReport

MOST = 64  # ranks captured: each is a process with the program in it
_STUCK_S = 5.0  # all ranks wait for one another for so long: they will for ever
_ASLEEP_S = 0.5

One = Callable[[int, Channel, Callable[[str], None]], dict[str, Any]]


OTHERS_MEMORY = "memory of other GPUs is not captured: torch.distributed's collective, and the product beside it"


class RefusedError(Exception):
    """The program cannot be captured; the message says why and what to do."""


class FailedError(Exception):
    """A rank's program failed; its process has said how."""


@dataclass(slots=True)
class Ranks:
    """The processes of one capture. one: captures a rank, in a process of its own."""

    folder: Path
    one: One
    explain: Callable[[BaseException], tuple[str, str]]
    report: RankReport
    _pids: dict[int, int] = field(default_factory=dict)  # of those that run, by rank
    _captured_ranks: list[int] = field(default_factory=list)
    _waits: dict[int, str] = field(default_factory=dict)
    _faults: dict[int, tuple[str, str]] = field(default_factory=dict)
    _ends: tuple[int, int] = (0, 0)
    _still_s: float = 0.0

    def run(self, ranks: Sequence[int]) -> list[int]:
        """Capture these ranks and whatever they need. Their numbers, ascending. Raises RefusedError or FailedError."""
        self._ends = os.pipe()
        try:
            for rank in ranks:
                self._start(rank)
            while self._pids:
                self._listen()
                self._reap()
                self._check_stuck()
        finally:
            for pid in self._pids.values():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        return sorted(self._captured_ranks)

    def _start(self, rank: int) -> None:
        if rank in self._captured_ranks:
            return
        if len(self._captured_ranks) == MOST:
            raise RefusedError(
                f"more than {MOST} ranks exchange messages with one another: capture fewer ranks (--ranks), "
                "or use a collective where all ranks of a group do the same"
            )
        self._captured_ranks.append(rank)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._child(rank)
        self._pids[rank] = pid
        if len(self._captured_ranks) > 1:
            self.report.phase(f"rank {rank}")

    def _child(self, rank: int) -> None:
        """The rank's process, to its end."""
        status, channel = 1, Channel(self.folder, rank, self._ends[1])
        try:
            captured = self.one(rank, channel, lambda phase: channel.tell(phase=phase))
            channel.end()
            (self.folder / f"rank-{rank}.json").write_text(json.dumps(captured), encoding="utf-8")
            status = 0
        except BaseException as exc:  # noqa: BLE001  whatever the program raises, the parent must be told
            kind, text = self.explain(exc)
            channel.tell(fault=[kind, text])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads and loaders of the program must not hold it back

    def _listen(self) -> None:
        """What the ranks tell, once some do or a moment has passed."""
        ready, _, _ = select.select([self._ends[0]], [], [], _ASLEEP_S)
        if not ready:
            return
        text = os.read(self._ends[0], 1 << 16)
        while not text.endswith(b"\n"):
            text += os.read(self._ends[0], 1 << 16)
        for line in text.splitlines():
            self._take_message(json.loads(line))

    def _take_message(self, message: dict[str, Any]) -> None:
        rank = message["rank"]
        self._still_s = time.monotonic()
        if "waits" in message:
            self._waits[rank] = message["waits"]
        if "phase" in message and rank == self._captured_ranks[0]:
            self.report.phase(message["phase"])
        if "fault" in message:
            self._faults[rank] = tuple(message["fault"])
        if "want" in message:
            self._start(message["want"])

    def _reap(self) -> None:
        for rank, pid in list(self._pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found == 0:
                continue
            del self._pids[rank]
            self._still_s = time.monotonic()
            if status or not (self.folder / f"rank-{rank}.json").is_file():  # os._exit(0)
                self._listen()
                raise FailedError(*self._first_fault(rank, status))

    def _first_fault(self, rank: int, status: int) -> tuple[str, str]:
        if rank not in self._faults:
            code = os.waitstatus_to_exitcode(status)
            return (
                "failed",
                f"rank {rank}: its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'} before its recorded step did",
            )
        kind, text = self._faults[rank]
        return kind, text if len(self._captured_ranks) == 1 else f"rank {rank}: {text}"

    def _check_stuck(self) -> None:
        """Ranks that all wait for one another's messages."""
        waits = [f"rank {rank} waits for {self._waits[rank]}" for rank in sorted(self._pids) if self._waits.get(rank)]
        if waits and len(waits) == len(self._pids) and time.monotonic() - self._still_s > _STUCK_S:
            raise RefusedError(f"the ranks wait for one another: {'; '.join(waits)}")
