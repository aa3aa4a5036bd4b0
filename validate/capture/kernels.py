"""Kernels that CUDA has and a build without CUDA lacks, and which of its kernels torch would choose for attention."""

from __future__ import annotations

from contextlib import suppress
from functools import wraps
from typing import Any

import torch
from torch import _meta_registrations
from torch.backends import cuda
from torch.nested._internal import sdpa
from torch.nn import functional
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import _disable_current_modes

from simulator.work.captured.capture import Kind
from validate.capture.streams import Recorder
from validate.gpus import built_with_cuda

_LSTM, _GRU = 2, 3  # cudnnRNNMode_t
FLASH_HEAD_DIM = 256  # the widest head that the flash kernel takes (torch 2.13 sdp_utils.cpp)
_HALF = (torch.float16, torch.bfloat16)
_LIBRARIES: list[Any] = []  # what is registered lasts as long as these
_OWN_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm", "native_channel_shuffle")


def install() -> None:
    """Operators that have kernels of their own on CUDA, which a build without CUDA would take apart instead.

    What is registered says that there is a kernel; the dispatch mode answers before it is called.
    """
    if not built_with_cuda():
        library = torch.library.Library("aten", "IMPL")
        for name in _OWN_ON_CUDA:
            library.impl(name, lambda *_: None, "CUDA")
        _LIBRARIES.append(library)
    _grouped_products()
    _batch_norm_across_ranks()
    _recurrent()
    _alignments()
    _half_sparse()
    _attention()
    torch.backends.mha.get_fastpath_enabled = _no_fast_path
    flex_attention.flex_attention = _flex


def _no_fast_path() -> bool:
    """nn.Transformer's and nn.MultiheadAttention's one operator of a layer hides its kernels: its own operators take its place."""
    if not torch.is_grad_enabled():
        Recorder.log.answer("the fast path of nn.Transformer without gradients: off, its operators run one by one")
    return False


def _flex(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
    enable_gqa: bool = False, return_lse: bool = False, **_: Any,  # noqa: FBT001, FBT002  as torch has them
) -> Any:  # fmt: skip
    """FlexAttention as a flash kernel: of the causal half where its mask is known to leave no more, else of all places."""
    causal = block_mask is not None and _is_causal(block_mask.mask_mod)
    of = "a causal mask, none sparser" if causal else "every place, whatever the mask"
    Recorder.log.answer(f"FlexAttention: priced as a flash kernel of {of}{', without its score_mod' * bool(score_mod)}")
    given = {"is_causal": causal, "scale": scale, "enable_gqa": enable_gqa}
    found = functional.scaled_dot_product_attention(query, key, value, **given)
    return (found, query.new_empty(query.shape[:-1], dtype=torch.float32)) if return_lse else found


def _is_causal(mask_mod: Any) -> bool:
    """Whether a mask leaves out the next place. False where its values are unknown."""
    with _disable_current_modes(), suppress(Exception):  # it may read tensors that have no values
        here, there = torch.tensor(0), torch.tensor(1)
        seen = mask_mod(here, here, here, there)
        return type(seen) is torch.Tensor and not bool(seen)
    return False


def _grouped_products() -> None:
    """Products of groups in fp32 and fp16: a product a group, whose sizes the host waits for (torch 2.13 GroupedMMUtils.h)."""
    original = _meta_registrations._meta_grouped_mm_common

    @wraps(original)
    def grouped_mm(mat_a: Any, mat_b: Any, *args: Any, **kwargs: Any) -> Any:
        if mat_a.dtype != mat_b.dtype or mat_a.dtype not in (torch.float32, torch.float16):
            return original(mat_a, mat_b, *args, **kwargs)
        # torch's own says bf16's shapes only
        Recorder.write(Kind.SYNCHRONIZE, Recorder.stack[-1].number)
        dtype = kwargs["out_dtype"] or mat_a.dtype
        return _meta_registrations._create_grouped_mm_output_tensor(mat_a, mat_b, kwargs["offs"], dtype)

    _meta_registrations._meta_grouped_mm_common = grouped_mm


