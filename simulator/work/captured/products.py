"""Products and attention of captured operators, by their shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, cast

from simulator.base.kernels import Attention, Dtype, Gemm, Kernel, Layout, Stated, Stream
from simulator.work.captured.tensors import CapturedTensor, tensors

# a barrier, a load of what another thread just wrote (L2) and one behind an index: 260 and 480 cycles (A100, H100: arXiv 2402.13499)
_STEP_S = 0.5e-6
_NARROWEST = 8  # columns of the smallest product that tensor cores take (mma.m16n8k16, PTX ISA)

Args = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """An operator's kernels and the category of the breakdown that they count in. known: a rule is about this operator.

    waits: the host, for their end.
    """

    category: str
    kernels: tuple[Kernel, ...]
    known: bool = True
    waits: bool = False


Rule = Callable[[Args, Args, list[CapturedTensor]], Priced]


def dtype_of(one: CapturedTensor) -> Dtype:
    """int8 products run at the speed of fp8."""
    narrow = {"int8": "fp8"}.get(one.dtype, one.dtype)
    return cast("Dtype", narrow if narrow in ("tf32", "bf16", "fp16", "fp8") else "fp32")


def _layout(a: CapturedTensor, b: CapturedTensor) -> Layout:
    """The names of cuBLAS for row-major inputs: y = x Wᵀ is tn, the data gradient nn, the weight gradient nt."""
    if a.is_transposed:
        return "nt"
    return "tn" if b.is_transposed else "nn"


def _product(a: CapturedTensor, b: CapturedTensor, **more: Any) -> Priced:  # noqa: ANN401
    m, k, n, times = a.shape[-2], a.shape[-1], b.shape[-1], 4 if a.dtype.startswith("complex") else 1
    gemm = Gemm(m=m, n=n, k=k, dtype=dtype_of(a), layout=_layout(a, b), batch=times * prod(a.shape[:-2]), **more)
    return Priced(category="gemm", kernels=(gemm,) if gemm.flop else ())


def product(first: int) -> Rule:
    """A product of the arguments from `first` on, or several of one shape; what comes before is added to it."""
    return lambda p, _, __: _product(p[first], p[first + 1])


def scaled_mm(p: Args, named: Args, _made: list[CapturedTensor]) -> Priced:
    """A product of fp8 operands. More scales than rows: one for each block of a row."""
    scale = next(tensors(dict(named).get("scale_a", p[2] if len(p) > 2 else None)), None)
    by_blocks = scale is not None and scale.numel > p[0].shape[-2]
    return _product(p[0], p[1], by_blocks=by_blocks)


def linear(p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
    """Rows times a weight's transposition."""
    x, w = p[0], p[1]
    rows = CapturedTensor(x.dtype, (prod(x.shape[:-1]), x.shape[-1]))
    return _product(rows, CapturedTensor(w.dtype, (w.shape[1], w.shape[0]), (1, w.shape[1])))


