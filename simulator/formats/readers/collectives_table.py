"""Reader of tables of measured collectives: one nccl-tests line a row. docs/reference/collectives-table.md has the columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from simulator.base.errors import Fault
from simulator.formats.readers.csv_table import (
    BadRow,
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

__all__ = ["COLUMNS", "REQUIRED", "BadRow", "CollectiveRow", "is_collectives_table", "read_collectives"]

# The table's names (nccl-tests' programs) -> ours
KINDS: dict[str, str] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "send_recv",
    "send_recv": "send_recv",
}
_RATE = re.compile(r"[0-9]{1,12}(\.[0-9]{0,12})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One measured size as its table states it; None (or "") where the table is silent. Units are the table's.

    `line` is the physical line where the record starts (the header is line 1). Every other field is a column.
    """

    line: int
    source: str = ""
    location: str = ""
    collective: str = ""
    gpu: str = ""
    n_gpus: int | None = None
    n_nodes: int | None = None
    gpus_per_node: int | None = None
    intra_link: str = ""
    inter_link_gbps_per_node: float | None = None
    nccl_version: str = ""
    algo_env: str = ""
    proto_env: str = ""
    size_bytes: int = 0
    time_us: float = 0.0
    algbw_GBps: float | None = None  # noqa: N815  the columns are named so
    busbw_GBps: float | None = None  # noqa: N815
    in_place: str = ""
    notes: str = ""


COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(CollectiveRow) if f.name != "line")
REQUIRED: tuple[str, ...] = ("collective", "gpu", "n_gpus", "n_nodes", "size_bytes", "time_us")
_NEVER_BLANK = ("collective", "gpu", "size_bytes", "time_us")


def is_collectives_table(path: str | Path) -> bool:
    """The file's first line names this table's own columns."""
    return {"collective", "size_bytes", "time_us"} <= set(header_names(Path(path)))


def read_collectives(path: str | Path) -> Iterator[CollectiveRow | BadRow]:
    """The table's records in order. `path` is a .csv, or the same compressed with gzip.

    Raises TableError if the file cannot be read, is empty, or has a header that lacks a required column, repeats one
    or has an unknown one. A bad record is yielded as a BadRow and the rest goes on.
    """
    with open_table(Path(path), COLUMNS, REQUIRED) as (header, records):
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
}
