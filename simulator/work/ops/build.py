"""build_blocks: the embedding, one layer and the head of a model under a stack, as ops."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Final, Literal

from simulator.base.kernels import DTYPE_BYTES, Gemm
from simulator.parallel.model_shard import shard_of, whole_body
from simulator.spec.model import FORWARD_SUFFIX, LOWEST_SUFFIX, BodyKind, LayerKind, Model, number_of
from simulator.spec.model.hybrid import HybridKind
from simulator.spec.model.layer_kinds import BF16_SUFFIX, TOWER_KINDS, TowerKind, plain
from simulator.spec.model.tower import TOWER_WEIGHT
from simulator.spec.plan import CudaGraph, Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops.attention import attention
from simulator.work.ops.core import Block, ModelBlocks, Op
from simulator.work.ops.embedding import embedding, joint, patches, scaled, tower_context
from simulator.work.ops.graph import Graph, Value, fuse_residuals, stream
from simulator.work.ops.head_loss import WITH_HEAD, loss_with_head
from simulator.work.ops.linear import linear
from simulator.work.ops.loss import SHIFTED, cross_entropy
from simulator.work.ops.mlp import mlp
from simulator.work.ops.norm import norm
from simulator.work.ops.op_context import OpContext, uses_autocast
from simulator.work.ops.quantise import casts_in_norms
from simulator.work.ops.tensor_parallel import Split, enter, gather, whole_columns

Feed = Callable[[Graph, OpContext, Value], Value]


def build_blocks(model: Model, stack: Stack, plan: Plan) -> ModelBlocks:
    """Blocks for one micro-batch on one rank: T = micro_batch_size × seq_len / cp tokens. Exact FLOP and bytes.

    Under tensor parallelism the shapes are those of the rank's share of the model.
    """
    setting = OpContext(model=shard_of(model, plan), stack=stack, plan=plan, autocast=uses_autocast(stack, plan))
    found = tuple(dict.fromkeys(whole_body(model, plan)))
    ends = replace(setting, plan=plan.model_copy(update={"peft": plan.peft.at(None)})) if plan.peft.any else setting
    return ModelBlocks(
        embedding=_patches(ends) if setting.model.sees or setting.model.patch_numel else embedding(ends),
        body=tuple(block for kind in _ORDER for block in _variants(setting, kind, found)),
        head=_head(ends),
    )


_ORDER: Final[tuple[LayerKind | TowerKind | Literal["mtp"], ...]] = (
    "layer",
    "dense_layer",
    "mamba",
    "attention",
    "both",
    "mlp",
    "moe",
    "mtp",
    *TOWER_KINDS,
)


def _variants(
    s: OpContext, kind: LayerKind | TowerKind | Literal["mtp"], found: tuple[BodyKind, ...]
) -> Iterator[Block]:
    """The blocks of a kind: as the plan has it, with products in bf16, as some layers are trained."""
    for name in sorted(
        (one for one in found if plain(one) == kind), key=lambda one: (one != kind, LOWEST_SUFFIX in one)
    ):
        plan = s.plan
        if plan.peft.any:
            plan = plan.model_copy(update={"peft": plan.peft.at(number_of(name))})
        if name.endswith(BF16_SUFFIX):
            plan = plan.copy_with(precision="bf16", fp8_recipe=None)
        block = with_graphs(_body(s if plan is s.plan else replace(s, plan=plan), kind), plan.cuda_graphs)
        ends = FORWARD_SUFFIX in name or LOWEST_SUFFIX in name
        yield replace(block, name=name, ops=tuple(_ended(block, lowest=LOWEST_SUFFIX in name)) if ends else block.ops)


def _ended(block: Block, *, lowest: bool) -> Iterator[Op]:
    """A layer whose input needs no gradient: what lies below all that is trained keeps nothing and has no backward.

    lowest: it has something to train, on whose results gradients begin; of other inputs there are none.
    """
    needs: set[str] = set()
    for op in block.ops:
        if lowest and (op.parameter_numel or needs.intersection(op.inputs)):
            needs |= {*(tensor.name for tensor in op.outputs), *op.views}
            ended = _towards(op, needs) if op.category != "attention" else op
        else:
            ended = replace(op, backward=(), saved=(), grad_inputs=(), grad_aliases=(), grad_overwrites=(), views=(),
                           backward_temporary_bytes=0, parameter_numel=0, backward_exchanges=())  # fmt: skip
        # what comes goes on as a gradient that nobody asks for
        last = block.output in {tensor.name for tensor in op.outputs}
        yield replace(ended, grad_aliases=tuple({*ended.grad_aliases, block.input})) if last else ended


def _towards(op: Op, needs: set[str]) -> Op:
    """Without gradients of inputs that need none."""
    made = tuple(tensor for tensor in op.grad_inputs if tensor.name in needs)
    alone = op.category == "gemm" and not made and not needs.intersection(op.grad_overwrites)
    backward = tuple(one for one in op.backward if not (alone and isinstance(one, Gemm) and one.layout == "nn"))
    aliases, over = (tuple(name for name in names if name in needs) for names in (op.grad_aliases, op.grad_overwrites))
    return replace(op, backward=backward, grad_inputs=made, grad_aliases=aliases, grad_overwrites=over)


def _patches(s: OpContext) -> Block:
    """The first block of a model that sees, or whose tokens are an image's: it makes patches of images, which have no gradients."""
    own = s.model.sees is None
    block = embedding(s) if own else patches(s)
    trained = s.plan.peft.trains("embedding.patch.weight" if own else TOWER_WEIGHT)
    ended = (replace(op, grad_aliases=(*({*op.grad_aliases} - {block.input}),)) for op in _ended(block, lowest=trained))
    return replace(block, ops=tuple(ended))


