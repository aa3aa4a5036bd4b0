"""Expert dispatch: each token's rows to the ranks of its experts, and the way back. Legend and sources: experts.py."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod
from typing import Literal

from simulator.work.ops.core import Exchange
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.op_context import OpContext

# Transformer Engine's Triton kernels of a permutation (common/triton/permutation.py): three that find the rows' places, and
# the copy
_PERMUTE_LAUNCHES = 4


def row_width(s: OpContext) -> int:
    """Channels of a row."""
    return s.experts.latent_dim or s.model.d_model


def sent_rows(s: OpContext, tokens: int) -> int:
    """Rows that a rank sends, its own experts' among them."""
    num_experts, top_k = s.experts.num_experts, s.experts.top_k
    factor = s.plan.experts.capacity_factor
    return tokens * top_k if factor is None else num_experts * ceil(tokens * top_k * factor / num_experts)


def host_counts(s: OpContext) -> bool:
    """The host waits for the number of rows of each expert: there is no capacity and no CUDA graph.

    Megatron-LM's dispatchers all do (token_dispatcher.py: d2h_event.synchronize, tokens_per_expert.cpu; DeepEP's and HybridEP's
    dispatch wait in C++ for the rows they will receive). So do loops over experts and over their slices. DeepSpeed's gate copies the
    counts to the host in any case (sharded_moe.py: exp_counts).
    """
    dropless = s.plan.experts.capacity_factor is None and "full_iteration" not in s.plan.cuda_graphs
    return way_of_rows(s) == "masked" or (dropless and (s.stack.traits.counts_rows or way_of_rows(s) != "sorted"))


def way_of_rows(s: OpContext) -> str:
    """How rows come to their experts: the framework's own layer, or as the stack's programs do it."""
    return "masked" if s.plan.traits.masks_rows and s.plan.ep > 1 else s.stack.kernels.expert_rows