def _batch_norm_across_ranks() -> None:
    """SyncBatchNorm's kernels, of which torch has no shapes: statistics are in fp32 (ATen, Normalization.cuh)."""
    library = torch.library.Library("aten", "IMPL", "Meta")

    def channels(x: Any, count: int) -> tuple[Any, ...]:
        dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        return tuple(x.new_empty(x.shape[1], dtype=dtype) for _ in range(count))

    def of_gradient(_: Any, x: Any, __: Any, ___: Any, weight: Any, *asked: bool) -> tuple[Any, ...]:
        sums, like = channels(x, 2 * asked[0]), x if weight is None else weight
        return (*(sums or (None, None)), *(like.new_empty(x.shape[1]) if one else None for one in asked[1:]))

    library.impl("batch_norm_stats", lambda x, _: channels(x, 2))
    library.impl("batch_norm_gather_stats_with_counts", lambda x, *_: channels(x, 2))
    library.impl("batch_norm_backward_reduce", of_gradient)
    for name in ("batch_norm_elemt", "batch_norm_backward_elemt"):
        library.impl(name, lambda one, *_: torch.empty_like(one))
    _LIBRARIES.append(library)


def _recurrent() -> None:
    """Layers as cuDNN's one operator, cells as CUDA's."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    with suppress(RuntimeError):  # a torch that lets nobody say more than its own function: step by step
        library.impl("_cudnn_rnn", _cudnn_layers)
        library.impl("_cudnn_rnn_backward", _cudnn_layers_backward)
        for mode, name in enumerate(("rnn_relu", "rnn_tanh", "lstm", "gru")):
            setattr(torch._VF, name, _by_cudnn(getattr(torch._VF, name), mode))

    def cell(_: Any, __: Any, hx: Any, *___: Any) -> tuple[Any, Any]:
        return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])

    def cell_backward(gradient: Any, kept: Any, biased: bool) -> tuple[Any, ...]:  # noqa: FBT001
        gates = [kept.new_empty(kept.shape[0], 3 * gradient.shape[1]) for _ in range(2)]
        biases = [kept.new_empty(3 * gradient.shape[1]) for _ in range(2)] if biased else [None, None]
        return (*gates, torch.empty_like(gradient), *biases)

    library.impl("_thnn_fused_gru_cell", cell)  # of which torch has no shapes (ATen, RNN.cu)
    library.impl("_thnn_fused_gru_cell_backward", cell_backward)
    _LIBRARIES.append(library)


def _by_cudnn(original: Any, mode: int) -> Any:
    """A layer's function as torch has it (ATen, RNN.cpp): it calls cuDNN's operator on the GPU. mode: cuDNN's number of it."""

    @wraps(original)
    def layer(x: Any, *args: Any) -> Any:
        if x.device.type != "cuda" or not torch.backends.cudnn.enabled:
            return original(x, *args)
        packed = isinstance(args[2], list | tuple)
        sizes, states, weights, biased, layers, dropout, train, both = args[:8] if packed else ((), *args[:7])
        states = list(states) if mode == _LSTM else [states]
        cast = torch.is_autocast_enabled("cuda") and x.is_floating_point()
        if cast:  # as ATen's _cudnn_rnn_cast_reflatten
            dtype = torch.get_autocast_dtype("cuda")
            x, states, weights = x.to(dtype), [one.to(dtype) for one in states], [one.to(dtype) for one in weights]
        hidden, out = states[-1].shape[-1], states[0].shape[-1]
        of_layer = (2 + 2 * biased + (out != hidden), None, states[0], states[1] if len(states) > 1 else None)
        sizes = sizes.tolist() if packed else []
        first = bool(args[-1]) and not packed
        how = (mode, hidden, out if out != hidden else 0, layers, first, dropout, train, both, sizes, None)
        with torch.autocast("cuda", enabled=False):
            found = torch.ops.aten._cudnn_rnn(x, list(weights), *of_layer, *how)
        return found[: 1 + len(states)]

    return layer


