"""Tables in CSV files: streamed records, checked headers, typed cells. What every reader of a table shares.

A reader holds one record at a time, whatever the file's size. A record that is wrong costs that record only; a file
that is no table at all raises TableError.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TextIO, TypeVar, cast

from simulator.base.errors import Fault, TableError
from simulator.base.files import ordinary
from simulator.base.schema import more_than_once, nearest
from simulator.studies.backtest.rows import BadRow

Parser = Callable[[str], object]
RowT = TypeVar("RowT")

# 4096, 4,096; 4096.0 by who read blanks as NaN
_INTEGER = re.compile(r"([0-9]{1,15}|[0-9]{1,3}(?:,[0-9]{3}){1,4})(?:\.0{1,15})?")
_NUMBER = re.compile(r"[0-9]{1,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})?")
_MOST_FAULTS, _SHOWN = 1000, 20
_LEAST, _MOST = 1e-30, 1e30  # of a measured number
_MAX_LINE_CHARS = 2**20
_MAX_RECORD_LINES = 64


class Spelling(NamedTuple):
    """A header's names as ours, what would be right instead of one that says too little, and the columns that it then gives."""

    own: Callable[[Sequence[str]], list[str]]
    advice: Callable[[str], str | None] = lambda _: None
    gives: Callable[[str], Collection[str]] = lambda _: ()


class Record(NamedTuple):
    """The cells of one record, or its problem. `line` is the physical line where it starts."""

    line: int
    cells: list[str] | str


@contextmanager
def open_table(
    file: Path,
    columns: Sequence[str],
    required: Sequence[str],
    *,
    others: bool = False,
    spelled: Spelling | None = None,
) -> Iterator[tuple[list[str], Iterator[Record]]]:
    """The header's names and the records that follow; blank lines are left out. A .csv, or the same in gzip.

    others: unknown columns are allowed. spelled: their names as ours. Raises TableError if the file cannot be read, is empty, or has a
    header that lacks a required column, repeats one or has an unknown one.
    """
    with _open(file) as stream:
        records = _records(stream)
        first = next(records, None)
        if first is None:
            raise TableError.at(str(file), "is empty", "a header line, and lines with its columns")
        header = _header(file, first.cells, columns, required, spelled or Spelling(list), others=others)
        yield header, records


def header_names(file: Path) -> list[str]:
    """The names in the first line of a table, unchecked; none where there is no first line to read."""
    try:
        with _open(file) as stream:
            first = next(_records(stream), None)
    except TableError:
        return []
    return [] if first is None or isinstance(first.cells, str) else [name.strip() for name in first.cells]


def until_too_many_faults(records: Iterable[Record], faults: Sequence[Fault]) -> Iterator[Record]:
    """The records, until the limit on listed faults is reached."""
    return itertools.takewhile(lambda _: len(faults) < _MOST_FAULTS, records)


