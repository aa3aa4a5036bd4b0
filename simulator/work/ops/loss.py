"""The loss: cross-entropy over V logits a token, which eager software does in fp32 with a storage a step.

Bytes a 16-bit logit: eager 48 (44 for short rows), Megatron's fused 44 and unfused 52, in place 10, other fused and
compiled ones 8.
"""

from __future__ import annotations

from simulator.base.kernels import Stream, StreamOp
from simulator.work.ops.core import Exchange
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.op_context import OpContext
from simulator.work.ops.tensor_parallel import exchange

# PyTorch's log-softmax passes over a row three times (maximum, sum, result). Short rows are still in a cache at the last
# pass: its forward takes 7.3 ps a logit on A100 where a row has 64 KB and 9.9 ps from 128 KB on (Liger-Kernel's benchmark
# data, fp32 logits), one read of 4 bytes apart at 1.7 TB/s. Backward it takes the same time for both.
SHORT_ROW_BYTES = 100_000
SHIFTED = ("fp32_cast", "fp32_cast_fused", "fp32_shifted", "fp32_shifted_fused", "shifted", "shifted_nll")  # fmt: skip

# What loss_parallel keeps of a row beside its logits: maximum, sum and its logarithm in fp32; backward the target, its
# column here and its row (int64), whether it is here (a bool), what that adds and the scale in fp32.
_ROW_BYTES_FORWARD, _ROW_BYTES_BACKWARD = 12, 33


def cross_entropy(g: Graph, s: OpContext, logits: Value) -> Value:
    """The mean loss, a scalar, of logits [T, V], and what the stack's training metrics make of the logits."""
    # labels are the tokens' own: nothing is shifted, or widened for it
    own = s.model.bidirectional or s.model.num_classes
    kind, kernels = s.stack.kernels.loss, dict.fromkeys(SHIFTED, _eager if own else _shifted)
    kernels |= {"eager": _eager, "fp32_eager": _eager, "fp32_in_place": _megatron_unfused}
    kernels |= {"fp32_beside": _beside, "in_place": _in_place}
    fused = _megatron if s.stack.traits.jit_loss else _one_kernel
    loss = kernels.get(kind, fused if kind == "fused" else _one_kernel)(g, s, logits)
    for index in range(s.stack.kernels.loss_metrics):
        _metric(g, s, logits, f"metric{index}")
    return loss


def _rows(s: OpContext, num_kernels: int) -> tuple[Exchange, ...]:
    """Where the vocabulary is split: each row's maximum, its sum and its target's logit, among the ranks of tp.

    Megatron-LM, core/tensor_parallel/cross_entropy.py.
    """
    if not s.splits_loss:
        return ()
    return (exchange("all_reduce", 4 * s.tokens, num_kernels),) * 3


def _metric(g: Graph, s: OpContext, logits: Value, name: str) -> None:
    """A metric's cross-entropy under autocast: log-softmax (8 B, short rows 6), cast of its result (6).

    PyTorch's cross_entropy_loss names the logits' own dtype to log_softmax (aten/src/ATen/native/LossNLL.cpp), which autocast
    leaves as it is (autocast_mode.h, set_opt_dtype); only nll_loss is cast to fp32. It runs after the backward, when
    nothing else is alive.
    """
    size, wide = logits.num_bytes, 4 * logits.numel
    log_softmax = stream("softmax", _passes(s, logits) * size, size)
    g.op(
        name, "loss", inputs=(logits,), grads=(), forward=(log_softmax, stream("widen", size, wide, numel=logits.numel))
    )


def _over(num_bytes: int, *ops: StreamOp) -> tuple[Stream, ...]:
    """Kernels that each read so many bytes; those that are no reduction write as many."""
    return tuple(stream(op, num_bytes, 0 if op == "reduce" else num_bytes) for op in ops)


def _passes(s: OpContext, rows: Value) -> int:
    """How often log-softmax reads its rows from memory."""
    return 2 if rows.num_bytes <= SHORT_ROW_BYTES * s.tokens else 3


def _eager(g: Graph, s: OpContext, logits: Value) -> Value:
    """Cast (6 B), log-softmax (16, short rows 12), pick; backward zero-fill (4), log-softmax (16), cast (6).

    Without a cast torch reads and writes 16 bits, and computes in fp32 inside its kernels.
    """
    wide = logits if s.stack.kernels.loss != "fp32_eager" else g.cast(logits, "fp32", "logits.float", "loss")
    if s.splits_loss and s.stack.traits.dtensor:
        return _split(g, s, logits, wide)
    return _log_softmax(g, s, wide, logits)


