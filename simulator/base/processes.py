"""Worker processes: they leave Ctrl-C to the parent, end with it, and the work of one that dies is repeated."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from multiprocessing import forkserver
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from simulator.base.files import abandoned, owned_file
from simulator.base.garbage import COLLECT
from simulator.base.room import must_start

ItemT = TypeVar("ItemT")
FoundT = TypeVar("FoundT")
RETRIES: Final = 5  # of a task whose process died
_DEEPEST: Final = 89  # bytes of a folder: a socket's path has 107 (Linux's sockaddr_un), and its name in there takes 18
_OF_POOL: Final = 4  # processes and threads that a pool has beside its workers, each of which has two
_OWNER: Final = "owner"  # a file, locked by the process whose folder it lies in
CHUNK: Final = 8  # items that one process takes at once


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def pool(jobs: int, begin: Callable[..., None] | None = None, arguments: tuple[Any, ...] = ()) -> ProcessPoolExecutor:
    """A pool of processes, forked from one that has not imported this package. begin(*arguments) is called first in each.

    Where temporary folders are too deep for the server's socket, each starts from nothing: a second later, and the same.
    """
    must_start(2 * jobs + _OF_POOL, f"{jobs} workers (--jobs)")
    folder = _meeting_place()
    context = multiprocessing.get_context("forkserver" if len(os.fsencode(folder)) <= _DEEPEST else "spawn")
    loaded: list[str] = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]  # noqa: SLF001  there is no asking
    context.set_forkserver_preload(list(dict.fromkeys([*loaded, "simulator.base.started"])))
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(folder, begin, arguments))


@cache
def _meeting_place() -> Path:
    """The folder of this process's sockets, claimed as long as it runs."""
    folder = Path(get_temp_dir())
    claim(folder)
    return folder


def claim(folder: Path) -> int:
    """Say that a temporary folder PREFIX-... is in use until the descriptor is closed; those that killed processes left go now."""
    remove_abandoned(folder.parent, folder.name.partition("-")[0])
    return owned_file(folder / _OWNER, 0o600)


def remove_abandoned(parent: Path, prefix: str = "pymp") -> None:
    """Remove the folders PREFIX-... that killed processes left; by default those of pools."""
    for owner in parent.glob(f"{prefix}-*/{_OWNER}"):
        if abandoned(owner):
            shutil.rmtree(owner.parent, ignore_errors=True)


class WorkerPool:
    """A pool of processes that is replaced when it breaks."""

    def __init__(self, jobs: int, begin: Callable[..., None] | None = None, arguments: tuple[Any, ...] = ()) -> None:
        self._new = partial(pool, jobs, begin, arguments)
        self._pool = self._new()

    def mapped(self, run: Callable[[ItemT], FoundT], items: Sequence[ItemT], chunk: int = CHUNK) -> Iterator[FoundT]:
        """run(item) of every item, in their order.

        A process that dies loses nothing: its items run again. Raises BrokenProcessPool if they end each that takes them.
        """
        parts = [items[i : i + chunk] for i in range(0, len(items), chunk)]
        done, lost = 0, 0
        while done < len(parts):
            try:
                for future in [self._pool.submit(_each, run, part) for part in parts[done:]]:
                    found = future.result()
                    done, lost = done + 1, 0
                    yield from found
            except BrokenProcessPool:
                lost += 1
                if lost > RETRIES:
                    raise
                self._pool.shutdown(wait=False, cancel_futures=True)
                self._pool = self._new()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)  # nothing runs at a proper end: no race at exit


def mapped(run: Callable[[ItemT], FoundT], items: Sequence[ItemT], jobs: int, chunk: int = CHUNK) -> Iterator[FoundT]:
    """run(item) of every item, in their order, on so many processes; in this one if `jobs` is 1."""
    if jobs <= 1 or len(items) <= chunk:
        yield from map(run, items)
        return
    with WorkerPool(jobs) as workers:
        yield from workers.mapped(run, items, min(chunk, max(1, len(items) // (4 * jobs))))  # few are told one by one


def _each(run: Callable[[ItemT], FoundT], items: Sequence[ItemT]) -> list[FoundT]:
    return [run(item) for item in items]


def _begin(folder: Path, begin: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it ends the pool
    gc.set_threshold(*COLLECT)
    try:
        threading.Thread(target=_end_with_the_parent, args=(folder,), daemon=True).start()
    except RuntimeError:  # no more threads may be started: the pool breaks, and the parent says so
        os._exit(1)
    if begin is not None:
        begin(*arguments)


def _end_with_the_parent(folder: Path) -> None:
    """End this process when its parent ends, so that a killed command leaves no process behind, nor their sockets' folder."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