def _body(s: OpContext, kind: LayerKind | TowerKind | Literal["mtp"]) -> Block:
    """A block of a kind."""
    match kind:
        case "tower" | "tower_window":
            return _layer(tower_context(s, windowed=kind == "tower_window")[0], dense=False)
        case "joint":
            return joint(s)
        case "mtp":
            return _mtp(s)
        case "layer" | "dense_layer":
            return _layer(s, dense=kind == "dense_layer")
        case _:
            return _one_branch(s, kind)


def _keep_every_second_product(block: Block) -> Block:
    """The first product's output is kept by the selective policy, the second's is made again, and so on."""
    products = [op.name for op in block.ops if op.category == "gemm"]
    sent = {op.name for op in block.ops if any(e.kind == "reduce_scatter" for e in op.forward_exchanges)}
    again = set(products[1::2]) - sent  # results of reduce-scatters are kept, those with a product inside too
    ops = tuple(replace(op, selective_save=False) if op.name in again else op for op in block.ops)
    return replace(block, ops=ops)


def _layer(s: OpContext, *, dense: bool) -> Block:
    """Norm, attention, residual; norm, MLP, residual; or both branches on one stream (parallel_residual)."""
    kind: LayerKind = "dense_layer" if dense else "layer"
    x = Value("input", s.stream_tokens * s.model.d_model, s.stream_dtype)
    g = Graph(kind, x, fused=s.stack.traits.fuses_elementwise)
    block = g.block(_branches(g, s, x, dense=dense), s.model.num_parameters_of(kind))
    return _finished(block, s, x)


def _mamba(g: Graph, s: OpContext, x: Value) -> Value:
    from simulator.work.ops.mamba import mamba

    return mamba(g, s, x)


def _both(g: Graph, s: OpContext, x: Value) -> Value:
    """A mixer and attention side by side."""
    branches = [_mamba(g, s, x), attention(g, s, x)]
    return g.pointwise("both", branches, g.value("both", x.numel, branches[0].dtype), aliases=branches)


