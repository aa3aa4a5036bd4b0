"""Experts as GShard writes them: rows leave and return by products with masks of [tokens, rows]. Legend: experts.py.

DeepSpeed's layer (moe/sharded_moe.py: TopKGate, MOELayer; moe/experts.py; after GShard, arXiv 2006.16668, algorithm 1). Every expert has C
rows, filled or not: its capacity, or, where no token may be dropped, as many as the busiest expert of any rank. A mask in
fp32 for each choice of a token says which row it takes with which weight; whether it does, as bools; both are cast to the
activations' dtype, and the products cost 2 t (E C) D FLOP each, which grows with the square of the tokens.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from simulator.base.kernels import Gemm, Kernel
from simulator.work.ops.expert_dispatch import row_width, rows_exchange, sent_rows, sort_rows, travel
from simulator.work.ops.graph import Graph, Value, conversion, stream
from simulator.work.ops.op_context import OpContext

_CHOICES: Final = 2  # of a token, that the gate writes one by one; with more it writes all at once


def send(g: Graph, s: OpContext, x: Value, weights: Value, scope: list[Value]) -> tuple[Value, Value]:
    """The rows of the rank's experts, and the weights [t, E C] with which they return."""
    d = row_width(s)
    t = x.numel // d
    rows = ceil(sent_rows(s, t) * s.plan.experts.imbalance)
    taken, weighted = _masks(g, s, weights, t * rows, scope)
    sent = g.value("permuted", rows * d, x.dtype)
    g.op(
        sent.name,
        "gemm",
        inputs=(x, taken),
        outputs=(sent,),
        forward=(Gemm(m=rows, n=d, k=t, dtype=s.wide_dtype, layout="nt"),),
        backward=(Gemm(m=t, n=d, k=rows, dtype=s.wide_dtype, layout="nn"),),
        saved=(taken,),
        grads=(x,),
    )
    return sort_rows(g, s, "sorted", _exchanged(g, s, "dispatched", sent)), weighted


def bring_back(g: Graph, s: OpContext, rows: Value, weighted: Value) -> Value:
    """Each token's rows summed with their weights, [t, D]."""
    d = row_width(s)
    rows = _exchanged(g, s, "combined", sort_rows(g, s, "unsorted", rows))
    count, t = rows.numel // d, weighted.numel // (rows.numel // d)
    out = g.value("unpermuted", t * d, rows.dtype)
    return g.op(
        out.name,
        "gemm",
        inputs=(rows, weighted),
        outputs=(out,),
        forward=(Gemm(m=t, n=d, k=count, dtype=s.wide_dtype, layout="nn"),),
        backward=(
            Gemm(m=count, n=d, k=t, dtype=s.wide_dtype, layout="nt"),
            Gemm(m=t, n=count, k=d, dtype=s.wide_dtype, layout="tn"),
        ),
        saved=(rows, weighted),
    )


def _exchanged(g: Graph, s: OpContext, name: str, rows: Value) -> Value:
    if s.plan.ep == 1:
        return rows
    came = g.value(name, rows.numel, rows.dtype)
    return travel(g, name, rows, came, rows_exchange(s, rows.num_bytes))


def _masks(g: Graph, s: OpContext, weights: Value, cells: int, scope: list[Value]) -> tuple[Value, Value]:
    """(which row a token takes, with which weight) of `cells` = t E C, in the activations' dtype."""
    choices = min(_CHOICES, s.experts.top_k)
    wide, taken = g.value("combine_weights", cells, "fp32"), g.value("dispatch_mask", cells, "int8")
    written = stream("elementwise", 0, wide.num_bytes, numel=cells)
    sums: tuple[Kernel, ...] = (stream("elementwise", 2 * wide.num_bytes, wide.num_bytes),) * (choices - 1)
    g.op(
        "masks",
        inputs=(weights,),
        outputs=(wide, taken),
        forward=(*(written,) * choices, *sums, stream("elementwise", wide.num_bytes, taken.num_bytes)),
        backward=(stream("reduce", wide.num_bytes, weights.num_bytes),) * choices,
    )
    scope += [wide, taken]
    mask = g.value("mask", cells, s.dtype)
    g.op("mask", inputs=(taken,), grads=(), outputs=(mask,), forward=(conversion(cells, "int8", s.dtype),))
    return mask, g.cast(wide, s.dtype, "mask.weighted")
