"""Tables of measurements as a backtest takes them: runs, tracked memory, collectives or servers, by the header's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from simulator.base.errors import TableError
from simulator.base.schema import nearest
from simulator.formats.readers.collectives_table import COLLECTIVES
from simulator.formats.readers.csv_table import header_names
from simulator.formats.readers.memory_table import TRACKED
from simulator.formats.readers.row_table import RowTable
from simulator.formats.readers.run_settings import setting_of
from simulator.formats.readers.runs_table import COLUMNS, SPELLING, read_runs
from simulator.formats.readers.serving_table import SERVERS
from simulator.formats.readers.spelled_columns import advice, parsers
from simulator.studies.backtest.rows import Table

RowT = TypeVar("RowT")
_MOST_ROWS: Final = 20_000
_KINDS: Final[Mapping[Literal["collectives", "memory", "serving"], RowTable[Any]]] = {
    "collectives": COLLECTIVES,
    "memory": TRACKED,
    "serving": SERVERS,
}


def read_measured(path: str | Path) -> Table:
    """The table at `path`, whole. Raises TableError if the file is none."""
    name, header = str(path), header_names(Path(path))
    for kind, table in _KINDS.items():
        if table.matches(path):
            unread = tuple(_unread(header, table.parsers))
            return Table(name=name, kind=kind, rows=_few(table.read(path), name), unread=unread)
    ours = dict(zip(header, SPELLING.own(header), strict=True))
    settings = [column for column in ours.values() if setting_of(column)]
    known = (*COLUMNS, *parsers(), *settings)
    unread = tuple(_unread((column for column, own in ours.items() if own not in known), known))
    return Table(name=name, kind="runs", rows=_few(read_runs(path), name), unread=unread)


def _few(rows: Iterable[RowT], name: str) -> tuple[RowT, ...]:
    """All records. Raises TableError above the limit on their number."""
    found = tuple(islice(rows, _MOST_ROWS + 1))
    if len(found) > _MOST_ROWS:
        raise TableError.at(name, f"has more than {_MOST_ROWS:,} rows", "several tables")
    return found


def _unread(header: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    """Unknown columns, each with the nearest that are known."""
    known = set(known)
    for column in dict.fromkeys(header):
        if column not in known:
            near = advice(column) or nearest(column[:60], known)
            yield f"{column[:60]!r}{f': {near}' if near else ''}"
