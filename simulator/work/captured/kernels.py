"""What a captured operator runs on a GPU: products and attention by their shapes, everything else by the bytes it touches.

`priced` looks an operator up by its name in torch's operator library (ATen, torch 2.13: native_functions.yaml). An
operator that no rule knows is a pass over its arguments and results, and says so.
"""

from __future__ import annotations

from contextlib import suppress
from math import prod
from typing import Any, Literal

from simulator.base.kernels import Kernel, Stated, Stream, StreamOp
from simulator.work.captured import products
from simulator.work.captured.cost import KernelCost
from simulator.work.captured.operators import ACTIVATIONS, BY_BYTES, FAMILIES, GATHERS, POINTWISE, REDUCTIONS, SCATTERS
from simulator.work.captured.products import Args, Priced, Rule, attention, by_rows
from simulator.work.captured.solvers import SOLVERS, solved
from simulator.work.captured.tensors import CapturedTensor, tensors

_TENSORS_PER_LAUNCH = 32  # as in simulator.work.ops.optimizer: multi-tensor kernels take their pointers by value
_POINTS_BITS = 13  # of a transform in one kernel
_FEW_ROWS_BYTES = 100_000  # as in simulator.work.ops.loss: shorter rows are still in a cache at log-softmax's last pass


def priced(name: str, args: Args, results: Any, cost: KernelCost | None = None) -> Priced:  # noqa: ANN401
    """What an operator costs. name: as `aten.mm.default`; args: (positional, named) as the capture file has them.

    cost: what its author says (`kernel_cost`), which then counts.
    """
    if cost is not None:
        return Priced(category=cost.category, kernels=(cost.kernel,))
    space, _, rest = name.partition(".")
    base = rest.partition(".")[0]
    made = [one for one in tensors(results) if one.on_gpu]
    if (every := [*tensors(args), *tensors(results)]) and not any(one.on_gpu for one in every):
        passed = Stated(num_bytes=sum(one.num_bytes for one in every), over="cpu")
        return Priced(category="CPU", kernels=(passed,), waits=True)
    with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):  # what no release has as arguments
        rule = _RULES.get(base) or _RULES.get(base.removesuffix("_"))  # in place or not
        if rule is not None and space in ("aten", "fsdp", "torch_attn"):
            return rule(args[0], args[1], made)
        if base in SOLVERS:
            return solved(base, args[0], made)
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
    known = space in ("aten", "prims") and (base in POINTWISE | ACTIVATIONS | BY_BYTES or base.startswith(FAMILIES))
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


# -- passes over memory


def _copy(p: Args, named: Args, made: list[CapturedTensor]) -> Priced:
    """A copy or a cast, from what is read to what is written. The host waits for one over PCIe unless it is told not to."""
    into = len(p) > 1 and isinstance(p[1], CapturedTensor)
    source = next(tensors(p[1] if into else p[0]), None)
    if source is None:
        return Priced(category="copies", kernels=())
    if not source.on_gpu or not made:
        goes_on = bool(dict(named).get("non_blocking", into and p[2:3] == (True,)))
        pinned = goes_on or source.pinned or (into and p[0].pinned)
        link: Literal["h2d", "d2h", "pageable"] = "pageable" if not pinned else "d2h" if source.on_gpu else "h2d"
        copied = (Stated(num_bytes=source.num_bytes, over=link),) if source.num_bytes else ()
        return Priced(category="offload", kernels=copied, waits=not goes_on)
    target = made[0]
    op: StreamOp = "copy"
    if source.dtype != target.dtype:
        op = "widen" if target.item_bytes > source.item_bytes else "cast"
    elif not source.is_dense or source.strides != target.strides:
        op = "strided"
    kernel = _of(op, target.numel * source.item_bytes, target.numel * target.item_bytes, target.numel)
    category = "copies" if op in ("copy", "strided") else "elementwise"
    return Priced(category=category, kernels=(kernel,) if kernel.num_bytes else ())


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
    kernel = _of("softmax", passes * x.num_bytes, y.num_bytes, 0)
    return Priced(category="loss" if y.dtype == "fp32" else "elementwise", kernels=(kernel,))


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


