"""The parent that keeps deadlines: it starts ranks, listens to them, and leaves no process and no file behind.

A rank is a process in a session of its own. It reports by JSON lines on an inherited pipe: `{"phase": name}` when a
phase begins (or `{"phase": {"name": name, "seconds": what it plans to take}}`), `{"partial": {...}}` for what is already
known, `{"answers": true}` if SIGUSR1 makes it write its stack, `{"sample": {...}}` for what is to be kept as it comes, `{"result": {...}}` at the end, `{"fault": {...}}` if it
knows what went wrong. Its standard input is a lifeline: it ends when the parent does (`validate.players.rank`).
No torch in here: what is supervised may be anything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.base.processes import claim
from validate.supervise.peers import Peers, PlaceInJob
from validate.supervise.processes import (
    MARK,
    Interrupted,
    Rank,
    end,
    ignore_signals,
    ignore_sigterm,
    start,
    stop_signals,
)
from validate.supervise.verdict import Deadlines, SupervisedOutcome, Verdict
from validate.supervise.watch import Watch

__all__ = [
    "Deadlines",
    "Peers",
    "PlaceInJob",
    "SupervisedOutcome",
    "Verdict",
    "ignore_sigterm",
    "scratch_folder",
    "supervise",
]


def supervise(
    commands: Sequence[Sequence[str]],
    deadlines: Deadlines,
    *,
    environments: Sequence[Mapping[str, str]] | None = None,
    scratch: Path | None = None,
    memory_bytes: int | None = None,
    progress: Callable[[int, str], None] | None = None,
    samples: Callable[[int, dict[str, Any]], None] | None = None,
    peers: Peers | None = None,
) -> SupervisedOutcome:
    """Run one process a command to the end, or to the first trouble; nothing of them is left when this returns.

    environments: added to this process's, one a command. scratch: the ranks' folder (TMPDIR), the caller's to remove.
    memory_bytes: what all ranks together may hold resident; more ends the run before the machine suffers.
    progress(rank, phase) is called as phases begin, samples(rank, sample) as samples come; what they raise ends the run.
    peers: ranks that have parents of their own; their troubles end this run too.
    """
    token = uuid.uuid4().hex
    ranks: list[Rank] = []
    watch = Watch(ranks, deadlines, memory_bytes, progress, samples, peers)
    try:
        with stop_signals():
            for index, command in enumerate(commands):
                extra = environments[index] if environments is not None else {}
                try:
                    ranks.append(start(index, command, {**extra, MARK: token}, scratch))
                except OSError as exc:
                    watch.trouble = Verdict(kind="missing", detail=f"{command[0]}: {exc.strerror}", rank=index)
                    break
            verdict = watch.trouble or watch.run()
    except KeyboardInterrupt:
        verdict = Verdict(kind="interrupted", detail="Ctrl-C")
    except Interrupted as exc:
        verdict = Verdict(kind="interrupted", detail=str(exc))
    finally:
        with ignore_signals():
            end(ranks, token, deadlines.grace_s)
            watch.drain()
    return SupervisedOutcome(
        verdict=verdict,
        results={rank.index: rank.result for rank in ranks if rank.result is not None},
        partials={rank.index: rank.partial for rank in ranks if rank.partial},
        stderr={rank.index: _last_words(rank) for rank in ranks},
    )


def _last_words(rank: Rank) -> str:
    """The end of what a rank wrote on stderr, without the lines that torch's profiler writes for tracers."""
    lines = rank.tail.decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith("USDT:"))


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
    claimed = claim(folder)
    try:
        yield folder
    finally:
        with ignore_signals():
            shutil.rmtree(folder, ignore_errors=True)
            os.close(claimed)
