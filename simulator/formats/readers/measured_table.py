"""Tables of measurements as a backtest takes them: runs, tracked memory, collectives or servers, by the header's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from simulator.base.errors import TableError
from simulator.base.schema import nearest
from simulator.formats.readers import collectives_table, memory_table, runs_table, serving_table
from simulator.formats.readers.collectives_table import is_collectives_table, read_collectives
from simulator.formats.readers.csv_table import header_names
from simulator.formats.readers.memory_table import is_memory_table, read_memory
from simulator.formats.readers.run_settings import setting_of
from simulator.formats.readers.runs_table import SPELLING, read_runs
from simulator.formats.readers.serving_table import is_serving_table, read_serving
from simulator.formats.readers.spelled_columns import advice, parsers
from simulator.studies.backtest.rows import Table

RowT = TypeVar("RowT")
_MOST_ROWS: Final = 20_000


def read_measured(path: str | Path) -> Table:
    """The table at `path`, whole. Raises TableError if the file is none."""
    name, header = str(path), header_names(Path(path))
    if is_collectives_table(path):
        unread = tuple(_unread(header, collectives_table.COLUMNS))
        return Table(name=name, kind="collectives", rows=_few(read_collectives(path), name), unread=unread)
    if is_memory_table(path):
        unread = tuple(_unread(header, memory_table.COLUMNS))
        return Table(name=name, kind="memory", rows=_few(read_memory(path), name), unread=unread)
    if is_serving_table(path):
        unread = tuple(_unread(header, serving_table.COLUMNS))
        return Table(name=name, kind="serving", rows=_few(read_serving(path), name), unread=unread)
    ours = dict(zip(header, SPELLING.own(header), strict=True))
    settings = [column for column in ours.values() if setting_of(column)]
    known = (*runs_table.COLUMNS, *parsers(), *settings)
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
