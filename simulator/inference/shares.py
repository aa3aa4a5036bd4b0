"""What one GPU of an engine holds: the layers of its stage, its part of every matrix, its part of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from simulator.inference.kernels import WEIGHT_BITS
from simulator.inference.plan import InferencePlan, Part
from simulator.kernels import DTYPE_BYTES
from simulator.model import Model
from simulator.share import Share

VOCAB_MULTIPLE = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE (model_executor/layers/vocab_parallel_embedding.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """One GPU of one pipeline stage. `part` is its share as a model; the ends are held by the first and last stage.

    embedding, head: the share whose vocabulary that part has (replicated parts have all of it).
    """

    part: Share
    layers: tuple[int, ...]
    embedding: Share
    head: Share
    holds_embedding: bool
    holds_head: bool


def stage_shares(model: Model, plan: InferencePlan) -> tuple[StageShare, ...]:
    """One a pipeline stage, in order."""
    return tuple(_stage(model, plan, stage, layers) for stage, layers in enumerate(_dealt(model.num_layers, plan.pp)))


def _dealt(num_layers: int, pp: int) -> list[tuple[int, ...]]:
    """Layers of each stage. What does not divide goes to stages before the last, which has the head (as vLLM does)."""
    each, more = divmod(num_layers, pp)
    longer = range(pp - 1 - more, pp - 1)
    found: list[tuple[int, ...]] = []
    begin = 0
    for stage in range(pp):
        end = begin + each + (stage in longer)
        found.append(tuple(range(begin, end)))
        begin = end
    return found


def _stage(model: Model, plan: InferencePlan, stage: int, layers: tuple[int, ...]) -> StageShare:
    first, last = stage == 0, stage == plan.pp - 1
    padded = -(-model.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    rows = {part: padded if part in plan.replicate else -(-padded // plan.tp) for part in ("embedding", "head")}
    tied = model.tied_embeddings and plan.pp == 1 and rows["embedding"] == rows["head"]
    shares = {
        part: Share.model_construct(
            **dict(model)
            | {
                "num_layers": len(layers),
                "num_heads": model.num_heads // plan.tp,
                "num_kv_heads": max(1, model.num_kv_heads // plan.tp),
                "d_ff": model.d_ff // plan.tp,
                "vocab_size": count,
                "tied_embeddings": tied,
                "chunks": (layers,),
                "embedding_chunk": 0 if first else None,
                "head_chunk": 0 if last else None,
            }
        )
        for part, count in rows.items()
    }
    return StageShare(
        part=shares["embedding"],
        layers=layers,
        embedding=shares["embedding"],
        head=shares["head"],
        holds_embedding=first,
        holds_head=last,
    )


def weight_bytes(share: StageShare, plan: InferencePlan) -> int:
    """Parameters of one GPU, in the dtypes that they are stored in: the matrices of layers as `weights` says."""
    wide = DTYPE_BYTES[plan.compute_dtype]
    matrices = sum(prod(shape) for _, shape in share.part.parameter_shapes("layer") if len(shape) >= 2)
    rest = share.part.num_parameters_of("layer") - matrices
    layers = len(share.layers) * (ceil(matrices * WEIGHT_BITS[plan.weights] / 8) + rest * wide)
    return layers + sum(part_bytes(share, plan, part) for part in ("embedding", "head"))


def part_bytes(share: StageShare, plan: InferencePlan, part: Part) -> int:
    """Parameters of an end of the model on this GPU; none where another stage holds it."""
    owner = share.embedding if part == "embedding" else share.head
    return owner.num_parameters_of(part) * DTYPE_BYTES[plan.compute_dtype]


def kv_bytes_per_token(share: StageShare, plan: InferencePlan) -> int:
    """Cached bytes of a token on one GPU: 2 (K and V) × layers × kv heads × head_dim × bytes."""
    return 2 * len(share.layers) * share.part.kv_width * DTYPE_BYTES[plan.kv_dtype]
