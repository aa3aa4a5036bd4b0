"""Experts: router, dispatch of each token's rows to the ranks of its experts, their products, and the way back.

Legend: t tokens of this rank's stream, k experts a token is sent to, E experts of the layer, D d_model; rows are (token,
expert) pairs. With capacity, each rank sends every expert ⌈t k factor / E⌉ rows, padded; without, t k in all, and a
balanced rank receives as many. The busiest receives `expert_imbalance` times that, and the others wait for it.

Sources: Megatron-LM core/transformer/moe (router.py, token_dispatcher.py: MoEAlltoAllTokenDispatcher, moe_utils.py),
torchtitan models/moe.
"""

from __future__ import annotations

from simulator.base.kernels import Dtype, Gemm, Kernel
from simulator.work.ops.core import Exchange
from simulator.work.ops.expert_dispatch import combine, dispatch, host_counts, row_width, sends_tokens, way_of_rows
from simulator.work.ops.expert_loops import in_turns, padded_numel, sliced, stacked_weights
from simulator.work.ops.expert_masks import bring_back, send
from simulator.work.ops.graph import Graph, Value, conversion, stream
from simulator.work.ops.linear import grouped_linear, linear
from simulator.work.ops.mlp import activation, shared_experts
from simulator.work.ops.op_context import OpContext
from simulator.work.ops.quantise import copy_bytes

# Passes over the router's fp32 logits [t, E] and back: scores, top-k, the map of choices, the balance loss.
_ROUTING_PASSES = 8


def experts(g: Graph, s: OpContext, x: Value) -> Value:
    """The mixture of one layer, [t, D] -> [t, D], without its norm and residual."""
    x = g.cast(x, s.dtype, "experts.input")
    shared = _shared(g, s, x)
    x = _enter(g, s, x)
    weights = _route(g, s, x)
    scope: list[Value] = []
    if way_of_rows(s) == "masked":
        return _summed(g, _by_masks(g, s, x, weights, scope), shared)
    rows = dispatch(g, s, _latent(g, s, x), scope)
    # hand-fused software weights rows inside the activation, as do those that send a token's weights with it
    late = not s.stack.traits.weights_in_activation and not sends_tokens(s)
    rows = _by_program(g, s, x, rows, None if late else weights)
    out = combine(g, s, rows, weights if late else None, scope)
    if s.experts.latent_dim:
        out = linear(g, s, "latent_up", out, s.model.d_model, bias=False, split="none", tokens=s.stream_tokens)
    if s.stack.traits.holds_dispatched:
        g.hold("experts.scope", scope)
    return _summed(g, out, shared)


def _by_masks(g: Graph, s: OpContext, x: Value, weights: Value, scope: list[Value]) -> Value:
    """The gate's masks are Python locals of the layer."""
    rows, weighted = send(g, s, x, weights, scope)
    out = bring_back(g, s, _products(g, s, rows, None), weighted)
    g.hold("experts.scope", scope)
    return out


def _summed(g: Graph, out: Value, shared: list[Value]) -> Value:
    if not shared:
        return out
    return g.pointwise("experts.sum", [out, *shared], aliases=[out, *shared])


def _by_program(g: Graph, s: OpContext, x: Value, rows: Value, weights: Value | None) -> Value:
    """The rank's experts on their rows, and what the program's own way to them costs."""
    kernel = way_of_rows(s)
    if kernel == "sorted":
        return _products(g, s, rows, weights)
    if kernel == "each":
        return in_turns(g, s, _products(g, s, rows, weights), x)
    if kernel == "stacked":
        stacked_weights(g, s, rows, s.experts.d_ff)
    padded = sliced(g, s, "padded", rows, padded_numel(s, rows))
    return sliced(g, s, "unpadded", _products(g, s, padded, weights), rows.numel)


def _latent(g: Graph, s: OpContext, x: Value) -> Value:
    """What travels: tokens, or their projections to fewer channels, which every rank of tp makes of its own tokens."""
    width = s.experts.latent_dim
    if not width:
        return x
    return linear(g, s, "latent_down", x, width, bias=False, split="none", tokens=s.stream_tokens)


def _shared(g: Graph, s: OpContext, x: Value) -> list[Value]:
    """What the shared experts make, if there are any: before the routed ones, as in Megatron-LM."""
    if not s.experts.shared_d_ff:
        return []
    shared = shared_experts(g, s, x)
    return [_gate(g, s, x, shared) if s.experts.shared_gate else shared]


def _tokens(s: OpContext, x: Value) -> int:
    return x.numel // s.model.d_model


def _enter(g: Graph, s: OpContext, x: Value) -> Value:
    """Ranks that hold the same tokens and slices of the experts sum what their slices leave of the gradient."""
    if s.plan.experts.etp == 1 or s.sequence_parallel:
        return x
    summed = Exchange(kind="all_reduce", axis="etp", num_bytes=x.num_bytes)
    return g.op("experts.enter", inputs=(x,), aliases=(x,), backward_exchanges=(summed,))


