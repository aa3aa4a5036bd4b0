"""The optimizer's kernels on one rank's parameters. Bytes a parameter: fused AdamW 28 in fp32, foreach 80."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from simulator.base.kernels import DTYPE_BYTES, Dtype, Gemm, Kernel
from simulator.spec.plan import Plan
from simulator.spec.plan.optimizers import MUON, NEWTON_SCHULZ_STEPS, ONE_BIT_LAMB, OPTIMIZERS, Pass
from simulator.work.ops.graph import conversion, stream
from simulator.work.parameters import is_matrix

# DeepSpeed's step (runtime/zero/stage3.py): gradients to fp64, their norm, made flat; scaled, once fp32. Bytes read and written
_ENGINE = (2, 8), (8, 0), (2, 2), (4, 4)
_TENSORS_PER_LAUNCH = 32  # multi-tensor kernels take their pointers by value: some tens of tensors a launch
Pieces = Sequence[tuple[str, Sequence[tuple[int, ...]]]]  # shapes of what a rank trains, by part of the model


def optimizer_kernels(numel: int, num_tensors: int, plan: Plan, pieces: Pieces = ()) -> tuple[Kernel, ...]:
    """Kernels of one optimizer step over `numel` parameters in `num_tensors` tensors on one rank.

    foreach and loop make the same passes; fused makes one. 8-bit Adam is always fused and keeps two states of a byte
    (plus an fp32 scale each 256). With 16-bit working copies beside the master weights (DeepSpeed, Megatron) the
    gradients are widened before and the copies written after. pieces: for optimizers that step matrices their own way.
    """
    own: tuple[Kernel, ...] = ()
    if OPTIMIZERS[plan.optimizer.kind].matrices:
        shapes = Counter(shape for name, found in pieces for shape in found if is_matrix(name, shape))
        own = tuple(_matrix_kernels(shapes, plan))
        numel -= sum(prod(shape) * count for shape, count in shapes.items())
        num_tensors -= shapes.total()
    return (*own, *_elementwise(numel, num_tensors, plan))


def clip_kernels(numel: int, num_tensors: int, plan: Plan) -> tuple[Kernel, ...]:
    """The norm of so many gradients, and their scale, in the dtype that the optimizer reads (docs/background/ops.md)."""
    launches, size = -(-num_tensors // _TENSORS_PER_LAUNCH), numel * DTYPE_BYTES[plan.precision.master]
    return stream("reduce", size, 4 * num_tensors, launches), stream("optimizer", size, size, launches)


def _elementwise(numel: int, num_tensors: int, plan: Plan) -> Iterator[Kernel]:
    """A pass over all parameters after the other."""
    found = OPTIMIZERS[plan.optimizer.kind]
    fused = plan.optimizer.impl == "fused" or not found.foreach
    passes, by_layer = found.fused if fused else found.foreach, plan.deepspeed.one_bit.kind == "lamb"
    single = found.loops or plan.optimizer.impl == "loop" or by_layer
    launches = num_tensors if single else -(-num_tensors // _TENSORS_PER_LAUNCH)
    copies = plan.traits.master_copy and plan.compute_dtype != plan.precision.master
    if copies and plan.gradient_dtype != plan.precision.master:
        for read, write in _ENGINE if plan.traits.zero_engine and plan.zero else ():
            yield stream("optimizer", numel * read, numel * write, launches)
        yield conversion(numel, plan.gradient_dtype, plan.precision.master, launches)
    narrow = plan.optimizer.kind == "adafactor" and plan.precision.master != "fp32"
    for _ in range(2 if narrow else 0):  # gradient and parameter, in fp32
        yield conversion(numel, plan.precision.master, "fp32", launches)
    yield from _passes(ONE_BIT_LAMB if by_layer else passes, numel, launches, plan)
    if narrow:
        yield conversion(numel, "fp32", plan.precision.master, launches)
    if copies:
        yield conversion(numel, plan.precision.master, plan.compute_dtype, launches)


def _passes(passes: Iterable[Pass], numel: int, launches: int, plan: Plan) -> Iterator[Kernel]:
    master, state = DTYPE_BYTES[plan.precision.master], DTYPE_BYTES[plan.optimizer.dtype]
    size = {"p": master, "g": master, "m": state, "v": state, "t": state, "f": 4, "h": 2, "8": 1, "4": 0.5}
    if plan.optimizer.kind == "adafactor":
        size |= {"p": 4, "g": 4}
    for read, write in passes:
        reads, writes = (int(numel * sum(size[x] for x in one)) for one in (read, write))
        yield stream("optimizer", reads, writes, launches)


def _matrix_kernels(shapes: Counter[tuple[int, ...]], plan: Plan) -> Iterator[Kernel]:
    """Of each matrix of a layer; a stack of experts is as many."""
    for shape, count in shapes.items():
        *many, rows, columns = shape
        short, long = sorted((rows, columns))
        number = count * prod(many)
        if plan.optimizer.kind == "muon":
            yield from _muon(short, long, number, plan)
        else:
            yield from _galore(short, long, number, plan)


def _muon(short: int, long: int, number: int, plan: Plan) -> Iterator[Kernel]:
    """Newton-Schulz: X Xᵀ, its square, and their polynomial times X, of the moment in bf16 with the shorter side first."""
    numel, steps = short * long * number, NEWTON_SCHULZ_STEPS
    yield from _passes(MUON, numel, number, plan)
    if plan.precision.master == "fp32":
        yield conversion(numel, "fp32", "bf16", number)
    yield stream("optimizer", 4 * numel, 2 * numel, 2 * number)  # norm; division by it
    for _ in range(steps * number):
        yield Gemm(m=short, n=short, k=long, dtype="bf16", layout="tn")
        yield Gemm(m=short, n=short, k=short, dtype="bf16", layout="nn")
        yield Gemm(m=short, n=long, k=short, dtype="bf16", layout="nn")


def _galore(short: int, long: int, number: int, plan: Plan) -> Iterator[Kernel]:
    """The gradient projected, Adam on that, and its step projected back, scaled and added."""
    rank = min(plan.optimizer.galore_rank, short)
    products: Dtype = plan.precision.master
    for _ in range(number):
        yield Gemm(m=long, n=rank, k=short, dtype=products)
        yield Gemm(m=long, n=short, k=rank, dtype=products)
    yield from _passes(OPTIMIZERS["galore"].fused[1:-1], long * rank * number, number, plan)
    yield from _passes((("mt", "t"),), long * rank * number, number, plan)
    yield from _passes((("g", "g"), ("pg", "p"), ("p", "p")), short * long * number, number, plan)
