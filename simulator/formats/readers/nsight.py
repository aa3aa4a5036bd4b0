"""Nsight Systems' exports (`nsys export --type sqlite`) as the events that a Kineto trace has.

Tables and columns: "SQLite Schema Reference" of Nsight Systems' user guide. Times in it are nanoseconds. The file is foreign: it is
opened read-only, and nothing but plain columns of the tables below is ever read of it; views, triggers, functions, virtual tables
and attached files are refused by SQLite's authorizer.
"""

from __future__ import annotations

import re
import sqlite3
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

from simulator.base.errors import Fault, InputError
from simulator.base.files import ordinary
from simulator.formats.readers.kineto_events import MAX_EVENTS, NAME_LENGTH, Events

SUFFIXES: Final = (".sqlite", ".sqlite3", ".db")
REPORT: Final = ".nsys-rep"
_MAGIC: Final = b"SQLite format 3\x00"
_MOST_BYTES: Final = 2**34
_MOST_STRINGS: Final = 1_000_000
_EFFORT: Final = 2_000  # calls of 1e6 steps of SQLite's machine: some minutes
_KERNEL, _MEMCPY, _MEMSET = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_RUNTIME, _NVTX = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
_ON_DEVICE: Final = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
_COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "StringIds": ("id", "value"),
    _KERNEL: (*_ON_DEVICE, "demangledName"),
    _MEMCPY: (*_ON_DEVICE, "copyKind"),
    _MEMSET: _ON_DEVICE,
    _RUNTIME: ("start", "end", "globalTid", "correlationId", "nameId"),
    _NVTX: ("start", "end", "eventType", "globalTid", "text", "textId"),
    "TARGET_INFO_GPU": ("id", "name"),
}
_NEEDED: Final = ("StringIds", _KERNEL)
_MAY_LACK: Final = {"globalPid", "text", "textId"}  # not in every release
_COPIES: Final = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}  # CUpti_ActivityMemcpyKind
_RANGES: Final = (59, 60)  # NvtxPushPopRange, NvtxStartEndRange
_STEP: Final = re.compile(r"(?:^|[^a-z])(?:profilerstep|step|iteration|iter)\s*[#:=_ -]?\s*(\d{1,9})$", re.IGNORECASE)
_VERSION: Final = re.compile(r"_v\d+(_ptsz|_ptds)?$")  # cudaLaunchKernel_v7000


def is_nsight(path: Path) -> bool:
    """Whether a file is an SQLite database, or is named as a report that is none yet."""
    if path.name.endswith(REPORT):
        return True
    try:
        with ordinary(path).open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_nsight(path: Path, events: Events) -> dict[str, Any]:
    """Pass the events of an export to `events`; returns the export's other values. Raises InputError."""
    if path.name.endswith(REPORT):
        raise InputError.at(str(path), "is a report that only nsys reads", f"nsys export --type sqlite {path.name}")
    try:
        ordinary(path, _MOST_BYTES)
        with _Export(path) as export:
            return export.read(events)
    except OSError as exc:
        raise InputError.at(str(path), f"cannot be read: {exc.strerror or exc}") from None
    except (sqlite3.Error, OverflowError, UnicodeError) as exc:
        raise InputError.at(str(path), f"is no export of Nsight Systems: {exc}", "nsys export --type sqlite") from None


