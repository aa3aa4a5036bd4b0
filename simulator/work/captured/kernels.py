"""What a captured operator runs on a GPU: products and attention by their shapes, everything else by the bytes it touches.

`priced` looks an operator up by its name in torch's operator library (ATen, torch 2.13: native_functions.yaml). An
operator that no rule knows is a pass over its arguments and results, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, cast

from simulator.base.kernels import Attention, Dtype, Gemm, Kernel, Layout, Stream, StreamOp
from simulator.work.captured.cost import KernelCost
from simulator.work.captured.operators import ACTIVATIONS, BY_BYTES, GATHERS, POINTWISE, REDUCTIONS, SCATTERS
from simulator.work.captured.tensors import CapturedTensor, tensors

_TENSORS_PER_LAUNCH = 32  # as in simulator.work.ops.optimizer: multi-tensor kernels take their pointers by value
_NARROWEST = 8  # columns of the smallest product that tensor cores take (mma.m16n8k16, PTX ISA)
_FEW_ROWS_BYTES = 100_000  # as in simulator.work.ops.loss: shorter rows are still in a cache at log-softmax's last pass

Args = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """An operator's kernels and the category of the breakdown that they count in. known: a rule is about this operator."""

    category: str
    kernels: tuple[Kernel, ...]
    known: bool = True


_Rule = Callable[[Args, Args, list[CapturedTensor]], Priced]


def priced(name: str, args: Args, results: Any, cost: KernelCost | None = None) -> Priced:  # noqa: ANN401
    """What an operator costs. name: as `aten.mm.default`; args: (positional, named) as the capture file has them.

    cost: what its author says (`kernel_cost`), which then counts.
    """
    if cost is not None:
        return Priced(category=cost.category, kernels=(cost.kernel,))
    space, _, rest = name.partition(".")
    base = rest.partition(".")[0]
    made = [one for one in tensors(results) if one.on_gpu]
    with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):  # what no release has as arguments
        if base in _RULES and space in ("aten", "fsdp"):
            return _RULES[base](args[0], args[1], made)
        if base.startswith(("_foreach", "_amp_foreach")):
            return _multi_tensor(base, args[0], made)
    return _by_its_name(space, base, [one for one in tensors(args) if one.on_gpu], made)


def _by_its_name(space: str, base: str, read: list[CapturedTensor], made: list[CapturedTensor]) -> Priced:
    """What an operator without a rule costs, or one whose rule its arguments do not fit."""
    in_place, base = base.endswith("_"), base.rstrip("_")
    if space == "aten" and base in REDUCTIONS:
        return _stream("reduce", "elementwise", read, made)
    if space == "aten" and base in GATHERS | SCATTERS:
        return _moved(base, read, made, in_place=in_place)
    op: StreamOp = "activation" if base in ACTIVATIONS else "elementwise"
    known = space == "aten" and (base in POINTWISE or base in ACTIVATIONS or base in BY_BYTES)
    if space == "triton":  # a launch by the program: each tensor that it is given passes once
        made, read = read, []
    return Priced(category="elementwise", kernels=_pointwise(op, read, made, in_place=in_place), known=known)


def _pointwise(
    op: StreamOp, read: list[CapturedTensor], made: list[CapturedTensor], *, in_place: bool = False
) -> tuple[Kernel, ...]:
    """One kernel over the result. Strided or broadcast operands of its size cost an address an element."""
    numel = max((one.numel for one in made), default=0)
    if not numel:
        return ()
    full = [one for one in read if one.numel == numel]
    broadcast = any(1 < one.numel < numel for one in read)
    uneven = broadcast or any(not one.is_dense for one in full) or len({one.strides for one in full}) > 1
    dtypes = {one.dtype for one in (*read, *made) if one.numel > 1}
    kind: StreamOp = "strided" if uneven else "widen" if len(dtypes) > 1 and op != "activation" else op
    written = sum(one.num_bytes for one in (read[:1] if in_place else made))
    return (_of(kind, sum(one.num_bytes for one in read), written, numel),)


