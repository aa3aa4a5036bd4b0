"""The MLP of one layer: up (and gate) projection, activation, down projection."""

from __future__ import annotations

from typing import NamedTuple

from simulator.base.kernels import StreamOp
from simulator.work.ops.graph import Graph, Value, conversion, stream
from simulator.work.ops.linear import linear
from simulator.work.ops.op_context import OpContext
from simulator.work.ops.tensor_parallel import FED, enter, leave

# SiLU's backward written out, σ(x) (1 + x (1 − σ(x))) dy, has six operators; five results die with the expression.
_SILU_OPERATORS = 5


def mlp(g: Graph, s: OpContext, x: Value) -> Value:
    """The MLP of one layer, [T, D] -> [T, D], without its norm and residual."""
    return _mlp(g, s, x, _Part("", "mlp", s.model.d_ff, s.model.mlp_bias))


def shared_experts(g: Graph, s: OpContext, x: Value) -> Value:
    """The MLP that all tokens pass beside the routed experts."""
    return _mlp(g, s, x, _Part("shared.", "shared", s.experts.shared_d_ff, s.experts.bias))


class _Part(NamedTuple):
    """An MLP of a layer: what its tensors' names begin with, its own name, its width, and whether it has biases."""

    prefix: str
    name: str
    width: int
    bias: bool


def _mlp(g: Graph, s: OpContext, x: Value, part: _Part) -> Value:
    feeds, products = tuple(f"{part.prefix}{name}" for name in FED), 2 if s.model.gated else 1
    given, x = x, enter(g, s, f"{part.name}.enter", x, feeds, products=products)
    hidden = _gated(g, s, x, part) if s.model.gated else _plain(g, s, x, part)
    out = linear(g, s, f"{part.prefix}down", hidden, s.model.d_model, bias=part.bias, split="rows")
    if s.stack.traits.holds_locals:
        g.hold(f"{part.name}.scope", [given, x])
    return leave(g, s, f"{part.name}.leave", out)


def activation(g: Graph, s: OpContext, up: Value, weights: Value | None = None) -> Value:
    """The activation of rows that one product made, gate and up beside each other; weighted by row, if so.

    Hand-fused software keeps what it reads; the weights' gradients are one more reduction in the same kernel. Where operators
    run one by one, act(gate) is a tensor of its own, and kept (torchtitan, models/moe: F.silu(x w1) * (x w3)).
    """
    if s.model.gated and weights is None and s.stack.traits.runs_operators:
        return _halves(g, up, "experts.", joined=False)
    numel = up.numel // 2 if s.model.gated else up.numel
    if s.model.gate_clamp and s.core_layers:
        up = _clamped(g, up)
    if s.model.gated and s.stack.kernels.gated_activation == "operators":
        hidden = _unfused(g, up, "experts.")
        return hidden if weights is None else _weighted(g, hidden, weights)
    hidden = g.value("activation", numel, up.dtype)
    read = [up] if weights is None else [up, weights]
    return g.op(
        "activation",
        inputs=read,
        outputs=(hidden,),
        forward=(stream("activation", sum(v.num_bytes for v in read), hidden.num_bytes, numel=numel),),
        backward=(stream("activation", hidden.num_bytes + up.num_bytes, up.num_bytes, numel=up.numel),),
        saved=read,
    )