def _route(g: Graph, s: OpContext, x: Value) -> Value:
    """Logits, and of them each token's experts with their weights; and the loss that balances them."""
    t, d, e = _tokens(s, x), s.model.d_model, s.experts.num_experts
    dtype: Dtype = s.wide_dtype if s.experts.router_dtype == "bf16" else "fp32"
    wide = dtype == "fp32" and x.dtype != "fp32"
    logits = g.value("router", t * e, "fp32" if dtype == "fp32" else s.dtype)
    casts: tuple[Kernel, ...] = (conversion(x.numel, x.dtype, "fp32"),) if wide else ()
    forward: tuple[Kernel, ...] = (*casts, Gemm(m=t, n=e, k=d, dtype=dtype))
    if wide and s.stack.kernels.router_product == "mixed":
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
            *([Gemm(m=e, n=d, k=t, dtype=dtype, layout="nt")] if s.trains("router.weight") else []),
            *((conversion(x.numel, "fp32", x.dtype),) if wide else ()),
        ),
        saved=(x,),
        forward_temporary_bytes=4 * x.numel if len(forward) > 1 else 0,
        backward_temporary_bytes=8 * x.numel if wide else 0,
        parameter_numel=(d * e + (e if s.experts.router_bias else 0)) * s.trains("router.weight"),
        selective_save=True,
    )
    weights, choices = g.value("weights", t * e, "fp32"), g.value("choices", t * e, "int8")
    passes = stream(
        "softmax",
        _ROUTING_PASSES * weights.num_bytes // 2,
        _ROUTING_PASSES * weights.num_bytes // 2,
        s.stack.kernels.routing_launches,
    )
    return g.op(
        "choose",
        inputs=(logits,),
        outputs=(weights, choices),
        forward=(passes,),
        backward=(passes,),
        saved=(weights, choices),
        forward_exchanges=(*_balance_exchange(s, s.experts.num_experts), *_counts_exchange(s, s.experts.num_experts)),
        waits=s.plan.experts.dispatcher != "all_gather" and host_counts(s),
    )


def _balance_exchange(s: OpContext, num_experts: int) -> tuple[Exchange, ...]:
    """The tokens that each expert has among the ranks of tp, for the loss that balances them (int64; router.py: _apply_aux_loss)."""
    if s.plan.tp == 1 or not s.stack.traits.counts_rows:
        return ()
    return (Exchange(kind="all_reduce", axis="tp", num_bytes=8 * num_experts),)


def _counts_exchange(s: OpContext, num_experts: int) -> tuple[Exchange, ...]:
    """How many rows each rank sends each expert (int64), gathered before the all-to-all (token_dispatcher.py: preprocess)."""
    dropless = s.stack.traits.counts_rows and s.plan.experts.capacity_factor is None
    if s.plan.experts.dispatcher != "all_to_all" or s.plan.ep == 1 or not dropless:
        return ()
    return (Exchange(kind="all_gather", axis="ep", num_bytes=8 * num_experts * s.plan.ep),)


def _products(g: Graph, s: OpContext, rows: Value, weights: Value | None) -> Value:
    """The MLPs of the rank's experts."""
    d, f = row_width(s), s.experts.d_ff
    into = 2 * f if s.model.gated else f  # gate and up are one product in every grouped implementation
    t = rows.numel // d
    fused = s.fuses_experts and weights is not None
    up = grouped_linear(g, s, "experts.up", rows, (into, d), bias=s.experts.bias, gradient_came=fused)
    if weights is not None:
        weights = _row_weights(g, weights, t)
    if fused and weights is not None:
        hidden = _inside_product(g, s, up, weights, t * f)
        return grouped_linear(g, s, "experts.down", hidden, (d, f), bias=s.experts.bias, rows=t)
    hidden = activation(g, s, up, weights)
    return grouped_linear(g, s, "experts.down", hidden, (d, f), bias=s.experts.bias)


def _inside_product(g: Graph, s: OpContext, up: Value, weights: Value, numel: int) -> Value:
    """The activation and its cast at the end of the first product's kernel; its derivative at the end of a backward one.

    Transformer Engine, pytorch/ops/fused/grouped_mlp.py: kernels of cuDNN's front end in CuTe.
    """
    hidden = g.value("activation", copy_bytes(s.recipe, numel), "fp8")
    return g.op("activation", inputs=(up, weights), outputs=(hidden,), saved=(up, weights))


def _row_weights(g: Graph, weights: Value, rows: int) -> Value:
    """Each row's weight, which travels with it; too small to cost time."""
    out = g.value("row_weights", rows, "fp32")
    return g.op(out.name, inputs=(weights,), outputs=(out,))


def _gate(g: Graph, s: OpContext, x: Value, shared: Value) -> Value:
    """A token's weight of the shared experts: a product with one column, read as a stream, and its sigmoid."""
    t, d = _tokens(s, x), s.model.d_model
    gate = g.value("shared_gate", t, x.dtype)
    g.op(
        "shared_gate",
        inputs=(x,),
        outputs=(gate,),
        forward=(Gemm(m=t, n=1, k=d, dtype=s.wide_dtype),),
        backward=(
            Gemm(m=t, n=d, k=1, dtype=s.wide_dtype, layout="nn"),
            *([Gemm(m=1, n=d, k=t, dtype=s.wide_dtype, layout="nt")] if s.trains("shared_gate.weight") else []),
        ),
        saved=(x,),
        parameter_numel=d * s.trains("shared_gate.weight"),
    )
    out = g.value("shared.weighted", shared.numel, shared.dtype)
    return g.pointwise(out.name, [gate, shared], out, saved=[gate, shared])
