"""Context parallelism around the attention kernel: a ring of keys and values, or heads swapped for tokens."""

from __future__ import annotations

from typing import Literal

from simulator.base.kernels import StreamOp
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
        "elementwise",
        inputs=values,
        outputs=outputs,
        forward=copies,
        backward=copies,
        grads=values,
        forward_temporary_bytes=size,
        backward_temporary_bytes=size,
        forward_exchanges=exchange,
        backward_exchanges=exchange,
    )
    return outputs


def ring(s: OpContext, *kinds: Literal["all_gather", "reduce_scatter"]) -> tuple[Exchange, ...]:
    """Ring attention: keys and values of the whole sequence pass every rank of cp beside the kernel.

    Backward they pass once more, and their gradients come back.
    """
    if not _rings(s):
        return ()
    size = 2 * s.batch * s.plan.seq_len * s.model.kv_width * s.element_bytes
    return tuple(Exchange(kind=kind, axis="cp", num_bytes=size, beside=1) for kind in kinds)


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
