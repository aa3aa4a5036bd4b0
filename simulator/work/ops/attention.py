"""Attention: projections, positions, the kernel itself (fused, or two products and a softmax), output projection."""

from __future__ import annotations

from simulator.base.kernels import Attention, Gemm, Kernel, Layout, StreamOp
from simulator.work.ops.context_parallel import (
    joins_halves,
    ring,
    ring_backward_bytes,
    ring_forward_bytes,
    ring_steps,
    ring_sums,
    swap,
)
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.latent import latent_projections
from simulator.work.ops.linear import linear
from simulator.work.ops.norm import norm
from simulator.work.ops.op_context import OpContext
from simulator.work.ops.rope import rejoins, rotate
from simulator.work.ops.tensor_parallel import FED, enter, leave, whole_columns

_SOFTMAX_MATRICES = 4  # of scores, that a thread block of Megatron's fused softmax takes


def attention(g: Graph, s: OpContext, x: Value) -> Value:
    """The attention of one layer, [T, D] -> [T, D], without its norm and residual."""
    given, x = x, enter(g, s, "attention.enter", x, FED, products=1 if s.model.fused_qkv else 3)
    q, k, v, gate = _heads(g, s, x)
    mixed = q.base == q.name and s.model.latent is None  # latent attention makes all three
    if s.stack.traits.one_qkv_layout and s.stack.attention.kernel == "cudnn" and mixed:
        # Transformer Engine takes Q, K, V as parts of one tensor or as three of their own, never mixed
        v = g.pointwise("v.contiguous", [v], op="copy")
    if s.plan.peft.method == "prefix":
        k, v = (_behind_prefix(g, s, x) for x in (k, v))
    if s.expand_kv:
        k, v = _expand(g, s, k, "k"), _expand(g, s, v, "v")
    if q.dtype != s.dtype and s.plan.peft.upcasts:  # flash-attention takes 16 bits
        q, k, v = (g.cast(x, s.dtype, f"{x.name}.narrowed") for x in (q, k, v))
    if s.swaps_heads:
        q, k, v = swap(g, "heads", q, k, v, by=_swaps(s))
    core = _core_math if s.stack.attention.kernel == "math" else _core_fused
    o = core(g, s, q, k, v)
    if s.swaps_heads:
        (o,) = swap(g, "tokens", o, by=_swaps(s))
    out = _out(g, s, o if gate is None else _gated(g, o, gate))
    if s.stack.traits.holds_locals:
        g.hold("attention.scope", [given, x, q, k, v, o])  # the caller's argument too
    return leave(g, s, "attention.leave", out)


