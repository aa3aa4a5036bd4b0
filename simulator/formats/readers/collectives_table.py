"""Reader of tables of measured collectives: one nccl-tests line a row. docs/reference/collectives-table.md has the columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from simulator.formats.readers.csv_table import (
    Parser,
    header_names,
    integer_cell,
    number_cell,
    one_of,
    pattern_cell,
    read_rows,
    text_cell,
)
from simulator.studies.backtest.rows import KINDS, BadRow, CollectiveRow

__all__ = ["COLUMNS", "REQUIRED", "BadRow", "CollectiveRow", "is_collectives_table", "read_collectives"]

COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(CollectiveRow) if f.name != "line")
REQUIRED: tuple[str, ...] = ("collective", "gpu", "n_gpus", "n_nodes", "size_bytes", "time_us")
_NEVER_BLANK = ("collective", "gpu", "size_bytes", "time_us")


def is_collectives_table(path: str | Path) -> bool:
    """The file's first line names this table's own columns."""
    return {"collective", "size_bytes", "time_us"} <= set(header_names(Path(path)))


def read_collectives(path: str | Path) -> Iterator[CollectiveRow | BadRow]:
    """The table's records in order: see `read_rows`."""
    return read_rows(
        path, CollectiveRow, _PARSERS, REQUIRED, never_blank=_NEVER_BLANK, id_column="source", unique=False
    )


# A bandwidth as nccl-tests prints it: 0.00 where it is small
_rate_cell = pattern_cell(
    r"[0-9]{1,12}(\.[0-9]{0,12})?", float, "a bandwidth", "GB/s as nccl-tests prints them, or blank"
)
_PARSERS: dict[str, Parser] = {
    **dict.fromkeys(COLUMNS, text_cell),
    **dict.fromkeys(("n_gpus", "n_nodes", "gpus_per_node", "size_bytes"), integer_cell),
    **dict.fromkeys(("inter_link_gbps_per_node", "time_us"), number_cell),
    **dict.fromkeys(("algbw_GBps", "busbw_GBps"), _rate_cell),
    "collective": one_of(*KINDS),
    "in_place": one_of("y", "n"),
    "usual_network": one_of("y", "n", blank=None),
}