def _shifted(g: Graph, s: OpContext, logits: Value) -> Value:
    """Transformers from 4.46 on (loss/loss_utils.py, ForCausalLMLoss): 22 B a logit more than without the copy (20).

    16-bit logits, their cast and the copy without each sequence's last row are locals of functions that call each other. The copy's
    gradient is put into zeros (slice_backward); Unsloth's kernel writes it over the copy. Models that do not cast (Qwen 1) copy 16 bits
    (`shifted`), of which under autocast only what nll_loss reads is fp32 (`shifted_nll`; `_metric` has the places).
    """
    kind = s.stack.kernels.loss
    wide = g.cast(logits, "fp32" if kind.startswith("fp32") else logits.dtype, "logits.float", "loss")
    f, rows = wide.num_bytes, g.value("logits.shifted", wide.numel, wide.dtype)
    g.op(
        rows.name,
        "loss",
        inputs=(wide,),
        outputs=(rows,),
        forward=(stream("copy", f, f),),
        backward=(stream("memset", 0, f), stream("copy", f, f)),
    )
    if not kind.endswith("_fused"):
        loss = _log_softmax(g, s, rows)
    else:
        loss = g.value("loss", 1, "fp32")
        g.op(
            "cross_entropy",
            "loss",
            inputs=(rows,),
            outputs=(loss,),
            forward=(stream("reduce", f, 12 * s.tokens),),
            backward=(stream("softmax", f, f),),
            saved=(rows,),
            overwrites=(rows,),
        )
    return g.hold("shifted.scope", [*([logits] if kind.startswith("fp32_shifted") else []), wide, rows, loss])


def _log_softmax(g: Graph, s: OpContext, wide: Value, logits: Value | None = None) -> Value:
    """Log-softmax of fp32 rows, and the pick. logits: held until then."""
    f = wide.num_bytes
    log_probs = g.value("log_probabilities", wide.numel, wide.dtype)
    g.op(
        "log_softmax",
        "loss",
        inputs=(wide,),
        outputs=(log_probs,),
        forward=(stream("softmax", _passes(s, wide) * f, f),),
        backward=(stream("softmax", 3 * f, f),),  # the gradient twice: its row sum comes first
        saved=(log_probs,),
        forward_exchanges=_rows(s, 1),
    )
    nll_dtype = "fp32" if s.stack.kernels.loss == "shifted_nll" else log_probs.dtype
    return _picked(g, s, logits, wide, g.cast(log_probs, nll_dtype, "log_probabilities.float", "loss"))


def _split(g: Graph, s: OpContext, logits: Value, wide: Value) -> Value:
    """Torch's loss_parallel: the same operator by operator on this rank's columns (distributed/tensor/parallel/loss.py).

    Forward: maximum (4), subtract (8), exponentiate (8), sum (4), subtract (8). Backward: zero-fill (4), exponentiate (8),
    add (12), scale (8); what comes out is the gradient of the logits already.
    """
    f = wide.num_bytes
    log_probs = g.value("log_probabilities", wide.numel, wide.dtype)
    g.op(
        "log_softmax",
        "loss",
        inputs=(wide,),
        outputs=(log_probs,),
        forward=(
            stream("reduce", f, 4 * s.tokens),
            stream("elementwise", f, f),
            stream("elementwise", f, f),
            stream("reduce", f, 4 * s.tokens),
            stream("elementwise", f, f),
        ),
        saved=(log_probs,),
        aliases=(wide,),
        forward_temporary_bytes=f + _ROW_BYTES_FORWARD * s.tokens,
        forward_exchanges=_rows(s, 1),
    )
    more = (stream("elementwise", f, f), stream("elementwise", 2 * f, f), stream("elementwise", f, f))
    return _picked(g, s, logits, wide, log_probs, more, 2 * f + _ROW_BYTES_BACKWARD * s.tokens)


def _picked(
    g: Graph,
    s: OpContext,
    logits: Value | None,
    wide: Value,
    log_probs: Value,
    more_backward: tuple[Stream, ...] = (),
    backward_temporary_bytes: int = 0,
) -> Value:
    """The mean of each token's own log-probability; backward zeros with a number in each row, and what follows on all."""
    loss, total = g.value("loss", 1, "fp32"), g.value("total_weight", 1, "fp32")
    picked = 32 * s.tokens  # a sector of memory for each picked number
    g.op(
        "nll",
        "loss",
        inputs=(log_probs, wide),
        outputs=(loss, total),
        forward=(stream("reduce", picked, 8),),
        backward=(stream("memset", 0, log_probs.num_bytes), stream("elementwise", picked, picked), *more_backward),
        saved=(log_probs, total),
        grads=(log_probs,),
        backward_temporary_bytes=backward_temporary_bytes,
    )
    return g.hold("loss.scope", [*([logits] if logits else []), loss])


def _one_kernel(g: Graph, s: OpContext, logits: Value) -> Value:
    """One kernel each way on 16-bit logits: forward two passes for a row's maximum and sum, backward dlogits."""
    size = logits.num_bytes
    loss, sums = g.value("loss", 1, "fp32"), g.value("loss.logsumexp", 2 * s.tokens, "fp32")
    g.op(
        "cross_entropy",
        "loss",
        inputs=(logits,),
        outputs=(loss, sums),
        forward=(stream("softmax", 2 * size, sums.num_bytes),),
        backward=(stream("softmax", size, size),),
        saved=(logits, sums),
        forward_exchanges=_rows(s, 1),
    )
    return g.hold("loss.scope", [logits, loss])


