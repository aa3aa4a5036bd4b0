"""Share: the part of a model that one rank holds under tensor parallelism: a narrower model.

Megatron's split (arXiv 1909.08053, section 3): the products into attention and MLP by columns, so each rank has whole
heads and a slice of d_ff; the products out of them by rows; the embedding and the LM head by vocabulary. Norms, the
biases after row-wise products and learned positions are on every rank.
"""

from __future__ import annotations

from simulator.model import Model
from simulator.plan import Plan

VOCAB_MULTIPLE = 128  # Megatron's make_vocab_size_divisible_by: each rank's part of the table is a multiple of it


class Share(Model):
    """What one rank holds of a model. Its sizes are the rank's own; d_model and head_dim are the whole model's."""


def share_of(model: Model, plan: Plan) -> Model:
    """The part of `model` on one rank of `plan`; the model itself where nothing splits it, and for a `Share`."""
    if plan.tp == 1 or isinstance(model, Share):
        return model
    tp = plan.tp
    narrower = {
        "num_heads": model.num_heads // tp,
        "num_kv_heads": model.num_kv_heads // tp,
        "d_ff": model.d_ff // tp,
        "vocab_size": _vocabulary(model.vocab_size, plan),
    }
    return Share.model_construct(**(dict(model) | narrower))


def _vocabulary(vocab_size: int, plan: Plan) -> int:
    """Rows of the embedding on one rank: Megatron pads them, DTensor's first ranks hold one more."""
    rows = -(-vocab_size // plan.tp)
    if plan.implementation in ("megatron", "deepspeed"):
        return -(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return rows
