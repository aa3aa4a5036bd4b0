"""Reader of tables of measured training runs: CSV in, one typed row or one list of faults a line out.

The columns are documented in docs/reference/runs-table.md. The reader streams: it holds one record at a time, whatever
the file's size. A row that is wrong costs that row only; a file that is no table at all raises TableError.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple, TextIO, cast, get_args

from simulator.errors import Fault, TableError
from simulator.schema import nearest

Metric = Literal["step_time_s", "tokens_per_s_per_gpu", "tokens_per_s", "samples_per_s", "model_tflops_per_gpu"]
MemoryMetric = Literal["peak_allocated_gib", "peak_reserved_gib", "nvidia_smi_used_gb", "gpu_memory_gb", "oom"]
YesNo = Literal["y", "n"]

_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp8_mx", "nvfp4")
_MLP_KINDS = ("gelu", "swiglu", "squared_relu", "relu")
_SHARDING = re.compile(r"ddp|zero[123]|zero1_intragroup[1-9][0-9]{0,5}|fsdp_full|fsdp_grad_op|hsdp")
_SHARDING_WORDS = ("ddp", "zero1", "zero2", "zero3", "zero1_intragroup8", "fsdp_full", "fsdp_grad_op", "hsdp")
_INTEGER = re.compile(r"[0-9]{1,15}")
_NUMBER = re.compile(r"[0-9]{1,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})?")

_MAX_LINE_CHARS = 2**20
_MAX_RECORD_LINES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One measured run as its table states it; None (or "") where the table is silent. Units are the table's.

    `line` is the physical line where the record starts (the header is line 1). Every other field is a column.
    """

    line: int
    id: str
    source: str = ""
    source_location: str = ""
    framework: str = ""
    model_name: str = ""
    n_layers: int | None = None
    d_model: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    d_ff: int | None = None
    mlp_kind: str = ""
    vocab: int | None = None
    seq_len: int | None = None
    n_experts: int | None = None
    top_k: int | None = None
    gpu: str = ""
    n_gpus: int | None = None
    gpus_per_node: int | None = None
    intra_link: str = ""
    inter_link_gbps_per_node: float | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    vpp: int | None = None
    zero_or_fsdp: str = ""
    micro_batch: int | None = None
    global_batch: int | None = None
    precision: str = ""
    act_ckpt: str = ""
    flash_attn: YesNo | None = None
    seq_parallel: YesNo | None = None
    compile: YesNo | None = None
    metric: Metric | None = None
    value: float | None = None
    mem_metric: MemoryMetric | None = None
    mem_metric_detail: str = ""  # what stands in parentheses behind mem_metric
    mem_value: float | None = None
    notes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A record that cannot be read: where it starts, its id if it has one, and everything that is wrong with it."""

    line: int
    id: str
    faults: tuple[Fault, ...]


COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(RunRow) if f.name not in ("line", "mem_metric_detail"))
REQUIRED: tuple[str, ...] = (
    "id",
    "framework",
    "n_layers",
    "d_model",
    "n_heads",
    "d_ff",
    "mlp_kind",
    "vocab",
    "seq_len",
    "gpu",
    "n_gpus",
    "zero_or_fsdp",
    "micro_batch",
    "global_batch",
    "precision",
    "metric",
    "value",
)


def read_runs(path: str | Path) -> Iterator[RunRow | BadRow]:
    """The table's records in order. `path` is a .csv, or the same compressed with gzip.

    Raises TableError if the file cannot be read, is empty, or has a header that lacks a required column, repeats one
    or has an unknown one. A bad record is yielded as a BadRow and the rest goes on.
    """
    file = Path(path)
    with _open(file) as stream:
        records = _records(stream)
        first = next(records, None)
        if first is None:
            raise TableError(Fault(place=str(file), problem="is empty", remedy="a header line and a line a run"))
        header = _header(file, first[1])
        seen: dict[str, int] = {}
        for line, cells in records:
            if cells == []:
                continue
            row = _bad_record(line, cells) if isinstance(cells, str) else _row(line, header, cells)
            yield _unique(row, seen)


@contextmanager
def _open(file: Path) -> Iterator[TextIO]:
    """The file as text lines; bytes that are not UTF-8 become lone surrogates, which `_text` refuses row by row."""
    try:
        raw = file.open("rb")
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
    except OSError as exc:
        problem = f"cannot be read: {exc.strerror or exc}"
        raise TableError(Fault(place=str(file), problem=problem, remedy="a .csv or .csv.gz file")) from None
    with raw:
        data = cast("io.BufferedReader", gzip.GzipFile(fileobj=raw)) if zipped else raw
        yield io.TextIOWrapper(data, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _records(stream: TextIO) -> Iterator[tuple[int, list[str] | str]]:
    """(line, cells) of each record, or (line, what is wrong).

    A quoted cell may span lines. A quote that is never closed must not swallow the file: a record that does not parse
    costs only its first line, and reading goes on at the next.
    """
    lines = _lines(stream)
    ahead: list[_Line] = []  # lines read but not yet part of a record
    while ahead or (ahead := list(itertools.islice(lines, 1))):
        text, used = ahead[0].text, 1
        while text.count('"') % 2 and used < _MAX_RECORD_LINES:
            if used == len(ahead):
                ahead += itertools.islice(lines, 1)
            if used == len(ahead) or ahead[used].problem:
                break
            text += ahead[used].text
            used += 1
        cells = ahead[0].problem or _split(text)
        yield ahead[0].number, cells
        del ahead[: 1 if isinstance(cells, str) else used]


class _Line(NamedTuple):
    """A physical line with its line end, or why there is none."""

    number: int
    text: str
    problem: str = ""


def _lines(stream: TextIO) -> Iterator[_Line]:
    """The physical lines; one that is too long to be part of a row is skipped in pieces."""
    number = 0
    try:
        while text := stream.readline(_MAX_LINE_CHARS):
            number += 1
            whole = len(text) < _MAX_LINE_CHARS or text.endswith("\n")
            yield _Line(number, text) if whole else _Line(number, "", f"has more than {_MAX_LINE_CHARS} characters")
            while not whole and (text := stream.readline(_MAX_LINE_CHARS)):
                whole = len(text) < _MAX_LINE_CHARS or text.endswith("\n")
    except (OSError, EOFError, zlib.error) as exc:
        if number == 0:
            raise TableError(Fault(place="table", problem=f"cannot be read: {exc}")) from None
        yield _Line(number + 1, "", f"the file ends early: {exc}")


def _split(text: str) -> list[str] | str:
    """The cells of one record, or what is wrong with it."""
    body = text.rstrip("\r\n")
    if body.count('"') % 2:
        return "a quote is opened and never closed"
    if not body.strip():
        return []
    try:
        parsed = list(csv.reader(io.StringIO(body, newline=""), strict=True))
    except csv.Error as exc:
        return f"wrong quoting: {exc}"
    return parsed[0] if len(parsed) == 1 else "wrong quoting: a line end outside quotes"


def _header(file: Path, cells: list[str] | str) -> list[str]:
    """The column names, checked all at once."""
    place = f"{file}: header"
    if isinstance(cells, str) or not cells:
        problem = cells if isinstance(cells, str) else "is blank"
        raise TableError(Fault(place=place, problem=problem, remedy="column names, comma separated"))
    names = [c.strip() for c in cells]
    faults = [
        Fault(place=place, problem=f"unknown column {n!r}", remedy=nearest(n[:60], COLUMNS))
        for n in dict.fromkeys(names)
        if n not in COLUMNS
    ]
    faults += [
        Fault(place=place, problem=f"column {n!r} stands {names.count(n)} times", remedy="keep one")
        for n in dict.fromkeys(names)
        if names.count(n) > 1 and n in COLUMNS
    ]
    faults += [Fault(place=place, problem=f"column {n!r} is missing") for n in REQUIRED if n not in names]
    if not set(names) & set(COLUMNS):
        faults = [Fault(place=place, problem="the first line names no known column", remedy=", ".join(REQUIRED))]
    if faults:
        raise TableError(faults)
    return names


def _bad_record(line: int, problem: str) -> BadRow:
    return BadRow(line=line, id="", faults=(Fault(place=f"line {line}", problem=problem),))


def _unique(row: RunRow | BadRow, seen: dict[str, int]) -> RunRow | BadRow:
    """The row, or a BadRow if its id stood before."""
    if isinstance(row, BadRow) or row.id not in seen:
        seen.setdefault(row.id, row.line)
        return row
    problem = f"{row.id!r} stands on line {seen[row.id]} too"
    fault = Fault(place=f"line {row.line}: id", problem=problem, remedy="one id a run")
    return BadRow(line=row.line, id=row.id, faults=(fault,))


def _row(line: int, header: list[str], cells: list[str]) -> RunRow | BadRow:
    """The typed row, or everything that is wrong with it."""
    by_name = dict(zip(header, (c.strip() for c in cells), strict=False))
    name = by_name.get("id", "")
    if len(cells) != len(header):
        problem = f"{len(cells)} cells where the header has {len(header)} columns"
        return BadRow(line=line, id=_printable(name), faults=(Fault(place=f"line {line}", problem=problem),))
    values: dict[str, object] = {}
    faults: list[Fault] = []
    for column, cell in by_name.items():
        try:
            values[column] = _PARSERS[column](cell)
        except _CellError as exc:
            faults.append(Fault(place=f"line {line}: {column}", problem=exc.problem, remedy=exc.remedy))
    if not faults:
        values["mem_metric"], values["mem_metric_detail"] = cast(
            "tuple[str, str]", values.get("mem_metric") or (None, "")
        )
        faults = [Fault(place=f"line {line}: {c}", problem=p, remedy=r) for c, p, r in _contradictions(values)]
    if faults:
        return BadRow(line=line, id=_printable(name), faults=tuple(faults))
    return RunRow(line=line, **values)  # type: ignore[arg-type]  # _PARSERS gives each column its field's type


def _contradictions(values: dict[str, object]) -> Iterator[tuple[str, str, str]]:
    """What no single cell shows: (column, problem, remedy)."""
    if (values.get("metric") is None) != (values.get("value") is None):
        yield "value", "metric and value come together, one of them is blank", "both, or neither"
    memory, amount = values.get("mem_metric"), values.get("mem_value")
    if memory != "oom" and (memory is None) != (amount is None):
        yield "mem_value", "mem_metric and mem_value come together, one of them is blank", "both, or neither"
    if values.get("value") is None and memory is None:
        yield "metric", "nothing was measured: neither metric nor mem_metric", f"one of {', '.join(get_args(Metric))}"


class _CellError(Exception):
    """One cell that cannot be read."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