def _cudnn_layers(x: Any, _: Any, *given: Any) -> tuple[Any, ...]:
    """Results of cuDNN's operator. What it reserves for the backward it keeps to itself: taken for gates, cell and output of each step."""
    _, _, hx, cx, mode, hidden, projected, layers, _, _, train, both, *_ = given
    ways, rows = 1 + both, x.numel() // x.shape[-1]
    kept = ({_LSTM: 4, _GRU: 3}.get(mode, 1) + 2) * rows * layers * ways * hidden * x.element_size()
    out = x.new_empty((*x.shape[:-1], ways * (projected or hidden)))
    cell = x.new_empty(0) if cx is None else torch.empty_like(cx)
    return out, torch.empty_like(hx), cell, x.new_empty(kept if train else 0, dtype=torch.uint8), x.new_empty(0)


def _cudnn_layers_backward(
    x: Any, weight: Any, _stride: int, _buffer: Any, hx: Any, cx: Any, *_: Any
) -> tuple[Any, ...]:
    cell = x.new_empty(0) if cx is None else torch.empty_like(cx)
    return torch.empty_like(x), torch.empty_like(hx), cell, [torch.empty_like(one) for one in weight]


def _alignments() -> None:
    """CTC: lengths on the CPU are numbers, as without a mode (ATen, LossCTC.cpp), and its gradient has the scores' shape."""
    original = torch.ctc_loss

    @wraps(original)
    def ctc_loss(scores: Any, labels: Any, steps: Any, lengths: Any, *args: Any, **kwargs: Any) -> Any:
        both = (steps, lengths)
        if all(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in both):
            steps, lengths = (one.tolist() for one in both)
        return original(scores, labels, steps, lengths, *args, **kwargs)

    torch.ctc_loss = ctc_loss
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name in ("_ctc_loss_backward", "_ctc_loss_backward.Tensor"):
        library.impl(name, lambda _gradient, scores, *_, **__: torch.empty_like(scores))
    _LIBRARIES.append(library)


def _half_sparse() -> None:
    """Two of four numbers and where they stood, as cuSPARSELt keeps them: of which torch has products' shapes (_meta_registrations)."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_cslt_compress", lambda one: one.new_empty(one.numel() * (10 if one.itemsize == 1 else 9) // 16))
    _LIBRARIES.append(library)


def _attention() -> None:
    """The kernel that torch would choose on a GPU: flash where it can, else the memory-efficient one."""
    original = functional.scaled_dot_product_attention
    sdpa.can_use_flash_attention = lambda of, **_: cuda.flash_sdp_enabled() and of.query.dtype in _HALF
    sdpa.can_use_efficient_attention = lambda *_, **__: cuda.mem_efficient_sdp_enabled()

    @wraps(original)
    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,  # noqa: FBT001, FBT002
        scale: float | None = None, enable_gqa: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:  # fmt: skip
        if query.device.type != "cuda":
            more = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
            return original(query, key, value, **more, enable_gqa=enable_gqa)
        if query.is_nested:
            given = attn_mask, dropout_p, is_causal, scale, enable_gqa
            return sdpa.jagged_scaled_dot_product_attention(query, key, value, *given)
        if not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()):
            more = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
            return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, **more, enable_gqa=enable_gqa)[
                0
            ]
        half = query.dtype in _HALF
        if (
            cuda.flash_sdp_enabled()
            and attn_mask is None
            and half
            and query.shape[-1] == value.shape[-1] <= FLASH_HEAD_DIM
            and query.dim() == 4
        ):
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale)[0]
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        if attn_mask is not None:
            attn_mask = _as_bias(attn_mask, query, key)
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]

    functional.scaled_dot_product_attention = attention
    torch._C._nn.scaled_dot_product_attention = attention


def _as_bias(mask: Any, query: Any, key: Any) -> Any:
    """A mask as the memory-efficient kernel takes it: of the query's dtype and whole shape."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:-2], query.shape[-2], key.shape[-2])
