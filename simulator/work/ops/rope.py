"""Rotary positions, as each kind of software writes them. Bytes an element in 16 bits: half 23 [29 backward], complex 20, pairs 50 [100].

The operators of rotate-half and the complex product read strided or broadcast tensors, where torch computes an address
for every element: SMs limit them, not memory.
"""

from __future__ import annotations

from simulator.base.kernels import DTYPE_BYTES, Stream
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.op_context import OpContext


def rotate(g: Graph, s: OpContext, values: list[Value]) -> list[Value]:
    """Q and K rotated by their positions; unchanged for models without rotary positions."""
    if s.model.positions != "rope":
        return values
    if s.core_layers and (s.model.rotary_scale != 1 or s.stack.kernels.rope == "unfused"):
        tables = _tables(g, s)
        return [_scaled(g, x, tables) for x in values]
    kind = s.stack.kernels.rope  # inductor has no complex operators and calls torch's own kernel
    compiled = s.stack.traits.fuses_elementwise and kind != "complex_fp32"
    if kind == "fused" or s.stack.traits.rotates_by_hand or compiled:
        return [_one_kernel(g, x) for x in values]
    if kind in ("complex_fp32", "pairs_fp32"):
        return [_in_fp32(g, x, pairs=kind == "pairs_fp32") for x in values]
    tables = _tables(g, s)
    return [_half(g, s, x, tables) for x in values]


def rejoins(s: OpContext) -> bool:
    """Operators join turned channels to the others by `cat`, whose result lies by heads, as attention's does then.

    So the heads of a token are put beside each other by a copy; else Q, and with it attention's result, lies by tokens.
    """
    m, kernels = s.model, s.stack.kernels
    turns = m.positions == "rope" and m.rotary_fraction < 1 and m.latent is None
    return turns and kernels.rope == "half" and s.stack.traits.runs_operators


def _tables(g: Graph, s: OpContext) -> list[Value]:
    """Cosine and sine tables in the compute dtype; in fp32 the buffers themselves are used."""
    if s.dtype == "fp32":
        return []
    numel = s.seq_q * int(s.model.head_dim * s.model.rotary_fraction)
    tables = []
    for name in ("cos", "sin"):
        table = g.value(name, numel, s.dtype)
        kernel = stream("cast", 4 * numel, table.num_bytes)
        g.op(name, inputs=(), outputs=(table,), forward=(kernel,))
        tables.append(table)
    return tables


