"""Layers from the size in a model's name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from simulator.studies.backtest.blanks import counted
from simulator.studies.backtest.rows import RunRow

_SIZE: Final = re.compile(r"(?<![\d.a-z])(\d+(?:\.\d+)?)([bt])(?![a-z\d])", re.IGNORECASE)
_UNITS: Final = {"b": 10**9, "t": 10**12}


def with_counts(row: RunRow) -> RunRow:
    """The row with blank counts that others leave no choice for, or that its name states."""
    row = counted(row)
    return replace(row, n_layers=row.n_layers or _layers(row))


def _layers(row: RunRow) -> int | None:
    """Layers that make a dense model of the size in its name, as many as its pipeline can share evenly."""
    named = _SIZE.search(row.model_name)
    if named is None or row.d_model is None or row.d_ff is None or row.vocab is None or (row.n_experts or 1) > 1:
        return None
    grouped = (row.n_kv_heads or 1) / (row.n_heads or 1) if row.n_kv_heads else 1.0
    matrices = 3 if row.mlp_kind == "swiglu" else 2
    layer = row.d_model * (2 * row.d_model * (1 + grouped) + matrices * row.d_ff)
    ends = row.vocab * row.d_model * (2 if row.mlp_kind == "swiglu" else 1)
    positions = (row.pp or 1) * (row.vpp or 1)
    share = (float(named[1]) * _UNITS[named[2].casefold()] - ends) / layer / positions
    return max(1, round(share)) * positions
