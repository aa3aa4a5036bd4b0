"""The first blocks of a model: tokens looked up; of a tower, patches and the joint, which puts features in the places of tokens.

The tower runs ahead of the text's embedding, whose look-up stands in the joint, so that nothing of the text waits beside it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Final

from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.model import Model
from simulator.spec.model.tower import PROJECTOR, TOWER_WEIGHT, Tower
from simulator.spec.plan.peft import NO_PEFT, PeftPlan
from simulator.work.ops.core import Block
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.linear import linear
from simulator.work.ops.norm import norm
from simulator.work.ops.op_context import OpContext
from simulator.work.ops.tensor_parallel import leave, part

_FROZEN: Final = PeftPlan(frozen=("*",))


@lru_cache(maxsize=64)
def _encoder(tower: Tower, tp: int) -> Model:
    """A rank's part of the tower's layers, as those of a model."""
    fields = tower.layer_fields
    return Model.model_construct(**fields | {key: fields[key] // tp for key in ("num_heads", "num_kv_heads", "d_ff")})


def tower_context(s: OpContext, weight: str = TOWER_WEIGHT, *, windowed: bool = False) -> tuple[OpContext, Tower]:
    """Shapes and dtypes in the tower of a language model, whose products stay in 16 bits. weight: one that is trained, or not."""
    tower = s.model.sees
    assert tower is not None
    plan = s.plan.copy_with(precision="bf16", fp8_recipe=None) if s.plan.narrow else s.plan
    changed = {
        "micro_batch_size": plan.micro_batch_size * tower.images * tower.inputs,
        "seq_len": tower.num_tokens,
        "document_len": tower.attended if windowed else None,
        "peft": NO_PEFT if s.plan.peft.trains(weight) else _FROZEN,
        "cuda_graphs": (),
    }
    return replace(s, model=_encoder(tower, plan.tp), plan=plan.model_copy(update=changed), tower=tower), tower


def patches(s: OpContext) -> Block:
    """Pixels to patches: a product, a class token before them, positions, a norm. s: the language model's."""
    t, tower = tower_context(s)
    rows, d = t.batch * tower.num_patches, tower.d_model
    pixels = Value("input", rows * tower.patch_numel, "fp32")
    g = Graph("embedding", pixels, fused=s.stack.traits.fuses_elementwise)
    x = linear(g, t, "patch", g.cast(pixels, t.dtype, "pixels"), d, bias=tower.patch_bias, split="none", tokens=rows)
    if tower.class_token:
        x = _with_class_token(g, t, x, "class_token")
    if tower.positions == "learned":
        x = learned_positions(g, t, x)
    if tower.window:
        x = g.pointwise("by_window", [x], op="strided")
    if tower.pre_norm:
        x = norm(g, t, "pre_norm", x, d)
    return g.block(g.cast(x, t.stream_dtype, "widened"), s.model.num_parameters_of("embedding"))


def _with_class_token(g: Graph, s: OpContext, x: Value, parameter: str) -> Value:
    """A learned token ahead of an image's patches."""
    d = s.model.d_model
    trained, whole = d * s.trains(parameter), g.value("with_class", s.tokens * d, x.dtype)
    joins = stream("join", whole.num_bytes, whole.num_bytes, numel=whole.numel)
    sums = (stream("reduce", whole.num_bytes - x.num_bytes, 2 * d),) if trained else ()
    return g.op(whole.name, inputs=(x,), outputs=(whole,), forward=(joins,), backward=sums, aliases=(x,), parameter_numel=trained)  # fmt: skip


def scaled(g: Graph, t: OpContext, name: str, x: Value) -> Value:
    """A branch times a weight a channel. Backward: the product again, and its columns' sums."""
    out, trained, size = g.value(name, x.numel, x.dtype), t.model.d_model * t.trains("scale"), x.num_bytes
    once = stream("strided", size, size, numel=x.numel)
    sums = (stream("elementwise", 2 * size, size), stream("reduce", size, 4 * trained)) if trained else ()
    kept, made = ([x], size) if trained else ([], 0)
    return g.op(name, inputs=(x,), outputs=(out,), forward=(once,), backward=(once, *sums), saved=kept,
         backward_temporary_bytes=made, parameter_numel=trained)  # fmt: skip


def joint(s: OpContext) -> Block:
    """Text's embeddings with features of images in their places. s: the language model's."""
    (t, tower), (p, _) = tower_context(s), tower_context(s, f"{PROJECTOR}.0.weight")
    x = Value("input", t.tokens * tower.d_model, t.stream_dtype)
    g = Graph("joint", x, fused=s.stack.traits.fuses_elementwise)
    text = embedded(g, s, x)
    if tower.post_norm == "read":
        x = norm(g, t, "post_norm", x, tower.d_model)
    if tower.class_token:  # its gradient is that of the rest in zeros
        view = g.view("without_class", x, t.batch * tower.num_patches * tower.d_model)
        zeroed = stream("copy", view.num_bytes, x.num_bytes)
        g.op(view.name, inputs=(x,), backward=(zeroed,), views=(view,))
        x = view
    features = [_projected(g, p, tower, x, number, s.model.d_model) for number in range(1 + tower.extra_projectors)]
    if tower.newline:
        features = [_in_rows(g, p, tower, one, s.model.d_model) for one in features]
    out, mask = g.value("joined", text.numel, text.dtype), g.value("mask", s.tokens, "int8")
    size, taken = text.num_bytes, sum(one.num_bytes for one in features)
    placed = stream("strided", size + taken, size, 2, numel=text.numel)
    back = stream("elementwise", size, size), stream("strided", size, taken, 2, numel=text.numel)
    copied = stream("copy", size, size)
    g.op("joined", inputs=(text, *features), outputs=(out, mask), forward=(copied, placed), backward=back, saved=(mask,))  # fmt: skip
    return g.block(out, 0)


