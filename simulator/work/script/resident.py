"""Bytes of tensors that stay on a GPU between steps: what implementations have in common."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.optimizers import OPTIMIZERS, matrix_state
from simulator.work.parameters import is_matrix
from simulator.work.script.sharding import pieces, shard_ranks


def torch_resident(
    stored: Sequence[int], stepped: Sequence[int], buckets: list[int], plan: Plan, states: list[int] | None = None
) -> dict[str, list[int]]:
    """Of torch's own implementations: parameters in the master dtype, and the state of those that the rank steps.

    stored, stepped: elements of each tensor. states: bytes of the optimizer's tensors, where they hang on shapes.
    """
    master = DTYPE_BYTES[plan.precision.master]
    made = {
        numel: [*(optimizer_tensors(numel, plan) if states is None else ()), *_outer_tensors(numel, plan)]
        for numel in dict.fromkeys(stepped)
    }
    return {
        "parameters": [numel * master for numel in stored],
        "gradients": [],
        "optimizer_state": [size for numel in stepped for size in made[numel]] + (states or []),
        "buckets": buckets,
    }


def _outer_tensors(numel: int, plan: Plan) -> list[int]:
    """DiLoCo's outer optimizer: where replicas last agreed, and its momentum."""
    outer = plan.sync_every_steps > 1 and plan.outer_optimizer == "nesterov"
    return [numel * DTYPE_BYTES[plan.precision.master]] * 2 if outer else []


def optimizer_tensors(numel: int, plan: Plan) -> list[int]:
    """Bytes of the state tensors of one parameter of `numel` elements. The fused optimizer keeps its step on the GPU."""
    found = OPTIMIZERS[plan.optimizer.kind]
    if plan.optimizer.kind == "adafactor":
        return [numel * 4]  # a vector's second moment is not factored
    counted = found.steps and plan.optimizer.impl == "fused"
    return found.on_gpu(numel, DTYPE_BYTES[plan.optimizer.dtype]) + ([4] if counted else [])


def shaped_states(model: Model, plan: Plan) -> list[int]:
    """The same of all whole parameters, where it hangs on their shapes."""
    master, size = DTYPE_BYTES[plan.precision.master], DTYPE_BYTES[plan.optimizer.dtype]
    kind, found = plan.optimizer.kind, list[int]()
    for name, shapes in pieces(model, plan):
        for shape in shapes:
            if plan.optimizer.wide_embedding and name == "embedding":
                found += OPTIMIZERS[kind].wide(prod(shape))
                continue
            factored = len(shape) > 1 if kind == "adafactor" else OPTIMIZERS[kind].matrices and is_matrix(name, shape)
            states = matrix_state(kind, shape, plan.optimizer.galore_rank, size, master) if factored else None
            found += optimizer_tensors(prod(shape), plan) if states is None else states
    return found


def stepped_numels(model: Model, plan: Plan) -> list[int]:
    """Elements of the parameters that the fullest rank steps where all ranks hold all: its part under ZeRO-1, or all."""
    stored = [prod(shape) for _, shapes in pieces(model, plan) for shape in shapes]
    return _largest_part(stored, shard_ranks(plan)) if plan.zero == 1 else stored


def _largest_part(numels: list[int], ranks: int) -> list[int]:
    """ZeRO-1 of torch gives whole parameters away, largest first, to the rank that has least; the fullest rank's part."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for numel in sorted(numels, reverse=True):
        rank = sizes.index(min(sizes))
        parts[rank].append(numel)
        sizes[rank] += numel
    return parts[sizes.index(max(sizes))]
