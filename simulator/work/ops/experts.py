"""Experts: router, dispatch of each token's rows to the ranks of its experts, their products, and the way back.

Legend: t tokens of this rank's stream, k experts a token is sent to, E experts of the layer, D d_model; rows are (token,
expert) pairs. With capacity, each rank sends every expert ⌈t k factor / E⌉ rows, padded; without, t k in all, and a
balanced rank receives as many. The busiest receives `expert_imbalance` times that, and the others wait for it.

Sources: Megatron-LM core/transformer/moe (router.py, token_dispatcher.py: MoEAlltoAllTokenDispatcher, moe_utils.py),
torchtitan models/moe.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod
from typing import Literal

from simulator.base.kernels import Dtype, Gemm, Kernel
from simulator.spec.model.experts import Experts
from simulator.work.ops.core import Exchange
from simulator.work.ops.graph import Graph, Value, conversion, stream
from simulator.work.ops.linear import grouped_linear, linear
from simulator.work.ops.mlp import activation, shared_experts
from simulator.work.ops.op_context import OpContext
from simulator.work.ops.quantise import copy_bytes

# Passes over the router's fp32 logits [t, E] and back: scores, top-k, the map of choices, the balance loss.
_ROUTING_PASSES = 8
# Transformer Engine's Triton kernels of a permutation (common/triton/permutation.py): three that find the rows' places, and
# the copy; of a sort of pieces: one, and the copy
_PERMUTE_LAUNCHES, _SORT_LAUNCHES = 4, 2


def experts(g: Graph, s: OpContext, x: Value) -> Value:
    """The mixture of one layer, [t, D] -> [t, D], without its norm and residual."""
    assert s.model.experts is not None
    x = g.cast(x, s.dtype, "experts.input")
    shared = _shared(g, s, s.model.experts, x)
    x = _enter(g, s, x)
    weights = _route(g, s, s.model.experts, x)
    scope: list[Value] = []
    rows = _dispatch(g, s, _latent(g, s, x), scope)
    # hand-fused software weights rows inside the activation, as do those that send a token's weights with it
    late = not s.stack.traits.weights_in_activation and not _sends_tokens(s)
    rows = _products(g, s, s.model.experts, rows, None if late else weights)
    out = _combine(g, s, rows, weights if late else None, scope)
    if s.model.experts.latent_dim:
        out = linear(g, s, "latent_up", out, s.model.d_model, bias=False, split="none", tokens=s.stream_tokens)
    if s.stack.traits.holds_dispatched:
        g.hold("experts.scope", scope)
    if not shared:
        return out
    total = g.value("experts.sum", out.numel, out.dtype)
    return g.pointwise(total.name, [out, *shared], total, aliases=[out, *shared])


def _latent(g: Graph, s: OpContext, x: Value) -> Value:
    """What travels: tokens, or their projections to fewer channels, which every rank of tp makes of its own tokens."""
    assert s.model.experts is not None
    width = s.model.experts.latent_dim
    if not width:
        return x
    return linear(g, s, "latent_down", x, width, bias=False, split="none", tokens=s.stream_tokens)


def _width(s: OpContext) -> int:
    """Channels of a row."""
    assert s.model.experts is not None
    return s.model.experts.latent_dim or s.model.d_model


def _shared(g: Graph, s: OpContext, experts: Experts, x: Value) -> list[Value]:
    """What the shared experts make, if there are any: before the routed ones, as in Megatron-LM."""
    if not experts.shared_d_ff:
        return []
    shared = shared_experts(g, s, x)
    return [_gate(g, s, x, shared) if experts.shared_gate else shared]


def sent_rows(s: OpContext, tokens: int) -> int:
    """Rows that a rank sends, its own experts' among them."""
    assert s.model.experts is not None
    num_experts, top_k = s.model.experts.num_experts, s.model.experts.top_k
    factor = s.plan.expert_capacity_factor
    return tokens * top_k if factor is None else num_experts * ceil(tokens * top_k * factor / num_experts)


def _tokens(s: OpContext, x: Value) -> int:
    return x.numel // s.model.d_model


