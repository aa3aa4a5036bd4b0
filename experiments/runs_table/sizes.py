"""Counts that follow from others: layers from the size in a model's name, ranks from the GPUs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from simulator.spec.cluster.device import Device
from simulator.studies.backtest.rows import RunRow

_SIZE: Final = re.compile(r"(?<![\d.a-z])(\d+(?:\.\d+)?)([bt])(?![a-z\d])", re.IGNORECASE)
_UNITS: Final = {"b": 10**9, "t": 10**12}


def with_counts(row: RunRow) -> RunRow:
    """The row with blank counts that others leave no choice for, or that its name states."""
    row = _with_degrees(row)
    row = replace(row, precision=row.precision or _sixteen_bits(row))
    return replace(row, n_layers=row.n_layers or _layers(row))


def _with_degrees(row: RunRow) -> RunRow:
    """GPUs from the degrees; `dp` without what its framework counts inside it.

    Some count cp's ranks among dp's, DeepSpeed and others ep's beside them, some all GPUs of one stage.
    """
    inner, cp, ep = (row.tp or 1) * (row.pp or 1), row.cp or 1, row.ep or 1
    if row.n_gpus is None:
        return replace(row, n_gpus=inner * cp * row.dp if row.dp else None)
    if row.dp is None or row.n_gpus == inner * cp * row.dp or row.n_gpus % (inner * cp):
        return row
    counted_otherwise = {inner * row.dp, inner * row.dp * ep, inner * row.dp * ep * cp}
    return replace(row, dp=None) if row.n_gpus in counted_otherwise else row


def _sixteen_bits(row: RunRow) -> str:
    """What mixed precision means on the row's GPU: bf16 where it has units for it."""
    return "bf16" if not row.gpu or Device.load(row.gpu).peak("bf16") else "fp16"


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
