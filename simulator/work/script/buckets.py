"""DDP's buckets: gradients that travel together, in the order in which the backward fills them."""

from __future__ import annotations

from math import prod
from typing import Final

from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.script.sharding import Shape, pieces

FIRST_BUCKET_BYTES: Final = 2**20  # DDP's first bucket is small so that communication starts early
DEFAULT_BUCKET_BYTES: Final = 25 * 2**20


def buckets(model: Model, plan: Plan) -> tuple[tuple[str, tuple[Shape, ...], str], ...]:
    """DDP's buckets as (name, shapes, piece that fills it), in the order of the backward.

    A bucket closes as soon as it holds its cap, so one parameter may exceed it. The first cap is 1 MiB, if the cap was
    left at its default.
    """
    size = DTYPE_BYTES[plan.precision.master]
    cap = FIRST_BUCKET_BYTES if plan.ddp.bucket_bytes == DEFAULT_BUCKET_BYTES else plan.ddp.bucket_bytes
    buckets: list[tuple[str, tuple[Shape, ...], str]] = []
    current: list[Shape] = []
    filled = 0
    name = ""
    for name, shapes in reversed(pieces(model, plan)):
        for shape in reversed(shapes):
            current.append(shape)
            filled += prod(shape) * size
            if filled >= cap:
                buckets.append((f"bucket{len(buckets)}", tuple(current), name))
                current, filled, cap = [], 0, plan.ddp.bucket_bytes
    if current:
        buckets.append((f"bucket{len(buckets)}", tuple(current), name))
    return tuple(buckets)
