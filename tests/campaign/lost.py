"""`python -m tests.campaign.lost --workers 100 --schedulers 20 --seed S`: searches on dask, of which workers and schedulers are killed.

A search whose workers are killed must find what a search in one process finds, byte for byte. One whose scheduler is killed
must say so, without a traceback, keep its journal, and find the same when it goes on. All on this machine, over loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from tests.campaign.kills import WORKS, Place
from tests.campaign.seeds import ROOT

COMMAND = WORKS["search"].command.replace("--jobs 2", "--jobs 1")
PATIENCE_S = 300


def lost_workers(wanted: int, rng: random.Random) -> int:
    """Searches until so many workers were killed; the number of searches that found something else."""
    from distributed import LocalCluster

    from simulator.studies.search import Dask, Serial, search
    from tests.unit.test_search_dask import _study

    study = _study()
    with Serial(study) as engine:
        alone = json.dumps(search(study, engine).as_json())
    killed, searches, wrong = 0, 0, 0
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        while killed < wanted:
            mean_s, over, found = rng.uniform(0.2, 3.0), threading.Event(), list[int]()
            killer = threading.Thread(
                target=_kill_some, args=(cluster, mean_s, over, found, random.Random(rng.random()))
            )
            killer.start()
            try:
                with Dask(study, cluster.scheduler_address) as engine:
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
    print(f"{killed} workers lost in {searches} searches, {wrong} wrong")
    return wrong


def _kill_some(cluster: Any, mean_s: float, over: threading.Event, found: list[int], rng: random.Random) -> None:
    """A worker at a time, at random moments; the cluster's own nannies start others. At most 8 in one search."""
    while len(found) < 8 and not over.wait(rng.expovariate(1 / mean_s)):
        processes = [one.process.pid for one in cluster.workers.values() if one.process and one.process.pid]
        if processes:
            victim = rng.choice(processes)
            os.kill(victim, signal.SIGKILL)
            found.append(victim)


class Served:
    """A scheduler and a worker, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        told = {**os.environ, "PYTHONPATH": str(ROOT), "DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING": "False"}
        self._started: list[subprocess.Popen[bytes]] = []
        file = folder / "scheduler.json"
        file.unlink(missing_ok=True)
        for words in (
            ("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)),
            ("worker", "--scheduler-file", str(file), "--nthreads", "1", "--no-dashboard", "--no-nanny", "--local-directory", str(folder)),
        ):  # fmt: skip
            command = [sys.executable, "-m", f"distributed.cli.dask_{words[0]}", *words[1:]]
            self._started.append(
                subprocess.Popen(command, env=told, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            until = time.monotonic() + PATIENCE_S
            while not file.exists() and time.monotonic() < until:
                time.sleep(0.05)
        self.address = str(json.loads(file.read_text(encoding="utf-8"))["address"])

    def kill_scheduler(self) -> None:
        self._started[0].kill()
        self._started[0].wait()

    def end(self) -> None:
        for one in self._started:
            one.kill()
            one.wait()


def lost_schedulers(wanted: int, rng: random.Random) -> int:
    """Commands whose scheduler is killed; the number of those that lost something, or did not say what happened."""
    scratch = Path(tempfile.mkdtemp(prefix="lost-"))
    whole = Place(WORKS["search"], scratch / "whole")
    whole.run()
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
            kept = place.kept()
            served.kill_scheduler()
            killed += 1
            code = process.wait(PATIENCE_S)
            error = (above / "stderr").read_bytes()
            if code not in (0, 3) or b"Traceback" in error:
                wrong += 1
                print(f"WRONG in {above}: exit code {code}: {error[-300:]!r}", flush=True)
            if not kept <= place.kept():
                wrong += 1
                print(f"WRONG in {above}: rows are lost", flush=True)
        served.end()
        seconds = max(seconds, time.monotonic() - begun)
        if code != 0:
            served = Served(above)
            _client(place, served).wait(PATIENCE_S)
            served.end()
        if place.answer() != whole.answer():
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
    told = parser.parse_args()
    warnings.simplefilter("ignore")  # sockets of killed workers
    wrong = lost_schedulers(told.schedulers, random.Random(f"{told.seed}:s")) if told.schedulers else 0
    wrong += lost_workers(told.workers, random.Random(f"{told.seed}:w")) if told.workers else 0
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
