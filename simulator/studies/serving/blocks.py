"""The ops of one serving step: training's forward blocks for any number of tokens, and a head that samples.

Layers and embedding are `simulator.work.ops` for T new tokens; the head works on the rows that sample, gathers the logits of
a split vocabulary on every GPU, and ends in a softmax and a draw instead of a loss.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any, Self

from simulator.base.kernels import DTYPE_BYTES, Attention, Gemm, Kernel, Stream
from simulator.spec.model import Model
from simulator.spec.model.experts import Experts
from simulator.spec.plan import ExpertsPlan, Plan, PrecisionPlan
from simulator.spec.software.engine import Engine
from simulator.spec.software.stack import Stack
from simulator.studies.serving.kernels import WEIGHT_BITS
from simulator.studies.serving.plan import InferencePlan, Part
from simulator.studies.serving.shards import StageShard, experts_reached
from simulator.work.ops import Block, Category, Op, build_blocks
from simulator.work.ops.core import Exchange
from simulator.work.ops.graph import Graph, Value, stream
from simulator.work.ops.linear import linear
from simulator.work.ops.norm import norm
from simulator.work.ops.op_context import OpContext
from simulator.work.ops.tensor_parallel import Split


def forward_blocks(shard: StageShard, plan: InferencePlan, stack: Stack, tokens: int) -> dict[str, Block]:
    """The embedding and a layer of each kind, for `tokens` new tokens of any sequences."""
    blocks = build_blocks(shard.embedding, stack, _training(plan, tokens, "embedding"))
    body = [_experts_as_served(block, shard, plan, stack.engine) if stack.engine else block for block in blocks.body]
    return {"embedding": blocks.embedding, **{block.name: _as_served(block) for block in body}}


def _experts_as_served(block: Block, shard: StageShard, plan: InferencePlan, engine: Engine) -> Block:
    """A mixture: no copies of rows but the engine's own, one sum behind shared and routed experts, routers in 16 bits.

    Tokens that travelled to their experts' GPUs become rows there, as in training.
    """
    names, found, experts = {op.name for op in block.ops}, list[Op](), shard.part.experts
    copied = () if plan.attention_dp else ("sorted", "unsorted", "permute")
    same: dict[str, str] = {}  # of tensors that are not made, what stands for them
    for op in block.ops:
        served = replace(op, inputs=tuple(same.get(name, name) for name in op.inputs))
        if op.name in copied and (op.name != "permute" or engine.expert_rows == "indexed"):
            same[op.outputs[0].name] = served.inputs[0]
            continue
        if op.name in copied and experts is not None:  # one kernel writes rows, in the numbers that their product reads
            size, bits = op.outputs[0].num_bytes, WEIGHT_BITS[plan.weights] if plan.weights in ("fp8", "nvfp4") else 16
            served = replace(served, forward=(stream("copy", size // experts.top_k, int(size * bits / 16)),))
        elif op.name == "router":
            product = op.forward[-1]
            assert isinstance(product, Gemm)
            product = replace(product, dtype=plan.compute_dtype)
            served = replace(served, forward=(product,), forward_temporary_bytes=0)
        elif op.name == "choose":  # nothing is trained, so no loss balances the experts
            served = replace(served, forward_exchanges=tuple(one for one in op.forward_exchanges if one.axis != "tp"))
        elif op.name == "shared.leave" and "experts.leave" in names:
            served = replace(served, forward_exchanges=())
        found.append(served)
    return replace(block, ops=tuple(found))


def _as_served(block: Block) -> Block:
    """A layer as inference engines run it: Q, K and V stay where their product put them, and sums of residuals are made by norms.

    The kernel of such a norm reads what is added besides, and writes the sum; that of a layer's end is the next layer's first.
    """
    ops = [replace(op, forward=()) if op.name == "split" else op for op in block.ops]
    sums = [i for i, op in enumerate(ops) if op.name.startswith("residual") and len(op.forward) == 1]
    for i in sums:
        following = [*range(i + 1, len(ops)), *range(i)]
        into = next((j for j in following if ops[j].category == "norm" and _is_wide(ops[j], ops[i])), None)
        if into is not None:
            ops[into] = replace(ops[into], forward=(_with_sum(ops[into].forward[0], ops[i].outputs[0].num_bytes),))
            ops[i] = replace(ops[i], forward=())
    return replace(block, ops=tuple(ops))


def _is_wide(norm: Op, total: Op) -> bool:
    """The norm is one kernel over the stream of residuals, not over heads."""
    return len(norm.forward) == 1 and norm.outputs[0].num_bytes == total.outputs[0].num_bytes


def _with_sum(kernel: Kernel, size: int) -> Kernel:
    """A norm's kernel that reads another addend, and writes the sum."""
    assert isinstance(kernel, Stream)
    return replace(kernel, read_bytes=kernel.read_bytes + size, write_bytes=kernel.write_bytes + size)


