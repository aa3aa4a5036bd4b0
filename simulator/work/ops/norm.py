"""Norms: one fused kernel each way, or written out as operators in fp32.

Bytes an element in 16 bits, backward in brackets: fused 4 [10]; operators 40 [104], 36 [92] where the result is cast before its weight.
"""

from __future__ import annotations

from simulator.base.kernels import DTYPE_BYTES
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.op_context import OpContext


def norm(g: Graph, s: OpContext, name: str, x: Value, width: int, *, casts: bool = False, biased: bool = True) -> Value:
    """Normalise each row of `width` elements of x. The output has x's dtype; casts: it is written in fp8. biased: it has a bias where the model's norms do."""
    if s.stack.kernels.norm != "fused" and s.model.norm == "rms" and s.model.norm_weight:
        return _operators(g, s, name, x, width)
    if s.stack.kernels.norm_dtype == "fp32" and s.stack.traits.runs_operators and x.dtype != "fp32":
        wide = g.cast(x, "fp32", f"{name}.float", "norm")
        return g.cast(_fused(g, s, f"{name}.wide", wide, width, biased=biased), x.dtype, name, "norm")
    return _fused(g, s, name, x, width, casts=casts, biased=biased)


def num_statistics(s: OpContext) -> int:
    """fp32 numbers a row that the backward needs: 1/rms, or mean and 1/std."""
    return 1 if s.model.norm == "rms" else 2


def _fused(
    g: Graph, s: OpContext, name: str, x: Value, width: int, *, casts: bool = False, biased: bool = True
) -> Value:
    """Forward reads x and writes y. Backward reads dy and x twice, for dx and for the weight's column sums."""
    rows = x.numel // width
    out = g.value(name, x.numel, x.dtype)
    statistics = g.value(f"{name}.statistics", rows * num_statistics(s), "fp32")
    trains = s.trains(f"{name}.weight") and s.model.norm_weight
    weight = width * (2 if s.model.norm_bias and biased else 1) * trains
    small = statistics.num_bytes
    size = x.num_bytes
    sums = stream("norm_backward", 2 * size + small, weight * DTYPE_BYTES[x.dtype], 2)
    return g.op(
        name,
        "norm",
        inputs=(x,),
        outputs=(out, statistics),
        forward=(stream("norm_forward", size, (x.numel if casts else size) + small),),
        backward=(stream("norm_backward", 2 * size + small, size), *([sums] if weight else [])),
        saved=(x, statistics),
        parameter_numel=weight,
    )


def _operators(g: Graph, s: OpContext, name: str, x: Value, width: int) -> Value:
    """RMSNorm as torch composes it where no fused kernel exists: cast, square, mean, rsqrt, two products, cast."""
    rows, n = x.numel // width, x.numel
    wide = g.cast(x, "fp32", f"{name}.float", "norm")
    square = g.value(f"{name}.square", n, "fp32")
    f = square.num_bytes
    power = (stream("elementwise", f, f, 1), stream("elementwise", f, f, 1), stream("elementwise", 2 * f, f, 1))
    g.op(
        f"{name}.square", "norm", inputs=(wide,), outputs=(square,), forward=(stream("elementwise", f, f),),
        backward=power, saved=(wide,), backward_temporary_bytes=2 * f,
    )  # fmt: skip
    mean, rstd = g.value(f"{name}.mean", rows, "fp32"), g.value(f"{name}.rstd", rows, "fp32")
    r = rstd.num_bytes
    g.op(
        f"{name}.mean", "norm", inputs=(square,), outputs=(mean,), forward=(stream("reduce", f, r),),
        backward=(stream("strided", r, f, numel=n),))  # fmt: skip
    g.op(
        f"{name}.rstd", "norm", inputs=(mean,), outputs=(rstd,), forward=(stream("elementwise", r, r, 2),),
        backward=(stream("elementwise", 2 * r, r, 3),), saved=(rstd,))  # fmt: skip
    scaled = g.value(f"{name}.scaled", n, "fp32")
    spread = stream("strided", f + r, f, numel=n)  # a number for each row, or for each column, meets the whole tensor
    product = (spread, stream("elementwise", 2 * f, f), stream("reduce", f, r))
    g.op(
        f"{name}.scaled", "norm", inputs=(wide, rstd), outputs=(scaled,), forward=(spread,),
        backward=product, saved=(wide, rstd), backward_temporary_bytes=f,
    )  # fmt: skip
    goes_on_wide = s.model.embedding_scale  # Gemma's (modeling_gemma.py)
    if s.stack.kernels.norm == "eager_cast" and not goes_on_wide:
        scaled = g.cast(scaled, x.dtype, f"{name}.narrow", "norm")
    f = scaled.num_bytes
    weighted = g.value(f"{name}.weighted" if scaled.dtype != x.dtype else name, n, scaled.dtype)
    spread = stream("strided", f, f, numel=n)
    trains = s.trains(f"{name}.weight")
    columns = (spread, stream("elementwise", 2 * f, f), stream("reduce", f, 4 * width))
    g.op(
        f"{name}.weighted", "norm", inputs=(scaled,), outputs=(weighted,), forward=(spread,),
        backward=columns if trains else columns[:1], saved=(scaled,) if trains else (), backward_temporary_bytes=f if trains else 0, parameter_numel=width if trains else 0,
    )  # fmt: skip
    return g.cast(weighted, x.dtype, name, "norm")