def _clamped(g: Graph, up: Value) -> Value:
    """Gate and up cut off before Megatron-Core's fused activation, whose kernel does not: two halves, each by itself.

    fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl: chunk, clamp each, cat. Backward masks the halves' gradients
    and joins them.
    """
    out, half = g.value("clamped", up.numel, up.dtype), up.num_bytes // 2
    joined = stream("copy", up.num_bytes, up.num_bytes)  # of contiguous halves, so whole vectors
    cut = stream("strided", half, half, numel=up.numel // 2)
    masked = stream("strided", 2 * half, half, numel=up.numel // 2)
    return g.op(
        "clamped",
        inputs=(up,),
        outputs=(out,),
        forward=(cut, cut, joined),
        backward=(masked, masked, joined),
        saved=(up,),
        forward_temporary_bytes=up.num_bytes,
        backward_temporary_bytes=up.num_bytes,
    )


def _plain(g: Graph, s: OpContext, x: Value, part: _Part) -> Value:
    """GELU and its like: one kernel each way."""
    p = part.prefix
    up = linear(g, s, f"{p}up", x, part.width, bias=part.bias, split="columns")
    if s.model.mlp == "squared_relu" and (s.stack.traits.runs_operators or s.stack.kernels.squared_relu == "operators"):
        return _squared_relu(g, up, p)
    hidden = g.value(f"{p}activation", up.numel, up.dtype)
    saved = [hidden] if s.model.mlp == "relu" else [up]
    return g.pointwise(hidden.name, [up], hidden, saved=saved, op="activation")


def _squared_relu(g: Graph, up: Value, prefix: str) -> Value:
    """torch.pow(relu(x), 2): two operators. The power's backward is a copy (x to the power 1), times 2, times the gradient.

    torch 2.7, torch/csrc/autograd/FunctionsManual.cpp, pow_backward: grad * (exponent * self.pow(exponent - 1)).
    """
    size, numel = up.num_bytes, up.numel
    relu, hidden = g.value(f"{prefix}relu", numel, up.dtype), g.value(f"{prefix}activation", numel, up.dtype)
    once = stream("elementwise", size, size, numel=numel)
    twice = stream("elementwise", 2 * size, size, numel=numel)
    g.op(
        relu.name,
        inputs=(up,),
        outputs=(relu,),
        forward=(once,),
        backward=(twice,),
        saved=(relu,),
        by_torch=True,
    )
    return g.op(
        hidden.name,
        inputs=(relu,),
        outputs=(hidden,),
        forward=(once,),
        backward=(stream("copy", size, size, numel=numel), once, twice),
        saved=(relu,),
        backward_temporary_bytes=size,
        by_torch=True,
    )


def _gated(g: Graph, s: OpContext, x: Value, part: _Part) -> Value:
    """act(gate) × up: two operators, or one fused kernel (which keeps gate and up only)."""
    p, width = part.prefix, part.width
    if s.stack.traits.joins_projections:
        both = linear(g, s, f"{p}gate_up", x, 2 * width, bias=part.bias, split="columns")
        if s.stack.traits.runs_operators:
            return _halves(g, both, p)
        if s.stack.kernels.gated_activation == "operators":
            return _unfused(g, both, p)
        hidden = g.value(f"{p}activation", s.tokens * width, both.dtype)
        return g.pointwise(hidden.name, [both], hidden, saved=[both], op="activation")
    gate = linear(g, s, f"{p}gate", x, width, bias=part.bias, split="columns")
    if s.stack.traits.fuses_elementwise:
        return _swiglu(g, gate, linear(g, s, f"{p}up", x, width, bias=part.bias, split="columns"), p)
    parts = _SILU_OPERATORS * gate.num_bytes if s.stack.kernels.activation_backward == "operators" else 0
    act = g.pointwise(f"{p}activation", [gate], saved=[gate], op="activation", backward_temporary_bytes=parts)
    return _gate_times_up(g, act, linear(g, s, f"{p}up", x, width, bias=part.bias, split="columns"), p)


def _parted(g: Graph, both: Value, prefix: str, *, joined: bool = True) -> tuple[Value, Value]:
    """Gate and up, the halves of one product, whose gradients are joined by a copy; not joined: of two products."""
    gate, up = (g.view(f"{prefix}{name}", both, both.numel // 2) for name in ("gate", "up"))
    copy = (stream("join", both.num_bytes, both.num_bytes, numel=both.numel),) if joined else ()
    g.op(f"{prefix}halves", inputs=(both,), backward=copy, views=(gate, up))
    return gate, up


def _halves(g: Graph, both: Value, prefix: str, *, joined: bool = True) -> Value:
    """Two operators on the halves of one product (see `_parted`)."""
    gate, up = _parted(g, both, prefix, joined=joined)
    how: StreamOp = "strided" if joined else "activation"
    act = g.pointwise(f"{prefix}activation", [gate], saved=[gate], op=how)
    return _gate_times_up(g, act, up, prefix)


def _unfused(g: Graph, both: Value, prefix: str) -> Value:
    """Megatron-Core without its fused kernel: the up half is shifted by an offset, though that be 0.

    core_v0.17.0, transformer/mlp.py and transformer/moe/experts.py: glu.
    """
    gate, up = _parted(g, both, prefix)
    act = g.pointwise(f"{prefix}activation", [gate], saved=[gate], op="strided")
    shifted = g.pointwise(f"{prefix}shifted", [up], aliases=[up], op="strided")
    return _gate_times_up(g, act, shifted, prefix)


def _weighted(g: Graph, rows: Value, weights: Value) -> Value:
    """Rows of 16 bits times fp32 weights, one a row, in fp32, and cast back (experts.py: bias_act_func)."""
    wide = g.value("weighted", rows.numel, "fp32")
    times = stream("strided", rows.num_bytes, wide.num_bytes, numel=rows.numel)  # the weights are broadcast
    own = (
        stream("strided", wide.num_bytes, wide.num_bytes, numel=rows.numel),
        conversion(rows.numel, "fp32", rows.dtype),
    )
    of_weights = (
        stream("widen", wide.num_bytes + rows.num_bytes, wide.num_bytes, numel=rows.numel),
        stream("reduce", wide.num_bytes, weights.num_bytes),
    )
    g.op(
        wide.name,
        inputs=(rows, weights),
        outputs=(wide,),
        forward=(times,),
        backward=(*own, *of_weights),
        saved=(rows, weights),
        backward_temporary_bytes=wide.num_bytes,
    )
    return g.cast(wide, rows.dtype, "weighted.cast")


def _gate_times_up(g: Graph, act: Value, up: Value, prefix: str) -> Value:
    return g.pointwise(f"{prefix}product", [act, up], saved=[act, up])


def _swiglu(g: Graph, gate: Value, up: Value, prefix: str) -> Value:
    hidden, f = g.value(f"{prefix}activation", gate.numel, gate.dtype), gate.num_bytes
    return g.op(
        hidden.name,
        inputs=(gate, up),
        outputs=(hidden,),
        forward=(stream("activation", 2 * f, f),),
        backward=(stream("activation", 3 * f, 2 * f),),
        saved=(gate, up),
    )
