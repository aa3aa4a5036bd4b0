"""The MLP of one layer: up (and gate) projection, activation, down projection."""

from __future__ import annotations

from simulator.ops.graph import Graph, Value, stream
from simulator.ops.linear import linear
from simulator.ops.setting import Setting
from simulator.ops.tensor_parallel import enter, leave

# SiLU's backward written out, σ(x) (1 + x (1 − σ(x))) dy, has six operators; five results die with the expression.
_SILU_OPERATORS = 5


def mlp(g: Graph, s: Setting, x: Value) -> Value:
    """The MLP of one layer, [T, D] -> [T, D], without its norm and residual."""
    m = s.model
    given, x = x, enter(g, s, "mlp.enter", x)
    hidden = _gated(g, s, x) if m.gated else _plain(g, s, x)
    out = linear(g, s, "down", hidden, m.d_model, bias=m.mlp_bias, split="rows")
    if s.stack.blocks == "eager":
        g.hold("mlp.scope", [given, x])
    return leave(g, s, "mlp.leave", out)


def _plain(g: Graph, s: Setting, x: Value) -> Value:
    """GELU and its like: one kernel each way. Squared ReLU written out is two operators."""
    up = linear(g, s, "up", x, s.model.d_ff, bias=s.model.mlp_bias, split="columns")
    if s.model.mlp == "squared_relu" and s.stack.blocks == "eager":
        relu = g.value("relu", up.numel, up.dtype)
        up = g.pointwise("relu", [up], relu, saved=[relu], grads=[up])
    hidden = g.value("activation", up.numel, up.dtype)
    saved = [hidden] if s.model.mlp == "relu" else [up]
    return g.pointwise("activation", [up], hidden, saved=saved, grads=[up], op="activation")


def _gated(g: Graph, s: Setting, x: Value) -> Value:
    """act(gate) × up: two operators, or one fused kernel (which keeps gate and up only)."""
    m = s.model
    if s.stack.blocks == "fused":
        both = linear(g, s, "gate_up", x, 2 * m.d_ff, bias=m.mlp_bias, split="columns")
        hidden = g.value("activation", s.tokens * m.d_ff, both.dtype)
        return g.pointwise("activation", [both], hidden, saved=[both], grads=[both], op="activation")
    gate = linear(g, s, "gate", x, m.d_ff, bias=m.mlp_bias, split="columns")
    if s.stack.blocks == "compiled":
        return _swiglu(g, gate, linear(g, s, "up", x, m.d_ff, bias=m.mlp_bias, split="columns"))
    act = g.value("activation", gate.numel, gate.dtype)
    parts = _SILU_OPERATORS * gate.num_bytes if s.stack.activation_backward == "operators" else 0
    g.pointwise("activation", [gate], act, saved=[gate], grads=[gate], op="activation", backward_temporary_bytes=parts)
    up = linear(g, s, "up", x, m.d_ff, bias=m.mlp_bias, split="columns")
    product = g.value("product", act.numel, act.dtype)
    return g.pointwise("product", [act, up], product, saved=[act, up], grads=[act, up])


def _swiglu(g: Graph, gate: Value, up: Value) -> Value:
    hidden, f = g.value("activation", gate.numel, gate.dtype), gate.num_bytes
    g.op(
        "activation",
        "elementwise",
        inputs=(gate, up),
        outputs=(hidden,),
        forward=(stream("activation", 2 * f, f),),
        backward=(stream("activation", 3 * f, 2 * f),),
        saved=(gate, up),
        grads=(gate, up),
    )
    return hidden
