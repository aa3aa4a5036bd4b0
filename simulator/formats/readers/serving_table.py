"""Reader of tables of measured servers: one figure of one engine under one load a row.

The columns are documented in docs/reference/serving-table.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from simulator.formats.readers.csv_table import (
    CellError,
    Parser,
    header_names,
    integer_cell,
    name_cell,
    number_cell,
    pattern_cell,
    read_rows,
    shown,
    text_cell,
)
from simulator.studies.backtest.rows import BadRow, ServingRow

COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(ServingRow) if f.name != "line")
REQUIRED: tuple[str, ...] = (
    *("id", "engine", "model", "gpu", "input_tokens", "output_tokens"),
    *("concurrency_or_rate", "metric", "value", "unit"),
)
_COUNTS = (
    *("n_gpus", "tp", "pp", "dp", "prefill_tp", "prefill_dp"),
    *("input_tokens", "output_tokens", "num_requests"),
)


def is_serving_table(path: str | Path) -> bool:
    """The file's first line names this table's own columns."""
    return {"engine", "concurrency_or_rate"} <= set(header_names(Path(path)))


def read_serving(path: str | Path) -> Iterator[ServingRow | BadRow]:
    """The table's records in order: see `read_rows`."""
    return read_rows(path, ServingRow, _PARSERS, REQUIRED, never_blank=("metric", "value"), id_column="id")


def _part_cell(cell: str) -> float | None:
    part = number_cell(cell)
    if part is not None and not 0 <= part <= 1:
        raise CellError(f"{shown(cell)} is no part of the stated lengths", "a number from 0 to 1, or blank if unknown")
    return part


# GPUs that experts are dealt over; tables write 0 and 1 for none
_experts_cell = pattern_cell(
    r"[0-9]{1,9}", lambda cell: max(1, int(cell)), "a whole number", "digits only, or blank if unknown"
)
_PARSERS: dict[str, Parser] = {
    **dict.fromkeys(COLUMNS, text_cell),
    **dict.fromkeys(_COUNTS, integer_cell),
    "id": name_cell,
    "ep": _experts_cell,
    "value": number_cell,
    "shortest": _part_cell,
}
