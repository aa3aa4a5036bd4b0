"""Published models that a row's name and width are of: they fill what the columns leave open."""

from __future__ import annotations

from typing import Final

from simulator.spec.model import Model
from simulator.studies.backtest.models import preset_of
from simulator.studies.backtest.rows import RunRow

published = preset_of


def is_hybrid(row: RunRow) -> bool:
    """The row's name is of a published model whose layers follow a pattern."""
    model = published(row)
    return model is not None and model.pattern is not None


def structure(row: RunRow) -> dict[str, object] | None:
    """Fields of a dense model beyond its sizes: the published model's; None where the row is of none, or has another MLP."""
    model = published(row)
    if model is None or model.experts is not None or row.mlp_kind not in _words(model):
        return None
    fields = model.model_dump(exclude={"name", "sources", "num_layers", "experts", "latent", *_OF_COLUMNS})
    return {**fields, "max_positions": row.seq_len, "head_dim": model.head_dim}


def _words(model: Model) -> tuple[str, str]:
    return model.mlp, {"gelu_tanh": "gelu", "geglu": "swiglu"}.get(model.mlp, model.mlp)


_OF_COLUMNS: Final = ("d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size", "max_positions")
