"""A process that plays cases one after the other, each in a fork of its own, and tells what came of them."""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import random
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

from tests.campaign.cases import Ended, cleared, in_company, played, wrong
from tests.campaign.mutate import drawn, mutated
from tests.campaign.seeds import Seed, seeds

SLOW_SHARE = 0.005  # of the cases: readers behind which a second of work lies
DRAWN_SHARE = 0.15  # that are no input's mutation, but drawn option by option
TOGETHER = 200  # cases that one process plays


QUICK = -1  # the seed of the cases that the tests play: no slow input, and no journal, which takes a run to make


def case_of(seed: int, index: int) -> Seed:
    """Case `index`: each input as it stands first; then mutated ones, all readers in turn, slow ones seldom."""
    known = seeds(journals=seed != QUICK)
    if seed == QUICK:
        known = tuple(one for one in known if not (one.slow or one.nightly))
    if index < len(known):
        return known[index]
    rng = random.Random(f"{seed}:{index}")
    if seed != QUICK and rng.random() < DRAWN_SHARE:
        return drawn(rng)
    slow = rng.random() < SLOW_SHARE
    return mutated(rng.choice([one for one in known if one.slow == slow] or known), rng)


def warm() -> None:
    """Load what commands load, so that a fork need not."""
    import matplotlib.font_manager  # noqa: F401  each case has a new home, and would look for fonts anew

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
        cleared(folder)


def work(seed: int, first: int, stride: int, until_s: float, last: int | None, queue: Any) -> None:
    warm()
    gc.freeze()  # or each fork copies what the collector touches
    scratch = Path(tempfile.mkdtemp(prefix="campaign-"))
    indices = _indices(first, stride, last)
    try:
        while time.time() < until_s and _wanted() and (few := list(islice(indices, TOGETHER))):
            for index, case, ended, fault in _several(seed, few, until_s, scratch):
                queue.put((index, case, ended, fault) if fault else (index, *_short(case, ended), fault))
    except KeyboardInterrupt:
        pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _wanted() -> bool:
    """The campaign is still there: killed, it tells its workers nothing."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


def _several(seed: int, indices: list[int], until_s: float, scratch: Path) -> Iterator[tuple[int, Seed, Ended, str]]:
    """These cases, together where they can be. One with a fault, or that ended the process, is played again alone."""
    left = deque((index, case_of(seed, index)) for index in indices)
    while left and time.time() < until_s:
        company = list(takewhile(lambda one: not one[1].alone, left))
        for index, ended, fault in in_company(company, scratch):
            _, case = left.popleft()
            if fault:
                case, again, alone = one(seed, index, scratch)
                yield index, case, again, alone or f"after other cases: {fault}"
            else:
                yield index, case, ended, ""
            company.pop(0)
        if left and time.time() < until_s and (company or left[0][1].alone):
            index, _ = left.popleft()
            cleared(scratch / str(index))
            yield index, *one(seed, index, scratch)


def _short(case: Seed, ended: Ended) -> tuple[Seed, Ended]:
    """Of a case without a fault only what is counted."""
    return replace(case, files={}), replace(ended, stdout=b"", stderr=b"")


def _indices(first: int, stride: int, last: int | None) -> Iterator[int]:
    for index in count(first, stride):
        if last is not None and index >= last:
            return
        yield index
