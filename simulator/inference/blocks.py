"""The ops of one serving step: training's forward blocks for any number of tokens, and a head that samples.

Layers and embedding are `simulator.ops` for T new tokens; the head works on the rows that sample, gathers the logits of
a split vocabulary on every GPU, and ends in a softmax and a draw instead of a loss.
"""

from __future__ import annotations

from simulator.inference.plan import InferencePlan, Part
from simulator.inference.shares import StageShare
from simulator.ops import Block, build_blocks
from simulator.ops.core import Exchange
from simulator.ops.graph import Graph, Value, stream
from simulator.ops.linear import linear
from simulator.ops.norm import norm
from simulator.ops.setting import Setting
from simulator.ops.tensor_parallel import Split
from simulator.plan import Plan
from simulator.stack import Stack


def forward_blocks(share: StageShare, plan: InferencePlan, stack: Stack, tokens: int) -> tuple[Block, Block]:
    """(embedding, one layer) for `tokens` new tokens of any sequences."""
    blocks = build_blocks(share.embedding, stack, _training(plan, tokens, "embedding"))
    return blocks.embedding, blocks.layer


def head_block(share: StageShare, plan: InferencePlan, stack: Stack, rows: int) -> Block:
    """Final norm, LM head, gather, and sampling of `rows` sequences."""
    s = Setting(model=share.head, stack=stack, plan=_training(plan, rows, "head"), autocast=False)
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
    whole = g.value("gathered", part.numel * tp, part.dtype)
    exchange = Exchange(kind="all_gather", axis="tp", num_bytes=whole.num_bytes)
    copy = stream("copy", whole.num_bytes, whole.num_bytes)
    g.op("gathered", "loss", inputs=(part,), outputs=(whole,), forward=(copy,), forward_exchanges=(exchange,))
    return whole


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
    """The training plan whose forward has the same shapes: one sequence of all new tokens, no optimizer, no autocast."""
    return Plan(
        tp=plan.tp,
        zero=0,
        data_parallel="megatron",
        micro_batch_size=1,
        seq_len=tokens,
        precision=plan.compute_dtype,
        master_dtype=plan.compute_dtype,
        vocab_parallel=part not in plan.replicate,
    )