def dispatch(g: Graph, s: OpContext, x: Value, scope: list[Value]) -> Value:
    """Each token's rows, by expert, on the ranks of their experts. scope: Python's locals, alive to the layer's end."""
    if s.plan.experts.dispatcher == "all_gather":
        return _gathered(g, s, x, scope)
    if sends_tokens(s):
        return _sent_once(g, s, x, scope)
    d, plan = row_width(s), s.plan
    sent = sent_rows(s, x.numel // d)
    rows = _permuted(g, x, sent, d)
    scope.append(rows)
    if plan.ep > 1:
        busiest = plan.experts.imbalance if way_of_rows(s) == "sorted" else min(plan.experts.imbalance, plan.ep)
        received = g.value("dispatched", ceil(sent * busiest) * d, x.dtype)
        sent_with = _weights_exchange(s, received.numel // d)
        rows = travel(g, "dispatch", rows, received, rows_exchange(s, received.num_bytes), beside=sent_with)
    if plan.experts.etp > 1 and s.sequence_parallel:
        gathered = g.value("gathered", rows.numel * plan.experts.etp, x.dtype)
        gather = Exchange(kind="all_gather", axis="etp", num_bytes=gathered.num_bytes)
        back = Exchange(kind="reduce_scatter", axis="etp", num_bytes=gathered.num_bytes)
        rows = travel(g, "gather", rows, gathered, gather, back)
    scope.append(rows)
    return sort_rows(g, s, "sorted", rows)


def sends_tokens(s: OpContext) -> bool:
    """Tokens travel, once to each rank that has one of their experts, and become rows there (DeepEP, HybridEP)."""
    return s.plan.experts.dispatcher == "deep_ep" and s.plan.ep > 1 and s.plan.experts.etp == 1


def _token_places(s: OpContext, rows: int) -> int:
    """Tokens that arrive where `rows` rows do: k experts drawn evenly lie on n (1 - (1 - 1/n)^k) of n ranks."""
    n, k = s.plan.ep, s.experts.top_k
    return ceil(rows * n * (1 - (1 - 1 / n) ** k) / k)


def _sent_once(g: Graph, s: OpContext, x: Value, scope: list[Value]) -> Value:
    """Tokens to the ranks of their experts, where one kernel makes rows of them, by expert (MoEFlexTokenDispatcher).

    HybridEP does the same inside its own call (dispatch_with_permute).
    """
    d, plan = row_width(s), s.plan
    rows = ceil(sent_rows(s, x.numel // d) * plan.experts.imbalance)
    came = g.value("dispatched", _token_places(s, rows) * d, x.dtype)
    x = travel(g, "dispatch", x, came, rows_exchange(s, rows * d * s.element_bytes))
    scope.append(x)
    out = _permuted(g, x, rows, d, read_bytes=x.num_bytes)
    scope.append(out)
    return out


def _permuted(g: Graph, x: Value, rows: int, width: int, read_bytes: int | None = None) -> Value:
    """Rows of tokens, by expert; the places they came from are kept for the way back. read_bytes: None: a token's for each row."""
    out, places = g.value("permuted", rows * width, x.dtype), g.value("places", 2 * rows, "fp32")
    return g.op(
        "permute",
        inputs=(x,),
        outputs=(out, places),
        forward=(stream("copy", read_bytes or out.num_bytes, out.num_bytes, _PERMUTE_LAUNCHES),),
        backward=(stream("copy", out.num_bytes, x.num_bytes),),
        saved=(places,),
    )


def _returned(g: Graph, s: OpContext, rows: Value, scope: list[Value]) -> Value:
    """The way back: a token's rows of a rank are summed there, and the ranks' sums where the token came from."""
    d = row_width(s)
    back = g.value("unpermuted", _token_places(s, rows.numel // d) * d, rows.dtype)
    there, here = (stream("copy", a.num_bytes, b.num_bytes) for a, b in ((rows, back), (back, rows)))
    g.op(back.name, inputs=(rows,), outputs=(back,), forward=(there,), backward=(here,))
    scope.append(back)
    out = g.value("combined", s.stream_tokens * d, rows.dtype)
    return _leave(g, s, travel(g, "combine", back, out, rows_exchange(s, rows.num_bytes)))


def _gathered(g: Graph, s: OpContext, x: Value, scope: list[Value]) -> Value:
    """Every token of the group on every rank, and of them the rows of the rank's experts (MoEAllGatherTokenDispatcher)."""
    d, plan = row_width(s), s.plan
    rows = ceil(sent_rows(s, x.numel // d) * plan.experts.imbalance)
    axes: tuple[tuple[Literal["ep", "etp"], int], ...] = (("ep", plan.ep), ("etp", plan.experts.etp))
    for axis, degree in axes:
        if degree > 1 and (axis == "ep" or s.sequence_parallel):
            gathered, rows = (
                g.value(f"tokens of {axis}", x.numel * degree, x.dtype),
                rows * (degree if axis == "etp" else 1),
            )
            there = Exchange(kind="all_gather", axis=axis, num_bytes=gathered.num_bytes)
            back = Exchange(kind="reduce_scatter", axis=axis, num_bytes=gathered.num_bytes)
            x = travel(g, f"gather over {axis}", x, gathered, there, back)
    scope.append(x)
    out = g.value("permuted", rows * d, x.dtype)
    kernels = (stream("copy", out.num_bytes, out.num_bytes, 2),)
    once, waits = kernels[:1], host_counts(s)
    return g.op(out.name, inputs=(x,), outputs=(out,), forward=kernels, backward=once, waits=waits)


def _scattered(g: Graph, s: OpContext, rows: Value) -> Value:
    """Rows summed into all tokens of the group, and these back to their ranks."""
    d, plan = row_width(s), s.plan
    degrees: list[tuple[Literal["ep", "etp"], int]] = [("etp", plan.experts.etp)] if s.sequence_parallel else []
    axes = [(axis, degree) for axis, degree in (*degrees, ("ep", plan.ep)) if degree > 1]
    unpermuted = g.value("unpermuted", s.stream_tokens * d * prod(degree for _, degree in axes), rows.dtype)
    there, back = (stream("copy", rows.num_bytes, size, 2) for size in (unpermuted.num_bytes, rows.num_bytes))
    g.op(unpermuted.name, inputs=(rows,), outputs=(unpermuted,), forward=(there,), backward=(back,))
    for axis, degree in axes:
        part = g.value(f"tokens from {axis}", unpermuted.numel // degree, unpermuted.dtype)
        scatter = Exchange(kind="reduce_scatter", axis=axis, num_bytes=unpermuted.num_bytes)
        gather = replace(scatter, kind="all_gather")
        unpermuted = travel(g, f"scatter over {axis}", unpermuted, part, scatter, gather)
    return _leave(g, s, unpermuted)


def rows_exchange(s: OpContext, num_bytes: int) -> Exchange:
    """The all-to-all of rows of `num_bytes` in all among the ranks of a layer's experts."""
    copies = s.experts.top_k if sends_tokens(s) else 1
    return Exchange(kind="all_to_all", axis="ep", num_bytes=num_bytes, copies=copies)


def travel(
    g: Graph,
    name: str,
    x: Value,
    out: Value,
    there: Exchange,
    back: Exchange | None = None,
    beside: tuple[Exchange, ...] = (),
) -> Value:
    """Rows to other ranks, and their gradients back; beside: small ones that follow either way."""
    return g.op(
        name,
        inputs=(x,),
        outputs=(out,),
        forward_exchanges=(there, *beside),
        backward_exchanges=(back or there, *beside),
    )


def _weights_exchange(s: OpContext, rows: int) -> tuple[Exchange, ...]:
    """Each row's weight in fp32, an all-to-all of its own behind the rows' (token_dispatcher.py: global_probs)."""
    return (rows_exchange(s, 4 * rows),) if s.stack.traits.sends_row_weights else ()


def sort_rows(g: Graph, s: OpContext, name: str, rows: Value) -> Value:
    """What came by rank, by expert; or the other way round."""
    if s.plan.ep * s.plan.experts.etp == 1 or s.experts.num_local == 1:
        return rows
    return g.pointwise(name, [rows], op="copy")


def combine(g: Graph, s: OpContext, rows: Value, weights: Value | None, scope: list[Value]) -> Value:
    """Rows back on their tokens' ranks, summed (weighted, if not before) into [t, D]."""
    d, plan = row_width(s), s.plan
    if plan.experts.dispatcher == "all_gather":
        return _scattered(g, s, rows)
    if sends_tokens(s):
        return _returned(g, s, rows, scope)
    rows = sort_rows(g, s, "unsorted", rows)
    scope.append(rows)
    if plan.experts.etp > 1 and s.sequence_parallel:
        part = g.value("scattered", rows.numel // plan.experts.etp, rows.dtype)
        scatter = Exchange(kind="reduce_scatter", axis="etp", num_bytes=rows.num_bytes)
        back = Exchange(kind="all_gather", axis="etp", num_bytes=rows.num_bytes)
        rows = travel(g, "scatter", rows, part, scatter, back)
    t = s.stream_tokens
    if plan.ep > 1:
        returned = g.value("combined", sent_rows(s, t) * d, rows.dtype)
        rows = travel(g, "combine", rows, returned, rows_exchange(s, rows.num_bytes))
    out = g.value("unpermuted", t * d, rows.dtype)
    size = rows.num_bytes
    g.op(
        "unpermute",
        inputs=(rows,) if weights is None else (rows, weights),
        outputs=(out,),
        forward=(stream("copy", size, out.num_bytes, 2),),
        backward=(stream("copy", size if weights is None else 2 * size, size),),
        saved=() if weights is None else (rows, weights),
    )
    return _leave(g, s, out)


def _leave(g: Graph, s: OpContext, x: Value) -> Value:
    """Slices of the experts leave partial sums on ranks that hold the same tokens."""
    if s.plan.experts.etp > 1 and not s.sequence_parallel:
        summed = Exchange(kind="all_reduce", axis="etp", num_bytes=x.num_bytes)
        g.op("experts.leave", inputs=(x,), aliases=(x,), forward_exchanges=(summed,))
    return x
