"""Reader of tables of measured servers: one figure of one engine under one load a row.

The columns are documented in docs/reference/serving-table.md.
"""

from __future__ import annotations

from typing import Final

from simulator.formats.readers.csv_table import CellError, name_cell, number_cell, pattern_cell, shown
from simulator.formats.readers.row_table import RowTable
from simulator.studies.backtest.rows import ServingRow


def _part_cell(cell: str) -> float | None:
    part = number_cell(cell)
    if part is not None and not 0 <= part <= 1:
        raise CellError(f"{shown(cell)} is no part of the stated lengths", "a number from 0 to 1, or blank if unknown")
    return part


# GPUs that experts are dealt over; tables write 0 and 1 for none
_experts_cell = pattern_cell(
    r"[0-9]{1,9}", lambda cell: max(1, int(cell)), "a whole number", "digits only, or blank if unknown"
)
SERVERS: Final = RowTable(
    row=ServingRow,
    signs=frozenset({"engine", "concurrency_or_rate"}),
    required=(
        *("id", "engine", "model", "gpu", "input_tokens", "output_tokens"),
        *("concurrency_or_rate", "metric", "value", "unit"),
    ),
    never_blank=("metric", "value"),
    id_column="id",
    own={"id": name_cell, "ep": _experts_cell, "shortest": _part_cell},
)
read_serving = SERVERS.read
