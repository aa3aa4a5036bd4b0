"""Published models that a row's name and width are of: they fill what the columns leave open.

A preset's file name says how it is found: `llama3.1-8b` is in "meta-llama/Meta-Llama-3.1-8B" and "LLAMA3.1_8B". Names that
no preset's file shows stand in _ALSO.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Final

from simulator.spec.model import Model
from simulator.spec.model.files import preset_names
from simulator.studies.backtest.rows import RunRow

# Found in a name, first match first, before the presets' own names.
_ALSO: Final = (
    (r"llama-?3\.3.*70b", "llama3.1-70b"),
    (r"llama-?1-?7b", "llama-7b"),
    (r"llama-?1-?13b", "llama-13b"),
    (r"llama.?(30|33)b", "llama-30b"),
    (r"llama-?1?-?65b", "llama-65b"),
    (r"deepseek.?v2(?!.*lite)", "deepseek-v2"),
    (r"deepseek.?(v3|r1(?!.*distill))", "deepseek-v3"),
    (r"kimi.?k2", "kimi-k2"),
    (r"grok", "grok-1"),
    (r"qwen-?3.*coder.*480b", "qwen3-coder-480b-a35b"),
    (r"qwen-?3.*30b", "qwen3-30b-a3b"),
    (r"qwen-?3.*235b", "qwen3-235b-a22b"),
    (r"qwen-?1\.5-?moe", "qwen1.5-moe-a2.7b"),
    (r"qwen-?2-?57b", "qwen2-57b-a14b"),
    (r"qwq-?32b", "qwen2.5-32b"),
    (r"gpt.?oss.*120b", "gpt-oss-120b"),
    (r"gpt.?oss.*20b", "gpt-oss-20b"),
    (r"mixtral.*8x22b", "mixtral-8x22b"),
    (r"mixtral.*8x7b", "mixtral-8x7b"),
    (r"moonlight", "moonlight-16b-a3b"),
    (r"minimax-?m2", "minimax-m2"),
    (r"llama-?4.*scout", "llama4-scout"),
    (r"llama-?4.*maverick", "llama4-maverick"),
    (r"nemotron-?h-?8b", "nemotron-h-8b"),
    (r"nemotron-?h-?47b", "nemotron-h-47b"),
    (r"nemotron-?h-?56b", "nemotron-h-56b"),
    (r"nemotron-?3-?nano(?!-?4b)", "nemotron-3-nano-30b-a3b"),
    (r"nemotron-?3-?super", "nemotron-3-super-120b-a12b"),
    (r"nemotron-?nano-?9b-?v2", "nemotron-nano-9b-v2"),
    (r"nemotron-?nano-?12b-?v2", "nemotron-nano-12b-v2"),
    (r"nemotron.*340b", "nemotron4-340b"),
    (r"nemotron.*15b", "nemotron4-15b"),
    (r"gpt-?3?.?175b", "gpt3-175b"),
    (r"gpt-?neox-?20b", "gpt-neox-20b"),
    (r"gpt-?j(?![a-z])", "gpt-j-6b"),
    (r"bloom-?7\.?1?b", "bloom-7b1"),
    (r"bloom-?1\.7b", "bloom-1b7"),
    (r"^bloom$|bloom.*176b", "bloom-176b"),
    (r"mistral-?nemo", "mistral-nemo-12b"),
    (r"mistral-?large", "mistral-large-123b"),
    (r"mistral-?small.*24b", "mistral-small-24b"),
    (r"chatglm-?[23]?-?6b", "chatglm3-6b"),
    (r"yi-1\.5-6b", "yi-6b"),
    (r"yi-1\.5-34b", "yi-34b"),
    (r"phi-?1[._]5", "phi-1.5"),
)


def published(row: RunRow) -> Model | None:
    """The published model that a row's name is of and its width agrees with; a blank width agrees with any."""
    name = plain_name(row.model_name)
    for pattern, preset in _patterns():
        if re.search(pattern, name):
            model = Model.load(preset)
            if row.d_model in (None, model.d_model) and row.n_heads in (None, model.num_heads):
                return model
    return None


def is_hybrid(row: RunRow) -> bool:
    """The row's name is of a published model whose layers follow a pattern."""
    model = published(row)
    return model is not None and model.pattern is not None


def with_published_sizes(row: RunRow) -> RunRow:
    """The row with blank sizes as the published model of its name has them."""
    model = published(row)
    if model is None:
        return row
    experts = model.experts
    known: dict[str, int | str | None] = {
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
    blank = {column: value for column, value in known.items() if getattr(row, column) in (None, "")}
    return replace(row, **blank)  # type: ignore[arg-type]  # each column's own type


def structure(row: RunRow) -> dict[str, object] | None:
    """Fields of a dense model beyond its sizes: the published model's; None where the row is of none, or has another MLP."""
    model = published(row)
    if model is None or model.experts is not None or row.mlp_kind not in (model.mlp, _KINDS.get(model.mlp)):
        return None
    fields = model.model_dump(exclude={"name", "sources", "num_layers", "experts", "latent", *_OF_COLUMNS})
    return {**fields, "max_positions": row.seq_len, "head_dim": model.head_dim}


_OF_COLUMNS: Final = ("d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size", "max_positions")
_KINDS: Final = {"gelu_tanh": "gelu", "geglu": "swiglu"}  # the table's word for each


@cache
def _patterns() -> tuple[tuple[str, str], ...]:
    """(pattern, preset), the longer name first: "llama3.1-8b" before "llama-7b"."""
    named = sorted(preset_names(), key=lambda name: (-len(name), name))
    return *_ALSO, *((_pattern(name), name) for name in named)


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