@dataclass(frozen=True, slots=True)
class _Line:
    """A kernel or collective of a forward for any number of tokens: the one for a single token, and what grows with more."""

    single: Kernel | Exchange
    growth: tuple[tuple[str, int], ...]
    ranks: int = 1

    @classmethod
    def through(cls, single: Kernel | Exchange, double: Kernel | Exchange, ranks: int = 1) -> Self:
        """From its sizes for one token and for two. ranks: that give it so many tokens each."""
        grown = ((f.name, getattr(double, f.name), getattr(single, f.name)) for f in fields(single))
        return cls(single, tuple((name, two - one) for name, two, one in grown if two != one), ranks)

    def at(self, tokens: int) -> Any:  # noqa: ANN401  of the kind that `single` is
        """Its sizes for so many tokens."""
        if not self.growth:
            return self.single
        more = {name: getattr(self.single, name) + (tokens * self.ranks - 1) * each for name, each in self.growth}
        return replace(self.single, **more)


@dataclass(frozen=True, slots=True)
class _Routed:
    """The products of a layer's experts: no straight line, for a few tokens reach a few experts only.

    Experts that are reached, on average over even routing, are computed and read, with all rows among them.
    """

    one: Gemm
    experts: Experts
    imbalance: float
    ranks: int = 1

    def at(self, tokens: int) -> Gemm:
        """For so many tokens of each rank. A GPU that holds some of the experts has its part of the rows, the busiest more."""
        tokens *= self.ranks
        share = self.experts.num_local / self.experts.num_experts
        count = max(1, round(share * max(self.experts.top_k, experts_reached(self.experts, tokens))))
        rows = ceil(self.imbalance * share * tokens * self.experts.top_k / count)
        return replace(self.one, m=rows, batch=count, launches=min(self.one.launches, count))


@dataclass(frozen=True, slots=True)
class ForwardOps:
    """The forward of a block for any number of tokens, without attention's own kernel and a mixer's scan.

    All sizes but those of experts are straight lines over the tokens (tests/unit/test_inference.py), so two forwards give them all,
    some ten times faster than building each.
    """

    ops: tuple[tuple[str, Category, tuple[_Line | _Routed, ...], tuple[_Line, ...]], ...]

    @classmethod
    def of(
        cls,
        single: Block,
        double: Block,
        experts: Experts | None = None,
        imbalance: float = 1.0,
        ranks: int = 1,
        gathered: int = 1,
    ) -> Self:
        """From the block of one token and that of two. ranks: GPUs, each with so many tokens, that share the experts.

        gathered: GPUs whose tokens each has beside its own, from the choice of experts to the sum of what they give.
        """
        found, inside = [], False
        for one, two in zip(single.ops, double.ops, strict=True):
            pairs = zip(one.forward, two.forward, strict=True)
            inside = (inside or one.name == "choose") and one.name != "experts.leave"
            given = gathered if inside else 1
            sized = (_sized(a, b, experts, imbalance, ranks, given) for a, b in pairs if not isinstance(a, Attention))
            kernels = tuple(sized)
            between = zip(one.forward_exchanges, two.forward_exchanges, strict=True)
            exchanges = tuple(_Line.through(a, b) for a, b in between)
            if kernels or exchanges:
                found.append((one.name, one.category, kernels, exchanges))
        return cls(tuple(found))

    def at(self, tokens: int) -> tuple[tuple[str, Category, tuple[Kernel, ...], tuple[Exchange, ...]], ...]:
        """(name, category, kernels, collectives) of each op, in order."""
        return tuple(
            (name, category, tuple(line.at(tokens) for line in kernels), tuple(line.at(tokens) for line in exchanges))
            for name, category, kernels, exchanges in self.ops
        )


def _sized(
    single: Kernel, double: Kernel, experts: Experts | None, imbalance: float, ranks: int, gathered: int
) -> _Line | _Routed:
    if isinstance(single, Gemm) and single.grouped and experts is not None:
        return _Routed(single, experts, imbalance, ranks * gathered)
    return _Line.through(single, double, gathered)


def _without_scan(block: Block) -> Block:
    """A mixer's scan depends on whose tokens they are (`mixers`)."""
    return replace(block, ops=tuple(op for op in block.ops if op.category != "scan"))


def forward_ops(shard: StageShard, plan: InferencePlan, stack: Stack) -> dict[str, ForwardOps]:
    """The embedding and a layer of each kind."""
    single, double = (
        {kind: _without_scan(block) for kind, block in forward_blocks(shard, plan, stack, n).items()} for n in (1, 2)
    )
    experts, imbalance = shard.part.experts, plan.expert_imbalance
    return {
        name: ForwardOps.of(single[name], double[name], experts, imbalance, plan.ranks, plan.pcp) for name in single
    }


def head_ops(shard: StageShard, plan: InferencePlan, stack: Stack) -> ForwardOps:
    """The head, by rows that sample."""
    single, double = (head_block(shard, plan, stack, rows) for rows in (1, 2))
    return ForwardOps.of(single, double)


