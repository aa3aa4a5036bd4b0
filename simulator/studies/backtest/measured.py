"""What a row measured, in SI: step seconds from whatever the table's metric was, bytes from its memory figure."""

from __future__ import annotations

from typing import Final, Literal

from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.rows import FP8_RECIPES, FlopConvention, RunRow

MemoryFigure = Literal["allocated", "reserved", "used"]

# Which of the three predicted figures a memory metric is held against, and the bytes of its unit.
MEMORY_FIGURES: dict[str, tuple[MemoryFigure, int]] = {
    "peak_allocated_gib": ("allocated", 2**30),
    "peak_reserved_gib": ("reserved", 2**30),
    "peak_active_gib": ("allocated", 2**30),
    "max_gpu_ram_gb": ("reserved", 10**9),
    "nvidia_smi_used_gb": ("used", 10**9),
    "gpu_memory_gb": ("used", 10**9),
}

_UNITS: Final = {**dict.fromkeys(FP8_RECIPES, "fp8"), "nvfp4": "fp4"}  # whose peak an MFU is of


class NoStepTimeError(RefusedError):
    """The row's metric cannot be turned into seconds; the message says why."""

    def __init__(self, why: str) -> None:
        super().__init__((why, ""))
        self.kind = "metric"


def device_of(row: RunRow) -> Device:
    """The device of the machine that the row names, else of its GPU's name. Raises ClusterError."""
    return Cluster.load(row.machine).device if row.machine else Device.load(row.gpu)


def step_seconds(row: RunRow, num_devices: int, convention: FlopConvention, model: Model) -> float | None:
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
        return tokens / (row.value * num_devices)
    speed = row.value * (device_of(row).peak(_UNITS.get(row.precision, row.precision)) if row.metric == "mfu" else 1e12)
    return _model_flop(row, tokens, convention, model) / (speed * num_devices)


def _model_flop(row: RunRow, tokens: int, convention: FlopConvention, model: Model) -> float:
    """FLOP a step as the framework's own TFLOP/s count them.

    full_attention: 6 per matmul weight that a token passes, plus 12 L H C s for the full square of attention
    (arXiv 2204.02311, appendix B, which MFU is defined by; MaxText from 2024-05-08, commit 353fb837c, until 2025-07,
    github.com/AI-Hypercomputer/maxtext/pull/1988).
    half_attention_all_weights: 6 a parameter, the embedding's too, plus half the square (MaxText before 2024-05-08,
    maxtext_utils.py, calculate_tflops_training_per_device).
    hardware_2021: arXiv 2104.04473 eq. 3, recompute counted: 96 B s l h² (1 + s/6h + V/16lh).
    """
    s = row.seq_len or 0
    if convention == "hardware_2021":
        l, h, v = model.num_layers, model.d_model, model.vocab_size  # noqa: E741  the paper's letters
        return 96 * tokens * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    square = 12 * model.num_layers * model.num_heads * model.head_dim * s
    if convention == "half_attention_all_weights":
        return tokens * (6 * model.num_parameters + square / 2)
    return float(tokens * (6 * model.num_matmul_parameters + square))


def memory_bytes(row: RunRow) -> int | None:
    """Measured bytes of one GPU; None where there is no figure (an `oom` row measured only that it did not fit)."""
    if row.mem_metric is None or row.mem_value is None or row.mem_metric == "oom":
        return None
    return round(row.mem_value * MEMORY_FIGURES[row.mem_metric][1])