def _text(cell: str) -> str:
    if "\x00" in cell:
        raise _CellError("holds a NUL byte")
    if any("\ud800" <= c <= "\udfff" for c in cell):
        raise _CellError("is not UTF-8", "save the table as UTF-8")
    return cell


def _name(cell: str) -> str:
    if not cell:
        raise _CellError("is blank", "an id that no other row has")
    return _text(cell)


def _integer(cell: str) -> int | None:
    if not cell:
        return None
    if not _INTEGER.fullmatch(cell) or int(cell) < 1:
        raise _CellError(f"{_shown(cell)} is not a whole number of at least 1", "digits only, or blank if unknown")
    return int(cell)


def _number(cell: str) -> float | None:
    if not cell:
        return None
    value = float(cell) if _NUMBER.fullmatch(cell) else math.nan
    if not (math.isfinite(value) and value > 0):
        raise _CellError(f"{_shown(cell)} is not a finite number above 0", "a decimal number, or blank if unknown")
    return value


def _one_of(*words: str, blank: object = "") -> Callable[[str], object]:
    def parse(cell: str) -> object:
        if not cell:
            return blank
        if cell not in words:
            raise _CellError(f"unknown word {_shown(cell)}", nearest(cell[:60], words))
        return cell

    return parse


def _sharding(cell: str) -> str:
    if cell and not _SHARDING.fullmatch(cell):
        raise _CellError(f"unknown word {_shown(cell)}", nearest(cell[:60], _SHARDING_WORDS))
    return cell


