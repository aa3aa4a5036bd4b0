"""Context parallelism around the attention kernel: a ring of keys and values, or heads swapped for tokens."""

from __future__ import annotations

from dataclasses import replace

from simulator.base.kernels import Attention, Stream, StreamOp
from simulator.work.ops.core import Exchange
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.op_context import OpContext


def swap(g: Graph, name: str, *values: Value, by: tuple[StreamOp, StreamOp] = ("copy", "copy")) -> list[Value]:
    """A part of the tokens and all heads become all tokens and a part of the heads, or the other way round.

    Each tensor is laid out by receiver, sent, and put in order: two copies around the all-to-all, and a buffer that it
    fills (transformer_engine/pytorch/attention/.../context_parallel.py: flash_attn_a2a_communicate). by: what kind of copies.
    """
    outputs = [g.value(f"{x.name}.{name}", x.numel, x.dtype) for x in values]
    size, numel = sum(x.num_bytes for x in values), sum(x.numel for x in values)
    copies = tuple(stream(op, size, size, len(values), numel=numel) for op in by)
    exchange = (Exchange(kind="all_to_all", axis="cp", num_bytes=size, at=1),)
    g.op(
        f"swap to {name}",
        inputs=values,
        outputs=outputs,
        forward=copies,
        backward=copies,
        forward_temporary_bytes=size,
        backward_temporary_bytes=size,
        forward_exchanges=exchange,
        backward_exchanges=exchange,
    )
    return outputs


def ring(s: OpContext, *, backward: bool) -> tuple[Exchange, ...]:
    """Ring attention: keys and values of the whole sequence pass every rank of cp beside the kernels of its steps.

    Backward they pass once more, and their gradients come back. torch gathers them all at once, beside the first step alone
    (_AllGatherRotater, its default, and torchtitan's); Transformer Engine sends them on while a step runs, in all but the last.
    """
    if not _rings(s):
        return ()
    size = 2 * s.batch * s.plan.seq_len * s.model.kv_width * s.element_bytes
    sent = s.stack.traits.attention_communicates
    first = 1 if not sent else s.plan.cp if backward else s.plan.cp - 1
    gathered = Exchange(kind="all_gather", axis="cp", num_bytes=size, beside=first)
    if not backward:
        return (gathered,)
    at, beside = (0, first) if sent else (1, s.plan.cp - 1)
    return gathered, Exchange(kind="reduce_scatter", axis="cp", num_bytes=size, at=at, beside=beside)