def _across_ranks(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """Batch norm whose statistics all ranks share, in kernels before and behind the exchange: each reads what is large once."""
    return _stream("norm_forward", "norm", [one for one in tensors(p[:2]) if one.shape == p[0].shape], made)


def _rows_added(rows: int, table: CapturedTensor) -> Priced:
    """The table's gradient is zeroed, and rows are added into it."""
    kernels = _of("memset", 0, table.num_bytes, 0), _of("embedding_backward", 2 * rows, rows, 0)
    return Priced(category="embedding", kernels=kernels)


def _bags(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """Rows that are picked, and a sum of each bag's."""
    rows = p[1].numel * p[0].shape[1] * p[0].item_bytes
    kernel = _of("embedding_forward", rows + p[1].num_bytes, made[0].num_bytes, 0)
    return Priced(category="embedding", kernels=(kernel,))


def _bags_backward(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """As a table's: each picked row gets its bag's gradient."""
    return _rows_added(p[1].numel * p[0].shape[1] * p[0].item_bytes, made[0])


def _transform(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """A pass for each dim; of one that has more than 2^13 points, whose values no block holds (64 KiB), two or more."""
    long = max((next(tensors(p)), made[0]), key=lambda one: one.numel)
    passes = sum(max(1, -(-(long.shape[dim].bit_length() - 1) // _POINTS_BITS)) for dim in p[1])
    read, written = next(tensors(p)).num_bytes, made[0].num_bytes
    middle = (passes - 1) * max(read, written)
    return Priced(category="elementwise", kernels=(_of("elementwise", read + middle, written + middle, 0, passes),))


def _checked(_p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
    """The host looks whether a factorisation failed."""
    return Priced(category="elementwise", kernels=(_of("reduce", 4, 4, 0),), waits=True)


def _picked(p: Args, _n: Args, made: list[CapturedTensor]) -> Priced:
    """One number of a row: a sector of 32 bytes each."""
    rows = p[0].shape[0] if p and isinstance(p[0], CapturedTensor) and p[0].shape else 1
    return Priced(category="loss", kernels=(_of("elementwise", 32 * rows, sum(one.num_bytes for one in made), 0),))


def _packed(p: Args, named: Args, made: list[CapturedTensor]) -> Priced:
    """FSDP2's gradients of a unit into one buffer: torch converts an element at a time where the dtype grows."""
    read = list(tensors(p[0]))
    out = list(tensors(dict(named).get("out", ()))) or made
    wide = bool(out) and bool(read) and out[0].item_bytes > read[0].item_bytes
    numel = sum(one.numel for one in read)
    written = sum(one.num_bytes for one in out)
    kernel = _of("widen" if wide else "copy", sum(one.num_bytes for one in read), written, numel)
    return Priced(category="copies", kernels=(kernel,))


def _nothing(_p: Args, _n: Args, _made: list[CapturedTensor]) -> Priced:
    return Priced(category="elementwise", kernels=())


_RULES: dict[str, Rule] = {
    "mm": products.product(0), "bmm": products.product(0), "_int_mm": products.product(0), "_scaled_mm": products.scaled_mm, "linear": products.linear,
    "_scaled_mm_v2": products.scaled_mm, "_weight_int4pack_mm": products.each(2), "_weight_int8pack_mm": products.each(2),
    "addmm": products.product(1), "baddbmm": products.product(1), "addbmm": products.product(1), "_addmm_activation": products.product(1),
    "_grouped_mm": products.grouped, "_scaled_grouped_mm": products.grouped,
    "convolution": products.convolution, "cudnn_convolution": products.convolution,
    "convolution_backward": products.convolution_backward, "_euclidean_dist": products.distances,
    "_cdist_forward": products.each(3), "_pdist_forward": products.each(3),
    "_cdist_backward": products.pairs_backward, "_pdist_backward": products.pairs_backward,
    "_ctc_loss": products.aligned, "_ctc_loss_backward": products.aligned,
    "_cslt_sparse_mm": products.half_sparse(1, 0), "_sparse_semi_structured_mm": products.half_sparse(2, 0),
    "_sparse_semi_structured_addmm": products.half_sparse(3, 0), "_sparse_semi_structured_linear": products.half_sparse(0, -1),
    "_linalg_check_errors": _checked, "_fft_r2c": _transform, "_fft_c2r": _transform, "_fft_c2c": _transform,
    "_flash_attention_forward": by_rows(0, 3, 8, "forward"), "_flash_attention_backward": by_rows(1, 6, 11, "backward"),
    "_efficient_attention_forward": by_rows(0, 4, 9, "forward"), "_efficient_attention_backward": by_rows(1, 6, 13, "backward"),
    "_varlen_attn": by_rows(0, 3, 7, "forward"), "_varlen_attn_backward": by_rows(1, 6, 10, "backward"),
    "_cudnn_rnn": products.recurrent("forward"), "_cudnn_rnn_backward": products.recurrent("backward"),
    "_scaled_dot_product_flash_attention": attention(0, 4, "forward"),
    "_scaled_dot_product_flash_attention_backward": attention(1, 11, "backward"),
    "_scaled_dot_product_cudnn_attention": attention(0, 6, "forward"),
    "_scaled_dot_product_cudnn_attention_backward": attention(1, 14, "backward"),
    "_scaled_dot_product_efficient_attention": attention(0, 6, "forward"),
    "_scaled_dot_product_efficient_attention_backward": attention(1, 11, "backward"), "sort": _sort,
    "_fused_adam_": _optimizer, "_fused_adamw_": _optimizer, "_fused_sgd_": _optimizer, "_fused_adagrad_": _optimizer,
    "_to_copy": _copy, "copy_": _copy, "clone": _copy, "contiguous": _copy, "_pin_memory": _nothing,
    "cat": _join, "stack": _join, "constant_pad_nd": _join, "slice_backward": _put_back, "select_backward": _put_back,
    "zeros": _filled, "zeros_like": _filled, "ones": _filled, "ones_like": _filled, "full": _filled, "full_like": _filled,
    "new_zeros": _filled, "new_ones": _filled, "new_full": _filled, "fill_": _filled, "zero_": _filled, "arange": _filled,
    "scalar_tensor": _filled, "tril": _filled, "triu": _filled,
    "_softmax": _softmax, "_log_softmax": _softmax, "_safe_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward, "_log_softmax_backward_data": _softmax_backward,
    "native_layer_norm": _norm, "_fused_rms_norm": _norm, "native_group_norm": _norm, "native_batch_norm": _norm,
    "_native_batch_norm_legit_no_training": _norm, "_native_batch_norm_legit": _norm, "_batch_norm_with_update": _norm,
    "cudnn_batch_norm": _norm, "cudnn_batch_norm_backward": _norm_backward, "batch_norm_backward": _norm_backward,
    "native_layer_norm_backward": _norm_backward, "_fused_rms_norm_backward": _norm_backward,
    "native_group_norm_backward": _norm_backward, "native_batch_norm_backward": _norm_backward,
    "batch_norm_stats": _across_ranks, "batch_norm_update_stats": _across_ranks, "batch_norm_elemt": _across_ranks,
    "batch_norm_backward_reduce": _across_ranks,
    "batch_norm_backward_elemt": _across_ranks, "batch_norm_gather_stats_with_counts": lambda p, n, made: _join(p[1:], n, made),
    "embedding": lambda _, __, made: _stream("embedding_forward", "embedding", made, made),
    "embedding_dense_backward": lambda p, _, made: _rows_added(p[0].num_bytes, made[0]), "_embedding_bag": _bags,
    "_embedding_bag_forward_only": _bags, "_embedding_bag_backward": _bags_backward,
    "_embedding_bag_dense_backward": _bags_backward, "nll_loss_forward": _picked, "nll_loss2d_forward": _picked,
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), lambda _, __, made: _stream("memset", "loss", [], made[:1])),
    "chunk_cat": _packed, "split_with_sizes_copy": lambda p, _, __: _stream("copy", "copies", [part := next(tensors(p))], [part]),
    "all_gather_copy_in": _nothing,  # FSDP2's foreach copy is an operator of its own
}  # fmt: skip
