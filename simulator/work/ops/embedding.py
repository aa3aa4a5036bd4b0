"""The embedding: tokens looked up, positions that are learned, scale and norm."""

from __future__ import annotations

from simulator.base.kernels import DTYPE_BYTES
from simulator.work.ops.core import Block
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.norm import norm
from simulator.work.ops.op_context import OpContext
from simulator.work.ops.tensor_parallel import leave, part


def embedding(s: OpContext) -> Block:
    """The first block of a model: its input are tokens."""
    ids = Value("tokens", s.tokens, "int64")
    g = Graph("embedding", ids)
    return g.block(embedded(g, s, ids), s.model.num_parameters_of("embedding"))


def embedded(g: Graph, s: OpContext, given: Value) -> Value:
    """Token lookup, learned positions, scale. Backward: a zeroed gradient, sorted indices, one scatter.

    given: the tokens, or another block's input behind which they are looked up.
    """
    m, ids_bytes = s.model, s.tokens * DTYPE_BYTES["int64"]
    x = g.value("embedded", s.tokens * m.d_model, s.stream_dtype)
    # DTensor makes the gradient of the whole table on every rank (torch 2.13, distributed/tensor/_ops/_embedding_ops.py)
    parts = s.plan.tp if s.vocab_parallel and s.stack.traits.dtensor else 1
    table = parts * m.vocab_size * m.d_model * DTYPE_BYTES[s.parameter_dtype]
    tied = (stream("elementwise", 2 * table, table),) if m.tied_embeddings else ()  # added to the head's gradient
    trains = s.trains("embedding.weight")
    scatter = (
        stream("memset", 0, table),
        stream("embedding_backward", x.num_bytes + 6 * ids_bytes, x.num_bytes, 6),
        *tied,
    )
    g.op(
        "embedding",
        "embedding",
        inputs=(given,),
        grads=(),
        outputs=(x,),
        forward=(stream("embedding_forward", ids_bytes + x.num_bytes, x.num_bytes),),
        backward=scatter if trains else (),
        saved=(given,) if trains and given.dtype == "int64" else (),
        parameter_numel=parts * m.vocab_size * m.d_model if trains else 0,
    )
    x = leave(g, s, "embedding.leave", x) if s.vocab_parallel else part(g, s, "embedding.part", x)
    if m.positions == "learned":
        x = learned_positions(g, s, x)
    if m.embedding_scale:
        x = g.pointwise("scaled", [x], g.value("scaled", x.numel, x.dtype))
    if m.embedding_norm:
        x = norm(g, s, "embedding_norm", x, m.d_model)
    return x


def learned_positions(g: Graph, s: OpContext, x: Value) -> Value:
    """Rows of the position table looked up and added; backward sums over the batch, then scatters."""
    m = s.model
    rows = x.num_bytes // s.batch
    table = m.max_positions * m.d_model * DTYPE_BYTES[s.parameter_dtype]
    out = g.value("positioned", x.numel, x.dtype)
    g.op(
        "positions",
        "embedding",
        inputs=(x,),
        outputs=(out,),
        forward=(stream("embedding_forward", rows, rows), stream("elementwise", x.num_bytes + rows, x.num_bytes)),
        backward=(
            stream("reduce", x.num_bytes, rows),
            stream("memset", 0, table),
            stream("embedding_backward", rows, rows, 6),
        )
        if s.trains("positions.weight")
        else (),
        aliases=(x,),
        forward_temporary_bytes=rows,
        parameter_numel=m.max_positions * m.d_model if s.trains("positions.weight") else 0,
    )
    return out
