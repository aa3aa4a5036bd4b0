"""Kernel sums against 19 steps of one H200 whose collectives returned at once. Nothing here was fitted.

    python experiments/check_steps.py

One line a step: measured and summed milliseconds, the error, and the sum by category. Host time and gaps between kernels
are left out, so steps of small models, which wait for the host, come out short.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from simulator.calibration import Calibration, Timer
from simulator.device import Device
from simulator.kernels import Kernel, Stream
from simulator.model import Model
from simulator.ops import build_blocks, optimizer_kernels, recompute_ops
from simulator.plan import Plan
from simulator.stack import Stack

STEPS = Path(__file__).resolve().parent / "measured" / "h200-2026-11-20" / "plans.jsonl"
HOST_BOUND_TOKENS = 1024  # fewer tokens a rank leave the device waiting for the host
MODELS = {  # layers, width, heads, key/value heads, feed-forward, vocabulary; as the samples' README names them
    "l1B": (16, 2048, 32, 8, 8192, 128256),
    "l3B": (28, 3072, 24, 8, 8192, 128256),
    "l8B": (32, 4096, 32, 8, 14336, 128256),
    "l8B_v1k": (32, 4096, 32, 8, 14336, 1024),
    "l13B_v32k": (40, 5120, 40, 40, 13824, 32000),
    "l70B_8L": (8, 8192, 64, 8, 28672, 128256),
}
SHAPE = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "vocab_size")


def sums(row: dict[str, Any], calibration: Calibration, device: Device) -> dict[str, float]:
    """Seconds by category of one measured step."""
    model = Model.model_validate({"name": row["model"]} | dict(zip(SHAPE, MODELS[row["model"]], strict=True)))
    sharded = row["strategy"] in ("fsdp2", "hsdp")
    stack = _stack(row, autocast=not sharded)
    plan = _plan(row, sharded=sharded)
    blocks, timer = build_blocks(model, stack, plan), calibration.timer(device, stack.attention)
    total: defaultdict[str, float] = defaultdict(float)
    for block, times in ((blocks.embedding, 1), (blocks.layer, model.num_layers), (blocks.head, 1)):
        for op in block.ops:
            total[op.category] += times * _seconds(timer, *op.forward, *op.backward)
    again = recompute_ops(blocks.layer, plan, stack)
    total["recompute"] += model.num_layers * _seconds(timer, *(kernel for op in again for kernel in op.forward))
    parameters = row["num_parameters"]
    if sharded:
        total["copies"] += _seconds(timer, *_copies(parameters, gathers=2 if row["reshard"] else 1))
    shards = (row["shards"] or row["world"]) if sharded else 1
    optimizer = _seconds(timer, *optimizer_kernels(parameters // shards, 300, plan))
    return {name: seconds * row["accum"] for name, seconds in total.items()} | {"optimizer": optimizer}


def _stack(row: dict[str, Any], *, autocast: bool) -> Stack:
    """Eager or compiled torch 2.11; attention as measured there: cuDNN's kernel, keys and values repeated."""
    stack = Stack.load("torch-2.11-compiled" if row["compile"] else "torch-2.11-eager")
    attention = stack.attention.model_copy(update={"kernel": "cudnn", "expand_kv_heads": True})
    return stack.model_copy(update={"attention": attention, "autocast": autocast})


def _plan(row: dict[str, Any], *, sharded: bool) -> Plan:
    return Plan(
        dp_shard=row["world"] if sharded else 1,
        dp_replicate=1 if sharded else row["world"],
        zero=3 if sharded else 0,
        micro_batch_size=row["mb"],
        seq_len=row["seq"],
        num_micro_batches=row["accum"],
        recompute=row["ac"],
        optimizer_impl=row["opt"],
    )


def _copies(parameters: int, *, gathers: int) -> tuple[Kernel, ...]:
    """FSDP2: gathered bf16 parameters copied out, gradients packed from bf16 to fp32."""
    size = 2 * parameters
    out = Stream(op="copy", read_bytes=gathers * size, write_bytes=gathers * size)
    return out, Stream(op="copy", read_bytes=size, write_bytes=2 * size)


def _seconds(timer: Timer, *kernels: Kernel) -> float:
    return timer.kernels_s(kernels)


def main() -> None:
    """Print the table and its median."""
    calibration, device = Calibration.load("h200-sxm"), Device.load("h200-sxm")
    errors = []
    for row in map(json.loads, STEPS.read_text(encoding="utf-8").splitlines()):
        if "error" in row:
            continue
        parts = sums(row, calibration, device)
        total = sum(parts.values())
        error = total / row["step_s"] - 1
        if row["mb"] * row["seq"] > HOST_BOUND_TOKENS:
            errors.append(error)
        by = " ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in sorted(parts.items(), key=lambda p: -p[1]))
        print(f"{row['name'][:44]:44} {1e3 * row['step_s']:8.1f} {1e3 * total:8.1f} {100 * error:+6.1f} %  {by}")
    print(f"{len(errors)} steps not bound by the host: median {100 * statistics.median(errors):+.1f} %", end=", ")
    print(f"from {100 * min(errors):+.1f} to {100 * max(errors):+.1f} %")


if __name__ == "__main__":
    main()
