"""The LM head and its loss in one, in kernels or in chunks of rows: Liger's, Cut Cross Entropy, TRL's, torchtune's."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from simulator.base.kernels import DTYPE_BYTES, Gemm, Kernel
from simulator.work.ops.graph import Graph, Value, conversion, stream
from simulator.work.ops.loss import SHORT_ROW_BYTES
from simulator.work.ops.op_context import OpContext

_ROWS: Final = 256  # of a chunk (trl/trainer/sft_trainer.py: _CHUNKED_LM_HEAD_CHUNK_SIZE)
_OUTPUT_CHUNKS: Final = 8  # torchtune/modules/loss: num_output_chunks
WITH_HEAD: Final = ("fused_linear", "cut", "chunked", "output_chunks", "linear_chunks")


def loss_with_head(g: Graph, s: OpContext, x: Value, *, trains: bool) -> Value:
    """Of normalised rows x, by the stack's word. trains: the head's weight is."""
    match s.stack.kernels.loss:
        case "fused_linear":
            return _liger(g, s, x, trains=trains)
        case "cut":
            return _cut(g, s, x, trains=trains)
        case "output_chunks" | "linear_chunks":
            return _output_chunks(g, s, x, trains=trains)
    return _chunked(g, s, x, trains=trains)


def _chunks(tokens: int, vocab: int, width: int) -> int:
    """Of a power of two rows, whose logits weigh about what the input does (liger_kernel/ops/fused_linear_cross_entropy.py)."""
    rows = -(-tokens // -(-vocab // width))
    return -(-tokens // (1 << (rows - 1).bit_length()))


def _liger(g: Graph, s: OpContext, x: Value, *, trains: bool) -> Value:
    """Liger's head and loss together: the forward makes the gradients too, chunk by chunk. trains: the head's weight is."""
    t, v, d = s.tokens, s.model.vocab_size, s.model.d_model
    count = _chunks(t, v, d)
    rows, element = -(-t // count), s.element_bytes
    size = rows * v * element
    one = Gemm(m=rows, n=v, k=d, dtype=s.wide_dtype, batch=count, launches=count)
    loss, gradient = g.value("loss", 1, "fp32"), g.value("loss.input_gradient", x.numel, x.dtype)
    weight = g.value("loss.weight_gradient", v * d, s.dtype) if trains else None
    products: tuple[Kernel, ...] = (one, replace(one, n=d, k=v, layout="nn"))
    if trains:
        products = (*products, replace(one, m=v, n=d, k=rows, layout="nt"))
    kernels = (stream("softmax", 2 * size * count, size * count, count), stream("memset", 0, x.num_bytes))
    made = (gradient, *((weight,) if weight else ()))
    g.op(
        "linear_cross_entropy",
        "loss",
        inputs=(x,),
        outputs=(loss, *made),
        forward=(*products, *kernels),
        backward=(stream("elementwise", sum(one.num_bytes for one in made), sum(one.num_bytes for one in made)),),
        saved=made,
        forward_temporary_bytes=size,
        parameter_numel=v * d if trains else 0,
    )
    return g.hold("loss.scope", [x, loss])


def _cut(g: Graph, s: OpContext, x: Value, *, trains: bool) -> Value:
    """Head and loss in one kernel each way, whose logits stay on the chip (arXiv 2411.09009): made again in the backward.

    Kept: the log-sum-exp of each row. The backward's filter, which skips blocks without a gradient to speak of, hangs on the
    data and is not counted. trains: the head's weight is.
    """
    t, v, d = s.tokens, s.model.vocab_size, s.model.d_model
    one = Gemm(m=t, n=v, k=d, dtype=s.wide_dtype)
    again: tuple[Kernel, ...] = (one, replace(one, n=d, k=v, layout="nn"))
    loss, sums = g.value("loss", 1, "fp32"), g.value("loss.log_sum_exp", t, "fp32")
    back = (*again, replace(one, m=v, n=d, k=t, layout="nt")) if trains else again
    g.op("cut_cross_entropy", "loss", inputs=(x,), outputs=(loss, sums), forward=(one,), backward=back, saved=(x, sums),
         parameter_numel=v * d if trains else 0)  # fmt: skip
    return g.hold("loss.scope", [x, loss])


def _chunked(g: Graph, s: OpContext, x: Value, *, trains: bool) -> Value:
    """TRL's `chunked_nll` (trl 1.10, trainer/sft_trainer.py: _chunk): head and loss of 256 rows, each behind a checkpoint.

    Every chunk widens the weight to fp32; autocast narrows it again where the product reads it, which DeepSpeed's engine does not
    have. Hits and entropy are metrics of each chunk. Masked rows are not known, so all count.
    """
    t, v, d = s.tokens, s.model.vocab_size, s.model.d_model
    count, rows = -(-t // _ROWS), min(t, _ROWS)
    packed, loss = g.value("loss.packed", x.numel, x.dtype), g.value("loss", 1, "fp32")
    order = stream("strided", x.num_bytes, x.num_bytes, numel=x.numel)
    g.op(packed.name, "loss", inputs=(x,), outputs=(packed,), forward=(order,), backward=(order,))
    held = s.parameter_dtype if trains else "fp32" if s.plan.peft.upcasts else s.dtype
    dtype = "fp32" if s.plan.traits.zero_engine else s.wide_dtype
    widened = (conversion(count * v * d, held, "fp32", count),) if held != "fp32" else ()
    narrowed = (conversion(count * v * d, "fp32", dtype, count),) if dtype != "fp32" else ()
    one = Gemm(m=rows, n=v, k=d, dtype=dtype, batch=count, launches=count)
    f, chunk = 4 * t * v, 4 * rows * v
    wide = (conversion(t * v, dtype, "fp32", count),) if dtype != "fp32" else ()
    softmax = stream("softmax", (2 if 4 * v <= SHORT_ROW_BYTES else 3) * f, f, count)
    hits, *entropy = (stream("reduce", f, 8 * t, count), *(stream("elementwise", n * f, f, count) for n in (1, 2)))
    made = (*widened, *narrowed, one, *wide, softmax, hits, *entropy)
    back: tuple[Kernel, ...] = (*made, stream("softmax", 3 * f, f, count), replace(one, n=d, k=v, layout="nn"))
    # What the product keeps; the wide copy goes once it is narrowed
    read = DTYPE_BYTES[dtype] * v * d if narrowed else 0
    copies = read + (4 * v * d if widened else 0)
    if trains:
        sums = stream("elementwise", 2 * 4 * v * d * count, 4 * v * d * count, count)
        back = (*back, replace(one, m=v, n=d, k=rows, layout="nt"), *narrowed, *widened, sums)
    g.op(
        "chunked_cross_entropy",
        "loss",
        inputs=(packed,),
        outputs=(loss,),
        forward=made,
        backward=back,
        saved=(packed,),
        forward_temporary_bytes=max(copies, read + 3 * chunk),
        backward_temporary_bytes=max(copies, read + 4 * chunk),
        parameter_numel=v * d if trains else 0,
    )
    return g.hold("loss.scope", [x, loss])


def _output_chunks(g: Graph, s: OpContext, x: Value, *, trains: bool) -> Value:
    """Head and loss of eight chunks of the tokens (torchtune 0.3 to 0.7: modules/loss): one gradient of the weight each, added up.

    Compiled, a chunk keeps its logits, in whose place its gradient is counted; eager, its log-probabilities in fp32, beside which a
    list holds the logits of all chunks (`output_chunks`). What a chunk keeps goes before the next ones add to the weight's gradient.
    """
    t, v, d, count = s.tokens, s.model.vocab_size, s.model.d_model, _OUTPUT_CHUNKS
    n, compiled, weight = t * v, s.stack.traits.compiles_blocks, s.element_bytes * v * d * trains
    one = Gemm(m=-(-t // count), n=v, k=d, dtype=s.wide_dtype, batch=count, launches=count)
    logits, loss = g.value("logits", n, s.dtype), g.value("loss", 1, "fp32")
    kept = logits if compiled else g.value("log_probabilities", n, "fp32")
    size, f = logits.num_bytes, kept.num_bytes
    forward: tuple[Kernel, ...] = (one, stream("softmax", 2 * size, 8 * t, count))
    back: tuple[Kernel, ...] = (stream("softmax", size, size, count), replace(one, n=d, k=v, layout="nn"))
    if not compiled:
        softmax = stream("softmax", (2 if 4 * v <= SHORT_ROW_BYTES else 3) * f, f, count)
        forward = (one, conversion(n, s.dtype, "fp32", count), softmax)
        zeros, gradient = stream("memset", 0, f, count), stream("softmax", 3 * f, f, count)
        back = (zeros, gradient, conversion(n, "fp32", s.dtype, count), back[-1])
    if trains:
        sums = stream("elementwise", 2 * weight * (count - 1), weight * (count - 1), count - 1)
        back = (*back, replace(one, m=v, n=d, k=one.m, layout="nt"), sums)
    held = (logits,) if not compiled and s.stack.kernels.loss == "output_chunks" else ()
    first, second = (0, weight - size // count) if compiled else (2 * f // count, weight + (size - 2 * f) // count)
    made = (loss, *dict.fromkeys((kept, *held)))
    g.op("chunked_cross_entropy", "loss", inputs=(x,), outputs=made, forward=forward, backward=back, saved=(x, kept),
         forward_temporary_bytes=0 if compiled else (f + (0 if held else size)) // count,
         backward_temporary_bytes=max(first - weight, second, 0), parameter_numel=v * d if trains else 0)  # fmt: skip
    g.hold("loss.scope", [x, loss, *held])
    return loss
