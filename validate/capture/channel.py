"""Channel: what captured ranks tell one another on their hosts, and which further ranks have to be captured.

A tensor on the GPU has no values, so messages between GPUs carry none. Shapes, counts and pickled objects do (frameworks
send them before tensors), and arrive here as bytes in files of the capture's scratch folder. A peer that nobody captures
yet is asked for.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

_POLL_S = 0.01


class NeverSentError(Exception):
    """A message that its sender has ended without sending."""


class Channel:
    """One rank's ends of all messages. reports: a pipe on which the parent reads lines of JSON."""

    def __init__(self, folder: Path, rank: int, reports: int) -> None:
        self._folder, self.rank, self._reports = folder, rank, reports
        self._requested = {rank}
        self._counts: Counter[tuple[str, int, tuple[int, ...]]] = Counter()

    def tell(self, **message: Any) -> None:
        """A line for the parent."""
        os.write(self._reports, (json.dumps({"rank": self.rank, **message}) + "\n").encode())

    def want(self, rank: int) -> None:
        """A rank that this one exchanges messages with, or that differs from it."""
        if rank not in self._requested:
            self._requested.add(rank)
            self.tell(want=rank)

    def publish(self, peer: int, group: tuple[int, ...], content: bytes | None) -> None:
        """The next message to a rank in a group. None: of a tensor whose values nobody knows."""
        path = self._path(self.rank, peer, group, self._next("to", peer, group))
        if content is not None:
            beside = path.with_suffix(".new")
            beside.write_bytes(content)
            beside.replace(path)

    def expect(self, peer: int, group: tuple[int, ...]) -> int:
        """The number of the next message from a rank in a group."""
        return self._next("from", peer, group)

    def receive(self, peer: int, group: tuple[int, ...], number: int) -> bytes:
        """Its content, once it is there. Raises NeverSentError where the peer has ended without it."""
        path, over = self._path(peer, self.rank, group, number), self._folder / f"over-{peer}"
        content = f"message {number} from rank {peer} to rank {self.rank}, whose content the host needs"
        reported = False
        while not path.exists():
            if over.exists() and not path.exists():
                raise NeverSentError(f"{content}, is never sent with known values")
            if not reported:
                self.tell(waits=content)
                reported = True
            time.sleep(_POLL_S)
        if reported:
            self.tell(waits="")
        return path.read_bytes()

    def end(self) -> None:
        """Nothing more will be sent."""
        (self._folder / f"over-{self.rank}").touch()

    def _next(self, direction: str, peer: int, group: tuple[int, ...]) -> int:
        self._counts[direction, peer, group] += 1
        return self._counts[direction, peer, group] - 1

    def _path(self, source: int, target: int, group: tuple[int, ...], number: int) -> Path:
        return self._folder / f"message-{source}-{target}-{crc32(repr(group).encode()):08x}-{number}"