def _memory_metric(cell: str) -> tuple[str, str] | None:
    """`peak_allocated_gib(last rank)` -> ("peak_allocated_gib", "last rank")."""
    if not cell:
        return None
    word, _, detail = _text(cell).partition("(")
    if word not in get_args(MemoryMetric) or (detail and not detail.endswith(")")):
        raise _CellError(f"unknown word {_shown(cell)}", nearest(word[:60], get_args(MemoryMetric)))
    return word, detail.removesuffix(")")


def _shown(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else f"{cell[:37]}...")


def _printable(cell: str) -> str:
    return cell.encode("utf-8", "replace").decode("utf-8").replace("\x00", "")[:200]


_INTEGER_COLUMNS = (
    "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab", "seq_len", "n_experts", "top_k", "n_gpus",
    "gpus_per_node", "tp", "pp", "cp", "ep", "dp", "vpp", "micro_batch", "global_batch",
)  # fmt: skip
_PARSERS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(COLUMNS, _text),
    **dict.fromkeys(_INTEGER_COLUMNS, _integer),
    **dict.fromkeys(("inter_link_gbps_per_node", "value", "mem_value"), _number),
    **dict.fromkeys(("flash_attn", "seq_parallel", "compile"), _one_of("y", "n", blank=None)),
    "id": _name,
    "mlp_kind": _one_of(*_MLP_KINDS),
    "precision": _one_of(*_PRECISIONS),
    "act_ckpt": _one_of("none", "full", "selective"),
    "zero_or_fsdp": _sharding,
    "metric": _one_of(*get_args(Metric), blank=None),
    "mem_metric": _memory_metric,
}