def _enter(g: Graph, s: OpContext, x: Value) -> Value:
    """Ranks that hold the same tokens and slices of the experts sum what their slices leave of the gradient."""
    if s.plan.etp == 1 or s.sequence_parallel:
        return x
    summed = Exchange(kind="all_reduce", axis="etp", num_bytes=x.num_bytes)
    g.op("experts.enter", "elementwise", inputs=(x,), aliases=(x,), backward_exchanges=(summed,))
    return x


def _route(g: Graph, s: OpContext, experts: Experts, x: Value) -> Value:
    """Logits, and of them each token's experts with their weights; and the loss that balances them."""
    t, d, e = _tokens(s, x), s.model.d_model, experts.num_experts
    dtype: Dtype = s.wide_dtype if experts.router_dtype == "bf16" else "fp32"
    wide = dtype == "fp32" and x.dtype != "fp32"
    logits = g.value("router", t * e, "fp32" if dtype == "fp32" else s.dtype)
    casts: tuple[Kernel, ...] = (conversion(x.numel, x.dtype, "fp32"),) if wide else ()
    forward: tuple[Kernel, ...] = (*casts, Gemm(m=t, n=e, k=d, dtype=dtype))
    if wide and s.stack.router_product == "mixed":
        forward, dtype = (Gemm(m=t, n=e, k=d, dtype=s.wide_dtype),), "tf32"
    g.op(
        "router",
        "gemm",
        inputs=(x,),
        outputs=(logits,),
        forward=forward,
        backward=(
            *casts,
            Gemm(m=t, n=d, k=e, dtype=dtype, layout="nn"),
            Gemm(m=e, n=d, k=t, dtype=dtype, layout="nt"),
            *((conversion(x.numel, "fp32", x.dtype),) if wide else ()),
        ),
        saved=(x,),
        grads=(x,),
        forward_temporary_bytes=4 * x.numel if len(forward) > 1 else 0,
        backward_temporary_bytes=8 * x.numel if wide else 0,
        parameter_numel=d * e + (e if experts.router_bias else 0),
        selective_save=True,
    )
    weights, choices = g.value("weights", t * e, "fp32"), g.value("choices", t * e, "int8")
    passes = stream(
        "softmax",
        _ROUTING_PASSES * weights.num_bytes // 2,
        _ROUTING_PASSES * weights.num_bytes // 2,
        s.stack.routing_launches,
    )
    g.op(
        "choose",
        "elementwise",
        inputs=(logits,),
        outputs=(weights, choices),
        forward=(passes,),
        backward=(passes,),
        saved=(weights, choices),
        grads=(logits,),
        forward_exchanges=_counts_exchange(s, experts.num_experts),
        waits=s.plan.dispatcher != "all_gather" and _host_counts(s),
    )
    return weights


def _counts_exchange(s: OpContext, num_experts: int) -> tuple[Exchange, ...]:
    """How many rows each rank sends each expert (int64), gathered before the all-to-all (token_dispatcher.py: preprocess)."""
    dropless = s.stack.traits.counts_rows and s.plan.expert_capacity_factor is None
    if s.plan.dispatcher != "all_to_all" or s.plan.ep == 1 or not dropless:
        return ()
    return (Exchange(kind="all_gather", axis="ep", num_bytes=8 * num_experts * s.plan.ep),)


def _host_counts(s: OpContext) -> bool:
    """The host reads how many rows each expert has before it goes on: no capacity says it, and no graph holds the step.

    Megatron-LM's dispatchers all do (token_dispatcher.py: d2h_event.synchronize, tokens_per_expert.cpu; DeepEP's and HybridEP's
    dispatch wait in C++ for the rows they will receive).
    """
    dropless = s.plan.expert_capacity_factor is None and "full_iteration" not in s.plan.cuda_graphs
    return dropless and s.stack.traits.counts_rows


