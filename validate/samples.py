"""Samples: one measurement a line of JSON, and the machine they were taken on. docs/reference/samples.md describes the file.

A reader never stops at a bad line: every fault is named by its line, and the rest is kept.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from simulator.base.errors import Fault, TableError, finite_number
from simulator.base.files import ordinary
from simulator.base.schema import more_than_once

FORMAT_VERSION: Final = 1
MAX_LINE_BYTES: Final = 1 << 20  # a sample is a few hundred bytes; a longer line is something else
MAX_FAULTS: Final = 1000
MAX_WRONG: Final = 100_000  # faults after which a file is no file of samples, and is not read on

_GEMM = ("m", "n", "k", "layout", "dtype")
_ATTENTION = ("batch", "seq_q", "seq_kv", "num_heads", "num_kv_heads", "head_dim", "causal", "dtype")
# What a sample of each kind must say beside its time. Kinds that stand here are fitted or reported; others are kept.
REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "gemm": _GEMM,
    "attention_forward": _ATTENTION,
    "attention_backward": _ATTENTION,
    "stream": ("op", "stream_op", "read_bytes", "write_bytes", "launches"),
    "membound_forward": ("op", "elements"),
    "membound_backward": ("op", "elements"),
    "cross_entropy_forward": ("tokens", "vocab"),
    "cross_entropy_backward": ("tokens", "vocab"),
    "adamw": ("impl", "parameters"),
    "host_dispatch": ("op",),
    "eager_block": ("phase",),
    "fsdp2_group": ("groups",),
    "hbm_copy": ("bytes_moved",),
    "h2d_pinned": ("bytes",),
    "d2h_pinned": ("bytes",),
    "h2d_pageable": ("bytes",),
    "d2h_pageable": ("bytes",),
    "h2d_d2h_together": ("bytes",),
    "h2d_d2h_together_pageable": ("bytes",),
    "storage_read": ("bytes",),
    "storage_write": ("bytes",),
    "device_malloc": ("bytes",),
    "device_free": ("bytes",),
    "collective": ("op", "size_bytes", "num_ranks", "num_nodes"),
    "pair": ("source", "target", "size_bytes"),
    "rail": ("size_bytes",),
    "overlap": ("what", "op", "size_bytes", "num_ranks"),
    "collective_burst": ("op", "size_bytes", "num_ranks", "count"),
    "collective_issue": ("op", "num_ranks"),
}
_OWN = frozenset(
    {"kind", "time_s", "mean_s", "p10_s", "p90_s", "reps", "sustained", "rank", "host", "machine", "dtype"}
)
_IDENTITY = ("device", "architecture", "driver", "torch", "nccl", "hostname", "threads", "num_ranks")
# Of a machine, what is more than told to people
_FACTS: Final[Mapping[str, tuple[type, str]]] = {
    "memory_bytes": (int, "a whole number above 0"), "num_ranks": (int, "a whole number above 0"),
    "settings": (dict, "a table of variables"), "nics": (list, "a list of texts"),
}  # fmt: skip
_YEAR_S = 31_557_600
_NOT_SAMPLES = frozenset({"section"})  # notes of the file itself

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was measured: device, driver, versions, clocks, date, command. Equal `id` means comparable samples."""

    id: str
    line: int
    facts: Mapping[str, Any] = field(hash=False)

    def text(self, name: str) -> str:
        """A fact as text, empty where it is not stated."""
        value = self.facts.get(name)
        return "" if value is None else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement. time_s: median of `reps`; mean_s: their mean; p10_s, p90_s: spread; sustained: until power limits it.

    shape: what else decides the time (sides, bytes, op, impl …) and nothing measured.
    """

    kind: str
    time_s: float
    p10_s: float | None
    p90_s: float | None
    reps: int
    sustained: bool
    rank: int
    host: str
    machine: str
    line: int
    shape: Mapping[str, Any] = field(hash=False)
    mean_s: float | None = None

    @property
    def expected_s(self) -> float:
        """What many calls take each: their mean, or the median where the file has no more."""
        return self.time_s if self.mean_s is None else self.mean_s

    @property
    def key(self) -> str:
        """Two samples with equal keys measured the same thing (perhaps on different ranks)."""
        return sample_key(self.kind, {**self.shape, "sustained": self.sustained})

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  JSON values
        return self.shape[name]


# What kinds report beside their time; kernel: that torch had for the shape. They do not tell two measurements apart.
_MEASURED = frozenset({
    "first_half_s", "time_with_sync_s", "flop", "flop_forward", "ideal_bytes", "alone_s", "iteration", "reference_s", "kernel",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFile:
    """What a file (or several) holds: one machine, its samples, failed measurements, and every fault by line.

    sections: what ranks said of their clocks where phases ended.
    """

    machine: Machine
    samples: tuple[Sample, ...]
    failures: tuple[Mapping[str, Any], ...]
    faults: tuple[Fault, ...]
    sha256: Mapping[str, str]
    sections: tuple[Mapping[str, Any], ...] = ()

    def of(self, *kinds: str) -> list[Sample]:
        """The samples of these kinds, in the file's order."""
        return [sample for sample in self.samples if sample.kind in kinds]