def ring_steps(s: OpContext, kernel: Attention) -> tuple[Attention, ...]:
    """A kernel as a ring runs it: a rank's own keys under the mask, then, of each other rank's, half of all pairs without one.

    A rank has two parts of the sequence, one from either end: all its queries see the first half of another's keys, or the
    latter half of its queries all of them (Transformer Engine's context_parallel.py; torch's `enable_load_balance`).
    """
    if not _rings(s):
        return (kernel,)
    own = replace(kernel, seq_kv=max(1, kernel.seq_kv // s.plan.cp))
    other = replace(own, seq_kv=max(1, own.seq_kv // 2), causal=False)
    return (own, *(other,) * (s.plan.cp - 1))


def ring_sums(s: OpContext, o: Value, *, backward: bool) -> tuple[Stream, ...]:
    """What makes one result of a ring's steps: kernels that stream over results or gradients, on an average rank.

    Of cp - 1 steps half are of all queries, half of the latter half of them. Transformer Engine corrects and adds the 16-bit
    results behind the steps, a kernel each (flash_attn_fwd_out_correction); backward it adds dQ, dK and dV. torch works in
    fp32, operator by operator: _SDPAMerger's casts, difference, product and sum, `cat` where half of a tensor was updated.
    """
    if not _rings(s):
        return ()
    more, n, kv = s.plan.cp - 1, o.numel, _kv_bytes(s) // s.element_bytes
    if s.stack.traits.attention_communicates:
        first = stream("elementwise", 2 * n, 2 * n, numel=n)
        added = stream("elementwise", 3 * n * more, 3 * n * more // 2, more, numel=3 * n * more // 4)
        keys = stream("elementwise", 3 * kv * more, 3 * kv * more // 2, 2 * more, numel=3 * kv * more // 4)
        return (first, added, keys) if backward else (first, added)
    sent = stream("join", 2 * kv * more, 2 * kv * more, more, numel=kv * more)
    if s.stack.traits.fuses_elementwise:
        return sent, *_compiled_sums(n + kv if backward else n, more)
    return (sent, *(_torch_gradients(n, kv, more) if backward else _torch_results(n, more)))


def _compiled_sums(n: int, more: int) -> tuple[Stream, ...]:
    """The same under a compiler: a kernel a step reads 16 bits and the fp32 sum, and writes all of it, also where half is new."""
    summed = stream("elementwise", 2 * n + 11 * n * more // 2, 4 * n * (more + 1), more + 1, numel=n * (more + 1))
    return summed, stream("cast", 4 * n, 2 * n, numel=n)


def _torch_results(n: int, more: int) -> tuple[Stream, ...]:
    """Results widened, difference and sum, the product with a weight a row, `cat` in half of the steps, and narrowed at last."""
    steps = n + 3 * n * more // 4
    return (
        stream("widen", 2 * steps, 4 * steps, more + 1, numel=steps),
        stream("elementwise", 12 * n * more, 6 * n * more, 2 * more, numel=3 * n * more // 2),
        stream("strided", 3 * n * more, 3 * n * more, more, numel=3 * n * more // 4),
        stream("join", 2 * n * more, 2 * n * more, -(-more // 2), numel=n * more // 2),
        stream("cast", 4 * n, 2 * n, numel=n),
    )


def _torch_gradients(n: int, kv: int, more: int) -> tuple[Stream, ...]:
    """Gradients added in fp32, `cat` in half of the steps, those of keys joined each step to be sent on, and narrowed at last."""
    both, steps = n + kv, more + 1
    return (
        stream(
            "widen",
            6 * both + 9 * both * more // 2,
            (4 + 3 * more) * both,
            3 * steps,
            numel=both + 3 * both * more // 4,
        ),
        stream("join", 2 * both * more, 2 * both * more, 3 * more // 2, numel=both * more // 2),
        stream("join", 4 * kv * steps, 4 * kv * steps, steps, numel=kv * steps),
        stream("cast", 4 * both, 2 * both, 3, numel=both),
    )


def _rings(s: OpContext) -> bool:
    return s.plan.cp > 1 and not s.swaps_heads


def joins_halves(s: OpContext) -> bool:
    """Torch's ring puts halves of the tokens together by `cat`, whose result lies by heads, and which is then copied by tokens.

    On every rank of cp but the last (_attention.py: _partial_update of the second half of the queries).
    """
    return _rings(s) and not s.stack.traits.attention_communicates


def ring_forward_bytes(s: OpContext, o: Value) -> int:
    """Temporary bytes of a ring's forward: keys and values of every rank, and partial results.

    Transformer Engine keeps the 16-bit result of each of the cp steps (the last rank's are all whole). torch merges each
    step's into one in fp32 (torch/distributed/tensor/experimental: _SDPAMerger): the sum, a step's result in fp32 where it
    is none, their difference and its product.
    """
    if not _rings(s):
        return 0
    sums = 4 * o.numel * (3 if o.dtype == "fp32" else 4)
    return s.plan.cp * _kv_bytes(s) + (s.plan.cp * o.num_bytes if s.stack.traits.attention_communicates else sums)


def ring_backward_bytes(s: OpContext, o: Value) -> int:
    """Of a ring's backward, beside its results: two buffers of keys, values and their gradients, and one step's gradients.

    torch gathers all keys and values once more instead (_templated_ring_attention_backward). While a step's kernel runs
    there are also what was sent for that, the sums in fp32, gradients of keys and values in fp32 as they were sent and as
    they came, and the kernel's results of the step before; its own are half of the queries and all keys and values.
    """
    if not _rings(s):
        return 0
    kv = _kv_bytes(s)
    if s.stack.traits.attention_communicates:
        return 4 * kv + o.num_bytes + kv
    return (s.plan.cp + 2) * kv + 4 * (o.numel + 3 * kv // s.element_bytes) + o.num_bytes // 2


def _kv_bytes(s: OpContext) -> int:
    """Keys and values of this rank's tokens."""
    return 2 * s.tokens * (s.model.q_width if s.expand_kv else s.model.kv_width) * s.element_bytes
