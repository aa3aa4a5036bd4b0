"""Reader of tables of measured collectives: one nccl-tests line a row. docs/reference/collectives-table.md has the columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from simulator.base.errors import Fault
from simulator.formats.readers.csv_table import (
    CellError,
    Parser,
    Record,
    header_names,
    integer_cell,
    number_cell,
    one_of,
    open_table,
    parse_record,
    shown,
    text_cell,
)
from simulator.studies.backtest.rows import KINDS, BadRow, CollectiveRow

__all__ = ["COLUMNS", "REQUIRED", "BadRow", "CollectiveRow", "is_collectives_table", "read_collectives"]

_RATE = re.compile(r"[0-9]{1,12}(\.[0-9]{0,12})?")


COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(CollectiveRow) if f.name != "line")
REQUIRED: tuple[str, ...] = ("collective", "gpu", "n_gpus", "n_nodes", "size_bytes", "time_us")
_NEVER_BLANK = ("collective", "gpu", "size_bytes", "time_us")


def is_collectives_table(path: str | Path) -> bool:
    """The file's first line names this table's own columns."""
    return {"collective", "size_bytes", "time_us"} <= set(header_names(Path(path)))


def read_collectives(path: str | Path) -> Iterator[CollectiveRow | BadRow]:
    """The table's records in order. `path` is a .csv, or the same compressed with gzip.

    Raises TableError if the file cannot be read, is empty, or has a header that lacks a required column or repeats one.
    A bad record is yielded as a BadRow and the rest goes on.
    """
    with open_table(Path(path), COLUMNS, REQUIRED, others=True) as (header, records):
        for record in records:
            yield _row(record, header)


def _row(record: Record, header: list[str]) -> CollectiveRow | BadRow:
    values = parse_record(record, header, _PARSERS, "source")
    if isinstance(values, BadRow):
        return values
    blank = [column for column in _NEVER_BLANK if values[column] in ("", None)]
    if blank:
        faults = (Fault(place=f"line {record.line}: {c}", problem="is blank", remedy="a value") for c in blank)
        return BadRow(line=record.line, id=str(values.get("source", "")), faults=tuple(faults))
    return CollectiveRow(line=record.line, **values)  # type: ignore[arg-type]  # _PARSERS gives each column its field's type


def _rate_cell(cell: str) -> float | None:
    """A bandwidth as nccl-tests prints it: 0.00 where it is small; None where blank."""
    if not cell:
        return None
    if not _RATE.fullmatch(cell):
        raise CellError(f"{shown(cell)} is not a bandwidth", "GB/s as nccl-tests prints them, or blank")
    return float(cell)


_PARSERS: dict[str, Parser] = {
    **dict.fromkeys(COLUMNS, text_cell),
    **dict.fromkeys(("n_gpus", "n_nodes", "gpus_per_node", "size_bytes"), integer_cell),
    **dict.fromkeys(("inter_link_gbps_per_node", "time_us"), number_cell),
    **dict.fromkeys(("algbw_GBps", "busbw_GBps"), _rate_cell),
    "collective": one_of(*KINDS),
    "in_place": one_of("y", "n"),
    "usual_network": one_of("y", "n", blank=None),
}
