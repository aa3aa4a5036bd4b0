"""Experts as programs in plain PyTorch run them: a loop over experts, or one product over rows that a loop has padded.

Legend: rows are (token, expert) pairs, R of them; E experts of a rank; t tokens of D channels.

each, transformers 4's modeling_mixtral.py (MixtralSparseMoeBlock) and scripts like it: for each expert the host reads which
tokens it has (torch.where), gathers their rows, runs the expert's module, weights the result and adds it where the tokens
stand (index_add_). Backward each gather makes a gradient of all tokens, which is added to the one before it.

padded, stacked: rows sorted by expert, whose counts the host reads, are copied expert by expert into [E, most rows, D], and
after the products back. Autograd's CopySlices copies the whole destination's gradient for each slice that was written, and
each slice that was read gets a gradient of zeros with the size of the whole, added to the one before. stacked: the weights
of E modules are joined, transposed, in every forward, and their gradients laid out anew.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.op_context import OpContext

# Kernels of an expert's turn beside its products, counted in the operators above (PyTorch 2.6: nonzero is 4; index_put_
# with accumulate sorts, 8). Forward where, gather, SiLU's product, weight, its gather, add; backward their gradients.
_TURN_FORWARD: Final = 11
_TURN_BACKWARD: Final = 24
# Of an expert in each of the two copies: its copy behind two views; backward the clone of the destination's gradient, zeros in the
# slice, and the slice's own way back, beside a zero-fill and a sum.
_SLICE_FORWARD: Final = 3
_SLICE_BACKWARD: Final = 3


def in_turns(g: Graph, s: OpContext, rows: Value, tokens: Value) -> Value:
    """What the loop costs beside the products: the rows are the same."""
    num_experts = _held(s)
    size, total_bytes = rows.num_bytes, num_experts * tokens.num_bytes
    out = g.value("turns", rows.numel, rows.dtype)
    return g.op(
        "turns",
        inputs=(rows,),
        outputs=(out,),
        forward=(stream("copy", size, size, num_experts * _TURN_FORWARD), stream("elementwise", 2 * size, size)),
        backward=(
            stream("copy", size, size, num_experts * (_TURN_BACKWARD - 2)),
            stream("memset", 0, total_bytes, num_experts),
            stream("elementwise", 2 * total_bytes, total_bytes, num_experts),
        ),
    )


def padded_numel(s: OpContext, rows: Value) -> int:
    """Elements of the padded tensor, where the busiest expert has `expert_imbalance` times the mean."""
    ranks = min(s.plan.experts.imbalance, s.plan.ep)  # of which the busiest rank's rows have as much already
    return ceil(rows.numel * max(1.0, s.plan.experts.imbalance / ranks))


def sliced(g: Graph, s: OpContext, name: str, rows: Value, numel: int) -> Value:
    """Copy each expert's rows into a tensor padded to equal rows per expert, or back."""
    out = g.value(name, numel, rows.dtype)
    num_experts, size, moved = _held(s), (rows.num_bytes + out.num_bytes) // 2, min(rows.num_bytes, out.num_bytes)
    return g.op(
        out.name,
        inputs=(rows,),
        outputs=(out,),
        forward=(stream("memset", 0, out.num_bytes), stream("copy", moved, moved, num_experts * _SLICE_FORWARD)),
        backward=(
            stream("copy", num_experts * size, num_experts * size, num_experts * _SLICE_BACKWARD),
            stream("memset", 0, num_experts * size, num_experts),
            stream("elementwise", 2 * num_experts * size, num_experts * size, num_experts),
        ),
    )


def stacked_weights(g: Graph, s: OpContext, rows: Value, d_ff: int) -> None:
    """Modules' weights joined into one tensor a projection, transposed; a strided copy each, and again of its gradient."""
    copies = (3 if s.model.gated else 2) * _held(s)
    weights = g.value("stacked", copies * d_ff * s.model.d_model, s.dtype)
    copy = stream("strided", weights.num_bytes, weights.num_bytes, copies)
    g.op(
        "stacked",
        inputs=(rows,),
        grads=(),  # so that it is made again with them
        outputs=(weights,),
        forward=(copy,),
        backward=(copy,),
        saved=(weights,),
    )


def _held(s: OpContext) -> int:
    return s.experts.num_local
