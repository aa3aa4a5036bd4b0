"""DDP's communication hooks: what travels of a bucket, and the passes over it.

torch 2.13 `ddp_comm_hooks/default_hooks.py` (16-bit buckets) and `powerSGD_hook.py`; PowerSGD: arXiv 1905.13727, where M is a
gradient of n x m elements, P and Q its factors of n x r and m x r.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Final

from simulator.base.kernels import DTYPE_BYTES, Dtype, Gemm, Kernel, Stream
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.script.sharding import Shape, buckets, numel_of
from simulator.work.script.unit_comm import Hop

# Below so many columns a product with a factor is limited by reading M: cuBLAS runs it as a matrix-vector product or in
# pieces, and no tile of a plain product is that narrow.
NARROW: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """A bucket under PowerSGD: its matrices as (n, m, r), and elements of what is sent whole."""

    matrices: tuple[tuple[int, int, int], ...]
    whole_numel: int

    @property
    def p_numel(self) -> int:
        return sum(n * r for n, _, r in self.matrices)

    @property
    def q_numel(self) -> int:
        return sum(m * r for _, m, r in self.matrices)

    @property
    def matrix_numel(self) -> int:
        return sum(n * m for n, m, _ in self.matrices)


def compressed(shapes: Iterable[Shape], plan: Plan) -> Compressed:
    """What PowerSGD makes of a bucket: a matrix is worth it where (n + m) r times the rate is less than n m."""
    matrices, rest = [], 0
    for shape in shapes:
        n, m = shape[0], prod(shape[1:])
        r = min(n, m, plan.ddp.comm_hook.rank)
        if (n + m) * r * plan.ddp.comm_hook.min_compression_rate < n * m:
            matrices.append((n, m, r))
        else:
            rest += n * m
    return Compressed(matrices=tuple(matrices), whole_numel=rest)


def hook_hops(filled: tuple[tuple[Shape, ...], ...], plan: Plan) -> tuple[Hop, ...]:
    """Instead of an all-reduce of the buckets that a piece of the model fills; none where the plan has no hook."""
    numel = sum(prod(shape) for bucket in filled for shape in bucket)
    if numel == 0 or plan.num_devices == 1:
        return ()
    if plan.ddp.comm_hook.kind == "powersgd":
        return tuple(hop for bucket in filled for hop in _powersgd(compressed(bucket, plan), plan))
    wide, narrow = DTYPE_BYTES[plan.precision.master], DTYPE_BYTES[plan.gradient_dtype]
    if wide == narrow:
        return ()
    count = len(filled)
    cast = Stream(op="cast", read_bytes=numel * wide, write_bytes=numel * narrow, launches=count)
    divide = Stream(op="elementwise", read_bytes=numel * narrow, write_bytes=numel * narrow, launches=count)
    back = Stream(op="widen", read_bytes=numel * narrow, write_bytes=numel * wide, launches=count, numel=numel)
    return (
        Hop(kernels=(cast, divide), kind="all_reduce", role="replicate", size_bytes=numel * narrow, count=count),
        Hop(kernels=(back,)),
    )


def hook_tensors(model: Model, plan: Plan) -> list[int]:
    """Bytes of what PowerSGD keeps from step to step: each bucket's error, and its factors under a warm start."""
    hook, size = plan.ddp.comm_hook, DTYPE_BYTES[plan.precision.master]
    if hook.kind != "powersgd":
        return []
    sizes: list[int] = []
    for _, shapes, _ in buckets(model, plan):
        bucket = compressed(shapes, plan)
        sizes += [numel_of(shapes) * size] if hook.error_feedback else []
        sizes += [bucket.p_numel * size, bucket.q_numel * size] if hook.warm_start else []
    return sizes


def _powersgd(bucket: Compressed, plan: Plan) -> tuple[Hop, ...]:
    """Whole tensors, then P = M Q, then Q = Mᵀ P: three all-reduces in turn, and M = P Qᵀ at the end.

    The hook waits for the device at its end (`torch.cuda.synchronize`), so nothing of the backward runs beside it.
    """
    size, hook = DTYPE_BYTES[plan.precision.master], plan.ddp.comm_hook
    total = (bucket.matrix_numel + bucket.whole_numel) * size
    full, factors = bucket.whole_numel * size, (bucket.p_numel * size, bucket.q_numel * size)
    copy = Stream(op="copy", read_bytes=full, write_bytes=full)
    feedback: tuple[Kernel, ...] = ()
    if hook.error_feedback:
        feedback = (
            Stream(op="elementwise", read_bytes=2 * total, write_bytes=total),
            Stream(op="copy", read_bytes=total, write_bytes=total),
        )
    columns_q, columns_p = [(m, r) for _, m, r in bucket.matrices], [(n, r) for n, _, r in bucket.matrices]
    before = (*feedback, copy, *_orthogonalised(columns_q, size), *_products(bucket, plan, "p"))
    last: tuple[Kernel, ...] = _products(bucket, plan, "m")
    if hook.error_feedback:
        last = (*last, Stream(op="elementwise", read_bytes=2 * total, write_bytes=total))
    return (
        Hop(kernels=before, kind="all_reduce", role="replicate", size_bytes=full, blocking=True),
        Hop(kernels=(copy,), kind="all_reduce", role="replicate", size_bytes=factors[0], blocking=True),
        Hop(
            kernels=(*_orthogonalised(columns_p, size), *_products(bucket, plan, "q")),
            kind="all_reduce", role="replicate", size_bytes=factors[1], blocking=True,
        ),
        Hop(kernels=last, blocking=True),
    )  # fmt: skip


def _orthogonalised(columns: list[tuple[int, int]], size: int) -> tuple[Kernel, ...]:
    """Gram-Schmidt: each of r columns is normalised and taken out of those behind it, r (r + 1) / 2 visits.

    From 3 columns of fp32 on torch takes a QR decomposition of LAPACK's kind; it is priced alike.
    """
    visited = sum(rows * r * (r + 1) // 2 for rows, r in columns) * size
    count = sum(6 * r for _, r in columns)
    return (Stream(op="elementwise", read_bytes=2 * visited, write_bytes=visited, launches=count),) if visited else ()


def _products(bucket: Compressed, plan: Plan, of: str) -> tuple[Kernel, ...]:
    """P = M Q, Q = Mᵀ P, or M = P Qᵀ of every matrix, in the gradients' dtype."""
    size = DTYPE_BYTES[plan.precision.master]
    dtype: Dtype = "tf32" if plan.precision.compute == "tf32" and size == 4 else plan.precision.master
    kernels: list[Kernel] = []
    for n, m, r in bucket.matrices:
        sizes = {"p": (n, r, m), "q": (m, r, n), "m": (n, m, r)}[of]
        if r >= NARROW:
            kernels.append(Gemm(m=sizes[0], n=sizes[1], k=sizes[2], dtype=dtype))
            continue
        matrix, result = n * m * size, sizes[0] * sizes[1] * size
        factor = {"p": m * r, "q": n * r, "m": (n + m) * r}[of] * size
        read = factor if of == "m" else matrix + factor
        kernels.append(Stream(op="elementwise", read_bytes=read, write_bytes=result))
    return tuple(kernels)
