"""Reader of tables of tracked memory: one training step of one rank a row, live bytes by moment.

The columns are documented in docs/reference/memory-table.md.
"""

from __future__ import annotations

from typing import Final

from simulator.formats.readers.csv_table import name_cell, one_of, pattern_cell
from simulator.formats.readers.row_table import RowTable
from simulator.studies.backtest.rows import MemoryRow

_REQUIRED: Final = (
    *("row", "n_layers", "d_model", "n_heads", "d_ff", "vocab", "seq_len", "micro_batch", "world"),
    *("strategy", "ac", "store_dtype", "param_dtype", "opt_impl", "device", "peak_bytes"),
)


def _flag_cell(cell: str) -> bool | None:
    return {"": None, "True": True, "False": False}[str(_FLAG(cell))]


_bytes_cell = pattern_cell(r"[0-9]{1,18}", int, "a whole number of bytes", "digits only, or blank if unknown")
_FLAG = one_of("True", "False")
_dtype = one_of("fp32", "bf16", "fp16", blank=None)
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
    own={
        **dict.fromkeys(_BYTES, _bytes_cell),
        **dict.fromkeys(("store_dtype", "param_dtype", "reduce_dtype", "opt_dtype"), _dtype),
        "row": name_cell,
        "strategy": one_of("single", "ddp", "fsdp2_full", "fsdp2_noreshard", "hsdp", "tp", blank=None),
        "ac": one_of("none", "full", "selective", blank=None),
        "amp": one_of("none", "bf16", "fp16", blank="none"),
        "opt_impl": one_of("adamw_foreach", "adamw_loop", "adamw_fused", blank=None),
        "attn": one_of("sdpa_repeat", "flash_gqa", "eff_repeat"),
        "ddp_bucket_view": _flag_cell,
        "device": one_of("cpu", "cuda", blank=None),
    },
)
read_memory = TRACKED.read