def _experts(g: Graph, s: OpContext, x: Value) -> Value:
    from simulator.work.ops.experts import experts

    return experts(g, s, x)


_BRANCHES: Final[dict[HybridKind, tuple[str, Feed]]] = {
    "mamba": ("1", _mamba),
    "attention": ("1", attention),
    "both": ("1", _both),
    "mlp": ("2", mlp),
    "moe": ("2", _experts),
}


def _one_branch(s: OpContext, kind: HybridKind) -> Block:
    """A hybrid's layer: norm, branch, residual. Its ops are called as those of the half of a layer that it amounts to."""
    x = Value("input", s.stream_tokens * s.model.d_model, s.stream_dtype)
    g = Graph(kind, x, fused=s.stack.traits.fuses_elementwise)
    half, branch = _BRANCHES[kind]
    y = branch(g, s, norm(g, s, f"norm_{half}", x, s.model.d_model))
    block = g.block(_add(g, s, f"residual_{half}", x, y), s.model.num_parameters_of(kind))
    return _finished(block, s, x)


def _mtp(s: OpContext) -> Block:
    """A module of multi-token prediction, passed as often as the model says.

    The stream goes on as it came (Megatron-LM, core/transformer/multi_token_prediction.py). Embedding and head are used
    once more in each pass; their gradients, and a repeated module's, are added to those of the first use.
    """
    m, d = s.model, s.model.d_model
    x = Value("input", s.stream_tokens * d, s.stream_dtype)
    g = Graph("mtp", x, fused=s.stack.traits.fuses_elementwise)
    losses = [_mtp_pass(g, s, x, number) for number in range(m.mtp_passes)]
    passed = g.value("passed", x.numel, x.dtype)
    g.op(
        "passed",
        inputs=(x, *losses),
        outputs=(passed,),
        forward=(stream("copy", x.num_bytes, x.num_bytes),),
        aliases=(x,),
    )
    return _finished(g.block(passed, m.num_parameters_of("mtp")), s, x)


def _mtp_pass(g: Graph, s: OpContext, x: Value, number: int) -> Value:
    """A layer on the stream joined with the next tokens' embeddings, and its loss."""
    m, d = s.model, s.model.d_model
    g.prefix = f"pass{number + 1}." if number else ""
    next_tokens = g.value("mtp.embedded", x.numel, x.dtype)
    size, table = x.num_bytes, m.vocab_size * d * DTYPE_BYTES[s.parameter_dtype]
    lookup = stream("embedding_forward", size, size)
    scatter = (stream("memset", 0, table), stream("embedding_backward", size, size, 6))
    added = stream("elementwise", 2 * table, table)
    g.op("mtp.embedding", "embedding", inputs=(), outputs=(next_tokens,), forward=(lookup,), backward=(*scatter, added))
    parts = [norm(g, s, "mtp.stream_norm", x, d), norm(g, s, "mtp.embedding_norm", next_tokens, d)]
    both = g.value("mtp.both", 2 * x.numel, x.dtype)
    joins = (stream("join", 2 * size, 2 * size, numel=both.numel),)
    g.op("mtp.both", inputs=parts, outputs=(both,), forward=joins, backward=joins)
    y = linear(g, s, "mtp.join", both, d, bias=False, split="none", tokens=s.stream_tokens)
    y = norm(g, s, "mtp.norm", _branches(g, s, y, dense=False), d)
    loss = _loss(g, s, y)
    g.prefix = ""
    return loss


def _branches(g: Graph, s: OpContext, x: Value, *, dense: bool) -> Value:
    """What a layer makes of the stream."""
    feed = mlp if dense or s.model.experts is None else _experts
    return _parallel(g, s, x, feed) if s.model.parallel_residual else _sequential(g, s, x, feed)