def parse_record(
    record: Record, header: Sequence[str], parsers: Mapping[str, Parser], id_column: str
) -> dict[str, object] | BadRow:
    """Column -> value, or everything that is wrong with the cells. The id of a BadRow is its cell of `id_column`.

    A column without a parser is left out.
    """
    line, cells = record
    if isinstance(cells, str):
        return BadRow(line=line, id="", faults=(Fault(f"line {line}", cells),))
    by_name = dict(zip(header, (c.strip() for c in cells), strict=False))
    identity = printable(by_name.get(id_column, ""))
    if len(cells) != len(header):
        problem = f"{len(cells)} cells where the header has {len(header)} columns"
        return BadRow(line=line, id=identity, faults=(Fault(f"line {line}", problem),))
    values: dict[str, object] = {}
    faults: list[Fault] = []
    for column, cell in by_name.items():
        if column not in parsers:
            continue
        try:
            values[column] = parsers[column](cell)
        except CellError as exc:
            faults.append(Fault(f"line {line}: {column}", exc.problem, exc.remedy))
    return BadRow(line=line, id=identity, faults=tuple(faults)) if faults else values


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTable(Generic[RowT]):
    """A table without tolerance for bad lines: its name, the limit on its lines, and the format of a line.

    item: made of a line's cells and number. clash: of an item, its line and those before it: column, problem and remedy.
    own: a header's names as ours. others: unknown columns are allowed.
    """

    parsers: Mapping[str, Parser]
    required: Sequence[str]
    item: Callable[[dict[str, Any], int], RowT]
    clash: Callable[[RowT, int, Sequence[RowT]], Iterable[tuple[str, str, str]]]
    noun: str
    most: int
    remedy: str
    own: Callable[[Sequence[str]], list[str]] = list
    others: bool = False

    def read(self, file: Path) -> list[RowT]:
        """All of it, in order. Raises TableError with every fault, by line."""
        found: list[RowT] = []
        faults: list[Fault] = []
        spelled = Spelling(self.own)
        with open_table(file, tuple(self.parsers), self.required, others=self.others, spelled=spelled) as (
            header,
            records,
        ):
            for record in until_too_many_faults(records, faults):
                row = parse_record(record, header, self.parsers, "")
                faults += row.faults if isinstance(row, BadRow) else self._add(row, record.line, found)
                if len(found) > self.most:
                    faults.append(Fault(f"line {record.line}", f"more than {self.most:,} {self.noun}s"))
                    break
        if not found and not faults:
            faults.append(Fault("line 2", f"there is no {self.noun}", self.remedy))
        if len(faults) > _SHOWN:
            faults = [*faults[:_SHOWN], Fault("table", f"at least {len(faults) - _SHOWN} more")]
        if faults:
            raise TableError(replace(fault, place=f"{file}: {fault.place}") for fault in faults)
        return found

    def _add(self, cells: dict[str, Any], line: int, found: list[RowT]) -> list[Fault]:
        one = self.item(cells, line)
        clashes = [
            Fault(f"line {line}: {column}", problem, remedy) for column, problem, remedy in self.clash(one, line, found)
        ]
        found.append(one)
        return clashes


def repeated(line: int, name: str, first_line: int, column: str) -> BadRow:
    """A row that repeats an earlier id."""
    fault = Fault(f"line {line}: {column}", f"{name!r} appears on line {first_line} too", "one id a run")
    return BadRow(line=line, id=name, faults=(fault,))


