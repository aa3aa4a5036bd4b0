"""Tables of measurements as a backtest takes them: runs, tracked memory, collectives or servers, by the header's names.

Their columns: docs/reference/runs-table.md, memory-table.md, collectives-table.md and serving-table.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from simulator.base.errors import TableError
from simulator.base.schema import nearest
from simulator.formats.readers.csv_table import (
    CellError,
    header_names,
    name_cell,
    number_cell,
    one_of,
    pattern_cell,
    shown,
)
from simulator.formats.readers.row_table import RowTable
from simulator.formats.readers.run_settings import setting_of
from simulator.formats.readers.runs_table import COLUMNS, SPELLING, read_runs
from simulator.formats.readers.spelled_columns import advice, parsers
from simulator.studies.backtest.rows import KINDS, CollectiveRow, MemoryRow, ServingRow, Table

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
    },
)
read_collectives = COLLECTIVES.read


_REQUIRED: Final = (
    *("row", "n_layers", "d_model", "n_heads", "d_ff", "vocab", "seq_len", "micro_batch", "world"),
    *("strategy", "ac", "store_dtype", "param_dtype", "opt_impl", "device", "peak_bytes"),
)


def _flag_cell(cell: str) -> bool | None:
    return {"": None, "True": True, "False": False}[str(_FLAG(cell))]


_bytes_cell = pattern_cell(r"[0-9]{1,18}", int, "a whole number of bytes", "digits only, or blank if unknown")
_FLAG = one_of("True", "False")
_BYTES: Final = (
    *("peak_bytes", "param", "sharded_param", "unsharded_param", "grad", "sharded_grad", "activation", "optstate"),
    *("temp", "all_gather", "reduce_scatter", "buffer", "inputs_other", "ddp_buckets", "start_bytes"),
    *("after_fwd_bytes", "after_bwd_bytes", "peak_fwd", "peak_bwd", "peak_opt"),
    *("real_peak_bytes", "real_profiler_peak_bytes"),
)
TRACKED: Final = RowTable(
    row=MemoryRow,
    signs=frozenset({"row", "strategy", "peak_bytes"}),  # a table of runs has `id`, `metric` and `value` instead
    required=_REQUIRED,
    never_blank=_REQUIRED,
    id_column="row",
    own={**dict.fromkeys(_BYTES, _bytes_cell), "row": name_cell, "ddp_bucket_view": _flag_cell},
)
read_memory = TRACKED.read


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
            return Table(name=name, kind=kind, rows=few_rows(table.read(path), name), unread=unread)
    ours = dict(zip(header, SPELLING.own(header), strict=True))
    settings = [column for column in ours.values() if setting_of(column)]
    known = (*COLUMNS, *parsers(), *settings)
    unread = tuple(_unread((column for column, own in ours.items() if own not in known), known))
    return Table(name=name, kind="runs", rows=few_rows(read_runs(path), name), unread=unread)


def few_rows(rows: Iterable[RowT], name: str) -> tuple[RowT, ...]:
    """All records of a table. Raises TableError above the limit on their number."""
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
