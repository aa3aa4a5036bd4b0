"""The model of a row: the preset that it names, else Llama's structure for a gated MLP and GPT-3's for any other; sizes by columns."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any, Final

from simulator.base.errors import ModelError
from simulator.spec.model import Model
from simulator.spec.model.files import preset_names
from simulator.studies.backtest.merge import merged
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
    """The row with blank sizes as the preset of its name has them."""
    model = preset_of(row)
    if model is None:
        return row
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
    name = plain_name(row.model_name)
    for pattern, preset in _patterns():
        if re.search(pattern, name):
            model = Model.load(preset)
            if row.d_model in (None, model.d_model) and row.n_heads in (None, model.num_heads):
                return model
    return None


def _structure(row: RunRow) -> dict[str, Any]:
    """Everything beyond sizes: the preset's where it has the same kind of MLP, with experts or without."""
    known, mixture = preset_of(row), (row.n_experts or 1) > 1
    columns = {"num_experts": row.n_experts, "top_k": row.top_k, "d_ff": row.d_ff}  # d_ff is the width of one expert
    if known is None or (known.experts is not None) != mixture or not (mixture or row.mlp_kind in _words(known)):
        gated = row.mlp_kind == "swiglu"
        mlp = "gelu_tanh" if row.mlp_kind == "gelu" else row.mlp_kind
        plain = {"family": "llama", "mlp": mlp} if gated else {**_GPT, "mlp": mlp}
        return {**plain, "experts": columns} if mixture else plain
    fields = known.model_dump(exclude=_BY_COLUMNS) | ({} if known.latent else {"head_dim": known.head_dim})
    if known.experts is None:
        return fields
    dense = min(known.experts.first_dense_layers, (row.n_layers or 1) - 1)
    experts = {**known.experts.model_dump(), **columns, "first_dense_layers": dense}
    return {**fields, "d_ff": known.d_ff, "experts": experts}


def _words(model: Model) -> tuple[str, str]:
    return model.mlp, _KINDS.get(model.mlp, model.mlp)


@cache
def _patterns() -> tuple[tuple[str, str], ...]:
    """(pattern, preset), the longer name first: "llama3.1-8b" before "llama-7b"."""
    return tuple((_pattern(name), name) for name in sorted(preset_names(), key=lambda name: (-len(name), name)))


def _pattern(preset: str) -> str:
    """`llama3.1-8b`: those letters, digits and versions in that order, other words between them."""
    family, *rest = preset.split("-")
    head = re.sub(r"(?<=[a-z])(?=\d)", "-?", re.escape(family))
    parts = [rf"(?<![a-z]){head}(?![.\d])", *(rf"(?<![\d.]){re.escape(part)}(?![.\da-z])" for part in rest)]
    return r"-(?:[a-z0-9.]+-)*?".join(parts)


@cache
def plain_name(name: str) -> str:
    """Small letters, without the owner, words joined by `-`."""
    return re.sub(r"[\s_]+", "-", name.casefold().rpartition("/")[2])
