"""What one piece of the model sends: the record that sharding makes and compression changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from simulator.base.kernels import Kernel, Stream
from simulator.work.script.sharding import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """Passes over memory, then `count` collectives that carry `size_bytes` together; none where that is 0.

    role: whose group, as `simulator.play.lower.builder.Fabric.axis` names it. blocking: the host waits for it, and the backward
    for the host.
    """

    kernels: tuple[Kernel, ...] = ()
    kind: str = ""
    role: str = ""
    size_bytes: int = 0
    count: int = 1
    blocking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitComm:
    """What one piece of the model (embedding, layer0.., head) sends, in bytes of the full tensor; 0 = nothing.

    all_gather_forward_bytes, all_gather_backward_bytes: parameters, in every micro-batch. FSDP's root unit is gathered
    before the embedding and reduced after it.
    reduce_scatter_bytes, all_reduce_bytes: gradients, in every micro-batch or the last one (Plan.syncs_every_micro_batch);
    all_reduce_bytes under HSDP is the shard that travels between replicas. num_buckets, num_gathers: collectives that gradients and parameters are split into.
    parameter_gather_bytes: updated parameters, once a step; broadcasts: (bytes, calls) of what carries them where each owner
    broadcasts its own (torch's ZeRO-1, a tensor at a time), matrices apart from vectors; none where they are gathered.
    backward_gather_ranks: ranks of the backward's all-gather (smaller than dp_shard if reshard_after_forward is a number).
    *_kernels: full-size passes over memory around the collectives, on the compute stream. keep_kernels, add_kernels: for
    gradients that add up whole over micro-batches, in the first one and in later ones. experts: what its routed experts
    send in their own groups, without passes.
    """

    unit: str
    all_gather_forward_bytes: int = 0
    all_gather_backward_bytes: int = 0
    reduce_scatter_bytes: int = 0
    all_reduce_bytes: int = 0
    num_buckets: int = 1
    num_gathers: int = 1
    parameter_gather_bytes: int = 0
    broadcasts: tuple[tuple[int, int], ...] = ()
    backward_gather_ranks: int = 1
    gather_forward_kernels: tuple[Stream, ...] = ()
    gather_backward_kernels: tuple[Stream, ...] = ()
    gradient_kernels: tuple[Stream, ...] = ()
    keep_kernels: tuple[Stream, ...] = ()
    add_kernels: tuple[Stream, ...] = ()
    experts: UnitComm | None = None
    hops: tuple[Hop, ...] = ()
    late_all_reduce: bool = False


def last_of(root: UnitComm, head: UnitComm) -> UnitComm:
    """Communication of the last unit of a stage with the head and without the embedding: the head's, or FSDP's root, which contains it."""
    own = head.reduce_scatter_bytes or head.all_reduce_bytes or head.parameter_gather_bytes or head.hops
    return head if own else replace(root, unit=head.unit)


def whole_broadcasts(shapes: tuple[Shape, ...], element_bytes: int) -> tuple[tuple[int, int], ...]:
    """A call a tensor: (bytes, calls) of matrices, and of vectors, where there are any."""
    kinds = ([prod(one) for one in shapes if (len(one) > 1) == matrix] for matrix in (True, False))
    return tuple((sum(numels) * element_bytes, len(numels)) for numels in kinds if numels)