def head_block(shard: StageShard, plan: InferencePlan, stack: Stack, rows: int) -> Block:
    """Final norm, LM head, gather, and sampling of `rows` sequences."""
    s = OpContext(model=shard.head, stack=stack, plan=_training(plan, rows, "head"), autocast=False)
    m = s.model
    x = Value("input", s.tokens * m.d_model, s.stream_dtype)
    g = Graph("head", x)
    x = norm(g, s, "norm", x, m.d_model)
    split: Split = "columns" if s.vocab_parallel else "none"
    logits = linear(g, s, "logits", x, m.vocab_size, bias=m.lm_head_bias, split=split, head=True)
    if s.vocab_parallel:
        logits = _gathered(g, logits, plan.tp)
    if m.logit_softcap:
        logits = g.pointwise("capped", [logits], g.value("capped", logits.numel, logits.dtype), category="loss")
    return g.block(_sampled(g, logits, rows), m.num_parameters_of("head"))


def _gathered(g: Graph, part: Value, tp: int) -> Value:
    """The logits of the whole vocabulary on every rank; gathered ranks lie behind each other, so a copy puts them in order."""
    gathered = g.value("gathered", part.numel * tp, part.dtype)
    exchange = Exchange(kind="all_gather", axis="tp", num_bytes=gathered.num_bytes)
    copy = stream("copy", gathered.num_bytes, gathered.num_bytes)
    g.op("gathered", "loss", inputs=(part,), outputs=(gathered,), forward=(copy,), forward_exchanges=(exchange,))
    return gathered


def _sampled(g: Graph, logits: Value, rows: int) -> Value:
    """Logits in fp32, their softmax, and the index drawn from each row."""
    wide = g.value("logits.float", logits.numel, "fp32")
    g.op(
        "logits.float",
        "loss",
        inputs=(logits,),
        outputs=(wide,),
        forward=(g.conversion(logits.numel, logits.dtype, "fp32"),),
    )
    f = wide.num_bytes
    odds = g.value("probabilities", logits.numel, "fp32")
    g.op("probabilities", "loss", inputs=(wide,), outputs=(odds,), forward=(stream("softmax", 3 * f, f),))
    drawn = g.value("drawn", rows, "int64")
    g.op("drawn", "loss", inputs=(odds,), outputs=(drawn,), forward=(stream("reduce", f, drawn.num_bytes),))
    return drawn


def _training(plan: InferencePlan, tokens: int, part: Part) -> Plan:
    """The training plan whose forward has the same shapes: one sequence of all new tokens, no optimizer, no autocast.

    Tokens that travel to experts do so once to each GPU that has one of theirs (DeepEP, which engines use for it).
    """
    sends = ExpertsPlan(dispatcher="deep_ep", imbalance=plan.expert_imbalance)
    return Plan(
        tp=plan.attention_tp,
        ep=plan.ranks,
        dp_replicate=plan.ranks,
        experts=sends if plan.attention_dp else ExpertsPlan(etp=plan.tp),
        zero=0,
        data_parallel="megatron",
        micro_batch_size=1,
        seq_len=tokens,
        precision=PrecisionPlan(compute=plan.compute_dtype, master=plan.compute_dtype),
        vocab_parallel=part not in plan.replicate and not plan.attention_dp,
    )


def _split_over(model: Model, plan: InferencePlan) -> int:
    """GPUs that split the tower's layers: tp where they come out even, else each has all of them."""
    tower, tp = model.sees, plan.attention_tp
    return tp if tower is not None and not (tower.num_heads % tp or tower.d_ff % tp) else 1


def encoder_bytes(model: Model, plan: InferencePlan) -> int:
    """Weights of the tower on one GPU, in 16 bits as in published checkpoints; its ends are whole."""
    if model.sees is None:
        return 0
    layers = sum(model.num_parameters_of(kind) for kind in model.tower_kinds)
    ends = model.num_parameters_of("embedding") - model.model_copy(update={"tower": None}).num_parameters_of(
        "embedding"
    )
    return (-(-layers // _split_over(model, plan)) + ends) * DTYPE_BYTES[plan.compute_dtype]


def encoder_blocks(model: Model, plan: InferencePlan, stack: Stack, requests: int) -> tuple[tuple[Block, int], ...]:
    """Its blocks for the images of so many requests, each with how often it runs; text is looked up elsewhere."""
    training = Plan(
        tp=_split_over(model, plan),
        zero=0,
        data_parallel="megatron",
        micro_batch_size=requests,
        seq_len=1,
        vocab_parallel=False,
        precision=PrecisionPlan(compute=plan.compute_dtype, master=plan.compute_dtype),
    )
    blocks, counts = build_blocks(model, stack, training), Counter(model.tower_kinds)
    return (blocks.embedding, 1), *((block, counts[block.name]) for block in blocks.body if block.name in counts)  # type: ignore[index]
