"""What one GPU of an engine holds: the layers of its stage, its part of every matrix, its part of the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, prod

from simulator.base.kernels import DTYPE_BYTES
from simulator.parallel.model_shard import LocalExperts, ModelShard
from simulator.spec.model import LayerKind, Model
from simulator.spec.model.experts import Experts
from simulator.spec.model.hybrid import Mamba
from simulator.studies.serving.kernels import WEIGHT_BITS
from simulator.studies.serving.plan import InferencePlan, Part

WIDE = ("router", "shared_gate")
NO_ATTENTION = ("mamba", "mlp", "moe")  # layers of hybrids
VOCAB_MULTIPLE = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE (model_executor/layers/vocab_parallel_embedding.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShard:
    """One GPU of one pipeline stage. `part` is its share as a model; the ends are held by the first and last stage.

    embedding, head: the share whose vocabulary that part has (replicated parts have all of it).
    """

    part: ModelShard
    layers: tuple[int, ...]
    embedding: ModelShard
    head: ModelShard
    holds_embedding: bool
    holds_head: bool


def stage_shards(model: Model, plan: InferencePlan) -> tuple[StageShard, ...]:
    """One a pipeline stage, in order."""
    return tuple(_stage(model, plan, stage, layers) for stage, layers in enumerate(_dealt(model.num_layers, plan.pp)))


def _experts(experts: Experts | None, plan: InferencePlan) -> LocalExperts | None:
    """A slice of every expert, or whole experts. The shared ones are split in either case."""
    if experts is None:
        return None
    dealt, tp = plan.experts == "dealt", plan.tp * plan.pcp
    fields = {
        "held": experts.num_experts // (tp if dealt else 1),
        "d_ff": experts.d_ff // (1 if dealt else tp),
        "shared_d_ff": experts.shared_d_ff // plan.attention_tp,
    }
    return LocalExperts.model_construct(**(dict(experts) | fields))


def _mixer(mamba: Mamba | None, split: int) -> Mamba | None:
    """Heads of a GPU; of fewer groups than GPUs each holds one."""
    if mamba is None:
        return None
    return mamba.model_copy(
        update={"num_heads": mamba.num_heads // split, "num_groups": max(1, mamba.num_groups // split)}
    )


def _dealt(num_layers: int, pp: int) -> list[tuple[int, ...]]:
    """Layers of each stage. What does not divide goes to stages before the last, which has the head (as vLLM does)."""
    each, more = divmod(num_layers, pp)
    ends = accumulate((each + (pp - 1 - more <= stage < pp - 1) for stage in range(pp)), initial=0)
    return [tuple(range(begin, end)) for begin, end in pairwise(ends)]


def _stage(model: Model, plan: InferencePlan, stage: int, layers: tuple[int, ...]) -> StageShard:
    first, last = stage == 0, stage == plan.pp - 1
    padded = -(-model.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    split = plan.attention_tp
    rows = {part: padded if part in plan.replicate else -(-padded // split) for part in ("embedding", "head")}
    tied = model.tied_embeddings and plan.pp == 1 and rows["embedding"] == rows["head"]
    shards = {
        part: ModelShard.model_construct(
            **dict(model)
            | {
                "num_layers": len(layers),
                "num_heads": model.num_heads // split,
                "num_kv_heads": max(1, model.num_kv_heads // split),
                "ranks_per_kv_head": 1,  # of several ranks each holds the whole head
                "d_ff": model.d_ff // split,
                "experts": _experts(model.experts, plan),
                "mamba": _mixer(model.mamba, split),
                "tower": None,  # `encoder`
                "mtp_layers": 0,  # modules of multi-token prediction are not loaded
                "vocab_size": count,
                "tied_embeddings": tied,
                "chunks": (layers,),
                "embedding_chunk": 0 if first else None,
                "head_chunk": 0 if last else None,
            }
        )
        for part, count in rows.items()
    }
    return StageShard(
        part=shards["embedding"],
        layers=layers,
        embedding=shards["embedding"],
        head=shards["head"],
        holds_embedding=first,
        holds_head=last,
    )


def weight_bytes(shard: StageShard, plan: InferencePlan) -> int:
    """Parameters of one GPU, in the dtypes that they are stored in: the matrices of layers as `weights` says."""
    kinds = Counter(shard.part.layer_kinds)
    layers = sum(count * _layer_bytes(shard.part, kind, plan) for kind, count in kinds.items())
    return layers + sum(part_bytes(shard, plan, part) for part in ("embedding", "head"))


def _layer_bytes(part: ModelShard, kind: LayerKind, plan: InferencePlan) -> int:
    """One layer; a router stays in wide precision."""
    narrow = wide = 0
    of = ("experts.",) if plan.weights == "mxfp4" else ("",)
    for name, shape in part.parameter_shapes(kind):
        if len(shape) >= 2 and name.startswith(of) and not name.startswith(WIDE):
            narrow += prod(shape)
        else:
            wide += prod(shape)
    return ceil(narrow * WEIGHT_BITS[plan.weights] / 8) + wide * DTYPE_BYTES[plan.compute_dtype]


def experts_reached(experts: Experts, tokens: int) -> float:
    """Experts of a layer that so many tokens are sent to, on average, where every expert is as likely.

    One token misses an expert with probability 1 - k / E.
    """
    return experts.num_experts * (1 - (1 - experts.top_k / experts.num_experts) ** tokens)


def idle_expert_bytes(shard: StageShard, plan: InferencePlan, tokens: int) -> int:
    """Weights of routed experts that a step of so many tokens does not reach."""
    part = shard.part
    if part.experts is None:
        return 0
    kind: LayerKind = "layer" if part.pattern is None else "moe"
    routed = sum(prod(shape) for name, shape in part.parameter_shapes(kind) if name.startswith("experts."))
    idle = 1 - experts_reached(part.experts, tokens) / part.experts.num_experts
    return int(part.layer_kinds.count(kind) * routed * WEIGHT_BITS[plan.weights] / 8 * idle)


def part_bytes(shard: StageShard, plan: InferencePlan, part: Part) -> int:
    """Parameters of an end of the model on this GPU; none where another stage holds it."""
    owner = shard.embedding if part == "embedding" else shard.head
    return owner.num_parameters_of(part) * DTYPE_BYTES[plan.compute_dtype]


def cached_channels(part: ModelShard) -> int:
    """Numbers that a layer keeps of a token on one GPU: K and V of its heads, or the latent and the rotating key.

    Latents are the same for all heads, so every GPU of a tp group keeps all of them.
    """
    if part.latent is not None:
        return part.latent.kv_lora_rank + part.latent.qk_rope_head_dim
    return 2 * part.kv_width


def layer_kv_bytes(shard: StageShard, plan: InferencePlan) -> int:
    """Cached bytes of a token in one layer on one GPU: 2 (K and V) × kv heads × head_dim × bytes; of latents, their channels.

    Where dcp GPUs have a part of the tokens each, in the mean.
    """
    return -(-cached_channels(shard.part) * DTYPE_BYTES[plan.kv_dtype] // plan.dcp)


def cached_layers(shard: StageShard, plan: InferencePlan) -> tuple[int, int]:
    """Layers that cache whole sequences, and those that cache the window that a token sees."""
    found = dict(windows(shard.part, shard.layers))
    whole, every = found.get(None, 0), sum(found.values())
    return (whole, every - whole) if plan.window_cache and whole else (every, 0)


def kv_bytes_per_token(shard: StageShard, plan: InferencePlan) -> int:
    """Cached bytes of a token on one GPU, in layers that cache whole sequences, or a part of all tokens."""
    whole, each = cached_layers(shard, plan)[0], layer_kv_bytes(shard, plan)
    if plan.window_cache or plan.window_part == 1.0:
        return whole * each
    found = dict(windows(shard.part, shard.layers))
    every = found.get(None, 0)
    return ceil((every + plan.window_part * (whole - every)) * each) if every else whole * each


def windows(model: Model, layers: Iterable[int]) -> tuple[tuple[int | None, int], ...]:
    """The attention windows of layers: (keys a token sees, None: all; layers that do) of the layers with these numbers."""
    every = model.global_every
    counts: dict[int | None, int] = {}
    kinds = dict(zip(model.layer_numbers, model.layer_kinds, strict=True))
    for layer in layers:
        if kinds[layer] in NO_ATTENTION:
            continue
        sees_all = model.sliding_window is None or (every > 0 and (layer + 1) % every == 0)
        window = None if sees_all else model.sliding_window
        counts[window] = counts.get(window, 0) + 1
    return tuple(sorted(counts.items(), key=lambda item: item[0] or 0))
