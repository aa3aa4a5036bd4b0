"""`python -m tests.campaign --minutes M --seed S`: mutated inputs of every reader and option; one reproducer a kind of fault.

Case i of a seed is always the same; `--case i` plays one again and prints it. Faults go to --out, a folder each: files,
command line, what was printed. The exit code is 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty
from typing import Any

from tests.campaign.cases import Ended, measures
from tests.campaign.seeds import Seed, seeds
from tests.campaign.worker import one, warm, work

SHOWN_EVERY_S = 10
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+|'[^']*'|\"[^\"]*\"")


def kind_of(case: Seed, fault: str) -> str:
    """What makes two faults one: the command and the words, without numbers and names."""
    return f"{case.argv[0] if case.argv else ''}: {_NUMBER.sub('#', fault)[:120]}"


def keep(case: Seed, ended: Ended, fault: str, index: int, seed: int, out: Path) -> Path:
    """The files and the command line, to be played again by hand."""
    folder = out / hashlib.sha256(kind_of(case, fault).encode()).hexdigest()[:10]
    for name, data in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "argv": case.argv,
        "special": case.special,
        "fault": fault,
        "again": f"python -m tests.campaign --seed {seed} --case {index}",
        "status": ended.status,
    }
    (folder / "case.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "stderr").write_bytes(ended.stderr[-20_000:])
    return folder


class Tally:
    """What came of the cases so far."""

    def __init__(self, seed: int, out: Path) -> None:
        self.seed, self.out = seed, out
        self.statuses: Counter[int] = Counter()
        self.kinds: Counter[str] = Counter()
        self.slowest = (0.0, "")

    def add(self, index: int, case: Seed, ended: Ended, fault: str) -> None:
        self.statuses[ended.status] += 1
        if not measures(case):
            self.slowest = max(self.slowest, (ended.cpu_s, f"case {index} ({case.name})"))
        if not fault:
            return
        kind = kind_of(case, fault)
        self.kinds[kind] += 1
        if self.kinds[kind] == 1:
            folder = keep(case, ended, fault, index, self.seed, self.out)
            print(f"FAULT case {index} ({case.name}): {fault}\n  {folder}", flush=True)

    def show(self) -> None:
        print(f"{self.statuses.total():,} cases, {len(self.kinds)} kinds of fault", file=sys.stderr, flush=True)

    def report(self) -> None:
        codes, (slowest_s, which) = dict(sorted(self.statuses.items())), self.slowest
        print(f"{self.statuses.total():,} cases of {len(seeds())} inputs, seed {self.seed}; exit codes {codes}")
        print(f"slowest: {slowest_s:.1f} s of the processor, {which}")
        for kind, number in self.kinds.most_common():
            print(f"{number:6,}  {kind}")


def run(seed: int, minutes: float, jobs: int, indices: tuple[int, int | None], out: Path) -> int:
    """Play cases until time is up; the number of kinds of fault. indices: the first case, and the one that ends them."""
    context = multiprocessing.get_context("spawn")
    queue, until_s, tally = context.Queue(), time.time() + 60 * minutes, Tally(seed, out)
    first, last = indices
    workers = [
        context.Process(target=work, args=(seed, first + number, jobs, until_s, last, queue)) for number in range(jobs)
    ]
    for worker in workers:
        worker.start()
    with contextlib.suppress(KeyboardInterrupt):
        _gathered(workers, queue, tally)
    for worker in workers:
        if worker.is_alive():  # stopped by hand: what is done is reported
            worker.terminate()
        elif worker.exitcode:
            tally.kinds[f"a worker of the campaign ended with {worker.exitcode}"] += 1
        worker.join()
    tally.report()
    return len(tally.kinds)


def _gathered(workers: Sequence[BaseProcess], queue: Any, tally: Tally) -> None:
    shown_s = time.monotonic()
    while any(worker.is_alive() for worker in workers) or not queue.empty():
        with contextlib.suppress(Empty):
            tally.add(*queue.get(timeout=1))
        if time.monotonic() - shown_s > SHOWN_EVERY_S:
            shown_s = time.monotonic()
            tally.show()
    for worker in workers:
        worker.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cases", type=int, help="up to this one; the same on every machine")
    parser.add_argument("--first", type=int, default=0, help="begin with this case, where an earlier run ended")
    parser.add_argument("--case", type=int, help="play this one and print it")
    parser.add_argument("--out", type=Path, default=Path("campaign-faults"))
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="campaign-kept-") as kept:
        os.environ.setdefault("SHARDWISE_CACHE", kept)  # or each capture compiles its device guard
        return _main(options)


def _main(options: argparse.Namespace) -> int:
    if options.case is None:
        return int(run(options.seed, options.minutes, options.jobs, (options.first, options.cases), options.out) > 0)
    warm()
    case, ended, fault = one(options.seed, options.case, Path(tempfile.mkdtemp(prefix="campaign-")))
    print(
        " ".join(case.argv),
        f"\nexit code {ended.status}, {ended.cpu_s:.2f} s, {ended.peak_bytes / 2**20:.0f} MiB",
        fault or "no fault",
        sep="\n",
    )
    sys.stdout.flush()
    sys.stdout.buffer.write(ended.stderr[-4000:])
    return int(bool(fault))


if __name__ == "__main__":
    sys.exit(main())
