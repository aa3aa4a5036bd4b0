"""Reader of tables of measured collectives: one nccl-tests line a row. docs/reference/collectives-table.md has the columns."""

from __future__ import annotations

from typing import Final

from simulator.formats.readers.csv_table import one_of, pattern_cell
from simulator.formats.readers.row_table import RowTable
from simulator.studies.backtest.rows import KINDS, CollectiveRow

# A bandwidth as nccl-tests prints it: 0.00 where it is small
_rate_cell = pattern_cell(
    r"[0-9]{1,12}(\.[0-9]{0,12})?", float, "a bandwidth", "GB/s as nccl-tests prints them, or blank"
)
COLLECTIVES: Final = RowTable(
    row=CollectiveRow,
    signs=frozenset({"collective", "size_bytes", "time_us"}),
    required=("collective", "gpu", "n_gpus", "n_nodes", "size_bytes", "time_us"),
    never_blank=("collective", "gpu", "size_bytes", "time_us"),
    id_column="source",
    unique=False,
    own={
        **dict.fromkeys(("algbw_GBps", "busbw_GBps"), _rate_cell),
        "collective": one_of(*KINDS),
        "in_place": one_of("y", "n"),
        "usual_network": one_of("y", "n", blank=None),
    },
)
read_collectives = COLLECTIVES.read
