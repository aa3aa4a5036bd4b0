"""Pools of processes: order, a process that dies, a parent that is killed."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from simulator.base import room
from simulator.base.files import abandoned
from simulator.base.processes import WorkerPool, claim, mapped
from simulator.cli import main
from simulator.studies.search.journal import Journal

ROOT = Path(__file__).resolve().parents[2]
_STAYS = """
import sys, time
from simulator.studies.search.journal import Journal
from simulator.base.processes import WorkerPool
from tests.unit.test_processes import tell

if __name__ == "__main__":
    with WorkerPool(2) as pool:
        for _ in pool.mapped(tell, [sys.argv[1]] * 2, chunk=1):
            pass
"""


def once_dies(task: tuple[str, int]) -> int:
    """The square; the first process that sees 5 is killed."""
    folder, number = task
    if number == 5:
        try:
            Path(folder, "died").touch(exist_ok=False)
        except FileExistsError:
            return number**2
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2


def tell(folder: str) -> None:
    """Leave this process's number, and stay."""
    Path(folder, str(os.getpid())).touch()
    time.sleep(60)


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_order(jobs: int) -> None:
    assert list(mapped(abs, range(-40, 0), jobs)) == list(range(40, 0, -1))
    assert list(mapped(abs, [], jobs)) == []


def test_a_process_that_dies_loses_nothing(tmp_path: Path) -> None:
    with WorkerPool(2) as pool:
        tasks = [(str(tmp_path), number) for number in range(20)]
        assert list(pool.mapped(once_dies, tasks, chunk=3)) == [number**2 for number in range(20)]
        assert (tmp_path / "died").exists()
        assert list(pool.mapped(abs, [-1])) == [1]


@pytest.mark.parametrize("deep", [False, True], ids=["folder for a socket", "folder too deep for a socket"])
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path, *, deep: bool) -> None:
    script = tmp_path / "stays.py"
    script.write_text(_STAYS)
    seen = tmp_path / "seen"
    seen.mkdir()
    temporary = tmp_path / ("d" * 120) if deep else Path(tempfile.mkdtemp(prefix="sw"))
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    parent = subprocess.Popen([sys.executable, script, seen], env=environment)
    try:
        _until(lambda: len(list(seen.iterdir())) == 2)
    finally:
        parent.kill()
        parent.wait()
    _until(lambda: not any(Path("/proc", child.name).exists() for child in seen.iterdir()))
    assert deep or not list(temporary.iterdir())  # the folder of their sockets is gone with them
    shutil.rmtree(temporary)


def _until(done) -> None:  # noqa: ANN001
    for _ in range(1200):
        if done():
            return
        time.sleep(0.05)
    pytest.fail("not within a minute")


def test_a_folder_that_is_being_claimed_is_not_taken_for_one_that_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process looks for what was left at each moment of a claim: before its file is locked, and after."""
    folder, lock = tmp_path / "mine-1", fcntl.flock
    folder.mkdir()
    looked: list[bool] = []

    def seen(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        looked.extend(map(abandoned, folder.glob("owner")))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", seen)
    held = claim(folder)
    assert looked == []
    assert [abandoned(one) for one in folder.glob("owner")] == [False]
    assert [one.name for one in folder.iterdir()] == ["owner"]
    os.close(held)
    assert abandoned(folder / "owner")


def test_a_claim_removes_the_folders_of_processes_that_are_gone(tmp_path: Path) -> None:
    gone, used, new, other = (tmp_path / name for name in ("mine-1", "mine-2", "mine-3", "theirs-1"))
    for one in (gone, used, new, other):
        one.mkdir()
    for one in (gone, other):
        (one / "owner").touch()
    held = claim(used)
    claimed = claim(new)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mine-2", "mine-3", "theirs-1"]
    os.close(held)
    os.close(claimed)


def test_a_journal_that_a_killed_run_left_is_gone_on_from_without_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where everything is in the journal and nobody starts a pool."""
    (tmp_path / "pymp-gone").mkdir()
    (tmp_path / "pymp-gone" / "owner").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Journal(tmp_path / "found.journal", "a study"):
        assert not (tmp_path / "pymp-gone").exists()


@pytest.mark.parametrize(
    ("raised", "said"), [("FileNotFoundError(2, 'semaphore')", False), ("ValueError('ours')", True)]
)
def test_a_worker_that_starts_while_its_parent_leaves_says_nothing(raised: str, *, said: bool) -> None:
    code = f"import simulator.base.started; raise {raised}"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ("Traceback" in ended.stderr) == said


def test_a_pool_that_may_not_have_its_processes_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under `ulimit -u` one waited for ever: CPython's thread that feeds its workers could not be started."""
    start, seen = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(seen) == 7:
            raise RuntimeError("can't start new thread")
        seen.append(thread)
        start(thread)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr(room, "limit_bytes", lambda: 0)
    with pytest.raises(OSError, match=r"^\[Errno 11\] 7 more .*, and 2 workers \(--jobs\) take 8$"):
        WorkerPool(2)
    for thread in seen:  # none of those that were tried stays
        thread.join(5)
        assert not thread.is_alive()
    varied = ["--vary", "plan.tp=1,2", "--vary", "plan.micro_batch_size=1,2,4,8,16"]
    assert main(["explore", "--model", "gpt2", "--cluster", "hgx-h100-8", *varied, "--jobs", "2"]) == 5
    told = "shardwise: this process: 0 more processes and threads may be started (ulimit -u), and 2 workers (--jobs) take 8"
    assert capsys.readouterr().err == told + "\n"
    monkeypatch.setattr("simulator.cli.explore.explored", lambda *_: limited(threading.current_thread()))
    assert main(["explore", "--model", "gpt2", "--cluster", "hgx-h100-8", *varied]) == 5
    assert capsys.readouterr().err == "shardwise: no more processes and threads may be started (ulimit -u)\n"


def test_a_few_long_items_are_answered_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine, eight came together: their progress was told after minutes."""
    chunks: list[int] = []

    def noted(_: WorkerPool, run: Callable[[int], int], items: Sequence[int], chunk: int) -> Iterator[int]:
        chunks.append(chunk)
        return map(run, items)

    monkeypatch.setattr(WorkerPool, "mapped", noted)
    monkeypatch.setattr(WorkerPool, "__init__", lambda *_: None)
    monkeypatch.setattr(WorkerPool, "__exit__", lambda *_: None)
    assert list(mapped(abs, range(-9, 0), jobs=2)) == [*range(9, 0, -1)]
    assert len(list(mapped(abs, range(1000), jobs=2))) == 1000
    assert list(mapped(abs, range(8), jobs=2)) == [*range(8)]  # here
    assert chunks == [1, 8]
