"""A process that plays cases one after the other, each in a fork of its own, and tells what came of them."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from tests.campaign.cases import Ended, played, wrong
from tests.campaign.mutate import mutated
from tests.campaign.seeds import Seed, seeds

SLOW_SHARE = 0.03  # of the cases: readers behind which a second of work lies


def case_of(seed: int, index: int) -> Seed:
    """Case `index`: each seed as it stands first; then mutated ones, all readers in turn, slow ones every tenth time."""
    known = seeds()
    if index < len(known):
        return known[index]
    rng = random.Random(f"{seed}:{index}")
    slow = rng.random() < SLOW_SHARE
    return mutated(rng.choice([one for one in known if one.slow == slow] or known), rng)


def warm() -> None:
    """Load what commands load, so that a fork need not."""
    from simulator.cli import VERBS, main, shardwise

    for verb in VERBS:
        command: Any = shardwise.get_command(None, verb)  # type: ignore[arg-type]
        for name in getattr(command, "commands", {}):
            command.get_command(None, name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(["predict", "--model", "llama3.2-1b", "--cluster", "hgx-h100-8", "--plain"])


def one(seed: int, index: int, scratch: Path) -> tuple[Seed, Ended, str]:
    case, folder = case_of(seed, index), scratch / str(index)
    folder.mkdir()
    try:
        ended = played(case, folder)
        return case, ended, wrong(case, ended, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for suffix in (".out", ".err"):
            folder.with_suffix(suffix).unlink(missing_ok=True)


def work(seed: int, first: int, stride: int, until_s: float, last: int | None, queue: Any) -> None:
    warm()
    scratch = Path(tempfile.mkdtemp(prefix="campaign-"))
    try:
        for index in _indices(first, stride, last):
            if time.time() > until_s:
                break
            case, ended, fault = one(seed, index, scratch)
            queue.put((index, case, ended, fault) if fault else (index, *_short(case, ended), fault))
    except KeyboardInterrupt:
        pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _short(case: Seed, ended: Ended) -> tuple[Seed, Ended]:
    """Of a case without a fault only what is counted."""
    return replace(case, files={}), replace(ended, stdout=b"", stderr=b"")


def _indices(first: int, stride: int, last: int | None) -> Iterator[int]:
    for index in count(first, stride):
        if last is not None and index >= last:
            return
        yield index