def _finished(block: Block, s: OpContext, x: Value) -> Block:
    """The block as the stack runs and recomputes it."""
    if s.stack.kernels.selective_keeps == "every_second_product":
        block = _keep_every_second_product(block)
    return fuse_residuals(block, x.num_bytes) if s.stack.traits.fuses_elementwise else block


def _sequential(g: Graph, s: OpContext, x: Value, feed: Feed) -> Value:
    d = s.model.d_model
    casts = casts_in_norms(s)
    branch = attention(g, s, norm(g, s, "norm_1", x, d, casts=casts and s.model.latent is None))
    if s.model.post_norms:
        branch = norm(g, s, "post_norm_1", branch, d)
    x = _add(g, s, "residual_1", x, branch)
    branch = feed(g, s, norm(g, s, "norm_2", x, d, casts=casts and feed is mlp))
    if s.model.post_norms:
        branch = norm(g, s, "post_norm_2", branch, d)
    return _add(g, s, "residual_2", x, branch)


def _parallel(g: Graph, s: OpContext, x: Value, feed: Feed) -> Value:
    d = s.model.d_model
    first = norm(g, s, "norm_1", x, d)
    second = first if s.model.shared_input_norm else norm(g, s, "norm_2", x, d)
    branches = [attention(g, s, first), feed(g, s, second)]
    return _add(g, s, "residual_2", x, _add(g, s, "residual_1", *branches))


def _add(g: Graph, s: OpContext, name: str, x: Value, branch: Value) -> Value:
    """The sum, in the dtype of x. Gradients pass through; a narrower branch gets its own by a cast."""
    if s.tower is not None and s.tower.layer_scale:
        branch = scaled(g, s, f"{name}.scaled", branch)
    if s.stack.kernels.dropout:
        return _dropped(g, name, x, branch)
    out = g.value(name, x.numel, x.dtype)
    if branch.dtype == x.dtype:
        return g.pointwise(name, [x, branch], out, aliases=[x, branch])
    read = x.num_bytes + branch.num_bytes
    return g.op(
        name,
        inputs=(x, branch),
        outputs=(out,),
        forward=(
            stream("widen" if s.stack.traits.generic_copies else "elementwise", read, out.num_bytes, numel=x.numel),
        ),
        backward=(g.conversion(x.numel, out.dtype, branch.dtype),),
        aliases=(x,),
    )


def _dropped(g: Graph, name: str, x: Value, branch: Value) -> Value:
    """Bias, dropout and addition in one kernel, as Megatron has it; the branch's gradient is masked."""
    out, mask = g.value(name, x.numel, x.dtype), g.value(f"{name}.mask", branch.numel, "int8")
    return g.op(
        name,
        inputs=(x, branch),
        outputs=(out, mask),
        forward=(stream("elementwise", x.num_bytes + branch.num_bytes, out.num_bytes + mask.num_bytes),),
        backward=(stream("elementwise", out.num_bytes + mask.num_bytes, branch.num_bytes),),
        saved=(mask,),
        aliases=(x,),
    )


def _head(s: OpContext) -> Block:
    """Final norm, LM head, loss."""
    m = s.model
    x = Value("input", s.stream_tokens * m.d_model, s.stream_dtype)
    g = Graph("head", x)
    loss = _loss(g, s, norm(g, s, "norm", x, m.d_model) if m.final_norm else x)
    return g.block(loss, m.num_parameters_of("head"))


def _first_tokens(g: Graph, s: OpContext, x: Value) -> tuple[OpContext, Value]:
    """The token of each sequence that a head of classes reads, and a head of so many rows; its gradient comes back among zeros."""
    x = gather(g, s, "head.gather", x)
    first = g.view("first", x, s.batch * s.model.d_model)
    back = stream("memset", 0, x.num_bytes), stream("copy", first.num_bytes, first.num_bytes)
    g.op(first.name, inputs=(x,), backward=back, views=(first,))
    alone = {"seq_len": 1, "document_len": None, "sequence_parallel": False, "vocab_parallel": False}
    model = s.model.model_copy(update={"vocab_size": s.model.num_classes})
    return replace(s, plan=s.plan.model_copy(update=alone), model=model), first