def _behind_prefix(g: Graph, s: OpContext, x: Value) -> Value:
    """K or V joined to trained ones ahead of them, which all sequences share."""
    added = s.plan.peft.prefix_tokens * (x.numel // s.tokens)
    out = g.value(f"{x.name}.prefixed", x.numel + s.batch * added, x.dtype)
    joined = stream("join", out.num_bytes, out.num_bytes, numel=out.numel)
    back = (
        stream("join", x.num_bytes, x.num_bytes, numel=x.numel),
        stream("reduce", out.num_bytes - x.num_bytes, added),
    )
    return g.op(out.name, inputs=(x,), outputs=(out,), forward=(joined,), backward=back, parameter_numel=added)


def _heads(g: Graph, s: OpContext, x: Value) -> tuple[Value, Value, Value, Value | None]:
    """Q, K and V with their norms and positions, and the gate of attention's result."""
    if s.model.latent is not None:
        return *latent_projections(g, s, x), None
    gate = None
    q, k, v = _projections(g, s, x)
    if s.model.attention_gate:
        q, gate = _query_and_gate(g, s, q)
    if s.model.qk_norm:
        q, k = (_head_norm(g, s, f"{name}_norm", x) for name, x in (("q", q), ("k", k)))
    if s.stack.traits.copies_heads:
        joined = k.numel + v.numel if s.model.num_kv_heads == s.model.num_heads else 0
        q, k, v = (_apart(g, x, *how) for x, how in ((q, (1, joined)), (k, (3,)), (v, (3,))))
    q, k = rotate(g, s, [q, k])
    return q, k, v, gate


def _apart(g: Graph, x: Value, copies: int, joined: int = 0) -> Value:
    """A tensor of its own for a part of a product: [tokens, sequences] turned around, keys joined to values and put in order.

    nanotron, src/nanotron/models/llama.py: transpose and `contiguous`, then `cat`, `permute` and `contiguous` of both. joined: of as
    many heads queries, keys and values are turned around as one; queries, rotated in place, keep so many elements of the others alive.
    """
    out = g.value(f"{x.name}.apart", x.numel, x.dtype)
    kept = (g.value(f"{x.name}.joined", joined, x.dtype),) if joined else ()
    once = stream("strided", x.num_bytes, x.num_bytes, numel=x.numel)
    return g.op(
        out.name,
        inputs=(x,),
        outputs=(out, *kept),
        saved=kept,
        forward=(once,) * copies,
        backward=(once,) * (2 if copies > 1 else 1),
        forward_temporary_bytes=x.num_bytes if copies > 1 else 0,
        backward_temporary_bytes=x.num_bytes if copies > 1 else 0,
    )


def _head_norm(g: Graph, s: OpContext, name: str, x: Value) -> Value:
    """A norm of each head, or of all together; without bias."""
    return norm(g, s, name, x, x.numel // s.tokens if s.model.qk_norm_wide else s.model.head_dim, biased=False)


def _gated(g: Graph, o: Value, gate: Value) -> Value:
    """Attention's result times the sigmoid of its gate."""
    share = g.value("gate.sigmoid", o.numel, o.dtype)
    g.pointwise("gate.sigmoid", [gate], share, saved=[share])
    return g.pointwise("gated", [o, share], saved=[o, share])


def _out(g: Graph, s: OpContext, o: Value) -> Value:
    """The output projection, through low ranks where the model has them."""
    latent = s.model.latent
    if latent is not None and latent.o_lora_rank:
        o = linear(g, s, "out_down", o, latent.o_lora_rank, bias=False, split="none", tokens=s.tokens * latent.o_groups)
    return linear(g, s, "out", o, s.model.d_model, bias=s.model.out_bias, split="rows")


def _projections(g: Graph, s: OpContext, x: Value) -> tuple[Value, Value, Value]:
    """Q, K, V. Where they come from one product they share its storage, and their gradients are joined by one copy."""
    m, t = s.model, s.tokens
    if not m.fused_qkv and not s.stack.traits.joins_projections:
        widths = {"q": m.q_columns, "k": m.kv_width, "v": m.kv_width}
        q, k, v = (linear(g, s, name, x, width, bias=m.qkv_bias, split="columns") for name, width in widths.items())
        return q, k, v
    qkv = linear(g, s, "qkv", x, m.q_columns + 2 * m.kv_columns, bias=m.qkv_bias, split="columns")
    if m.kv_columns < m.kv_width:
        qkv = whole_columns(g, s, "qkv.gathered", qkv)
    q, k, v = (g.view(n, qkv, t * w) for n, w in (("q", m.q_columns), ("k", m.kv_width), ("v", m.kv_width)))
    numel, size = sum(v.numel for v in (q, k, v)), sum(v.num_bytes for v in (q, k, v))
    joined = stream("join" if s.stack.traits.generic_copies else "copy", size, size, numel=numel)
    g.op("split", inputs=(qkv,), forward=_groups_apart(s, q), backward=(joined,), views=(q, k, v))
    return q, k, v


def _query_and_gate(g: Graph, s: OpContext, q: Value) -> tuple[Value, Value]:
    """Each head's product is its query, then its gate: two strided parts, whose gradients are joined by one copy."""
    query, gate = (g.view(name, q, q.numel // 2) for name in ("q.query", "q.gate"))
    joined = (stream("join" if s.stack.traits.generic_copies else "copy", q.num_bytes, q.num_bytes, numel=q.numel),)
    g.op("q.split", inputs=(q,), backward=joined, views=(query, gate))
    return query, gate


def _groups_apart(s: OpContext, q: Value) -> tuple[Kernel, ...]:
    """Megatron's joint columns go by group of heads: its queries, its key, its value (core/transformer/attention.py).

    Where a rank has several groups of several queries, its queries are no view of [s, b, heads, head_dim]: `reshape` copies them.
    """
    several = 1 < s.model.num_kv_heads < s.model.num_heads and s.core_layers
    return (stream("strided", q.num_bytes, q.num_bytes, numel=q.numel),) if several else ()


def _expand(g: Graph, s: OpContext, x: Value, name: str) -> Value:
    """K or V copied to all heads; backward sums the copies' gradients."""
    out = g.value(f"{name}.expanded", x.numel * s.model.q_width // s.model.kv_width, x.dtype)
    return g.op(
        out.name,
        inputs=(x,),
        outputs=(out,),
        forward=(stream(_reorder(s), x.num_bytes, out.num_bytes, numel=out.numel),),
        backward=(stream("reduce", out.num_bytes, x.num_bytes),),
    )


def _core_fused(g: Graph, s: OpContext, q: Value, k: Value, v: Value) -> Value:
    """Tiled attention. Saves Q, K, V, O, the log-sum-exp of each row in fp32, and dropout's random state."""
    m, b = s.model, s.batch
    o = g.value("o", s.tokens * m.o_width, q.dtype)
    heads, kv_heads = m.num_heads // s.head_parts, m.num_kv_heads // s.head_parts
    if m.latent is not None and m.latent.shared_kv:
        kv_heads = 1
    lse = g.value("logsumexp", b * heads * _rounded(s, s.attention_seq), "fp32")
    state = []
    if s.stack.attention.random_state:
        state = [g.value("philox_seed", 2, "int64"), g.value("philox_offset", 1, "int64")]
    kernels = [
        Attention(
            batch=b,
            seq_q=s.attention_seq,
            seq_kv=s.seq_kv,
            num_heads=heads,
            num_kv_heads=heads if s.expand_kv else kv_heads,
            head_dim=m.head_dim,
            causal=s.causal,
            direction=direction,
            dtype=s.wide_dtype,
            v_head_dim=0 if m.latent is None else m.latent.v_head_dim,
        )
        for direction in ("forward", "backward")
    ]
    g.op(
        "attention",
        "attention",
        inputs=(q, k, v),
        outputs=(o, lse, *state),
        forward=(*ring_steps(s, kernels[0]), *ring_sums(s, o, backward=False)),
        backward=(*ring_steps(s, kernels[1]), *ring_sums(s, o, backward=True)),
        saved=(q, k, v, o, lse, *state),
        forward_temporary_bytes=ring_forward_bytes(s, o),
        backward_temporary_bytes=_backward_temporary_bytes(s) + ring_backward_bytes(s, o),
        forward_exchanges=ring(s, backward=False),
        backward_exchanges=ring(s, backward=True),
        selective_save=True,
    )
    if not rejoins(s) and not joins_halves(s):
        return o
    return g.pointwise("o.merged", [o], aliases=[o], op=_reorder(s))  # its gradient comes back as a view


def _rounded(s: OpContext, seq: int) -> int:
    """Rows of the log-sum-exp: the 2022 Triton kernel pads to 128, the fp32 (memory-efficient) kernel to 32."""
    multiple = {"flash1_triton": 128}.get(s.stack.attention.kernel, 32 if s.dtype == "fp32" else 1)
    return -(-seq // multiple) * multiple


def _backward_temporary_bytes(s: OpContext) -> int:
    """FlashAttention-2's backward sums dQ in fp32, keeps Σ dO·O of each row, and expands dK and dV for shared heads."""
    m, rows = s.model, s.batch * s.seq_q
    expanded = 0 if s.expand_kv or m.num_kv_heads == m.num_heads else 2 * rows * m.q_width * s.element_bytes
    return rows * m.q_width * 4 + rows * m.num_heads * 4 + expanded


def _core_math(g: Graph, s: OpContext, q: Value, k: Value, v: Value) -> Value:
    """Two batched products with a masked softmax between them."""
    sq, skv, c = s.attention_seq, s.plan.seq_len, s.model.head_dim
    cv = s.model.o_width // s.model.num_heads
    numel = s.batch * (s.model.num_heads // s.head_parts) * sq * skv
    scores = g.value("scores", numel, q.dtype)
    g.op(
        "scores",
        "attention",
        inputs=(q, k),
        outputs=(scores,),
        forward=(_product(s, sq, skv, c, "tn"),),
        backward=(_product(s, sq, c, skv, "nn"), _product(s, skv, c, sq, "nt")),
        saved=(q, k),
        forward_exchanges=ring(s, backward=False),
        backward_exchanges=ring(s, backward=True),
    )
    probs = _softmax(g, s, scores)
    if s.stack.kernels.dropout:
        probs = g.dropped("probabilities.", probs, "attention")
    o = g.value("o", s.tokens * s.model.o_width, q.dtype)
    g.op(
        "o",
        "attention",
        inputs=(probs, v),
        outputs=(o,),
        forward=(_product(s, sq, cv, skv, "nn"),),
        backward=(_product(s, sq, skv, cv, "tn"), _product(s, skv, cv, sq, "nt")),
        saved=(probs, v),
    )
    return g.pointwise("o.merged", [o], op=_reorder(s))  # the heads beside each other again: a copy


def _softmax(g: Graph, s: OpContext, scores: Value) -> Value:
    """Scale, mask and softmax: one fused kernel each way in the compute dtype, or operators in fp32 where that cannot run.

    Megatron's kernel takes four matrices of scores a thread block: heads of the rank times sequences must divide by 4
    (NVIDIA/Megatron-LM and microsoft/Megatron-DeepSpeed, megatron/model/fused_softmax.py; NVIDIA/TransformerEngine,
    transformer_engine/pytorch/softmax.py, is_kernel_available).
    """
    fours = s.stack.traits.softmax_in_fours and s.batch * s.model.num_heads // s.head_parts % _SOFTMAX_MATRICES == 0
    if s.stack.traits.own_layers and not fours:  # as Megatron-Core without that kernel: core/fusions/fused_softmax.py
        return _softmax_operators(g, scores)
    probs = g.value("probabilities", scores.numel, scores.dtype)
    p = probs.num_bytes
    return g.op(
        "probabilities",
        "attention",
        inputs=(scores,),
        outputs=(probs,),
        forward=(stream("softmax", p, p),),
        backward=(stream("softmax", 2 * p, p),),
        saved=(probs,),
    )


def _softmax_operators(g: Graph, scores: Value) -> Value:
    """To fp32, times the scale, masked in place, softmax, and back: an operator each, each with a gradient of its own."""
    wide = g.cast(scores, "fp32", "scores.float", "attention")
    scaled = g.pointwise("scores.scaled", [wide], category="attention")
    probs, f = g.value("probabilities.float", wide.numel, wide.dtype), wide.num_bytes
    g.op(
        "probabilities.float",
        "attention",
        inputs=(scaled,),
        outputs=(probs,),
        forward=(stream("elementwise", f, f), stream("softmax", f, f)),
        backward=(stream("softmax", 2 * f, f), stream("elementwise", f, f)),
        saved=(probs,),
        backward_temporary_bytes=f,
    )
    return g.cast(probs, scores.dtype, "probabilities", "attention")


def _reorder(s: OpContext) -> StreamOp:
    """How the stack copies a strided tensor into a contiguous one."""
    return "strided" if s.stack.traits.generic_copies else "copy"


def _swaps(s: OpContext) -> tuple[StreamOp, StreamOp]:
    """Copies around an all-to-all of heads for tokens.

    Transformer Engine's: torch's `contiguous` of a strided view, by heads, and one that its fuser compiles, by chunks of the
    sequence (context_parallel.py, reorder_seq_chunks_for_a2a_before_attn, _after_attn).
    """
    return ("strided", "copy") if s.stack.traits.attention_communicates else (_reorder(s), _reorder(s))


def _product(s: OpContext, m: int, n: int, k: int, layout: Layout) -> Gemm:
    """One product for each head of each sequence."""
    return Gemm(m=m, n=n, k=k, batch=s.batch * s.model.num_heads // s.head_parts, dtype=s.wide_dtype, layout=layout)