def distances(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """Of all pairs of points: one product of the points, each with its squared length and a one beside it; then roots (ATen, Distance.cpp)."""
    (m, k), n = p[0].shape[-2:], p[1].shape[-2]
    gemm = Gemm(m=m, n=n, k=k + 2, dtype=dtype_of(p[0]), layout="tn", batch=prod(p[0].shape[:-2]))
    root = Stream(op="elementwise", read_bytes=2 * made[0].num_bytes, write_bytes=2 * made[0].num_bytes, launches=2)
    return Priced(category="gemm", kernels=(gemm, root))


def each(flop: int) -> Rule:
    """So many FLOP for each number of a row and each result, or the bytes: what takes longer.

    2: rows times packed whole numbers, made floating point on the way. 3: distances of pairs in any norm (ATen, DistanceKernel.cu).
    """

    def rule(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
        moved = sum(one.num_bytes for one in (*tensors(p), *made))
        kernel = Stated(flop=flop * made[0].numel * p[0].shape[-1], num_bytes=moved, dtype=dtype_of(p[0]))
        return Priced(category="gemm" if flop == 2 else "elementwise", kernels=(kernel,))

    return rule


def pairs_backward(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """Each pair's share of each coordinate is written down, and the shares are summed (ATen, DistanceKernel.cu)."""
    both_ways = 1 if isinstance(p[2], CapturedTensor) else 2  # of pairs of one set, each point's
    shares = both_ways * p[0].numel * p[1].shape[-1] * p[1].item_bytes
    written = Stream(op="elementwise", read_bytes=sum(one.num_bytes for one in tensors(p)), write_bytes=shares)
    summed = Stream(op="reduce", read_bytes=shares, write_bytes=made[0].num_bytes)
    return Priced(category="elementwise", kernels=(written, summed))


def half_sparse(dense: int, dim: int) -> Rule:
    """A product with two of four numbers: tensor cores take twice as deep ones in their time (PTX ISA, mma.sp). dense, dim: where its depth stands."""

    def rule(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
        (*rows, n), k = made[0].shape, p[dense].shape[dim] // 2
        return Priced(category="gemm", kernels=(Gemm(m=prod(rows), n=n, k=k, dtype=dtype_of(p[dense]), layout="tn"),))

    return rule


def aligned(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """CTC: a block walks through its sequences a step after another, all labels at once (ATen, LossCTC.cu).

    Backward from the last to the first, then a pass over what both ways have found, and the scores.
    """
    back = len(made) == 1
    kernels: tuple[Kernel, ...] = (Stated(seconds=p[back].shape[0] * _STEP_S),)
    if back:
        read, gradient = 2 * p[6].num_bytes + p[1].num_bytes + made[0].num_bytes, made[0].num_bytes
        cleared = Stream(op="memset", read_bytes=0, write_bytes=gradient)
        kernels = cleared, *kernels, Stream(op="elementwise", read_bytes=read, write_bytes=gradient)
    return Priced(category="loss", kernels=kernels, known=False)


def grouped(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """A product for each expert, in one kernel; a dim that all of them share is shared out evenly."""
    a, b = p[0], p[1]
    sizes = [a.shape[-2], a.shape[-1], b.shape[-1]]
    groups = next((one.shape[0] for one in (a, b, made[0]) if len(one.shape) == 3), 1)
    shared = {(2, 3): 0, (2, 2): 1, (3, 2): 2}.get((len(a.shape), len(b.shape)))
    if shared is not None:  # else padded to equal parts
        sizes[shared] = max(1, sizes[shared] // groups)
    m, k, n = sizes
    gemm = Gemm(m=m, n=n, k=k, dtype=dtype_of(a), layout=_layout(a, b), batch=groups, grouped=True)
    return Priced(category="gemm", kernels=(gemm,))


def convolution(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """The implicit product of cuDNN: m output positions, n channels out, k channels in of a group times the window.

    A transposed one is the data gradient of a convolution from its result to its input.
    """
    x, w, groups = p[0], p[1], p[-1] if isinstance(p[-1], int) else 1
    ends = (made[0], x) if p[6:7] == (True,) else (x, made[0])
    return Priced(category="gemm", kernels=(_implicit(ends[0], w, ends[1], groups),))


def _implicit(x: CapturedTensor, w: CapturedTensor, y: CapturedTensor, groups: int) -> Kernel:
    """A product, unless each group has a channel or a few of its own: tiles of tensor cores are eight wide at least."""
    if groups > 1 and w.shape[0] // groups < _NARROWEST and x.numel > w.numel < y.numel:
        return Stream(op="elementwise", read_bytes=x.num_bytes + w.num_bytes, write_bytes=y.num_bytes)
    positions, window = y.numel // y.shape[1], prod(w.shape[1:])
    return Gemm(m=positions, n=max(1, w.shape[0] // groups), k=window, dtype=dtype_of(x), batch=groups)


def convolution_backward(p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
    """The same product for each gradient asked for."""
    mask = p[-1] if isinstance(p[-1], tuple) else (True, True, False)
    groups = next((one for one in reversed(p) if isinstance(one, int) and not isinstance(one, bool)), 1)
    ends = (p[0], p[1]) if p[7:8] == (True,) else (p[1], p[0])
    one = _implicit(ends[0], p[2], ends[1], groups)
    return Priced(category="gemm", kernels=(one,) * sum(bool(needed) for needed in mask[:2]))


def recurrent(direction: Literal["forward", "backward"]) -> Rule:
    """Layers of cuDNN (arXiv 1604.01946): the inputs' product of all steps at once, then one a step with the gates' arithmetic.

    Both directions run beside each other; of one direction, the layers do. One call of the host launches all.
    """
    first, back = {"forward": (6, False), "backward": (10, True)}[direction]

    def rule(p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
        x, (mode, hidden, projected, layers, rows_first), (both, sizes) = (
            p[0],
            p[first : first + 5],
            p[first + 7 : first + 9],
        )
        gates, width, ways = {2: 4, 3: 3}.get(mode, 1) * hidden, projected or hidden, 1 + both
        rows, steps = x.numel // x.shape[-1], len(sizes) or x.shape[bool(rows_first)]
        beside, turns = (ways, layers) if both else (layers, 1)

        def product(m: int, n: int, k: int, layout: Layout, batch: int = ways) -> Gemm:
            return Gemm(m=m, n=n, k=k, dtype=dtype_of(x), layout=layout, batch=batch, launches=0)

        of_step = (-(-rows // steps), width, gates) if back else (-(-rows // steps), gates, width)
        kernels = [product(*of_step, "nn" if back else "tn", beside)] * (steps * turns)
        for wide in (x.shape[-1], *[ways * width] * (layers - 1)):
            weights = [product(gates, each, rows, "nt") for each in (wide, width)]
            kernels += [product(rows, wide, gates, "nn"), *weights] if back else [product(rows, gates, wide, "tn")]
        size = rows * ways * layers * x.item_bytes
        passed = Stream(
            op="activation", read_bytes=size * (2 * gates + hidden), write_bytes=size * (gates + 2 * hidden)
        )
        return Priced(category="gemm", kernels=(passed, *kernels))

    return rule


# -- attention


def _attends(
    q: CapturedTensor, k: CapturedTensor, v: CapturedTensor, *, causal: bool, direction: Literal["forward", "backward"]
) -> Priced:
    kernel = Attention(
        batch=q.shape[0], num_heads=q.shape[1], seq_q=q.shape[2], head_dim=q.shape[3],
        seq_kv=k.shape[2], num_kv_heads=k.shape[1], v_head_dim=v.shape[3] if v.shape[3] != q.shape[3] else 0,
        causal=causal, direction=direction, dtype=dtype_of(q),
    )  # fmt: skip
    return Priced(category="attention", kernels=(kernel,))


def attention(first: int, causal: int, direction: Literal["forward", "backward"]) -> Rule:
    """An operator whose queries, keys and values are the arguments from `first` on, and its is_causal the `causal`-th."""

    def rule(p: Args, named: Args, _made: list[CapturedTensor]) -> Priced:
        causal_flag = dict(named).get("is_causal", p[causal] if len(p) > causal else False)
        return _attends(*p[first : first + 3], causal=bool(causal_flag), direction=direction)

    return rule


def by_rows(first: int, lengths: int, causal: int, direction: Literal["forward", "backward"]) -> Rule:
    """The same with heads behind the rows; where sequences of several lengths lie end to end, of their mean length.

    lengths: which argument says where queries' sequences begin; the keys' is the next. causal: a flag, or a kind of mask.
    """

    def rule(p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
        def shaped(one: CapturedTensor, begins: CapturedTensor | None) -> CapturedTensor:
            *rows, heads, width = one.shape
            batch = begins.numel - 1 if begins is not None else rows[0]
            return CapturedTensor(one.dtype, (batch, heads, -(-prod(rows) // max(batch, 1)), width))

        begins = p[lengths], p[lengths + 1], p[lengths + 1]
        q, k, v = (shaped(*each) for each in zip(p[first : first + 3], begins, strict=True))
        return _attends(q, k, v, causal=bool(p[causal]), direction=direction)

    return rule
