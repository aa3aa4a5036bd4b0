"""Reader of tables of tracked memory: one training step of one rank a row, live bytes by moment.

The columns are documented in docs/reference/memory-table.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from simulator.formats.readers.csv_table import (
    Parser,
    header_names,
    integer_cell,
    name_cell,
    number_cell,
    one_of,
    pattern_cell,
    read_rows,
    text_cell,
)
from simulator.studies.backtest.rows import BadRow, MemoryRow

__all__ = ["COLUMNS", "REQUIRED", "BadRow", "MemoryRow", "is_memory_table", "read_memory"]

COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(MemoryRow) if f.name != "line")
REQUIRED: tuple[str, ...] = (
    *("row", "n_layers", "d_model", "n_heads", "d_ff", "vocab", "seq_len", "micro_batch", "world"),
    *("strategy", "ac", "store_dtype", "param_dtype", "opt_impl", "device", "peak_bytes"),
)


def is_memory_table(path: str | Path) -> bool:
    """The file's first line names this table's own columns (a table of runs has `id`, `metric` and `value` instead)."""
    return {"row", "strategy", "peak_bytes"} <= set(header_names(Path(path)))


def read_memory(path: str | Path) -> Iterator[MemoryRow | BadRow]:
    """The table's records in order: see `read_rows`."""
    return read_rows(path, MemoryRow, _PARSERS, REQUIRED, never_blank=REQUIRED, id_column="row")


def _flag_cell(cell: str) -> bool | None:
    return {"": None, "True": True, "False": False}[str(_FLAG(cell))]


_bytes_cell = pattern_cell(r"[0-9]{1,18}", int, "a whole number of bytes", "digits only, or blank if unknown")
_FLAG = one_of("True", "False")
_dtype = one_of("fp32", "bf16", "fp16", blank=None)
_SIZES = (
    "n_params", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab", "seq_len", "micro_batch", "world",
    "replicate", "tp",
)  # fmt: skip
_PARSERS: dict[str, Parser] = {
    **dict.fromkeys(COLUMNS, _bytes_cell),
    **dict.fromkeys(("model", "tool", "peak_phase"), text_cell),
    **dict.fromkeys(_SIZES, integer_cell),
    **dict.fromkeys(("store_dtype", "param_dtype", "reduce_dtype", "opt_dtype"), _dtype),
    "row": name_cell,
    "strategy": one_of("single", "ddp", "fsdp2_full", "fsdp2_noreshard", "hsdp", "tp", blank=None),
    "ac": one_of("none", "full", "selective", blank=None),
    "amp": one_of("none", "bf16", "fp16", blank="none"),
    "opt_impl": one_of("adamw_foreach", "adamw_loop", "adamw_fused", blank=None),
    "attn": one_of("sdpa_repeat", "flash_gqa", "eff_repeat"),
    "ddp_bucket_view": _flag_cell,
    "device": one_of("cpu", "cuda", blank=None),
    "track_seconds": number_cell,
}