def _dispatch(g: Graph, s: OpContext, x: Value, scope: list[Value]) -> Value:
    """Each token's rows, by expert, on the ranks of their experts. scope: Python's locals, alive to the layer's end."""
    if s.plan.dispatcher == "all_gather":
        return _gathered(g, s, x, scope)
    if _sends_tokens(s):
        return _sent_once(g, s, x, scope)
    d, plan = _width(s), s.plan
    sent = sent_rows(s, x.numel // d)
    rows, places = g.value("permuted", sent * d, x.dtype), g.value("places", 2 * sent, "fp32")
    size = rows.num_bytes
    g.op(
        "permute",
        "elementwise",
        inputs=(x,),
        outputs=(rows, places),
        forward=(stream("copy", size, size, _PERMUTE_LAUNCHES),),
        backward=(stream("copy", size, x.num_bytes),),
        saved=(places,),
        grads=(x,),
    )
    scope.append(rows)
    if plan.ep > 1:
        received = g.value("dispatched", ceil(sent * plan.expert_imbalance) * d, x.dtype)
        sent_with = _weights_exchange(s, received.numel // d)
        rows = _travel(g, "dispatch", rows, received, _rows_exchange(s, received.num_bytes), beside=sent_with)
    if plan.etp > 1 and s.sequence_parallel:
        whole = g.value("gathered", rows.numel * plan.etp, x.dtype)
        gather = Exchange(kind="all_gather", axis="etp", num_bytes=whole.num_bytes)
        back = Exchange(kind="reduce_scatter", axis="etp", num_bytes=whole.num_bytes)
        rows = _travel(g, "gather", rows, whole, gather, back)
    scope.append(rows)
    return _sort(g, s, "sorted", rows)


def _sends_tokens(s: OpContext) -> bool:
    """Tokens travel, once to each rank that has one of their experts, and become rows there (DeepEP, HybridEP)."""
    return s.plan.dispatcher == "deep_ep" and s.plan.ep > 1 and s.plan.etp == 1


def _token_places(s: OpContext, rows: int) -> int:
    """Tokens that arrive where `rows` rows do: k experts drawn evenly lie on n (1 - (1 - 1/n)^k) of n ranks."""
    assert s.model.experts is not None
    n, k = s.plan.ep, s.model.experts.top_k
    return ceil(rows * n * (1 - (1 - 1 / n) ** k) / k)


def _sent_once(g: Graph, s: OpContext, x: Value, scope: list[Value]) -> Value:
    """Tokens to the ranks of their experts, where one kernel makes rows of them, by expert (MoEFlexTokenDispatcher).

    HybridEP does the same inside its own call (dispatch_with_permute).
    """
    d, plan = _width(s), s.plan
    rows = ceil(sent_rows(s, x.numel // d) * plan.expert_imbalance)
    came = g.value("dispatched", _token_places(s, rows) * d, x.dtype)
    x = _travel(g, "dispatch", x, came, _rows_exchange(s, rows * d * s.element_bytes))
    scope.append(x)
    out, places = g.value("permuted", rows * d, x.dtype), g.value("places", 2 * rows, "fp32")
    g.op(
        "permute",
        "elementwise",
        inputs=(x,),
        outputs=(out, places),
        forward=(stream("copy", x.num_bytes, out.num_bytes, _PERMUTE_LAUNCHES),),
        backward=(stream("copy", out.num_bytes, x.num_bytes),),
        saved=(places,),
        grads=(x,),
    )
    scope.append(out)
    return out


def _returned(g: Graph, s: OpContext, rows: Value, scope: list[Value]) -> Value:
    """The way back: a token's rows of a rank are summed there, and the ranks' sums where the token came from."""
    d = _width(s)
    back = g.value("unpermuted", _token_places(s, rows.numel // d) * d, rows.dtype)
    there, here = (stream("copy", a.num_bytes, b.num_bytes) for a, b in ((rows, back), (back, rows)))
    g.op(back.name, "elementwise", inputs=(rows,), outputs=(back,), forward=(there,), backward=(here,), grads=(rows,))
    scope.append(back)
    out = g.value("combined", s.stream_tokens * d, rows.dtype)
    return _leave(g, s, _travel(g, "combine", back, out, _rows_exchange(s, rows.num_bytes)))


def _gathered(g: Graph, s: OpContext, x: Value, scope: list[Value]) -> Value:
    """Every token of the group on every rank, and of them the rows of the rank's experts (MoEAllGatherTokenDispatcher)."""
    d, plan = _width(s), s.plan
    rows = ceil(sent_rows(s, x.numel // d) * plan.expert_imbalance)
    ways: tuple[tuple[Literal["ep", "etp"], int], ...] = (("ep", plan.ep), ("etp", plan.etp))
    for axis, degree in ways:
        if degree > 1 and (axis == "ep" or s.sequence_parallel):
            whole, rows = (
                g.value(f"tokens of {axis}", x.numel * degree, x.dtype),
                rows * (degree if axis == "etp" else 1),
            )
            there = Exchange(kind="all_gather", axis=axis, num_bytes=whole.num_bytes)
            back = Exchange(kind="reduce_scatter", axis=axis, num_bytes=whole.num_bytes)
            x = _travel(g, f"gather over {axis}", x, whole, there, back)
    scope.append(x)
    out = g.value("permuted", rows * d, x.dtype)
    kernels = (stream("copy", out.num_bytes, out.num_bytes, 2),)
    once, waits = kernels[:1], _host_counts(s)
    g.op(out.name, "elementwise", inputs=(x,), outputs=(out,), forward=kernels, backward=once, grads=(x,), waits=waits)
    return out


def _scattered(g: Graph, s: OpContext, rows: Value) -> Value:
    """Rows summed into all tokens of the group, and these back to their ranks."""
    d, plan = _width(s), s.plan
    degrees: list[tuple[Literal["ep", "etp"], int]] = [("etp", plan.etp)] if s.sequence_parallel else []
    ways = [(axis, degree) for axis, degree in (*degrees, ("ep", plan.ep)) if degree > 1]
    whole = g.value("unpermuted", s.stream_tokens * d * prod(degree for _, degree in ways), rows.dtype)
    there, back = (stream("copy", rows.num_bytes, size, 2) for size in (whole.num_bytes, rows.num_bytes))
    g.op(whole.name, "elementwise", inputs=(rows,), outputs=(whole,), forward=(there,), backward=(back,), grads=(rows,))
    for axis, degree in ways:
        part = g.value(f"tokens from {axis}", whole.numel // degree, whole.dtype)
        scatter = Exchange(kind="reduce_scatter", axis=axis, num_bytes=whole.num_bytes)
        gather = replace(scatter, kind="all_gather")
        whole = _travel(g, f"scatter over {axis}", whole, part, scatter, gather)
    return _leave(g, s, whole)


def _rows_exchange(s: OpContext, num_bytes: int) -> Exchange:
    """The all-to-all of rows of `num_bytes` in all among the ranks of a layer's experts."""
    assert s.model.experts is not None
    copies = s.model.experts.top_k if _sends_tokens(s) else 1
    return Exchange(kind="all_to_all", axis="ep", num_bytes=num_bytes, copies=copies)


def _travel(
    g: Graph,
    name: str,
    x: Value,
    out: Value,
    there: Exchange,
    back: Exchange | None = None,
    beside: tuple[Exchange, ...] = (),
) -> Value:
    """Rows to other ranks, and their gradients back; beside: small ones that follow either way."""
    g.op(
        name,
        "elementwise",
        inputs=(x,),
        outputs=(out,),
        grads=(x,),
        forward_exchanges=(there, *beside),
        backward_exchanges=(back or there, *beside),
    )
    return out


def _weights_exchange(s: OpContext, rows: int) -> tuple[Exchange, ...]:
    """Each row's weight in fp32, an all-to-all of its own behind the rows' (token_dispatcher.py: global_probs)."""
    return (_rows_exchange(s, 4 * rows),) if s.stack.traits.sends_row_weights else ()


def _sort(g: Graph, s: OpContext, name: str, rows: Value) -> Value:
    """What came by rank, by expert; or the other way round."""
    assert s.model.experts is not None
    if s.plan.ep * s.plan.etp == 1 or s.model.experts.num_local == 1:
        return rows
    out = g.value(name, rows.numel, rows.dtype)
    return g.pointwise(name, [rows], out, grads=[rows], op="copy")


def _products(g: Graph, s: OpContext, experts: Experts, rows: Value, weights: Value | None) -> Value:
    """The MLPs of the rank's experts."""
    d, f = _width(s), experts.d_ff
    into = 2 * f if s.model.gated else f  # gate and up are one product in every grouped implementation
    t = rows.numel // d
    fused = s.fuses_experts and weights is not None
    up = grouped_linear(g, s, "experts.up", rows, (into, d), bias=experts.bias, gradient_came=fused)
    if weights is not None:
        weights = _row_weights(g, weights, t)
    if fused and weights is not None:
        hidden = _inside_product(g, s, up, weights, t * f)
        return grouped_linear(g, s, "experts.down", hidden, (d, f), bias=experts.bias, rows=t)
    hidden = activation(g, s, up, weights)
    return grouped_linear(g, s, "experts.down", hidden, (d, f), bias=experts.bias)


def _inside_product(g: Graph, s: OpContext, up: Value, weights: Value, numel: int) -> Value:
    """The activation and its cast at the end of the first product's kernel; its derivative at the end of a backward one.

    Transformer Engine, pytorch/ops/fused/grouped_mlp.py: kernels of cuDNN's front end in CuTe.
    """
    hidden = g.value("activation", copy_bytes(s.recipe, numel), "fp8")
    g.op("activation", "elementwise", inputs=(up, weights), outputs=(hidden,), saved=(up, weights), grads=(up, weights))
    return hidden


def _row_weights(g: Graph, weights: Value, rows: int) -> Value:
    """Each row's weight, which travels with it; too small to cost time."""
    out = g.value("row_weights", rows, "fp32")
    g.op(out.name, "elementwise", inputs=(weights,), outputs=(out,), grads=(weights,))
    return out


def _combine(g: Graph, s: OpContext, rows: Value, weights: Value | None, scope: list[Value]) -> Value:
    """Rows back on their tokens' ranks, summed (weighted, if not before) into [t, D]."""
    d, plan = _width(s), s.plan
    if plan.dispatcher == "all_gather":
        return _scattered(g, s, rows)
    if _sends_tokens(s):
        return _returned(g, s, rows, scope)
    rows = _sort(g, s, "unsorted", rows)
    scope.append(rows)
    if plan.etp > 1 and s.sequence_parallel:
        part = g.value("scattered", rows.numel // plan.etp, rows.dtype)
        scatter = Exchange(kind="reduce_scatter", axis="etp", num_bytes=rows.num_bytes)
        back = Exchange(kind="all_gather", axis="etp", num_bytes=rows.num_bytes)
        rows = _travel(g, "scatter", rows, part, scatter, back)
    t = s.stream_tokens
    if plan.ep > 1:
        returned = g.value("combined", sent_rows(s, t) * d, rows.dtype)
        rows = _travel(g, "combine", rows, returned, _rows_exchange(s, rows.num_bytes))
    out = g.value("unpermuted", t * d, rows.dtype)
    size = rows.num_bytes
    g.op(
        "unpermute",
        "elementwise",
        inputs=(rows,) if weights is None else (rows, weights),
        outputs=(out,),
        forward=(stream("copy", size, out.num_bytes, 2),),
        backward=(stream("copy", size if weights is None else 2 * size, size),),
        saved=() if weights is None else (rows, weights),
        grads=(rows,) if weights is None else (rows, weights),
    )
    return _leave(g, s, out)


def _leave(g: Graph, s: OpContext, x: Value) -> Value:
    """Slices of the experts leave partial sums on ranks that hold the same tokens."""
    if s.plan.etp > 1 and not s.sequence_parallel:
        summed = Exchange(kind="all_reduce", axis="etp", num_bytes=x.num_bytes)
        g.op("experts.leave", "elementwise", inputs=(x,), aliases=(x,), forward_exchanges=(summed,))
    return x


def _gate(g: Graph, s: OpContext, x: Value, shared: Value) -> Value:
    """A token's weight of the shared experts: a product with one column, read as a stream, and its sigmoid."""
    t, d = _tokens(s, x), s.model.d_model
    gate = g.value("shared_gate", t, x.dtype)
    g.op(
        "shared_gate",
        "elementwise",
        inputs=(x,),
        outputs=(gate,),
        forward=(Gemm(m=t, n=1, k=d, dtype=s.wide_dtype),),
        backward=(
            Gemm(m=t, n=d, k=1, dtype=s.wide_dtype, layout="nn"),
            Gemm(m=1, n=d, k=t, dtype=s.wide_dtype, layout="nt"),
        ),
        saved=(x,),
        grads=(x,),
        parameter_numel=d,
    )
    out = g.value("shared.weighted", shared.numel, shared.dtype)
    return g.pointwise(out.name, [gate, shared], out, saved=[gate, shared], grads=[gate, shared])
