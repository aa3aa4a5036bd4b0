"""`python -m tests.campaign.sweep --plans 1000000 --every 60`: a search of so many plans on dask, whose workers are killed.

A scheduler and two workers on this machine; a worker in turn is killed every so many seconds, and another begins. The answer
must be that of the same search in one process, byte for byte, and the journal below 2 GB for a million plans. The exit code
is 1 if it is not. The plans are of one layer, and differ in the size of their buckets and in their part of the device's
memory: what is asked is what a search makes of a million plans, not what is in them. Each finished plan is synced, for which
a disk takes milliseconds: TMPDIR=/dev/shm spares an hour of waiting (needs `distributed`). With --folder, a sweep that was
killed goes on from its journal, once what it started has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.campaign.kills import Place, Work
from tests.campaign.lost import Served

MOST_BYTES: Final = 2e9  # of a journal of a million plans
_PARTS: Final = 1000  # parts of a device's memory: so many plans for each size of bucket
_LEAST_KIB, _STEP_KIB = 8192, 7  # sizes of bucket: all gradients are in few of them
_STARTS: Final = 10  # of the same command
_MODEL: Final = b'name = "small"\nnum_layers = 1\nd_model = 512\nnum_heads = 8\nd_ff = 1408\nvocab_size = 1024\n'


def work_of(plans: int) -> Work:
    """A search of which so many plans are simulated: every plan, of as many sizes of bucket as that takes."""
    sizes = ",".join(f"{_LEAST_KIB + _STEP_KIB * i}KiB" for i in range(-(-plans // _PARTS)))
    parts = ",".join(f"{1 - i / (2 * _PARTS):.4f}" for i in range(min(plans, _PARTS)))
    held = "--fix tp=1 --fix pp=1 --fix cp=1 --fix zero=0 --fix recompute=none --fix micro_batch_size=1"
    return Work(
        command="search --model small.toml --cluster hgx-h100-8 --nodes 1 --global-batch 8 --seq-len 128 --stack torch-2.6-eager"
        f" --all --top {min(plans, 10_000)} {held} --fix bucket_bytes={sizes} --fix memory_fraction={parts} --json --journal found.journal --jobs 1",
        share=1, files={"small.toml": _MODEL}, journal="found.journal",
    )  # fmt: skip


def swept(plans: int, every_s: float, scratch: Path) -> tuple[bool, int, int, int]:
    """(the same answer, workers that were killed, plans in the journal, its bytes)."""
    work = work_of(plans)
    alone = Place(work, scratch / "alone")
    begun = alone.start(*(word for word in work.command.split() if word not in ("--journal", work.journal)))
    place, killed = Place(work, scratch / "dask"), 0
    served = Served(scratch / "dask", workers=2)
    words = (*work.command.split(), "--engine", "dask", "--scheduler", served.address)
    process, starts = place.start(*words), 1
    while (code := _ended(process, every_s)) is None or (code and starts < _STARTS):
        if code is None:
            served.replace_worker(killed % 2)
            killed += 1
        else:  # no worker for half a minute, as on a busy machine: the journal goes on where it was
            process, starts = place.start(*words), starts + 1
    served.end()
    begun.wait()
    same = place.answer() == alone.answer() and process.returncode == begun.returncode == 0
    journal = place.folder / work.journal
    with contextlib.closing(sqlite3.connect(journal)) as database:
        (count,) = database.execute("SELECT count(*) FROM outcomes").fetchone()
    return same, killed, count, sum(one.stat().st_size for one in place.folder.glob("found.journal*"))


def _ended(process: subprocess.Popen[bytes], within_s: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(within_s)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=20_000)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills")
    parser.add_argument("--folder", type=Path, help="where it works, and where a sweep that was killed goes on")
    options = parser.parse_args()
    scratch, started = options.folder or Path(tempfile.mkdtemp(prefix="sweep-")), time.monotonic()
    same, killed, count, size = swept(options.plans, options.every, scratch)
    million = size / max(1, count) * 1e6
    print(
        f"{count:,} plans in {time.monotonic() - started:,.0f} s, {killed} workers killed, answer {'the same' if same else 'ANOTHER'};"
    )
    print(
        f"journal of {size:,} bytes, {size / max(1, count):,.0f} a plan, {million / 1e9:.2f} GB for a million ({scratch})"
    )
    return int(not same or million > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