def _projected(g: Graph, t: OpContext, tower: Tower, x: Value, number: int, d_model: int) -> Value:
    """Features as wide as the language model: squares of patches made one, a norm, linear layers."""
    name, rows = f"{PROJECTOR}{number or ''}", t.batch * tower.features
    kind, _, joined = tower.projector_norm.partition("_")
    read, *widths = tower.projector_widths(d_model)
    if tower.merging == "mean":
        x = g.pointwise(f"{name}.pooled", [x], g.value(f"{name}.pooled", rows * tower.d_model, x.dtype), op="strided")
    if kind != "none":
        own = t.model.model_copy(update={"norm": kind, "norm_bias": kind == "layer"})
        x = norm(g, replace(t, model=own), f"{name}.norm", x, read if joined or number else tower.d_model)
    if tower.merging == "product":
        x = g.pointwise(f"{name}.squares", [x], op="strided")
        x = linear(g, t, f"{name}.merge", x, tower.d_model, bias=False, split="none", tokens=rows)
    for layer, width in enumerate(widths):
        x = linear(g, t, f"{name}.{layer}", x, width, bias=tower.projector_bias, split="none", tokens=rows)
        if layer < len(widths) - 1:
            x = g.pointwise(f"{x.name}.gelu", [x], saved=[x], op="activation")
    return x


def _in_rows(g: Graph, t: OpContext, tower: Tower, x: Value, d_model: int) -> Value:
    """Features of tiles in the rows of their image, without its padding: put in order, a trained row behind each, the whole image's ahead."""
    out = g.value(f"{x.name}.rows", t.batch // tower.inputs * tower.image_tokens * d_model, x.dtype)
    whole, trained = x.num_bytes // tower.inputs, d_model * t.trains("newline")
    tiles, kept = x.num_bytes - whole, out.num_bytes - whole
    ahead = stream("strided", tiles, tiles), stream("join", kept, kept), stream("join", out.num_bytes, out.num_bytes)
    back = (
        *reversed(ahead),
        *((stream("reduce", kept // (tower.grid // tower.merge), 4 * d_model),) if trained else ()),
    )
    g.op(out.name, "elementwise", inputs=(x,), outputs=(out,), forward=ahead, backward=back,
         forward_temporary_bytes=tiles + kept, backward_temporary_bytes=tiles + kept, parameter_numel=trained)  # fmt: skip
    return out


def embedding(s: OpContext) -> Block:
    """The first block of a model: its input are tokens, or the pixels of an image."""
    m, rows = s.model, s.tokens - s.batch
    given = Value("input", rows * m.patch_numel, "fp32") if m.patch_numel else Value("tokens", s.tokens, "int64")
    g = Graph("embedding", given)
    if not m.patch_numel:
        return g.block(embedded(g, s, given), m.num_parameters_of("embedding"))
    pixels = g.cast(given, s.dtype, "pixels")
    x = linear(g, s, "embedding.patch", pixels, m.d_model, bias=True, split="none", tokens=rows, head=True)
    x = learned_positions(g, s, _with_class_token(g, s, x, "embedding.class_token"))
    return g.block(part(g, s, "embedding.part", x), m.num_parameters_of("embedding"))


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
    if m.token_kinds:
        x = _kinds(g, s, x)
    if m.embedding_scale:
        x = g.pointwise("scaled", [x])
    if m.embedding_norm:
        x = norm(g, s, "embedding_norm", x, m.d_model)
    return x


def _kinds(g: Graph, s: OpContext, x: Value) -> Value:
    """A row of the table of kinds added to each token: text before a separator, text behind it."""
    m, trained = s.model, s.trains("embedding.kinds.weight")
    table, size, ids = m.token_kinds * m.d_model * DTYPE_BYTES[s.parameter_dtype], x.num_bytes, 8 * s.stream_tokens
    out = g.value("of_kind", x.numel, x.dtype)
    added = stream("embedding_forward", ids + size, size), stream("elementwise", 2 * size, size)
    back = (stream("memset", 0, table), stream("embedding_backward", size + 6 * ids, table, 6)) if trained else ()
    return g.op("kinds", "embedding", inputs=(x,), outputs=(out,), forward=added, backward=back, aliases=(x,),
         forward_temporary_bytes=size, parameter_numel=m.token_kinds * m.d_model * trained)  # fmt: skip


def learned_positions(g: Graph, s: OpContext, x: Value) -> Value:
    """Rows of the position table looked up and added; backward sums over the batch, then scatters."""
    m = s.model
    rows = x.num_bytes // s.batch
    table = m.max_positions * m.d_model * DTYPE_BYTES[s.parameter_dtype]
    out = g.value("positioned", x.numel, x.dtype)
    return g.op(
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
