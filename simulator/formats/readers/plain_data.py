"""Reads an untrusted memory snapshot: run as a script, in a separate process with limited memory and time.

A pickle may ask for any global, and a few bytes of one may ask for gigabytes. So no global is ever loaded (plain
containers, text, numbers, None and booleans need none), and what a file costs to read is bounded by the system. What
comes out on stdout is JSON of the parts that a replay needs, each of them checked. Nothing but the standard library.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

_PICKLED = (b"\x80", b"(", b"}", b"]")  # a table or a list, by any protocol
MAX_FAULTS = 20
BASE_BYTES = 2**30  # what reading may take beside the file itself ...
BYTES_PER_BYTE = 40  # ... and for each of its bytes, as objects; snapshots take about 8
BYTES_PER_GZIP_BYTE = 400  # snapshots shrink to a twentieth ...
BASE_UNZIPPED, UNZIPPED_PER_BYTE = 2**26, 200  # ... and no file is unzipped beyond this
BASE_SECONDS = 30
BYTES_PER_SECOND = 10**6  # of the compressed file; what is read for real is ten times faster

ACTIONS = {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap"}
STATES = {"active_allocated", "active_awaiting_free", "active_pending_free", "inactive"}
SETTINGS = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "max_split_size",
    "garbage_collection_threshold",
    "expandable_segments",
    "roundup_power2_divisions",
)
LIMIT = 2**64
MAX_SIZE = 2**48  # bytes of anything: beyond every device


class Refused(Exception):  # noqa: N818  not an error of ours
    """The file is no snapshot that can be replayed. Carries (place, problem, remedy) of every fault."""

    def __init__(self, *faults: tuple[str, str, str]) -> None:
        self.faults = faults
        super().__init__(faults)


class Plain(pickle.Unpickler):
    """Containers, text and numbers only."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise Refused(("", f"it asks for the global {module_name}.{global_name}", "nothing was executed"))

    def persistent_load(self, pid: object) -> NoReturn:
        raise Refused(("", f"it asks for an outside object {str(pid)[:80]!r}", "nothing was loaded"))


def read(file: BinaryIO) -> Any:  # noqa: ANN401  whatever it holds
    """The file as plain data. Raises Refused."""
    stream: Any = file
    begins = b""
    try:
        if peek(file)[:2] == b"\x1f\x8b":
            stream = unzipped(file)
        begins = peek(stream).lstrip()[:1]
        is_json = begins in (b"{", b"[")
        return json.load(stream) if is_json else Plain(stream).load()
    except Refused:
        raise
    except (EOFError, pickle.UnpicklingError) as exc:
        if begins not in _PICKLED:
            remedy = "torch.cuda.memory._dump_snapshot(file) writes one; replay --plan takes a study"
            raise Refused(("", "it is no snapshot: neither a pickle nor JSON", remedy)) from None
        raise Refused(("", f"it ends early or is damaged: {exc}", "copy it again from where it was written")) from None
    except RecursionError:
        raise Refused(("", "it is nested too deeply", "a snapshot has 4 levels")) from None
    except MemoryError:
        raise
    except Exception as exc:  # noqa: BLE001  a hostile pickle can raise anything
        raise Refused(("", f"neither a pickle nor JSON: {type(exc).__name__}: {str(exc)[:200]}", "")) from None


def unzipped(file: BinaryIO) -> io.BufferedReader:
    """The content of a gzipped file; refuses implausible compression ratios."""
    most = BASE_UNZIPPED + UNZIPPED_PER_BYTE * Path(file.name).stat().st_size
    data = gzip.GzipFile(fileobj=file).read(most + 1)
    if len(data) > most:
        raise Refused(("", f"it unzips to more than {most} bytes", "no snapshot shrinks like that"))
    return io.BufferedReader(io.BytesIO(data))


def peek(file: Any) -> bytes:  # noqa: ANN401
    """The next bytes, left where they are."""
    data: bytes = file.peek(64)
    return data


