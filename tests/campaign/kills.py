"""`python -m tests.campaign.kills --kills 300 --seed S`: SIGKILL at random moments, and what is left of the work.

Each command first runs undisturbed. Then it is killed several times and started again in the same folder, at last to its
end. Wrong is: an answer or a written file that is not the undisturbed run's, byte for byte; a row of a journal or a line of
measurements that is gone; a process, a lock or a file with a name of its own that stays, there or in the temporary folder.
The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.campaign import inputs
from tests.campaign.seeds import EXAMPLES, ROOT

ENDS_S: Final = 60.0  # until what a killed process has started must have ended, on a busy machine
PATIENCE_S: Final = 300.0  # for a run that nobody kills


@dataclass(frozen=True, kw_only=True)
class Work:
    """A command, the share of the kills that it gets, its inputs and what it writes; same: these bytes are always the same."""

    command: str
    share: int
    files: dict[str, bytes] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    journal: str = ""
    same: bool = True


_MODEL: Final = "--model gpt2 --cluster hgx-h100-8"
_FOUND: Final = "found.journal"
WORKS: Final = {
    "search": Work(
        command=f"search {_MODEL} --nodes 1 --global-batch 8 --seq-len 256 --fix pp=1 --fix cp=1 --jobs 2 --json --journal {_FOUND} --export plans.json",
        share=6, writes=("plans.json",), journal=_FOUND,
    ),
    "serve": Work(
        command=f"serve {_MODEL} --rate 4 --requests 20 --prompt 64 --output 16 --search --slo-ttft 1s --jobs 2 --json --journal {_FOUND}",
        share=5, journal=_FOUND,
    ),
    "explore": Work(
        command=f"explore {_MODEL} --set plan.seq_len=256 --vary plan.tp=1,2,4 --vary plan.micro_batch_size=1,2,4,8 --jobs 2 --json --journal {_FOUND} --html page.html",
        share=4, writes=("page.html",), journal=_FOUND,
    ),
    "sensitivity": Work(
        command=f"sensitivity {_MODEL} --set plan.seq_len=256 --vary link.intra.bytes_per_s=200GB/s..450GB/s --samples 32 --jobs 2 --json --journal {_FOUND}",
        share=3, journal=_FOUND,
    ),
    "goodput": Work(
        command="goodput run.toml --failures llama3 --replicas 2000 --json --html page.html",
        share=4, files={"run.toml": inputs.SPOT_STUDY}, writes=("page.html",),
    ),
    "backtest": Work(
        command="backtest runs.csv --jobs 2 --json --html page.html",
        share=4, files={"runs.csv": (EXAMPLES / "runs.csv").read_bytes()}, writes=("page.html",),
    ),
    "capture": Work(
        command="capture step.py --cluster hgx-h100-8 -o step.capture.gz", share=2, files={"step.py": inputs.SCRIPT}, writes=("step.capture.gz",),
    ),
    "calibrate": Work(
        command="calibrate run --tiny --minutes 0.1 --device cpu --out mine.jsonl", share=2, writes=("mine.jsonl",), same=False,
    ),
}  # fmt: skip


class Place:
    """A folder where a command runs, and a temporary folder that is nobody else's."""

    def __init__(self, work: Work, above: Path) -> None:
        self.work, self.folder, self.temporary = work, above / "here", above / "tmp"
        for one in (self.folder, self.temporary):
            one.mkdir(parents=True, exist_ok=True)
        for name, data in work.files.items():
            (self.folder / name).write_bytes(data)

    def start(self, *others: str) -> subprocess.Popen[bytes]:
        """The command, or these words."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.temporary),
            "HOME": str(self.folder.parent),
        }
        words = list(others) or self.work.command.split()
        if not self.work.same and any((self.folder / name).exists() for name in self.work.writes):
            words.append("--resume")
        out = (self.folder.parent / "stdout").open("wb")
        err = (self.folder.parent / "stderr").open("wb")
        return subprocess.Popen(
            [sys.executable, "-m", "simulator.cli", *words],
            cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip

    def run(self) -> float:
        """To the end; its seconds. Raises RuntimeError where it fails."""
        started = time.monotonic()
        code = self.start().wait(PATIENCE_S)
        if code not in (0, 4):
            msg = f"exit code {code}: {(self.folder.parent / 'stderr').read_bytes()[-300:]!r}"
            raise RuntimeError(msg)
        return time.monotonic() - started

    def kill(self, after_s: float) -> bool:
        """Whether the command was still running."""
        process = self.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
            return False
        process.send_signal(signal.SIGKILL)
        process.wait()
        until = time.monotonic() + ENDS_S
        while (left := _session(process.pid)) and time.monotonic() < until:
            time.sleep(0.05)
        if left:
            os.killpg(process.pid, signal.SIGKILL)
            msg = f"{len(left)} processes left: {left[0]}"
            raise RuntimeError(msg)
        return True

    def answer(self) -> dict[str, bytes]:
        found = {name: (self.folder / name).read_bytes() for name in self.work.writes}
        return {**found, "stdout": (self.folder.parent / "stdout").read_bytes()}

    def kept(self) -> set[str]:
        """Rows of the journal, or lines of measurements, that are on disk."""
        path = self.folder / self.work.journal
        if self.work.journal and path.exists():
            with contextlib.closing(sqlite3.connect(path)) as database, contextlib.suppress(sqlite3.OperationalError):
                return {f"{key} {text}" for key, text in database.execute("SELECT key, outcome FROM outcomes")}
        if not self.work.same:
            path = self.folder / self.work.writes[0]
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            return {line for line in lines if line.endswith("\n") and '"kind": "section"' not in line}
        return set()

    def strangers(self) -> list[str]:
        """Files that nobody asked for."""
        known = {*self.work.files, *self.work.writes, self.work.journal}
        return [str(one) for one in (*self.folder.iterdir(), *self.temporary.iterdir()) if one.name not in known]


def _session(leader: int) -> list[str]:
    """Command lines of the processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            state, _, _, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200])
    return found


