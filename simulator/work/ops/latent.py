"""Multi-head latent attention: queries, keys and values through low ranks (arXiv 2405.04434, section 2.1).

Legend: T tokens, H heads of the rank. Under sequence parallelism the products into the low ranks run on the rank's part of
the tokens, and what they make is gathered (Megatron-LM core/transformer/multi_latent_attention.py).
"""

from __future__ import annotations

from simulator.base.kernels import Gemm, Kernel
from simulator.spec.model.experts import Latent
from simulator.work.ops.core import Exchange
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.linear import linear
from simulator.work.ops.norm import norm
from simulator.work.ops.op_context import OpContext


def latent_projections(g: Graph, s: OpContext, x: Value) -> tuple[Value, Value, Value]:
    """Q, K [T, H, qk_head_dim] and V [T, H, v_head_dim], positions applied. x is the stream, or gathered already."""
    latent = s.model.latent
    assert latent is not None
    tokens = x.numel // s.model.d_model
    q = _rotated(g, s, _queries(g, s, latent, x, tokens), latent)
    width = latent.kv_lora_rank + latent.qk_rope_head_dim
    down = linear(g, s, "kv_down", x, width, bias=False, split="none", tokens=tokens)
    low = g.view("kv_low", down, tokens * latent.kv_lora_rank)
    rope = g.view("k_rope", down, tokens * latent.qk_rope_head_dim)
    g.op(
        "kv_split",
        inputs=(down,),
        backward=(stream("copy", down.num_bytes, down.num_bytes),),
        views=(low, rope),
    )
    low = norm(g, s, "kv_norm", low, latent.kv_lora_rank)
    if latent.shared_kv:
        k = g.pointwise("k", [low, rope], g.value("k", low.numel + rope.numel, low.dtype), op="join")
        return q, k, g.view("v", k, k.numel)
    heads = s.model.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    kv = linear(g, s, "kv_up", low, heads, bias=False, split="columns")
    return q, *_keys_and_values(g, s, latent, kv, rope)


def _queries(g: Graph, s: OpContext, latent: Latent, x: Value, tokens: int) -> Value:
    if not latent.q_lora_rank:
        return linear(g, s, "q", x, s.model.q_width, bias=False, split="columns")
    low = linear(g, s, "q_down", x, latent.q_lora_rank, bias=False, split="none", tokens=tokens)
    low = norm(g, s, "q_norm", low, latent.q_lora_rank)
    if latent.index_heads:
        _index(g, s, latent, low, x, tokens)
    return linear(g, s, "q_up", low, s.model.q_width, bias=False, split="columns")


def _index(g: Graph, s: OpContext, latent: Latent, low: Value, x: Value, tokens: int) -> None:
    """Scores of every earlier key for each query, out of which the keys are chosen (DeepSeek-V3.2, section 2.1).

    Both gradients of the scores are counted, as where the indexer learns. The choice itself is no product.
    """
    heads, width = latent.index_heads, latent.index_head_dim
    wide = linear(g, s, "index_q", low, heads * width, bias=False, split="none", tokens=tokens)
    key = linear(g, s, "index_k", x, width, bias=False, split="none", tokens=tokens)
    weights = linear(g, s, "index_weights", x, heads, bias=False, split="none", tokens=tokens)
    pairs = -(-s.plan.seq_len // 2)  # of a query, on average

    def product(m: int, n: int, k: int) -> Gemm:
        return Gemm(m=m, n=n, k=k, batch=s.batch, dtype=s.wide_dtype)

    rows = s.seq_q * heads
    chosen = g.value("index", 1, "int64")
    g.op(
        "index",
        "attention",
        inputs=(wide, key, weights),
        outputs=(chosen,),
        forward=(product(rows, pairs, width),),
        backward=(product(rows, width, pairs), product(pairs, width, rows)),
        saved=(wide, key, weights),
    )


def _rotated(g: Graph, s: OpContext, q: Value, latent: Latent) -> Value:
    """The rotating channels turned and joined to the others again, or turned where they lie."""
    if s.stack.kernels.latent_rope == "in_place":
        part = q.num_bytes * latent.qk_rope_head_dim // latent.qk_head_dim
        rotated = g.view("q.rotated", q, q.numel)
        # pairs of channels lie beside each other, so the kernel reads and writes every second one
        turn = (stream("strided", part, part, numel=part // s.element_bytes),)
        g.op("q.rotated", inputs=(q,), aliases=(q,), views=(rotated,), forward=turn, backward=turn)
        return rotated
    out = g.value("q.rotated", q.numel, q.dtype)
    turned = q.num_bytes * latent.qk_rope_head_dim // latent.qk_head_dim
    kernels = [stream("join", q.num_bytes, q.num_bytes, numel=q.numel)]
    if s.stack.kernels.rope != "fused":
        kernels.append(stream("elementwise", turned, turned))
    return g.op(out.name, inputs=(q,), outputs=(out,), forward=kernels, backward=kernels)


def _keys_and_values(g: Graph, s: OpContext, latent: Latent, kv: Value, rope: Value) -> tuple[Value, Value]:
    """Keys get the rotating part that all heads share, turned; values become a tensor of their own."""
    m = s.model
    k, v = g.value("k", s.tokens * m.q_width, kv.dtype), g.value("v", s.tokens * m.o_width, kv.dtype)
    size = k.num_bytes + v.num_bytes
    shared = rope.num_bytes
    rope_bytes = s.tokens * latent.qk_rope_head_dim * s.element_bytes
    gathers = s.sequence_parallel and s.stack.traits.linears_communicate
    forward: tuple[Kernel, ...] = (
        stream("elementwise", shared, shared),
        stream("join", kv.num_bytes + shared, size, 2, numel=k.numel),
    )
    backward: tuple[Kernel, ...] = (
        stream("join", size, kv.num_bytes, 2, numel=k.numel),
        stream("reduce", k.num_bytes // 3, shared),
    )
    # one kernel splits, turns and repeats; another sums the heads' parts back
    if s.stack.kernels.latent_rope == "in_place":
        forward, backward = (
            (stream("copy", kv.num_bytes + shared, size),),
            (stream("copy", size, kv.num_bytes + shared),),
        )
    g.op(
        "keys and values",
        inputs=(kv, rope),
        outputs=(k, v),
        forward=forward,
        backward=backward,
        forward_exchanges=(Exchange(kind="all_gather", axis="tp", num_bytes=rope_bytes),) if gathers else (),
        backward_exchanges=(Exchange(kind="reduce_scatter", axis="tp", num_bytes=rope_bytes),) if gathers else (),
    )
    return k, v
