"""1-bit Adam, 1-bit LAMB and 0/1 Adam: what DeepSpeed sends instead of gradients once the variance no longer changes.

1-bit Adam: arXiv 2102.02888, algorithm 1; 1-bit LAMB: arXiv 2104.06069; 0/1 Adam: arXiv 2202.06009. Signs and one scale travel:
each rank sends the others their chunks, averages its own, and gathers all, with the errors of both compressions kept.
Passes over memory: DeepSpeed 0.8 runtime/comm/nccl.py, `compressed_allreduce`, operator by operator, in fp32.
"""

from __future__ import annotations

from functools import partial
from math import gcd, prod
from typing import Final

from simulator.base.kernels import Stream
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.script.sharding import pieces
from simulator.work.script.unit_comm import Hop

_SIZE: Final = 4  # errors and momenta are fp32, whatever the parameters are
# (reads, writes, launches) of one tensor, over its fp32 bytes. Before the first exchange: error added, norm, new error (sign,
# half-open to ±1, scaled, subtracted), sign, bits. Between: bits to ±1 of every rank's chunk, scaled, summed; the same
# compression of the sum. After: bits to ±1, scaled, copied back.
_WORKER: Final = (14.5, 10.3, 14)
_SERVER: Final = (4.3, 3.3, 6)
_RESULT: Final = (4.3, 4.3, 6)


def _tensors(model: Model, plan: Plan) -> list[int]:
    """Elements of what is compressed at once, padded to bytes of every rank: the flat master copy, or each tensor in fp32.

    16-bit training steps one flat tensor (DeepSpeed's FP16_Optimizer); LAMB flattens its momenta itself.
    """
    numels = [prod(shape) for _, shapes in pieces(model, plan) for shape in shapes]
    if plan.deepspeed.one_bit.kind == "lamb" or plan.compute_dtype != "fp32":
        numels = [sum(numels)]
    ranks = plan.dp_replicate
    unit = ranks * (8 * ranks // gcd(8, ranks))
    return [-(-numel // unit) * unit for numel in numels]


def compressed_sum(model: Model, plan: Plan) -> tuple[Hop, ...]:
    """The compressed all-reduce at the end of a step: signs by all-to-all, then gathered; the host waits for neither."""
    numels, ranks = _tensors(model, plan), plan.dp_replicate
    if ranks == 1:
        return ()
    total, count = sum(numels), len(numels)
    scales = 4 * ranks * count

    def passes(of: tuple[float, float, int], share: float = 1.0) -> Stream:
        read, write = (int(part * share * _SIZE * total) for part in of[:2])
        return Stream(op="elementwise", read_bytes=read, write_bytes=write, launches=of[2] * count)

    signs, sent = total // 8, partial(Hop, role="replicate", count=count, blocking=True)
    return (
        sent(kernels=(passes(_WORKER),), kind="all_to_all", size_bytes=signs),
        sent(kind="all_gather", size_bytes=scales),
        sent(kernels=(passes(_SERVER), passes(_WORKER, 1 / ranks)), kind="all_gather", size_bytes=signs),
        sent(kind="all_gather", size_bytes=scales),
        Hop(kernels=(passes(_RESULT),), blocking=True),
    )


def one_bit_states(model: Model, plan: Plan) -> list[int]:
    """Bytes of what is kept beside Adam's moments: a rank's error of its own, and of its chunk of the sum.

    0/1 Adam accumulates local steps; LAMB follows the variance that its ratios would have (`exp_avg_sq_fresh`).
    """
    kind, numels = plan.deepspeed.one_bit.kind, _tensors(model, plan)
    if kind == "none":
        return []
    errors = [size for numel in numels for size in (_SIZE * numel, _SIZE * numel // plan.dp_replicate)]
    further = 0 if kind == "adam" else 1
    return errors + [_SIZE * prod(shape) for _, shapes in pieces(model, plan) for shape in shapes] * further