class _Export:
    """A database, opened so that it can do nothing but be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)
        for limit, value in ((sqlite3.SQLITE_LIMIT_LENGTH, 2**20), (sqlite3.SQLITE_LIMIT_ATTACHED, 0)):
            self._db.setlimit(limit, value)
        self._db.execute("PRAGMA trusted_schema = OFF")
        self._db.execute("PRAGMA query_only = ON")
        self._db.set_authorizer(_only_reads)
        self._left = _EFFORT
        self._db.set_progress_handler(self._spend, 1_000_000)
        self._db.text_factory = lambda data: data[: 4 * NAME_LENGTH].decode("utf-8", "replace")[:NAME_LENGTH]
        self._columns: dict[str, set[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def _spend(self) -> bool:
        self._left -= 1
        return self._left < 0

    def read(self, events: Events) -> dict[str, Any]:
        self._check()
        names = dict(self._rows("StringIds", _MOST_STRINGS))
        process = self._process(events)
        device = list(self._on_device(names, process))
        calls = list(self._calls(names, process))
        launched = {args["correlation"]: call for call in calls if (args := call["args"])}
        for event in (*device, *calls):
            events.add(event)
        for event in self._ranges(names, process, device, launched):
            events.add(event)
        gpus = sorted(self._rows("TARGET_INFO_GPU", 4096), key=lambda row: str(row[0]))
        return {"deviceProperties": [{"name": str(name)} for _, name in gpus]}

    def _check(self) -> None:
        """Raise InputError with every table and column that is missing."""
        rows = self._db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        found = {name for name, made in rows if str(made).upper().startswith("CREATE TABLE")}  # no virtual ones
        faults = []
        for table, wanted in _COLUMNS.items():
            if table not in found:
                if table in _NEEDED:
                    remedy = "nsys profile --trace=cuda,nvtx, and nsys export --type sqlite"
                    faults.append(Fault(place=f"{self._path}: {table}", problem="is missing", remedy=remedy))
                continue
            columns = self._db.execute(f'SELECT * FROM "{table}" LIMIT 0').description  # noqa: S608  names of ours
            self._columns[table] = {row[0] for row in columns}
            missing = [name for name in wanted if name not in self._columns[table] | _MAY_LACK]
            if missing:
                faults.append(Fault(place=f"{self._path}: {table}", problem=f"has no column {', '.join(missing)}"))
        InputError.raise_for(faults)

    def _rows(self, table: str, most: int = MAX_EVENTS) -> list[tuple[Any, ...]]:
        """The columns of a table that we know, in their order; NULL for those that it lacks."""
        there = self._columns.get(table)
        if there is None:
            return []
        columns = ", ".join(f'"{name}"' if name in there else "NULL" for name in _COLUMNS[table])
        return self._db.execute(f'SELECT {columns} FROM "{table}" LIMIT {most}').fetchall()  # noqa: S608  names of ours

    def _process(self, events: Events) -> int | None:
        """A process drives one GPU; of a file of several the one with the most time on its GPU is taken."""
        busy = Counter[int]()
        for start, end, _, _, _, process, _ in self._rows(_KERNEL):
            if type(start) is int and type(end) is int and type(process) is int:
                busy[process] += end - start
        if not busy:
            return None
        best = max(busy, key=lambda one: (busy[one], -one))
        if len(busy) > 1:
            several = f"{len(busy)} processes in it: that with the most time on its GPU is read"
            events.notes.append(f"{several} (nsys profile in each rank makes a file of each)")
        return best

    def _on_device(self, names: dict[Any, Any], process: int | None) -> Iterator[dict[str, Any]]:
        """Kernels, copies and memsets as a profiler's events."""
        for table, cat in ((_KERNEL, "kernel"), (_MEMCPY, "gpu_memcpy"), (_MEMSET, "gpu_memset")):
            for start, end, device, stream, correlation, owner, *more in self._rows(table):
                if process is None or owner in (None, process):
                    name = "Memset (Device)"
                    if table == _KERNEL:
                        name = str(names.get(more[0], more[0]))
                    elif table == _MEMCPY:
                        name = f"Memcpy {_COPIES.get(more[0], 'of kind ' + str(more[0])[:8])}"
                    args = {"device": device, "stream": stream, "correlation": correlation}
                    yield {"ph": "X", "cat": cat, "name": name, **_times(start, end), "args": args}

    def _calls(self, names: dict[Any, Any], process: int | None) -> Iterator[dict[str, Any]]:
        for start, end, thread, correlation, name in self._rows(_RUNTIME):
            if _of_process(thread, process):
                called = _VERSION.sub("", str(names.get(name, name)))
                yield {"ph": "X", "cat": "cuda_runtime", "name": called, **_times(start, end), "tid": _thread(thread),
                       "args": {"correlation": correlation}}  # fmt: skip

    def _ranges(
        self,
        names: dict[Any, Any],
        process: int | None,
        device: list[dict[str, Any]],
        launched: dict[Any, dict[str, Any]],
    ) -> Iterator[dict[str, Any]]:
        """Steps and optimizers that NVTX marks: on the host, and on the device from the first to the last kernel of theirs."""
        issued = sorted(
            (call["ts"], one["ts"], one["ts"] + one["dur"])
            for one in device
            if (call := launched.get(one["args"]["correlation"])) and call["ts"] is not None and one["dur"] is not None
        )
        begins = [row[0] for row in issued]
        for start, end, kind, thread, text, text_id in self._rows(_NVTX):
            name = str(text if text is not None else names.get(text_id, ""))
            step = _STEP.search(name)
            if (
                kind not in _RANGES
                or not _of_process(thread, process)
                or not (step or name.startswith("Optimizer.step"))
            ):
                continue
            times = _times(start, end)
            named = {"ph": "X", "name": f"ProfilerStep#{step[1]}" if step else name, "tid": _thread(thread), "args": {}}
            yield {**named, "cat": "user_annotation", **times}
            begin, lasts = times["ts"], times["dur"]
            if begin is None or lasts is None:
                continue
            inside = issued[bisect_left(begins, begin) : bisect_right(begins, begin + lasts)]
            if inside:
                first, last = min(row[1] for row in inside), max(row[2] for row in inside)
                yield {**named, "cat": "gpu_user_annotation", "ts": first, "dur": last - first}


def _only_reads(action: int, first: str | None, *_: object) -> int:
    """SQLite asks for everything that a statement would do: columns of the tables above may be read, and nothing else."""
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_TRANSACTION):
        return sqlite3.SQLITE_OK
    known = first in ("sqlite_master", "sqlite_schema") or first in _COLUMNS
    return sqlite3.SQLITE_OK if action == sqlite3.SQLITE_READ and known else sqlite3.SQLITE_DENY


def _times(start: object, end: object) -> dict[str, float | None]:
    """Microseconds; None where it is no time."""
    if type(start) is not int or type(end) is not int:
        return {"ts": None, "dur": None}
    return {"ts": start * 1e-3, "dur": (end - start) * 1e-3}


def _of_process(thread: object, process: int | None) -> bool:
    """A thread's global number holds that of its process: all but the last 24 bits."""
    return process is None or (type(thread) is int and thread & ~0xFFFFFF == process)


def _thread(number: object) -> int:
    return number & 0xFFFFFF if type(number) is int else -1