def _moved(name: str, read: list[CapturedTensor], made: list[CapturedTensor], *, in_place: bool) -> Priced:
    """Rows or elements by their indices: those that are picked pass once each way, those that are put twice and back.

    Indices are read. What is put into a result of its own is copied first; what falls on one place is added there.
    """
    if not read or not made:
        return Priced(category="elementwise", kernels=())
    indices = sum(one.num_bytes for one in read[1:] if one.dtype.startswith("int"))
    if name in GATHERS:
        size = made[0].num_bytes
        return Priced(category="elementwise", kernels=(_of("strided", size + indices, size, made[0].numel),))
    put = next((one for one in reversed(read[1:]) if not one.dtype.startswith("int")), None)
    numel = put.numel if put is not None else max((one.numel for one in read[1:]), default=1)
    size = numel * made[0].item_bytes
    copied = () if in_place else (_of("copy", read[0].num_bytes, made[0].num_bytes, 0),)
    return Priced(category="elementwise", kernels=(*copied, _of("strided", 2 * size + indices, size, numel)))


def _sort(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """Radix sort, eight bits at a time: a histogram, then keys and their places there and back for each byte of a key."""
    key = next(tensors(p))
    both = sum(one.num_bytes for one in made)
    passes = key.item_bytes
    found = _of("elementwise", key.num_bytes + passes * both, passes * both, 0, passes + 1)
    return Priced(category="elementwise", kernels=(found,))


def _of(op: StreamOp, read: int, written: int, numel: int, launches: int = 1) -> Stream:
    one_by_one = op in ("strided", "widen", "join")
    return Stream(op=op, read_bytes=read, write_bytes=written, launches=launches, numel=numel if one_by_one else 0)


def _stream(op: StreamOp, category: str, read: list[CapturedTensor], made: list[CapturedTensor]) -> Priced:
    numel = max((one.numel for one in made), default=0)
    kernel = _of(op, sum(one.num_bytes for one in read), sum(one.num_bytes for one in made), numel)
    return Priced(category=category, kernels=(kernel,) if kernel.num_bytes else ())


def _multi_tensor(name: str, p: Args, made: list[CapturedTensor]) -> Priced:
    """A kernel over lists of tensors. In place the first list is written; what is only copied into is not read."""
    read = list(tensors(p[1:] if name == "_foreach_copy_" else p))
    written = made or list(tensors(p[0]))
    launches = -(-max(1, len(list(tensors(p[0])))) // _TENSORS_PER_LAUNCH)
    op: StreamOp = "elementwise" if len({one.dtype for one in (*read, *written) if one.numel > 1}) <= 1 else "cast"
    passed, put = (sum(one.num_bytes for one in each) for each in (read, written))
    kernel = Stream(op=op, read_bytes=passed, write_bytes=put, launches=launches)
    return Priced(category="elementwise", kernels=(kernel,) if kernel.num_bytes else ())


def _optimizer(p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
    """A fused update reads parameters, gradients and states, and writes all but the gradients."""
    large = [one for one in tensors(p) if one.numel > 1]
    count = max(1, sum(one.numel > 1 for one in tensors(p[0])))
    read, written = (sum(one.num_bytes for one in each) for each in (large, (*large[:count], *large[2 * count :])))
    launches = -(-count // _TENSORS_PER_LAUNCH)
    kernel = Stream(op="optimizer", read_bytes=read, write_bytes=written, launches=launches)
    return Priced(category="optimizer", kernels=(kernel,))


# -- products


def _dtype(one: CapturedTensor) -> Dtype:
    """int8 products run at the speed of fp8."""
    narrow = {"int8": "fp8"}.get(one.dtype, one.dtype)
    return cast("Dtype", narrow if narrow in ("fp32", "bf16", "fp16", "fp8") else "fp32")


def _layout(a: CapturedTensor, b: CapturedTensor) -> Layout:
    """The names of cuBLAS for row-major inputs: y = x Wᵀ is tn, the data gradient nn, the weight gradient nt."""
    if a.is_transposed:
        return "nt"
    return "tn" if b.is_transposed else "nn"


def _product(a: CapturedTensor, b: CapturedTensor, **more: Any) -> Priced:  # noqa: ANN401
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    gemm = Gemm(m=m, n=n, k=k, dtype=_dtype(a), layout=_layout(a, b), batch=prod(a.shape[:-2]), **more)
    return Priced(category="gemm", kernels=(gemm,) if gemm.flop else ())


def _mm(p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
    return _product(p[0], p[1])


def _scaled_mm(p: Args, named: Args, _made: list[CapturedTensor]) -> Priced:
    """A product of fp8 operands. More scales than rows: one for each block of a row."""
    scale = dict(named).get("scale_a", p[2] if len(p) > 2 else None)
    by_blocks = isinstance(scale, CapturedTensor) and scale.numel > p[0].shape[-2]
    return _product(p[0], p[1], by_blocks=by_blocks)


def _addmm(p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
    return _product(p[1], p[2])


def _linear(p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
    x, w = p[0], p[1]
    rows = CapturedTensor(x.dtype, (prod(x.shape[:-1]), x.shape[-1]))
    return _product(rows, CapturedTensor(w.dtype, (w.shape[1], w.shape[0]), (1, w.shape[1])))


def _grouped(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """A product for each expert, in one kernel; a dim that all of them share is shared out evenly."""
    a, b = p[0], p[1]
    sizes = [a.shape[-2], a.shape[-1], b.shape[-1]]
    groups = next((one.shape[0] for one in (a, b, made[0]) if len(one.shape) == 3), 1)
    shared = {(2, 3): 0, (2, 2): 1, (3, 2): 2}.get((len(a.shape), len(b.shape)))
    if shared is not None:  # else padded to equal parts
        sizes[shared] = max(1, sizes[shared] // groups)
    m, k, n = sizes
    gemm = Gemm(m=m, n=n, k=k, dtype=_dtype(a), layout=_layout(a, b), batch=groups, grouped=True)
    return Priced(category="gemm", kernels=(gemm,))


def _convolution(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """The implicit product of cuDNN: m output positions, n channels out, k channels in of a group times the window."""
    x, w, groups = p[0], p[1], p[-1] if isinstance(p[-1], int) else 1
    return Priced(category="gemm", kernels=(_implicit(x, w, made[0], groups),))


def _depthwise(x: CapturedTensor, w: CapturedTensor, y: CapturedTensor, groups: int) -> bool:
    """A channel or a few of its own for each group: no product for tensor cores, whose tiles are eight wide at least."""
    return groups > 1 and w.shape[0] // groups < _NARROWEST and x.numel > w.numel < y.numel


def _implicit(x: CapturedTensor, w: CapturedTensor, y: CapturedTensor, groups: int) -> Kernel:
    if _depthwise(x, w, y, groups):
        return _of("elementwise", x.num_bytes + w.num_bytes, y.num_bytes, 0)
    positions, window = y.numel // y.shape[1], prod(w.shape[1:])
    return Gemm(m=positions, n=max(1, w.shape[0] // groups), k=window, dtype=_dtype(x), batch=groups)


def _convolution_backward(p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
    """The same product for each gradient asked for."""
    mask = p[-1] if isinstance(p[-1], tuple) else (True, True, False)
    groups = next((one for one in reversed(p) if isinstance(one, int) and not isinstance(one, bool)), 1)
    one = _implicit(p[1], p[2], p[0], groups)
    return Priced(category="gemm", kernels=(one,) * sum(bool(needed) for needed in mask[:2]))


# -- attention


def _attends(
    q: CapturedTensor, k: CapturedTensor, v: CapturedTensor, *, causal: bool, direction: Literal["forward", "backward"]
) -> Priced:
    kernel = Attention(
        batch=q.shape[0], num_heads=q.shape[1], seq_q=q.shape[2], head_dim=q.shape[3],
        seq_kv=k.shape[2], num_kv_heads=k.shape[1], v_head_dim=v.shape[3] if v.shape[3] != q.shape[3] else 0,
        causal=causal, direction=direction, dtype=_dtype(q),
    )  # fmt: skip
    return Priced(category="attention", kernels=(kernel,))


def _attention(first: int, causal: int, direction: Literal["forward", "backward"]) -> _Rule:
    """An operator whose queries, keys and values are the arguments from `first` on, and its is_causal the `causal`-th."""

    def rule(p: Args, named: Args, _made: list[CapturedTensor]) -> Priced:
        causal_flag = dict(named).get("is_causal", p[causal] if len(p) > causal else False)
        return _attends(*p[first : first + 3], causal=bool(causal_flag), direction=direction)

    return rule


# -- passes over memory


def _copy(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """A copy or a cast, from what is read to what is written."""
    source = next(tensors(p[1] if len(p) > 1 and isinstance(p[1], CapturedTensor) else p[0]), None)
    if source is None or not made:
        return Priced(category="copies", kernels=())
    if not source.on_gpu or not (target := made[0]).on_gpu:
        return Priced(category="copies", kernels=())  # over PCIe: what the host does is not in the step's device time
    op: StreamOp = "copy"
    if source.dtype != target.dtype:
        op = "widen" if target.item_bytes > source.item_bytes else "cast"
    elif not source.is_dense or source.strides != target.strides:
        op = "strided"
    kernel = _of(op, target.numel * source.item_bytes, target.numel * target.item_bytes, target.numel)
    return Priced(
        category="copies" if op in ("copy", "strided") else "elementwise", kernels=(kernel,) if kernel.num_bytes else ()
    )


def _join(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    return _stream("join", "elementwise", list(tensors(p)), made)


def _put_back(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """The gradient of a part: zeros as large as the whole, and the part copied in (torch 2.13, native/TensorShape.cpp)."""
    part, target, dim = p[0], made[0], p[2]
    op: StreamOp = "strided" if prod(target.shape[:dim]) > 1 or not part.is_dense else "copy"
    copied = _of(op, part.num_bytes, part.numel * target.item_bytes, part.numel)
    kernels = (_of("memset", 0, target.num_bytes, 0), copied)
    return Priced(category="elementwise", kernels=tuple(one for one in kernels if one.num_bytes))


def _filled(_p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    return _stream("memset", "copies", [], made)


def _softmax(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """Forward a row is read for its maximum, its sum and its result; what is short is in a cache the last time."""
    x, y = next(tensors(p)), made[0]
    passes = 2 if x.shape and x.shape[-1] * x.item_bytes <= _FEW_ROWS_BYTES else 3
    return Priced(
        category="loss" if y.dtype == "fp32" else "elementwise",
        kernels=(_of("softmax", passes * x.num_bytes, y.num_bytes, 0),),
    )


def _softmax_backward(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    gradient, y = p[0], p[1]
    kernel = _of("softmax", 2 * gradient.num_bytes + y.num_bytes, made[0].num_bytes, 0)
    return Priced(category="loss" if y.dtype == "fp32" else "elementwise", kernels=(kernel,))


def _norm(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    kernel = _of("norm_forward", p[0].num_bytes, sum(one.num_bytes for one in made), 0)
    return Priced(category="norm", kernels=(kernel,))


def _norm_backward(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """Two passes over gradient and input: for the input's gradient, and for the weight's column sums."""
    large = p[1]
    kernels = tuple(
        _of("norm_backward", 2 * large.num_bytes, one.num_bytes, 0, 1 if index == 0 else 2)
        for index, one in enumerate(made[:2])
    )
    return Priced(category="norm", kernels=kernels)


def _embedding(_p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    return _gathered("embedding_forward", "embedding", made)


def _gathered(op: StreamOp, category: str, made: list[CapturedTensor]) -> Priced:
    size = sum(one.num_bytes for one in made)
    return Priced(category=category, kernels=(_of(op, size, size, 0),))


def _embedding_backward(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """The table's gradient is zeroed, and rows are added into it."""
    rows, table = p[0].num_bytes, made[0].num_bytes
    return Priced(
        category="embedding", kernels=(_of("memset", 0, table, 0), _of("embedding_backward", 2 * rows, rows, 0))
    )


def _picked(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """One number of a row: a sector of 32 bytes each."""
    rows = p[0].shape[0] if p and isinstance(p[0], CapturedTensor) and p[0].shape else 1
    return Priced(category="loss", kernels=(_of("elementwise", 32 * rows, sum(one.num_bytes for one in made), 0),))


def _picked_backward(_p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    return Priced(category="loss", kernels=(_of("memset", 0, made[0].num_bytes, 0),))


def _packed(p: Args, named: Args, made: list[CapturedTensor]) -> Priced:
    """FSDP2's gradients of a unit into one buffer: torch converts an element at a time where the dtype grows."""
    read = list(tensors(p[0]))
    out = list(tensors(dict(named).get("out", ()))) or made
    wide = bool(out) and bool(read) and out[0].item_bytes > read[0].item_bytes
    numel = sum(one.numel for one in read)
    written = sum(one.num_bytes for one in out)
    return Priced(
        category="copies",
        kernels=(_of("widen" if wide else "copy", sum(one.num_bytes for one in read), written, numel),),
    )


def _unpacked(p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
    size = next(tensors(p)).num_bytes
    return Priced(category="copies", kernels=(_of("copy", size, size, 0),))


def _copied_in(_p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
    """FSDP2's shards of a unit into the buffer that is gathered."""
    return Priced(category="copies", kernels=())  # its foreach copy is an operator of its own


def _nothing(_p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
    return Priced(category="elementwise", kernels=())


_RULES: dict[str, _Rule] = {
    "mm": _mm, "bmm": _mm, "_scaled_mm": _scaled_mm, "_int_mm": _mm, "addmm": _addmm, "baddbmm": _addmm, "linear": _linear,
    "_grouped_mm": _grouped, "_scaled_grouped_mm": _grouped,
    "convolution": _convolution, "cudnn_convolution": _convolution, "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": _attention(0, 4, "forward"),
    "_scaled_dot_product_flash_attention_backward": _attention(1, 11, "backward"),
    "_scaled_dot_product_cudnn_attention": _attention(0, 6, "forward"),
    "_scaled_dot_product_cudnn_attention_backward": _attention(1, 14, "backward"),
    "_scaled_dot_product_efficient_attention": _attention(0, 6, "forward"),
    "_scaled_dot_product_efficient_attention_backward": _attention(1, 11, "backward"), "sort": _sort,
    "_fused_adam_": _optimizer, "_fused_adamw_": _optimizer, "_fused_sgd_": _optimizer, "_fused_adagrad_": _optimizer,
    "_to_copy": _copy, "copy_": _copy, "clone": _copy, "contiguous": _copy, "_pin_memory": _nothing,
    "cat": _join, "stack": _join, "constant_pad_nd": _join, "slice_backward": _put_back, "select_backward": _put_back,
    "zeros": _filled, "zeros_like": _filled, "ones": _filled, "ones_like": _filled, "full": _filled, "full_like": _filled,
    "new_zeros": _filled, "new_ones": _filled, "new_full": _filled, "fill_": _filled, "zero_": _filled, "arange": _filled,
    "scalar_tensor": _filled, "tril": _filled, "triu": _filled,
    "_softmax": _softmax, "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward, "_log_softmax_backward_data": _softmax_backward,
    "native_layer_norm": _norm, "_fused_rms_norm": _norm, "native_group_norm": _norm, "native_batch_norm": _norm,
    "native_layer_norm_backward": _norm_backward, "_fused_rms_norm_backward": _norm_backward,
    "native_group_norm_backward": _norm_backward, "native_batch_norm_backward": _norm_backward,
    "embedding": _embedding, "embedding_dense_backward": _embedding_backward,
    "nll_loss_forward": _picked, "nll_loss_backward": _picked_backward,
    "nll_loss2d_forward": _picked, "nll_loss2d_backward": _picked_backward,
    "chunk_cat": _packed, "split_with_sizes_copy": _unpacked, "all_gather_copy_in": _copied_in,
}  # fmt: skip