def machine_id(facts: Mapping[str, Any]) -> str:
    """Twelve hex digits of what makes samples comparable: device, versions, host, threads and ranks."""
    identity = json.dumps({name: facts.get(name) for name in _IDENTITY}, sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def sample_key(kind: str, shape: Mapping[str, Any]) -> str:
    """What was measured, without when, where and how long it took."""
    settings = {k: v for k, v in shape.items() if k not in _MEASURED and (k != "sustained" or v)}
    return json.dumps([kind, settings], sort_keys=True)


def sample_line(kind: str, **fields: object) -> str:
    """One line of the file. NaN and infinity are refused here already: a file never holds them."""
    return json.dumps({"kind": kind, **fields}, allow_nan=False) + "\n"


def read_samples(paths: Sequence[Path]) -> SampleFile:
    """Every usable sample of the files. Raises TableError where none is left or a file cannot be read."""
    reader = _Reader()
    hashes: dict[str, str] = {}
    for path in paths:
        try:
            ordinary(path)
        except OSError as exc:
            reader.fault(str(path), f"cannot be read: {exc.strerror or exc}", "shardwise calibrate run writes one")
            continue
        try:
            with path.open("rb") as raw:
                digest = hashlib.file_digest(raw, "sha256").hexdigest()
            if digest in hashes.values():
                reader.fault(str(path), "is given twice, or a copy of another one", "each file once")
                continue
            hashes[path.name] = digest
            with _opened(path) as lines:
                reader.read(lines, path.name)
        except (OSError, EOFError, zlib.error) as exc:
            reader.fault(str(path), f"cannot be read to its end: {exc}", "the lines before are kept")
    return reader.finish(hashes)


def _opened(path: Path) -> IO[bytes]:
    return io.BufferedReader(gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


class _Reader:
    """Collects machines, samples and faults over files."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.samples: list[Sample] = []
        self.failures: list[Mapping[str, Any]] = []
        self.faults: list[Fault] = []
        self.sections: list[Mapping[str, Any]] = []
        self._current = ""
        self._lost: dict[str, list[Mapping[str, Any]]] = {}  # of the file that is read: phases that were lost
        self._wrong = 0

    def fault(self, place: str, problem: str, remedy: str = "") -> None:
        self._wrong += 1
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(Fault(place=place, problem=problem, remedy=remedy))

    def read(self, lines: IO[bytes], name: str) -> None:
        self._current, before, self._lost = "", self._wrong, {}
        try:
            self._lines(lines, name, before)
        finally:
            told = {f"{one['kind']} {one['error']}" for one in self.failures if "rank" not in one}
            lost = [one for rows in self._lost.values() for one in rows]
            self.failures += [one for one in lost if f"{one['kind']} {one['error']}" not in told]

    def _lines(self, lines: IO[bytes], name: str, before: int) -> None:
        for number, raw in enumerate(_bounded(lines), 1):
            place = f"{name}: line {number}"
            if self._wrong - before >= MAX_WRONG:
                self.faults.append(Fault(place, "this line and those behind it were not read"))
                return
            if raw is None:
                self.fault(place, f"is longer than {MAX_LINE_BYTES} bytes", "a sample is one short line")
                continue
            text = raw.strip()
            if not text:
                continue
            try:
                row = _object(text)
            except ValueError as exc:
                last = not raw.endswith(b"\n")
                self.fault(place, "is cut off" if last else str(exc), "the last line was being written" if last else "")
                continue
            self._take(row, place, number)

    def _take(self, row: dict[str, Any], place: str, number: int) -> None:
        kind = row.get("kind")
        if not isinstance(kind, str) or not kind:
            self.fault(place, "has no kind", f"one of {', '.join(REQUIRED)}")
        elif kind == "machine":
            self._machine(row, place, number)
        elif kind == "run":
            self.fault(place, "is what validate run wrote", "shardwise validate compare reads it")
        elif kind in _NOT_SAMPLES:
            self.sections += [row] if row.get("state") == "ends" else []
            if row.get("state") == "begins":  # a phase that was lost is measured again
                self._lost.pop(str(row.get("name")), None)
        elif "error" in row and "rank" not in row:
            self._lost.setdefault(kind, []).append({**row, "place": place})
        elif "error" in row:
            self.failures.append({**row, "place": place})
        else:
            problems = list(_problems(row, kind))
            for problem in problems:
                self.fault(place, problem)
            if not problems:
                self._sample(row, kind, place, number)

    def _machine(self, row: dict[str, Any], place: str, number: int) -> None:
        self._current = identity = machine_id(row)
        facts = {name: value for name, value in row.items() if value is not None}
        for name in [name for name in _FACTS if name in facts]:
            kind, right = _FACTS[name]
            if type(facts[name]) is not kind or (kind is int and not 0 < facts[name] < 2**63):
                self.fault(place, f"machine: {name} = {facts.pop(name)!r} is not {right}", "it is left out")
        self.machines.setdefault(identity, Machine(id=identity, line=number, facts=facts))

    def _sample(self, row: dict[str, Any], kind: str, place: str, number: int) -> None:
        machine = str(row.get("machine") or self._current)
        if not machine:
            self.fault(place, "comes before any machine line", "the first line of a file is its machine")
            return
        self.samples.append(Sample(
            kind=kind, time_s=float(row["time_s"]), mean_s=row.get("mean_s"), p10_s=row.get("p10_s"), p90_s=row.get("p90_s"),
            reps=row.get("reps", 1), sustained=bool(row.get("sustained", False)), rank=row.get("rank", 0),
            host=str(row.get("host", "")), machine=machine, line=number, shape=_shape(row),
        ))  # fmt: skip

    def _unmeasured(self) -> tuple[Mapping[str, Any], ...]:
        """What failed and was not measured after all, when the run went on."""
        found = {f"{sample.rank} {sample.key}" for sample in self.samples}
        return tuple(
            one
            for one in self.failures
            if f"{one.get('rank')} {sample_key(one['kind'], {**_shape(one), 'sustained': one.get('sustained')})}"
            not in found
        )

    def finish(self, hashes: Mapping[str, str]) -> SampleFile:
        """Keep the machine with most samples; the others' are faults: two machines are two calibrations."""
        if not self.samples:
            if hashes or not self.faults:  # what could not even be opened holds none, of course
                self.fault(", ".join(hashes) or "samples", "no usable sample", "shardwise calibrate run")
            raise TableError(self.faults)
        counts = Counter(sample.machine for sample in self.samples)
        (main, _), *others = counts.most_common()
        for other, count in others:
            lines = [s.line for s in self.samples if s.machine == other]
            device = self.machines[other].text("device") if other in self.machines else "unknown"
            self.fault(
                f"lines {min(lines)} to {max(lines)}",
                f"{count} samples of another machine ({other}, {device or 'unnamed'}); left out",
                "fit each machine's file by itself",
            )
        machine = self.machines.get(main) or Machine(id=main, line=0, facts={})
        return SampleFile(
            machine=machine,
            samples=tuple(s for s in self.samples if s.machine == main),
            failures=self._unmeasured(),
            faults=tuple(self.faults),
            sha256=dict(hashes),
            sections=tuple(self.sections),
        )


def _shape(row: Mapping[str, Any]) -> dict[str, Any]:
    """What of a line decides the time."""
    shape = {k: v for k, v in row.items() if k not in _OWN and k not in ("error", "place")}
    return shape | ({"dtype": row["dtype"]} if "dtype" in row else {})


def _bounded(lines: IO[bytes]) -> Iterator[bytes | None]:
    """Lines, with None for one that is too long: memory stays bounded whatever the file is."""
    while raw := lines.readline(MAX_LINE_BYTES):
        if raw.endswith(b"\n") or len(raw) < MAX_LINE_BYTES:
            yield raw
            continue
        while raw and not raw.endswith(b"\n"):
            raw = lines.readline(MAX_LINE_BYTES)
        yield None


def _object(text: bytes) -> dict[str, Any]:
    """One JSON object without duplicate keys, NaN or infinity. Raises ValueError in words."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := sorted(more_than_once(k for k, _ in pairs)):
            raise ValueError(f"key {', '.join(map(repr, twice))} appears twice")
        return dict(pairs)

    try:
        row = json.loads(text, object_pairs_hook=unique, parse_constant=finite_number, parse_float=finite_number)
    except json.JSONDecodeError as exc:
        raise ValueError(f"not JSON: {exc.msg} at column {exc.colno}") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError("is not an object")  # noqa: TRY004  every bad line is a ValueError here
    return row


def _problems(row: Mapping[str, Any], kind: str) -> Iterator[str]:
    """What is wrong with a sample; nothing if it can be used."""
    missing = [name for name in ("time_s", *REQUIRED.get(kind, ())) if name not in row]
    if missing:
        yield f"{kind}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    for name in ("time_s", "mean_s", "p10_s", "p90_s"):
        if (row.get(name) is not None or name == "time_s" in row) and (wrong := _bad_seconds(row[name])):
            yield f"{kind}: {name} {wrong}"
    for name in ("reps", "rank"):
        value = row.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            yield f"{kind}: {name} = {value!r} is not a whole number"
    for name, value in row.items():
        if isinstance(value, list | dict):
            yield f"{kind}: {name} is not a plain value"
        elif name in _POSITIVE and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            yield f"{kind}: {name} = {value!r} is not above 0"


_POSITIVE = frozenset(
    {"m", "n", "k", "batch", "seq_q", "seq_kv", "num_heads", "num_kv_heads", "head_dim", "elements", "tokens"}
    | {"vocab", "parameters", "bytes", "bytes_moved", "size_bytes", "num_ranks", "num_nodes", "launches", "groups"}
)


_LEAST_S = 1e-12


def _bad_seconds(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"= {value!r} is not a number"
    if value > _YEAR_S:
        return "is longer than a year"
    if 0 < value < _LEAST_S:
        return f"= {value} is less than any clock can tell"
    return f"= {value} is not above 0" if value <= 0 else ""


def by_key(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Samples by what they measured: the ranks' and the repetitions' side by side."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.key, []).append(sample)
    return found
