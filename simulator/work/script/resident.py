"""Bytes of tensors that stay on a GPU between steps: what implementations have in common."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.script.sharding import pieces, shard_ranks

MIN_8BIT_NUMEL: Final = 4096  # bitsandbytes keeps 32-bit state for smaller tensors
QUANT_BLOCK_NUMEL: Final = 256  # bitsandbytes: one fp32 scale a block


def torch_resident(
    stored: Sequence[int], stepped: Sequence[int], buckets: list[int], plan: Plan
) -> dict[str, list[int]]:
    """Of torch's own implementations: parameters in the master dtype, and the state of those that the rank steps.

    stored, stepped: elements of each tensor.
    """
    master = DTYPE_BYTES[plan.precision.master]
    return {
        "parameters": [numel * master for numel in stored],
        "gradients": [],
        "optimizer_state": [
            size for numel in stepped for size in (*optimizer_tensors(numel, plan), *_outer_tensors(numel, plan))
        ],
        "buckets": buckets,
    }


def _outer_tensors(numel: int, plan: Plan) -> list[int]:
    """DiLoCo's outer optimizer: where replicas last agreed, and its momentum."""
    outer = plan.sync_every_steps > 1 and plan.outer_optimizer == "nesterov"
    return [numel * DTYPE_BYTES[plan.precision.master]] * 2 if outer else []


def optimizer_tensors(numel: int, plan: Plan) -> list[int]:
    """Bytes of the state tensors of one parameter of `numel` elements. The fused optimizer keeps its step on the GPU."""
    step = [4] if plan.optimizer.impl == "fused" and plan.optimizer.kind in ("adam", "adamw") else []
    match plan.optimizer.kind:
        case "sgd":
            return []
        case "sgd_momentum":
            return [numel * DTYPE_BYTES[plan.optimizer.dtype]]
        case "adam8bit" if numel >= MIN_8BIT_NUMEL:
            return [numel, numel, *[-(-numel // QUANT_BLOCK_NUMEL) * 4] * 2]
        case "adam8bit":
            return [numel * 4] * 2
        case _:
            return [numel * DTYPE_BYTES[plan.optimizer.dtype]] * 2 + step


def stepped_numels(model: Model, plan: Plan) -> list[int]:
    """Elements of the parameters that the fullest rank steps where all ranks hold all: its part under ZeRO-1, or all."""
    stored = [prod(shape) for _, shapes in pieces(model, plan) for shape in shapes]
    return _largest_part(stored, shard_ranks(plan)) if plan.zero == 1 else stored


def _largest_part(numels: list[int], ranks: int) -> list[int]:
    """ZeRO-1 of torch gives whole parameters away, largest first, to the rank that has least; the fullest rank's part."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for numel in sorted(numels, reverse=True):
        rank = held.index(min(held))
        parts[rank].append(numel)
        held[rank] += numel
    return parts[held.index(max(held))]
