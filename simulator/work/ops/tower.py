"""A tower's blocks: patches, layers that see both ways, and the joint, which puts features in the places of text's embeddings.

The tower runs ahead of the text's embedding, whose look-up stands in the joint, so that nothing of the text waits beside it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Final

from simulator.spec.model import Model
from simulator.spec.model.tower import PROJECTOR, VISION, Tower
from simulator.spec.plan.peft import NO_PEFT, PeftPlan
from simulator.work.ops.core import Block
from simulator.work.ops.embedding import embedded, learned_positions
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.linear import linear
from simulator.work.ops.norm import norm
from simulator.work.ops.op_context import OpContext

_FROZEN: Final = PeftPlan(frozen=("*",))


@lru_cache(maxsize=64)
def _encoder(tower: Tower) -> Model:
    """The tower's layers as those of a model."""
    return Model.model_construct(**tower.layer_fields)


def tower_context(s: OpContext, weight: str, *, windowed: bool = False) -> OpContext:
    """Shapes and dtypes in the tower of a language model, whose products stay in 16 bits. weight: one that is trained, or not."""
    tower = s.model.sees
    assert tower is not None
    plan = s.plan.copy_with(precision="bf16", fp8_recipe=None) if s.plan.narrow else s.plan
    changed = {
        "micro_batch_size": plan.micro_batch_size * tower.images,
        "seq_len": tower.num_tokens,
        "document_len": tower.attended if windowed else None,
        "peft": NO_PEFT if s.plan.peft.trains(weight) else _FROZEN,
        "cuda_graphs": (),
    }
    return replace(s, model=_encoder(tower), plan=plan.model_copy(update=changed), tower=tower)


def patches(s: OpContext) -> Block:
    """Pixels to patches: a product, a class token before them, positions, a norm. s: the language model's."""
    t = tower_context(s, f"{VISION}.patch.weight")
    tower = t.tower
    assert tower is not None
    rows = t.batch * tower.num_patches
    pixels = Value("input", rows * tower.patch_numel, "fp32")
    g = Graph("embedding", pixels, fused=s.stack.traits.fuses_elementwise)
    x = g.cast(pixels, t.dtype, "pixels")
    x = linear(g, t, "patch", x, tower.d_model, bias=tower.patch_bias, split="none", tokens=rows)
    if tower.class_token:
        x = _joined_class(g, t, x)
    if tower.positions == "learned":
        x = learned_positions(g, t, x)
    if tower.window:
        x = g.pointwise("by_window", [x], g.value("by_window", x.numel, x.dtype), op="strided")
    if tower.pre_norm:
        x = norm(g, t, "pre_norm", x, tower.d_model)
    return g.block(g.cast(x, t.stream_dtype, "widened"), s.model.num_parameters_of("embedding"))


def _joined_class(g: Graph, t: OpContext, x: Value) -> Value:
    """A trained row before the patches of each image."""
    d, trains = t.model.d_model, t.trains("class_token")
    out = g.value("with_class", x.numel + t.batch * d, x.dtype)
    g.op(
        "with_class",
        "elementwise",
        inputs=(x,),
        outputs=(out,),
        forward=(stream("join", out.num_bytes, out.num_bytes, numel=out.numel),),
        backward=(stream("reduce", out.num_bytes - x.num_bytes, 2 * d),) if trains else (),
        aliases=(x,),
        parameter_numel=d if trains else 0,
    )
    return out


def scaled(g: Graph, t: OpContext, name: str, x: Value) -> Value:
    """A branch times a weight a channel. Backward: the product again, and its columns' sums."""
    out, trains = g.value(name, x.numel, x.dtype), t.trains("scale")
    once, both = (
        stream("strided", x.num_bytes, x.num_bytes, numel=x.numel),
        stream("elementwise", 2 * x.num_bytes, x.num_bytes),
    )
    g.op(
        name,
        "elementwise",
        inputs=(x,),
        outputs=(out,),
        forward=(once,),
        backward=(once, *((both, stream("reduce", x.num_bytes, 4 * t.model.d_model)) if trains else ())),
        saved=(x,) if trains else (),
        backward_temporary_bytes=x.num_bytes if trains else 0,
        parameter_numel=t.model.d_model if trains else 0,
    )
    return out


def joint(s: OpContext) -> Block:
    """Text's embeddings with features of images in their places. s: the language model's."""
    t, p = tower_context(s, f"{VISION}.patch.weight"), tower_context(s, f"{PROJECTOR}.0.weight")
    tower = t.tower
    assert tower is not None
    x = Value("input", t.tokens * tower.d_model, t.stream_dtype)
    g = Graph("joint", x, fused=s.stack.traits.fuses_elementwise)
    text = embedded(g, s, x)
    if tower.post_norm == "read":
        x = norm(g, t, "post_norm", x, tower.d_model)
    if tower.class_token:
        x = _part(g, x, "without_class", t.batch * tower.num_patches * tower.d_model)
    features = [_projected(g, p, x, number, s.model.d_model) for number in range(1 + tower.extra_projectors)]
    out, mask = g.value("joined", text.numel, text.dtype), g.value("mask", s.tokens, "int8")
    size, taken = text.num_bytes, sum(one.num_bytes for one in features)
    g.op(
        "joined",
        "elementwise",
        inputs=(text, *features),
        outputs=(out, mask),
        forward=(stream("copy", size, size), stream("strided", size + taken, size, 2, numel=text.numel)),
        backward=(stream("elementwise", size, size), stream("strided", size, taken, 2, numel=text.numel)),
        saved=(mask,),
    )
    return g.block(out, 0)


def _part(g: Graph, x: Value, name: str, numel: int) -> Value:
    """A view of a part, whose gradient is copied into zeros."""
    view = g.view(name, x, numel)
    g.op(name, "elementwise", inputs=(x,), backward=(stream("copy", view.num_bytes, x.num_bytes),), views=(view,))
    return view


def _projected(g: Graph, t: OpContext, x: Value, number: int, d_model: int) -> Value:
    """Features as wide as the language model: squares of patches made one, a norm, linear layers."""
    tower, name = t.tower, f"{PROJECTOR}{number or ''}"
    assert tower is not None
    rows, kind, width = t.batch * tower.image_tokens, tower.projector_norm.partition("_")[0], tower.projector_width
    wide = tower.projector_norm.endswith("_joined") or number > 0
    if tower.merging == "mean":
        pooled = g.value(f"{name}.pooled", rows * tower.d_model, x.dtype)
        x = g.pointwise(pooled.name, [x], pooled, op="strided")
    if kind != "none":
        own = t.model.model_copy(update={"norm": kind, "norm_bias": kind == "layer"})
        x = norm(g, replace(t, model=own), f"{name}.norm", x, width if wide else tower.d_model)
    if tower.merging == "product":
        order = g.value(f"{name}.squares", x.numel, x.dtype)
        x = g.pointwise(order.name, [x], order, op="strided")
        x = linear(g, t, f"{name}.merge", x, tower.d_model, bias=False, split="none", tokens=rows)
    widths = tower.projector_widths(d_model)
    for layer, out in enumerate(widths):
        x = linear(g, t, f"{name}.{layer}", x, out, bias=tower.projector_bias, split="none", tokens=rows)
        if layer < len(widths) - 1:
            x = g.pointwise(
                f"{x.name}.gelu", [x], g.value(f"{x.name}.gelu", x.numel, x.dtype), saved=[x], op="activation"
            )
    return x
