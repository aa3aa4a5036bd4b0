"""What a row measured, in SI: step seconds from whatever the table's metric was, bytes from its memory figure."""

from __future__ import annotations

import re
from typing import Literal

from simulator.backtest.frameworks import FlopConvention
from simulator.readers.runs_table import RunRow

MemoryFigure = Literal["allocated", "reserved", "used"]

_CLUSTER_TOKENS = re.compile(r"\bcluster tokens/s=([0-9]+)")

# Which of the three predicted figures a memory metric is held against, and the bytes of its unit.
MEMORY_FIGURES: dict[str, tuple[MemoryFigure, int]] = {
    "peak_allocated_gib": ("allocated", 2**30),
    "peak_reserved_gib": ("reserved", 2**30),
    "nvidia_smi_used_gb": ("used", 10**9),
    "gpu_memory_gb": ("used", 10**9),
}


class NoStepTimeError(Exception):
    """The row's metric cannot be turned into seconds; the message says why."""


def step_seconds(row: RunRow, num_devices: int, convention: FlopConvention | None) -> float | None:
    """Seconds a step; None if the row has no metric. Raises NoStepTimeError."""
    if row.metric is None or row.value is None:
        return None
    if row.metric == "step_time_s":
        return row.value
    if row.global_batch is None:
        raise NoStepTimeError(f"global_batch is blank, and {row.metric} needs it")
    if row.metric == "samples_per_s":
        return row.global_batch / row.value
    if row.seq_len is None:
        raise NoStepTimeError(f"seq_len is blank, and {row.metric} needs it")
    tokens = row.global_batch * row.seq_len
    if row.metric == "tokens_per_s":
        return tokens / row.value
    if row.metric == "tokens_per_s_per_gpu":
        return tokens / _cluster_tokens_per_s(row, row.value, num_devices)
    return _model_flop(row, tokens, convention) / (row.value * 1e12 * num_devices)


def _cluster_tokens_per_s(row: RunRow, per_gpu: float, num_devices: int) -> float:
    """The cluster's figure from the notes where it is the same number with more digits, else per GPU × GPUs."""
    noted = _CLUSTER_TOKENS.search(row.notes)
    if noted and abs(int(noted[1]) / num_devices - per_gpu) <= 1:
        return float(noted[1])
    return per_gpu * num_devices


def _model_flop(row: RunRow, tokens: int, convention: FlopConvention | None) -> float:
    """FLOP a step as the framework's own TFLOP/s count them.

    full_attention: 6 per matmul weight and token, plus 12 L d s for the full square of attention (MaxText until
    2025-07, github.com/AI-Hypercomputer/maxtext/pull/1988; Megatron's formula without recompute).
    hardware_2021: arXiv 2104.04473 eq. 3, recompute counted: 96 B s l h² (1 + s/6h + V/16lh).
    """
    if convention is None:
        raise NoStepTimeError(f"no written convention says what the TFLOP/s of {row.framework!r} count")
    sizes = (row.n_layers, row.d_model, row.n_heads, row.d_ff, row.vocab, row.seq_len)
    if None in sizes:
        raise NoStepTimeError("the model's sizes are not complete, and TFLOP/s need them")
    l, h, heads, f, v, s = (x or 0 for x in sizes)  # noqa: E741  the papers' letters
    if convention == "hardware_2021":
        return 96 * tokens * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    kv = (row.n_kv_heads or heads) * h // heads
    weights = l * (2 * h * h + 2 * h * kv + (3 if row.mlp_kind == "swiglu" else 2) * h * f) + v * h
    return float(tokens * (6 * weights + 12 * l * h * s))


def memory_bytes(row: RunRow) -> int | None:
    """Measured bytes of one GPU; None where there is no figure (an `oom` row measured only that it did not fit)."""
    if row.mem_metric is None or row.mem_value is None or row.mem_metric == "oom":
        return None
    return round(row.mem_value * MEMORY_FIGURES[row.mem_metric][1])