def _in_place(g: Graph, s: OpContext, logits: Value) -> Value:
    """Transformer Engine's: maxima and sums (2 B), then gradients over the logits (4); backward scales them (4).

    transformer_engine/pytorch/triton/cross_entropy.py up to 2.17; later ones keep an fp32 gradient beside the logits.
    """
    size = logits.num_bytes
    loss, sums = g.value("loss", s.tokens, "fp32"), g.value("maxima_and_sums", 3 * s.tokens, "fp32")
    return g.op(
        "cross_entropy",
        "loss",
        inputs=(logits,),
        outputs=(loss, sums),
        forward=(stream("reduce", size, sums.num_bytes), stream("softmax", size, size)),
        backward=(stream("elementwise", size, size),),
        saved=(logits,),
        overwrites=(logits,),
    )


def _megatron(g: Graph, s: OpContext, logits: Value) -> Value:
    """Megatron's vocab-parallel cross-entropy, jit-fused: 44 B a logit, near the 7 × ideal measured on H100.

    Forward: cast (6), maximum (4), subtract and exponentiate (8), sum (4), divide in place (8). Backward: scale in
    place (8), cast (6).
    """
    f, size = 4 * logits.numel, logits.num_bytes
    loss, probs = g.value("loss", s.tokens, "fp32"), g.value("loss.probabilities", logits.numel, "fp32")
    g.op(
        "cross_entropy",
        "loss",
        inputs=(logits,),
        outputs=(loss, probs),
        forward=(stream("elementwise", size, f), *_over(f, "reduce", "elementwise", "reduce", "elementwise")),
        backward=(stream("elementwise", f, f), stream("elementwise", f, size)),
        saved=(probs,),
        forward_temporary_bytes=f,
        forward_exchanges=_rows(s, 5),
    )
    return g.hold("loss.scope", [logits, loss])


# What Megatron's unfused loss launches of a number a row, beside its passes over the logits: forward the target's mask
# (3), its place (4), its logit (5), the loss (2); backward its place and the mask in fp32 (3), what it takes off (3)
_ROW_LAUNCHES_FORWARD, _ROW_LAUNCHES_BACKWARD = 14, 6


def _megatron_unfused(g: Graph, s: OpContext, logits: Value) -> Value:
    """Megatron's vocab-parallel cross-entropy as plain operators: 52 B a logit in one fp32 storage.

    Forward: cast (6), maximum (4), then in place subtract (8), exponentiate (8), sum (4), divide (8); saves the quotients.
    Backward: scale in place (8), cast (6). Megatron-LM, core/tensor_parallel/cross_entropy.py.
    """
    f, size, row = 4 * logits.numel, logits.num_bytes, 8 * s.tokens
    loss, probs = g.value("loss", s.tokens, "fp32"), g.value("loss.probabilities", logits.numel, "fp32")
    g.op(
        "cross_entropy",
        "loss",
        inputs=(logits,),
        outputs=(loss, probs),
        forward=(
            stream("widen", size, f, numel=logits.numel),
            *_over(f, "reduce", "elementwise"),
            stream("elementwise", row, row, _ROW_LAUNCHES_FORWARD),
            *_over(f, "elementwise", "reduce", "elementwise"),
        ),
        backward=(
            stream("elementwise", row, row, _ROW_LAUNCHES_BACKWARD),
            stream("elementwise", f, f),
            stream("cast", f, size, numel=logits.numel),
        ),
        saved=(probs,),
        forward_exchanges=_rows(s, 7),
    )
    return g.hold("loss.scope", [logits, loss])


def _beside(g: Graph, s: OpContext, logits: Value) -> Value:
    """The same behind a cast of its own, whose result the caller holds: subtract into a second fp32 storage, 52 B a logit.

    The backward writes the gradient over what the forward saved (nanotron, parallel/tensor_parallel/functional.py).
    """
    wide = g.cast(logits, "fp32", "logits.float", "loss")
    f, row, loss = wide.num_bytes, 8 * s.tokens, g.value("loss", s.tokens, "fp32")
    return g.op(
        "cross_entropy",
        "loss",
        inputs=(wide,),
        outputs=(loss,),
        forward=(
            *_over(f, "reduce", "elementwise"),
            stream("elementwise", row, row, _ROW_LAUNCHES_FORWARD),
            *_over(f, "elementwise", "reduce", "elementwise"),
        ),
        backward=(stream("elementwise", row, row, _ROW_LAUNCHES_BACKWARD), *_over(f, "elementwise")),
        saved=(wide,),
        overwrites=(wide,),
        forward_temporary_bytes=f,
        forward_exchanges=_rows(s, 6),
    )