def _half(g: Graph, s: OpContext, x: Value, tables: list[Value]) -> Value:
    """Hugging Face's rotate-half, x cos + cat(-x₂, x₁) sin. Only cos and sin are saved: they need no gradient.

    x is a transposed view of a projection; after `cat` half of the terms lie in the order of heads. So the gradient that
    leaves here has to be copied into the projection's order.
    """
    cos, sin = (tables[:1], tables[1:]) if tables else ([], [])
    n = int(x.numel * s.model.rotary_fraction)
    size = n * DTYPE_BYTES[x.dtype]
    one = stream("strided", size, size, numel=n)
    g.sums_strided(x)
    by_cos, negated = g.value(f"{x.name}.cos", n, x.dtype), g.value(f"{x.name}.negated", n - n // 2, x.dtype)
    swapped, by_sin = g.value(f"{x.name}.swapped", n, x.dtype), g.value(f"{x.name}.sin", n, x.dtype)
    slice_grad = Value(x.name, n, x.dtype)  # a copy puts it in order; behind a joint Q, K, V the join does
    g.op(by_cos.name, inputs=(x, *cos), outputs=(by_cos,), forward=(one,), backward=(one,) if s.model.fused_qkv else (one, one),
         saved=cos, grads=(slice_grad,))  # fmt: skip
    half = stream("strided", negated.num_bytes, negated.num_bytes, numel=negated.numel)
    joined = stream("join", size, size, numel=n)  # the two halves' gradients become one
    g.op(negated.name, inputs=(x,), outputs=(negated,), forward=(half,), backward=(half, joined),
         grads=(slice_grad,), backward_temporary_bytes=negated.num_bytes)  # fmt: skip
    g.op(swapped.name, inputs=(x, negated), outputs=(swapped,), forward=(joined,), grads=(),
         aliases=(negated,))  # fmt: skip
    g.op(by_sin.name, inputs=(swapped, *sin), outputs=(by_sin,), forward=(one,), backward=(one,),
         saved=sin, grads=(swapped,))  # fmt: skip
    out = g.pointwise(f"{x.name}.rotated", [by_cos, by_sin], aliases=[by_cos, by_sin], op="strided")
    return out if n == x.numel else _rejoin(g, x, out)


def _scaled(g: Graph, x: Value, tables: list[Value]) -> Value:
    """Megatron-Core without its fused kernel, and where positions are scaled, which that kernel does not know.

    x cos + cat(-x₂, x₁) sin, then `cat` with the channels that do not turn, be there any or not (rope_utils.py,
    _apply_rotary_pos_emb_bshd). x is a slice of the joint product, so what reads it, and a table, is strided; what those make
    is contiguous.
    """
    cos, sin = (tables[:1], tables[1:]) if tables else ([], [])
    size, half = x.num_bytes, x.num_bytes // 2
    one, cut = stream("strided", size, size, numel=x.numel), stream("strided", half, half, numel=x.numel // 2)
    joined, summed = stream("join", size, size, numel=x.numel), stream("elementwise", 2 * size, size)
    by_cos, by_sin, swapped, out = (
        g.value(f"{x.name}.{n}", x.numel, x.dtype) for n in ("cos", "sin", "swapped", "rotated")
    )
    g.op(by_cos.name, inputs=(x, *cos), outputs=(by_cos,), forward=(one,), backward=(one,), saved=cos,
         grads=(x,))  # fmt: skip
    g.op(swapped.name, inputs=(x,), outputs=(swapped,), forward=(cut, joined), backward=(cut, joined),
         forward_temporary_bytes=half, backward_temporary_bytes=half)  # fmt: skip
    g.op(by_sin.name, inputs=(swapped, *sin), outputs=(by_sin,), forward=(one,), backward=(one,),
         saved=sin, grads=(swapped,))  # fmt: skip
    return g.op(out.name, inputs=(by_cos, by_sin), outputs=(out,), forward=(summed, stream("copy", size, size)),
         aliases=(by_cos, by_sin), forward_temporary_bytes=size)  # fmt: skip


def _rejoin(g: Graph, x: Value, rotated: Value) -> Value:
    """Partial rotation: the rotated channels and the others in one tensor again."""
    out = g.value(f"{x.name}.joined", x.numel, x.dtype)
    kernel = stream("join", out.num_bytes, out.num_bytes, numel=out.numel)
    return g.op(out.name, inputs=(rotated, x), outputs=(out,), forward=(kernel,), backward=(kernel,),
         aliases=(rotated,))  # fmt: skip


def _in_fp32(g: Graph, x: Value, *, pairs: bool) -> Value:
    """Cast to fp32, turned, cast back. The table is a buffer; nothing else is saved. Meta's takes one product of complex numbers.

    pairs: torchtune's, each of a pair by cosine and by sine, a difference and a sum, and `stack` (modules/position_embeddings.py).
    Halves lie a number apart, so each kernel reads whole sectors. Backward, each of the four products' gradients is put into zeros
    of the whole, and three sums make one of them.
    """
    own = "unturned" if x.name.endswith("norm") else "float"  # a norm has its own `.float`
    wide = g.cast(x, "fp32", f"{x.name}.{own}")
    turned, n, f = g.value(f"{x.name}.turned", x.numel, "fp32"), x.numel, wide.num_bytes
    forward: tuple[Stream, ...] = (stream("strided", f, f, numel=n // 2),)
    back = forward
    if pairs:
        products, negated = stream("strided", 4 * f, 2 * f, 4, numel=2 * n), stream("strided", f, f // 2, numel=n // 2)
        zeros, placed = stream("memset", 0, 4 * f, 4), stream("strided", 2 * f, 4 * f, 4, numel=2 * n)
        forward = (products, stream("elementwise", 2 * f, f, 2), stream("join", f, f, numel=n))
        back = (products, negated, zeros, placed, stream("elementwise", 6 * f, 3 * f, 3))
    g.op(turned.name, inputs=(wide,), outputs=(turned,), forward=forward, backward=back,
         forward_temporary_bytes=f * pairs, backward_temporary_bytes=3 * f // 2 * pairs)  # fmt: skip
    return g.cast(turned, x.dtype, f"{x.name}.rotated")


def _one_kernel(g: Graph, x: Value) -> Value:
    return g.pointwise(f"{x.name}.rotated", [x])
