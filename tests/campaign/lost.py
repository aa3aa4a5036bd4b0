"""`python -m tests.campaign.lost --workers 100 --schedulers 20 --seed S`: searches on dask, of which workers and schedulers are killed.

A search whose workers are killed must find what a search in one process finds, byte for byte. One whose scheduler is killed
must say so, without a traceback, keep its journal, and find the same when it goes on. All on this machine, over loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

from tests.campaign.kills import WORKS, Place
from tests.campaign.seeds import ROOT

COMMAND = WORKS["search"].command.replace("--jobs 2", "--jobs 1")
PATIENCE_S = 300


def lost_workers(wanted: int, rng: random.Random) -> int:
    """Searches until so many workers were killed; the number of searches that found something else."""
    from simulator.studies.search import Dask, Serial, search
    from tests.unit.test_search_dask import _study

    study = _study()
    with Serial(study) as engine:
        alone = json.dumps(search(study, engine).as_json())
    killed, searches, wrong = 0, 0, 0
    served = Served(Path(tempfile.mkdtemp(prefix="lost-")), workers=2)
    while killed < wanted:
        mean_s, over, found = rng.uniform(1.0, 6.0), threading.Event(), list[int]()
        killer = threading.Thread(target=_kill_some, args=(served, mean_s, over, found, random.Random(rng.random())))
        killer.start()
        try:
            with Dask(study, served.address) as engine:
                answer = json.dumps(search(study, engine).as_json())
        except Exception as exc:  # noqa: BLE001  any is a fault
            answer = repr(exc)
        over.set()
        killer.join()
        killed, searches = killed + len(found), searches + 1
        if answer != alone:
            wrong += 1
            print(f"WRONG after {len(found)} lost workers: {answer[:500]}", flush=True)
        print(f"{killed} workers lost in {searches} searches, {wrong} wrong", file=sys.stderr, flush=True)
    served.end()
    print(f"{killed} workers lost in {searches} searches, {wrong} wrong")
    return wrong


def _kill_some(served: Served, mean_s: float, over: threading.Event, found: list[int], rng: random.Random) -> None:
    """A worker at a time, at random moments, and another begins. At most 8 in one search."""
    while len(found) < 8 and not over.wait(rng.expovariate(1 / mean_s)):
        found.append(served.replace_worker(rng.randrange(2)))


class Served:
    """A scheduler and its workers, each a process of its own."""

    def __init__(self, folder: Path, workers: int = 1) -> None:
        self._folder, file = folder, folder / "scheduler.json"
        file.unlink(missing_ok=True)
        self._scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
        until = time.monotonic() + PATIENCE_S
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.05)
        self._workers = [self._worker() for _ in range(workers)]
        self.address = str(json.loads(file.read_text(encoding="utf-8"))["address"])

    def _start(self, kind: str, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", "--no-dashboard", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _worker(self) -> subprocess.Popen[bytes]:
        file = str(self._folder / "scheduler.json")
        return self._start("worker", "--scheduler-file", file, "--nthreads", "1", "--no-nanny", "--local-directory", str(self._folder))  # fmt: skip

    def replace_worker(self, which: int) -> int:
        """Kill it, and start another; the process that was killed."""
        victim = self._workers[which]
        victim.kill()
        victim.wait()
        self._workers[which] = self._worker()
        return victim.pid

    def kill_scheduler(self) -> None:
        self._scheduler.kill()
        self._scheduler.wait()

    def end(self) -> None:
        for one in (self._scheduler, *self._workers):
            one.kill()
            one.wait()


def lost_schedulers(wanted: int, rng: random.Random) -> int:
    """Commands whose scheduler is killed; the number of those that lost something, or did not say what happened."""
    scratch = Path(tempfile.mkdtemp(prefix="lost-"))
    undisturbed = Place(WORKS["search"], scratch / "whole")
    undisturbed.run()
    wrong = killed = number = 0
    seconds = 3.0
    while killed < wanted:
        above = scratch / str(number)
        number += 1
        place = Place(WORKS["search"], above)
        served = Served(above)
        process = _client(place, served)
        begun = time.monotonic()
        try:
            code = process.wait(rng.uniform(0.3, 1.0) * seconds)
        except subprocess.TimeoutExpired:
            rows = place.kept()
            served.kill_scheduler()
            killed += 1
            code = process.wait(PATIENCE_S)
            error = (above / "stderr").read_bytes()
            if code not in (0, 3) or b"Traceback" in error:
                wrong += 1
                print(f"WRONG in {above}: exit code {code}: {error[-300:]!r}", flush=True)
            if not rows <= place.kept():
                wrong += 1
                print(f"WRONG in {above}: rows are lost", flush=True)
        served.end()
        seconds = max(seconds, time.monotonic() - begun)
        if code != 0:
            served = Served(above)
            _client(place, served).wait(PATIENCE_S)
            served.end()
        if place.answer() != undisturbed.answer():
            wrong += 1
            print(f"WRONG in {above}: another answer", flush=True)
        print(f"{killed} schedulers lost in {number} searches, {wrong} wrong", file=sys.stderr, flush=True)
    print(f"{killed} schedulers lost in {number} searches, {wrong} wrong")
    return wrong


def _client(place: Place, served: Served) -> subprocess.Popen[bytes]:
    return place.start(*COMMAND.split(), "--engine", "dask", "--scheduler", served.address)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--schedulers", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # sockets of killed workers
    wrong = lost_schedulers(options.schedulers, random.Random(f"{options.seed}:s")) if options.schedulers else 0
    wrong += lost_workers(options.workers, random.Random(f"{options.seed}:w")) if options.workers else 0
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