class Selection:
    """The parts of a snapshot that a replay needs; faults are collected, all other keys are left out."""

    def __init__(self, data: object) -> None:
        self.faults: list[tuple[str, str, str]] = []
        self.unknown: Counter[str] = Counter()
        self.out: dict[str, Any] = {}
        record = "torch.cuda.memory._record_memory_history() before, torch.cuda.memory._dump_snapshot(file) after"
        if isinstance(data, list):
            raise Refused(("", "it is a list: segments without events, as torch.cuda.memory_snapshot() gives", record))
        if not isinstance(data, dict):
            raise Refused(("", f"it holds {type(data).__name__}, not a snapshot", record))
        for key in ("segments", "device_traces"):
            if not isinstance(data.get(key), list):
                self.fault(key, "is missing" if key not in data else "is not a list", record)
        self.check()
        self.out["segments"] = [self.segment(i, row) for i, row in enumerate(data["segments"])]
        self.check()
        self.out["device_traces"] = [self.trace(i, rows) for i, rows in enumerate(data["device_traces"])]
        self.out["allocator_settings"] = self.settings(data.get("allocator_settings"))
        self.check()
        self.out["unknown_actions"] = dict(sorted(self.unknown.items()))

    def check(self) -> None:
        if self.faults:
            raise Refused(*self.faults)

    def fault(self, place: str, problem: str, remedy: str = "") -> None:
        self.faults.append((place, problem, remedy))
        if len(self.faults) >= MAX_FAULTS:
            raise Refused(*self.faults, ("", f"and perhaps more: only the first {MAX_FAULTS} are told", ""))

    def number(self, row: dict[Any, Any], key: str, place: str, default: int | None = None) -> int:
        value = row.get(key, default)
        most = MAX_SIZE if "size" in key else LIMIT
        if type(value) is int and 0 <= value < most:
            return value
        problem = "is missing" if value is None else f"is {str(value)[:40]!r}"
        self.fault(f"{place}.{key}", problem, f"a whole number from 0 to 2^{most.bit_length() - 1}")
        return 0

    def segment(self, index: int, row: object) -> list[Any]:
        place = f"segments[{index}]"
        if not isinstance(row, dict) or not isinstance(row.get("blocks"), list):
            self.fault(place, "is not a segment with blocks")
            return []
        kind = row.get("segment_type")
        if kind not in ("small", "large"):
            self.fault(f"{place}.segment_type", f"is {str(kind)[:40]!r}", "small or large")
        numbers = [self.number(row, key, place) for key in ("address", "total_size", "stream")]
        device = self.number(row, "device", place, 0)
        pool = self.pool(row.get("segment_pool_id"), f"{place}.segment_pool_id")
        blocks = []
        address = numbers[0]
        for b, block in enumerate(row["blocks"]):
            blocks.append(self.block(block, address, f"{place}.blocks[{b}]"))
            address += blocks[-1][1]
        if address != numbers[0] + numbers[1] and not self.faults:
            self.fault(place, f"its blocks make {address - numbers[0]} bytes, total_size is {numbers[1]}")
        return [device, *numbers, kind == "small", row.get("is_expandable") is True, pool, blocks]

    def block(self, row: object, address: int, place: str) -> list[Any]:
        if not isinstance(row, dict):
            self.fault(place, "is not a block")
            return [0, 0, 0, ""]
        size = self.number(row, "size", place)
        at = self.number(row, "address", place, address)
        if at != address:
            self.fault(f"{place}.address", f"is {at}, the block before it ends at {address}")
        state = row.get("state")
        if state not in STATES:
            self.fault(f"{place}.state", f"is {str(state)[:40]!r}", "one of " + ", ".join(sorted(STATES)))
        return [address, size, self.number(row, "requested_size", place, size), state]

    def pool(self, value: object, place: str) -> list[int]:
        """(0, 0) is the usual pool; other ones belong to CUDA graphs and MemPool."""
        if value is None:
            return [0, 0]
        if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(part) is int for part in value):
            return list(value)
        self.fault(place, f"is {str(value)[:40]!r}", "two whole numbers")
        return [0, 0]

    def trace(self, device: int, rows: object) -> list[list[Any]]:
        if not isinstance(rows, list):
            self.fault(f"device_traces[{device}]", "is not a list")
            return []
        return [out for i, row in enumerate(rows) if (out := self.event(row, f"device_traces[{device}][{i}]"))]

    def event(self, row: object, place: str) -> list[Any] | None:
        if not isinstance(row, dict):
            self.fault(place, "is not an event")
            return None
        action = row.get("action")
        if action == "oom":
            return [action, 0, self.number(row, "size", place), 0, self.number(row, "time_us", place, 0), None]
        if action not in ACTIONS:
            self.unknown[str(action)[:40]] += 1
            return None
        pool = row.get("pool_id")
        numbers = [self.number(row, key, place) for key in ("addr", "size", "stream")]
        time_us = self.number(row, "time_us", place, 0)
        return [action, *numbers, time_us, None if pool is None else self.pool(pool, f"{place}.pool_id")]

    def settings(self, value: object) -> dict[str, Any] | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fault("allocator_settings", "is not a table")
            return None
        found = {key: value[key] for key in SETTINGS if key in value}
        for key, part in found.items():
            parts = list(part.values()) if isinstance(part, dict) else [part]
            if not all(isinstance(x, (int, float, str)) for x in parts):
                self.fault(f"allocator_settings.{key}", "is neither number nor text")
        return found


def limit(path: Path) -> None:
    """Limit this process' memory and time, on systems that can."""
    try:
        import resource
    except ImportError:
        return
    size = path.stat().st_size
    with path.open("rb") as file:
        factor = BYTES_PER_GZIP_BYTE if file.read(2) == b"\x1f\x8b" else BYTES_PER_BYTE
    most = BASE_BYTES + factor * size
    seconds = BASE_SECONDS + size // BYTES_PER_SECOND
    for kind, value in ((resource.RLIMIT_AS, most), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        if hard == resource.RLIM_INFINITY or value <= hard:
            resource.setrlimit(kind, (value, value))


def main() -> int:
    """Write the selection of the file named on the command line, or its faults (exit code 1)."""
    path = Path(sys.argv[1])
    answer: dict[str, Any]
    try:
        limit(path)
        with path.open("rb") as file:
            answer = Selection(read(file)).out
    except Refused as exc:
        answer = {"faults": exc.faults}
    except OSError as exc:
        answer = {"faults": [("", f"cannot be read: {exc.strerror or exc}", "")]}
    except MemoryError:
        answer = {"faults": [("", "it asks for more memory than a file of its size can need", "nothing was executed")]}
    json.dump(answer, sys.stdout, separators=(",", ":"))
    return 1 if "faults" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
