"""The model of a row: the preset or the family that it names, in the sizes of its columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from simulator.base.errors import ModelError
from simulator.base.schema import merged
from simulator.spec.model import Model
from simulator.spec.model.families import mlp_of, presets_of, structure_of, vocabulary_of
from simulator.studies.backtest.rows import RunRow

_GPT: Final[dict[str, Any]] = {
    "family": "gpt3",
    "norm": "layer",
    "norm_bias": True,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "fused_qkv": True,
    "positions": "learned",
    "tied_embeddings": True,
}
_KINDS: Final = {"gelu_tanh": "gelu", "geglu": "swiglu"}  # the column's word for an MLP
_BY_COLUMNS: Final = {"name", "sources", "num_layers", "max_positions", "d_model", "num_heads", "num_kv_heads",
                      "head_dim", "d_ff", "vocab_size", "experts"}  # fmt: skip


def model_of(row: RunRow) -> Model:
    """The row's model. Raises ModelError."""
    sizes = {
        "name": row.model_name or row.id,
        "num_layers": row.n_layers,
        "d_model": row.d_model,
        "num_heads": row.n_heads,
        "d_ff": row.d_ff,
        "vocab_size": row.vocab,
        "max_positions": row.seq_len,
        **({"num_kv_heads": row.n_kv_heads} if row.n_kv_heads else {}),
    }
    fields = merged({**sizes, **_structure(row)}, row.of("model"))
    return Model.parse(fields, f"line {row.line}", ModelError)


def with_sizes(row: RunRow) -> RunRow:
    """The row with blank sizes as its name says, or as the preset of that name has them."""
    row = replace(row, vocab=row.vocab or (None if row.model else vocabulary_of(row.model_name)))
    model = preset_of(row)
    if model is None:
        return replace(row, mlp_kind=row.mlp_kind or mlp_of(row.model_name))
    experts = model.experts
    known: dict[str, Any] = {
        "n_layers": model.num_layers,
        "d_model": model.d_model,
        "n_heads": model.num_heads,
        "n_kv_heads": model.num_kv_heads,
        "mlp_kind": _KINDS.get(model.mlp, model.mlp),
        "vocab": model.vocab_size,
        "d_ff": model.d_ff if experts is None else experts.d_ff or model.d_ff,
    }
    if experts is not None:
        known |= {"n_experts": experts.num_experts, "top_k": experts.top_k}
    return replace(row, **{column: value for column, value in known.items() if getattr(row, column) in (None, "")})


def preset_of(row: RunRow) -> Model | None:
    """The preset that the row states, or whose name is in `model_name` and whose width agrees with the columns."""
    if row.model:
        return Model.load(row.model)
    models = (Model.load(preset) for preset in presets_of(row.model_name))
    return next((m for m in models if row.d_model in (None, m.d_model) and row.n_heads in (None, m.num_heads)), None)


def _structure(row: RunRow) -> dict[str, Any]:
    """All fields beyond sizes: the preset's, if it has the same kind of MLP and also (or also no) experts."""
    known, mixture = preset_of(row), (row.n_experts or 1) > 1
    columns = {"num_experts": row.n_experts, "top_k": row.top_k, "d_ff": row.d_ff}  # d_ff is the width of one expert
    if (
        known is None
        or (known.experts is not None) != mixture
        or not (mixture or row.mlp_kind in (known.mlp, _KINDS.get(known.mlp, known.mlp)))
    ):
        plain = family_of(row)
        return {**plain, "experts": columns} if mixture else plain
    fields = known.model_dump(exclude=_BY_COLUMNS) | ({} if known.latent else {"head_dim": known.head_dim})
    if known.experts is None:
        return fields
    dense = min(known.experts.first_dense_layers, (row.n_layers or 1) - 1)
    experts = {**known.experts.model_dump(), **columns, "first_dense_layers": dense}
    return {**fields, "d_ff": known.d_ff, "experts": experts}


def family_of(row: RunRow) -> dict[str, Any]:
    """The family by the model's name; otherwise Llama for a gated MLP, else GPT-3."""
    fields = structure_of(row.model_name) or ({"family": "llama"} if row.mlp_kind == "swiglu" else _GPT)
    tanh = fields["family"] == "gpt3" and row.mlp_kind == "gelu"
    return {**fields, "mlp": "gelu_tanh" if tanh else row.mlp_kind}