def campaign(name: str, kills: int, rng: random.Random, scratch: Path, tally: Counter[str]) -> None:
    """One command, killed so often."""
    work = WORKS[name]
    undisturbed = Place(work, scratch / f"{name}-whole")
    seconds = undisturbed.run()
    wanted, done, number = undisturbed.answer(), 0, 0
    before = undisturbed.strangers()
    while done < kills:
        place, rows = Place(work, scratch / f"{name}-{number}"), set[str]()
        number += 1
        try:
            for _ in range(min(rng.randrange(1, 6), kills - done)):
                if place.kill(rng.uniform(0.1, 1.0) * seconds):
                    done += 1
                now = place.kept()
                if lost := rows - now:
                    raise RuntimeError(f"{len(lost)} rows are lost: {min(lost)[:200]}")  # noqa: TRY301
                rows |= now
            place.run()
            _compare(place, wanted, rows, len(before))
            shutil.rmtree(place.folder.parent)
        except (RuntimeError, OSError, sqlite3.Error, subprocess.TimeoutExpired) as exc:
            tally[f"WRONG {name}"] += 1
            print(f"WRONG {name} in {place.folder.parent}: {exc}", flush=True)
        tally[f"runs of {name} to the end"] += 1
    tally[f"kills of {name}"] += done


def _compare(place: Place, wanted: dict[str, bytes], rows: set[str], usual: int) -> None:
    if lost := rows - place.kept():
        raise RuntimeError(f"{len(lost)} rows are lost: {min(lost)[:200]}")
    if place.work.same and (other := [name for name, data in place.answer().items() if wanted[name] != data]):
        raise RuntimeError(f"{other[0]} differs from the undisturbed run's")
    if len(left := place.strangers()) > usual:
        raise RuntimeError(f"left: {left}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=WORKS, action="append")
    options = parser.parse_args()
    names, tally = options.only or list(WORKS), Counter[str]()
    shares = sum(WORKS[name].share for name in names)
    scratch = Path(tempfile.mkdtemp(prefix="kills-"))
    for name in names:
        kills = -(-options.kills * WORKS[name].share // shares)
        campaign(name, kills, random.Random(f"{options.seed}:{name}"), scratch, tally)
        print(f"{name}: {tally[f'kills of {name}']} kills, {tally[f'runs of {name} to the end']} runs to the end, {tally[f'WRONG {name}']} wrong", flush=True)  # fmt: skip
    wrong = sum(number for name, number in tally.items() if name.startswith("WRONG"))
    print(f"{sum(n for name, n in tally.items() if name.startswith('kills'))} kills, {wrong} wrong")
    if not wrong:
        shutil.rmtree(scratch)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