@contextmanager
def _open(file: Path) -> Iterator[TextIO]:
    """The file as text lines; bytes that are not UTF-8 become lone surrogates, which `text_cell` refuses row by row."""
    try:
        raw = ordinary(file).open("rb")
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
    except OSError as exc:
        raise TableError.at(str(file), f"cannot be read: {exc.strerror or exc}", "a .csv or .csv.gz file") from None
    with raw:
        data = cast("io.BufferedReader", gzip.GzipFile(fileobj=raw)) if zipped else raw
        yield io.TextIOWrapper(data, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _records(stream: TextIO) -> Iterator[Record]:
    """Each record: its cells, or its problem. Blank lines between them are left out, but for a first one.

    A quoted cell may span lines. A quote that is never closed must not swallow the file: a record that does not parse
    costs only its first line, and reading goes on at the next.
    """
    lines = _lines(stream)
    ahead: list[_Line] = []  # lines read but not yet part of a record
    while ahead or (ahead := list(itertools.islice(lines, 1))):
        text, used = ahead[0].text, 1
        if text.isspace() and ahead[0].number > 1:  # of which a file may hold millions
            del ahead[0]
            continue
        while text.count('"') % 2 and used < _MAX_RECORD_LINES:
            if used == len(ahead):
                ahead += itertools.islice(lines, 1)
            if used == len(ahead) or ahead[used].problem:
                break
            text += ahead[used].text
            used += 1
        cells = ahead[0].problem or _split(text)
        yield Record(ahead[0].number, cells)
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
            raise TableError.at("table", f"cannot be read: {exc}") from None
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


def _header(
    file: Path,
    cells: list[str] | str,
    columns: Sequence[str],
    required: Sequence[str],
    spelled: Spelling,
    *,
    others: bool,
) -> list[str]:
    """The column names, checked all at once."""
    place = f"{file}: header"
    if isinstance(cells, str) or not cells:
        raise TableError.at(place, cells if isinstance(cells, str) else "is blank", "column names, comma separated")
    # as bytes that do not decode are read
    if any(c == "\0" or "\udc80" <= c <= "\udcff" for cell in cells for c in cell):
        raise TableError.at(place, "is not UTF-8 text", "save the table as UTF-8")
    names = spelled.own([c.strip() for c in cells])
    missing = [n for n in required if n not in names]
    faults = [
        Fault(place, f"unknown column {n!r}", spelled.advice(n) or nearest(n[:60], columns))
        for n in dict.fromkeys(names)
        if n not in columns and (missing or not others)  # one of them may be the missing one, misspelt
    ]
    faults += [
        Fault(place, f"column {n!r} appears {names.count(n)} times", "keep one")
        for n in more_than_once(names)
        if n in columns
    ]
    meant = {given for n in names for given in spelled.gives(n)}
    faults += [Fault(place, f"column {n!r} is missing") for n in missing if n not in meant]
    if not set(names) & set(columns):
        signs = [sign for sign in (";", "\t", "|") if sign in names[0]]
        remedy = f"commas between columns, not {signs[0]!r}" if signs else ", ".join(required)
        faults = [Fault(place, "the first line names no known column", remedy)]
    TableError.raise_for(faults)
    return names


class CellError(Exception):
    """One cell that cannot be read."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


def text_cell(cell: str) -> str:
    """Free text, unchanged; NUL and bytes that are not UTF-8 are refused."""
    if "\x00" in cell:
        raise CellError("holds a NUL byte")
    if not cell.isascii() and any("\ud800" <= c <= "\udfff" for c in cell):
        raise CellError("is not UTF-8", "save the table as UTF-8")
    return cell


def name_cell(cell: str) -> str:
    """Text that is not blank."""
    if not cell:
        raise CellError("is blank", "an id that no other row has")
    return text_cell(cell)


def integer_cell(cell: str) -> int | None:
    """A whole number of at least 1; None where blank."""
    if not cell:
        return None
    found = _INTEGER.fullmatch(cell)
    number = int(found[1].replace(",", "")) if found else 0
    if number < 1:
        raise CellError(f"{shown(cell)} is not a whole number of at least 1", "digits only, or blank if unknown")
    return number


def number_cell(cell: str) -> float | None:
    """A finite number above 0; None where blank. Nothing measured is beyond 1e30, and what is made of it stays finite."""
    if not cell:
        return None
    value = float(cell) if _NUMBER.fullmatch(cell) else math.nan
    if not value > 0:
        raise CellError(f"{shown(cell)} is not a finite number above 0", "a decimal number, or blank if unknown")
    if not _LEAST <= value <= _MOST:
        raise CellError(f"{shown(cell)} is not from {_LEAST:g} to {_MOST:g}", "a decimal number, or blank if unknown")
    return value


def pattern_cell(pattern: str, convert: Callable[[str], object], noun: str, remedy: str) -> Parser:
    """A parser of what matches the pattern; None where blank."""
    matches = re.compile(pattern).fullmatch

    def parse(cell: str) -> object:
        if cell and not matches(cell):
            raise CellError(f"{shown(cell)} is not {noun}", remedy)
        return convert(cell) if cell else None

    return parse


def one_of(*words: str, blank: object = "") -> Parser:
    """A parser of one of the words; `blank` where the cell is."""

    def parse(cell: str) -> object:
        if not cell:
            return blank
        if cell not in words:
            raise CellError(f"unknown word {shown(cell)}", nearest(cell[:60], words))
        return cell

    return parse


def shown(cell: str) -> str:
    """A cell in quotes, shortened: for messages."""
    return repr(cell if len(cell) <= 40 else f"{cell[:37]}...")


def printable(cell: str) -> str:
    """A cell that can be written anywhere."""
    return cell.encode("utf-8", "replace").decode("utf-8").replace("\x00", "")[:200]
