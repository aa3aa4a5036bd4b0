"""nccl-tests' output as samples: the text tables, and `-J` JSON with times of single iterations.

Text: `# Collective test starting: all_reduce_perf`, a header line that names the columns, then a row a size; the
out-of-place time is taken (in place it is the same collective). Times are microseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import CalibrationError, Fault
from simulator.base.files import ordinary
from validate.samples import Machine, Sample, SampleFile

MAX_BYTES: Final = 64 * 2**20
KINDS: Final = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "send_recv",
}
_FEWEST = 2  # ranks: one alone sends nothing
_QUICKEST_S, _SLOWEST_S, _LARGEST_BYTES = 1e-9, 1e6, 2**50  # of a collective that anybody measured
_STARTING = re.compile(r"Collective test starting:\s*(\w+?)_perf")
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,9})\s+(?:Group\s+(\d{1,9})\s)?.*?\bon\s+(\S+)\s+device\s+(\d{1,9})", re.IGNORECASE
)
_ROW = re.compile(r"^\s*(\d{1,18})\s+(\d{1,18})\s+(\w+)\s+(\S+)\s+(-?\d+)\s+([\d.]+|nan|inf)\s+([\d.]+)\s+([\d.]+)")
_BY_NAME = tuple(sorted(KINDS, key=len, reverse=True))


def read_logs(paths: list[Path]) -> SampleFile:
    """Samples of kind `collective` of every log. Raises CalibrationError where no row can be read."""
    samples: list[Sample] = []
    faults: list[Fault] = []
    for path in paths:
        try:
            text = ordinary(path, MAX_BYTES).read_text(encoding="utf-8", errors="replace")
        except OSError as exc:
            faults.append(Fault(place=str(path), problem=f"cannot be read: {exc}"))
            continue
        reader = _json_rows if text.lstrip()[:1] == "{" else _text_rows
        found = list(reader(text, path, faults))
        samples += found
        if not found and not any(f.place.startswith(str(path)) for f in faults):
            faults.append(Fault(place=str(path), problem="no row of an nccl-tests table", remedy="its output, or -J's"))
    if not samples:
        raise CalibrationError(faults)
    machine = Machine(id="log", line=0, facts={"device": "", "architecture": ""})
    return SampleFile(machine=machine, samples=tuple(samples), failures=(), faults=tuple(faults), sha256={})


def _text_rows(text: str, path: Path, faults: list[Fault]) -> Iterator[Sample]:
    """A log may hold several tests; ranks and hosts are those of a group listed before the table (NCCL_TESTS_SPLIT)."""
    kind, fresh = _named(path.name), True
    groups: dict[str | None, dict[int, str]] = {}  # hosts of ranks
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{path}: line {number}"
        if starting := _STARTING.search(line):
            kind = KINDS.get(starting[1].lower(), "")
        elif listed := _RANK.search(line):
            if fresh:
                groups, fresh = {}, False
            groups.setdefault(listed[2], {})[int(listed[1])] = listed[3]
        elif row := _ROW.match(line):
            fresh, hosts = True, next(iter(groups.values()), {})
            if not kind or len(hosts) < _FEWEST:
                missing = "which collective this is" if not kind else "the ranks (two at least)"
                faults.append(Fault(place=place, problem=f"nothing before says {missing}", remedy="the whole output"))
                return
            try:
                time_s = float(row[6]) * 1e-6
            except ValueError:
                time_s = 0.0
            size = int(row[1])
            if not _QUICKEST_S < time_s < _SLOWEST_S or size > _LARGEST_BYTES:
                if size:
                    faults.append(Fault(place=place, problem=f"{size} bytes in {row[6]} us are no measurement"))
                continue
            yield _sample(kind, size, time_s, len(hosts), len(set(hosts.values())), number)


def _json_rows(text: str, path: Path, faults: list[Fault]) -> Iterator[Sample]:
    """`-J`, version 1 and 2 of its format: config.devices says who took part, results holds a row a size.

    A process may own several ranks and lists the first only, so ranks are devices × nthreads × ngpus.
    """
    data = _object(text, path, faults)
    if data is None:
        return
    config = data["config"] if isinstance(data.get("config"), dict) else {}
    every = _dicts(config.get("devices"))
    devices = [one for one in every if one.get("group") == every[0].get("group")]  # as in text
    ranks = len(devices) * _whole(config.get("nthreads")) * _whole(config.get("ngpus"))
    hosts = {str(d.get("hostname")) for d in devices}
    program = next(iter(_list(data.get("args"))), "")
    if ranks < _FEWEST:
        problem = f"config.devices, nthreads and ngpus make {ranks} ranks"
        faults.append(Fault(place=str(path), problem=problem, remedy="nccl-tests -J of two or more"))
        return
    for index, row in enumerate(_dicts(data.get("results"))):
        place = f"{path}: results[{index}]"
        kind = (
            _named(str(row.get("experiment_name", ""))) or _named(str(program).rpartition("/")[2]) or _named(path.name)
        )
        size = row.get("size")
        if not kind or not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= _LARGEST_BYTES:
            faults.append(Fault(place=place, problem="does not name its collective and size"))
            continue
        for iteration, time_us in enumerate(_times_us(row)):
            time_s = time_us * 1e-6 if isinstance(time_us, int | float) and not isinstance(time_us, bool) else 0.0
            if _QUICKEST_S < time_s < _SLOWEST_S:
                yield _sample(kind, size, time_s, ranks, len(hosts), index + 1, iteration)
            else:
                faults.append(Fault(place=place, problem=f"time {time_us!r} is no time in us"))


def _object(text: str, path: Path, faults: list[Fault]) -> dict[str, Any] | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as exc:
        faults.append(Fault(place=str(path), problem=f"not JSON: {exc}"))
        return None
    return data if isinstance(data, dict) else None


def _times_us(row: Mapping[str, Any]) -> list[object]:
    """Single iterations where they are listed, each the quickest process's: the others waited for a late one."""
    for variant in ("out_of_place", "in_place"):
        single = row.get(f"{variant}_per_iter")
        if isinstance(single, dict):
            every = [p for p in _list(single.get("per_process_max_times_us")) if isinstance(p, list)]
            if every and all(isinstance(t, int | float) for p in every for t in p):
                return [min(times) for times in zip(*every, strict=False)]
            if _list(single.get("times_us")):
                return _list(single.get("times_us"))
        entry = row.get(variant)
        if isinstance(entry, dict):
            return [entry.get("time", entry.get("cpu_time"))]
    return [None]


def _sample(kind: str, size: int, time_s: float, ranks: int, nodes: int, line: int, iteration: int = 0) -> Sample:
    shape = {"op": kind, "size_bytes": size, "num_ranks": ranks, "num_nodes": nodes, "iteration": iteration}
    return Sample(
        kind="collective",
        time_s=time_s,
        p10_s=None,
        p90_s=None,
        reps=1,
        sustained=False,
        rank=0,
        host="",
        machine="log",
        line=line,
        shape=shape,
    )


def _named(text: str) -> str:
    return next((KINDS[name] for name in _BY_NAME if name in text.lower()), "")


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in _list(value) if isinstance(one, dict)]


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