def _transformed(g: Graph, s: OpContext, x: Value) -> Value:
    """The head's own product, with an activation and perhaps a norm behind it."""
    d = s.model.d_model
    x = linear(g, s, "lm_head.transform", x, d, bias=s.model.out_bias, split="none", head=True, tokens=s.stream_tokens)
    x = g.pointwise("transformed", [x], saved=[x], op="activation")
    return norm(g, s, "lm_head.norm", x, d) if s.model.head_transform == "normed" else x


def _loss(g: Graph, s: OpContext, x: Value) -> Value:
    """LM head and cross-entropy on normalised rows."""
    if s.model.num_classes:
        s, x = _first_tokens(g, s, x)
    if s.model.head_transform != "none":
        x = _transformed(g, s, x)
    m = s.model
    x = enter(g, s, "head.enter", x) if s.vocab_parallel else gather(g, s, "head.gather", x)
    split: Split = "columns" if s.vocab_parallel else "none"
    if s.stack.kernels.loss in WITH_HEAD and not m.num_classes:
        return loss_with_head(g, s, x, trains=s.trains("lm_head.weight"))
    logits = linear(g, s, "logits", x, m.vocab_size, bias=m.lm_head_bias, split=split, head=True)
    if s.vocab_parallel and s.stack.kernels.gathers_logits:
        logits = whole_columns(g, s, "logits.whole", logits, alike=True)
    if s.stack.kernels.holds_logits:
        g.op("logits.held", inputs=(logits,), aliases=(logits,), saved=(logits,))
    if m.logit_softcap:
        logits = _softcap(g, s, logits)
    loss = cross_entropy(g, s, logits)
    if s.stack.kernels.loss in SHIFTED:
        g.hold("head.scope", [x])  # what the model returned, beside its logits
    return loss


def _softcap(g: Graph, s: OpContext, logits: Value) -> Value:
    """Logits become cap × tanh(logits / cap): three operators, joined to the loss where that is compiled."""
    if s.stack.kernels.loss == "fp32_compiled":
        return logits
    for name in ("divided", "tanh", "capped"):
        out = g.value(name, logits.numel, logits.dtype)
        saved = [out] if name == "tanh" else []
        logits = g.pointwise(name, [logits], out, saved=saved, category="loss")
    return logits


def with_graphs(block: Block, graphs: Collection[CudaGraph]) -> Block:
    """The block with its captured ops marked; itself where nothing of it is."""
    if not graphs or "full_iteration" in graphs:
        return block
    names = tuple(op.name for op in block.ops)
    ops = tuple(_marked(op) if _scopes(block.name, names, i) & set(graphs) else op for i, op in enumerate(block.ops))
    return replace(block, ops=ops)


def _scopes(kind: str, names: tuple[str, ...], number: int) -> set[CudaGraph]:
    """The scopes that an op is part of."""
    if names[number].startswith("mtp."):
        return set()
    if number <= _place(names, "residual_1"):
        return {"mamba"} if kind == "mamba" else {"attn"}
    if number > _place(names, "residual_2"):
        return set()
    if number > _place(names, "choose"):
        return {"moe"} if "choose" in names else {"mlp"}
    return {"moe", "moe_preprocess"} if names[number] == "choose" else {"moe", "moe_router"}


def _place(names: tuple[str, ...], name: str) -> int:
    return names.index(name) if name in names else -1


def _marked(op: Op) -> Op:
    return replace(
        op,
        captured=True,
        forward_exchanges=tuple(replace(e, captured=True) for e in op.forward_exchanges),
        backward_exchanges=tuple(replace(e, captured=True) for e in op.backward_exchanges),
    )
