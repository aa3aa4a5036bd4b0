"""ZeRO++: what quantisation and a second copy of the parameters change of what DeepSpeed's stage 3 sends.

arXiv 2306.10209, table 1: between nodes M + M + M of ZeRO-3 become M/2 + 0 + M/4. The scales, which the table leaves out,
are counted here. DeepSpeed 0.18: runtime/zero/partition_parameters.py (CUDAQuantizer), runtime/comm/coalesced_collectives.py
(all_to_all_quant_reduce).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Final

from simulator.base.kernels import DTYPE_BYTES, Stream
from simulator.spec.plan import Plan
from simulator.work.script.sharding import Shape
from simulator.work.script.unit_comm import Hop, UnitComm

SCALE_BYTES: Final = 4
BLOCK_NUMEL: Final = 8000  # elements that share a scale at most: CUDAQuantizer.target_group_size


def quantised_bytes(numel: int) -> int:
    """Bytes of one rank's int8 part and its scales."""
    return numel + -(-numel // BLOCK_NUMEL) * SCALE_BYTES


def with_zeropp(comm: UnitComm, shapes: tuple[Shape, ...], plan: Plan, node_ranks: int) -> UnitComm:
    """What a unit sends under the plan's ZeRO++; node_ranks: of the ranks that shard, those on one node."""
    zeropp = plan.deepspeed.zeropp
    if not zeropp.any or comm.all_gather_forward_bytes == 0:
        return comm
    size, ranks = DTYPE_BYTES[plan.compute_dtype], comm.backward_gather_ranks
    numel, near = comm.all_gather_forward_bytes // size, zeropp.secondary_ranks
    again = near if near > 1 else ranks
    copy = Stream(op="copy", read_bytes=numel // near * size, write_bytes=numel // near * size)
    comm = replace(
        comm,
        all_gather_forward_bytes=_gathered(numel, ranks, plan),
        all_gather_backward_bytes=_gathered(numel, again, plan),
        backward_gather_ranks=again,
        gather_forward_kernels=(*_gather_passes(numel, ranks, plan), *((copy,) if near > 1 else ())),
        gather_backward_kernels=_gather_passes(numel, again, plan),
    )
    return _two_hops(comm, shapes, plan, ranks, node_ranks) if zeropp.quantized_gradients else comm


def _gathered(numel: int, ranks: int, plan: Plan) -> int:
    part = -(-numel // ranks)
    return ranks * (
        quantised_bytes(part) if plan.deepspeed.zeropp.quantized_weights else part * DTYPE_BYTES[plan.compute_dtype]
    )


def _gather_passes(numel: int, ranks: int, plan: Plan) -> tuple[Stream, ...]:
    """The rank's part becomes int8, and what was gathered 16 bits again."""
    if not plan.deepspeed.zeropp.quantized_weights:
        return ()
    size, part = DTYPE_BYTES[plan.compute_dtype], -(-numel // ranks)
    narrow = quantised_bytes(part)
    return (
        Stream(op="quantise", read_bytes=part * size, write_bytes=narrow),
        Stream(op="quantise", read_bytes=ranks * narrow, write_bytes=numel * size),
    )


def _two_hops(comm: UnitComm, shapes: tuple[Shape, ...], plan: Plan, ranks: int, node_ranks: int) -> UnitComm:
    """Matrices: int4 to the ranks of the node, their sum as int4 to those elsewhere. The rest is scattered as before.

    A matrix must divide by twice the ranks. Each is sent alone, its scales too.
    """
    size = DTYPE_BYTES[plan.compute_dtype]
    sent = tuple(shape for shape in shapes if len(shape) > 1 and prod(shape) % (2 * ranks) == 0)
    rest = [prod(shape) for shape in shapes if shape not in sent]
    if not sent:
        return comm
    numel = sum(map(prod, sent))
    int4 = numel // 2 + sum(max(*shape[:2], ranks) for shape in sent) * SCALE_BYTES
    far_ranks = max(1, ranks // node_ranks)
    int4_far, wide_far = int4 // node_ranks, numel // node_ranks * size
    adds = Stream(op="elementwise", read_bytes=2 * wide_far, write_bytes=wide_far * max(1, far_ranks - 1) // far_ranks)
    count = 2 * len(sent)
    hops = (
        Hop(
            kernels=(Stream(op="quantise", read_bytes=numel * size, write_bytes=int4, launches=len(sent)),),
            kind="all_to_all", role="shard_near", size_bytes=int4, count=count,
        ),
        Hop(
            kernels=(Stream(op="quantise", read_bytes=int4, write_bytes=int4_far, launches=len(sent)),),
            kind="all_to_all", role="shard_far", size_bytes=int4_far, count=count,
        ),
        Hop(
            kernels=(Stream(op="quantise", read_bytes=int4_far, write_bytes=wide_far, launches=len(sent)), adds),
            kind="reduce_scatter", role="shard", size_bytes=sum(rest) * size, count=max(1, len(rest)),
        ),
    )  # fmt: skip
    return replace(comm, reduce_scatter_bytes=0, gradient_kernels=comm.gradient_kernels[:1], hops=hops)
