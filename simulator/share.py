"""Share: the part of a model that one rank holds under tensor and pipeline parallelism: a narrower, shorter model.

Tensor parallelism is Megatron's split (arXiv 1909.08053, section 3): the products into attention and MLP by columns, so
each rank has whole heads and a slice of d_ff; the products out of them by rows; the embedding and the LM head by
vocabulary. Norms, the biases after row-wise products and learned positions are on every rank.

A pipeline stage holds the layers of its chunks; the first virtual stage holds the embedding, the last the head. A tied
matrix is held by both (arXiv 2104.04473 follows Megatron-LM, which sums its two gradients in every step).
"""

from __future__ import annotations

from typing_extensions import override

from simulator.model import Model, Parameter
from simulator.pipeline import num_positions, position, stage_layers
from simulator.plan import Plan

VOCAB_MULTIPLE = 128  # Megatron's make_vocab_size_divisible_by: each rank's part of the table is a multiple of it


class Share(Model):
    """What one rank holds of a model. Its sizes are the rank's own; d_model and head_dim are the whole model's.

    chunks: layer numbers of its pipeline chunks. embedding_chunk, head_chunk: which of them holds the ends; None: none.
    """

    chunks: tuple[tuple[int, ...], ...]
    embedding_chunk: int | None
    head_chunk: int | None

    @property
    def holds_embedding(self) -> bool:
        return self.embedding_chunk is not None

    @property
    def holds_head(self) -> bool:
        return self.head_chunk is not None

    @override
    def _embedding(self) -> tuple[Parameter, ...]:
        return super()._embedding() if self.holds_embedding else ()

    @override
    def _head(self) -> tuple[Parameter, ...]:
        return super()._head() if self.holds_head else ()


def share_of(model: Model, plan: Plan, stage: int = 0) -> Model:
    """The part of `model` on one rank of a stage; the model itself where nothing splits it, and for a `Share`."""
    if plan.tp * plan.pp == 1 or isinstance(model, Share):
        return model
    schedule, pp, chunks = plan.pipeline_schedule, plan.pp, plan.virtual_stages
    held = stage_layers(model.num_layers, pp, chunks, split=plan.split, schedule=schedule)[stage]
    places = [position(schedule, pp, stage, chunk) for chunk in range(chunks)]
    last = num_positions(schedule, pp, chunks) - 1
    fields = {
        "num_layers": sum(map(len, held)),
        "num_heads": model.num_heads // plan.tp,
        "num_kv_heads": model.num_kv_heads // plan.tp,
        "d_ff": model.d_ff // plan.tp,
        "vocab_size": _vocabulary(model.vocab_size, plan),
        "tied_embeddings": model.tied_embeddings and pp == 1,
        "chunks": tuple(map(tuple, held)),
        "embedding_chunk": places.index(0) if 0 in places else None,
        "head_chunk": places.index(last) if last in places else None,
    }
    return Share.model_construct(**(dict(model) | fields))


def layer_numbers(share: Model) -> tuple[int, ...]:
    """The layers that a rank holds, numbered as the whole model's, in the order of its chunks."""
    if not isinstance(share, Share):
        return tuple(range(share.num_layers))
    return tuple(layer for chunk in share.chunks for layer in chunk)


def _vocabulary(vocab_size: int, plan: Plan) -> int:
    """Rows of the embedding on one rank: Megatron pads them, DTensor's first ranks hold one more."""
    if not plan.vocab_parallel:
        return vocab_size
    rows = -(-vocab_size // plan.tp)
    if plan.tp > 1 and plan.implementation in ("megatron", "deepspeed"):
        return -(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return rows
