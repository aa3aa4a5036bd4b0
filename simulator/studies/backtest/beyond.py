"""Features in a row's name or notes that models and plans here cannot express."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from simulator.studies.backtest.models import preset_of
from simulator.studies.backtest.notes import note_text, states
from simulator.studies.backtest.rows import RunRow

# Families whose layers are not softmax attention over the past, by their papers or config.json
_NOT_ATTENTION: Final = (
    (r"minimax-?(text-?)?0?1\b|minimax-?m1", "lightning attention in seven of eight layers"),  # arXiv 2501.08313
    (r"qwen-?3-?next|qwen-?3\.5|kimi-?linear", "gated delta layers (config.json: linear_attention)"),
    (r"ring-?(mini-)?linear|ling-?linear|minicpm-?sala", "linear attention"),
    (r"\brwkv|\bretnet|hyena|\bxlstm|\bgla-", "recurrence instead of attention"),
    (r"recurrent-?gemma|\bgriffin|\bhawk\b", "recurrent blocks beside attention"),  # arXiv 2402.19427
    (r"\bjamba|\bzamba|\bsamba|falcon-?(mamba|h1)|codestral-?mamba|granite-?4.*\bh\b|bamba", "state-space layers"),
)
_NOT_DECODER: Final = r"\b(bert|roberta|deberta|modernbert|t5|mt5|flan-?t5|ul2|bart|whisper|vit|clip|dit|unet)\b"
_ADAPTERS: Final = re.compile(r"\bpeft\b|\badapters?\b", re.IGNORECASE)  # of another kind than LoRA
# A state-space model of no published pattern, and states in host memory that no column of a plan describes
_STATE_SPACE: Final = re.compile(r"--hybrid-layer-pattern|--mamba-|\bmamba", re.IGNORECASE)
_OFFLOAD: Final = re.compile("offload", re.IGNORECASE)


def inexpressible(row: RunRow) -> Iterator[tuple[str, str]]:
    """(kind, detail) of each feature that a model or plan here cannot express."""
    yield from beyond_models(row)
    if (row.ep or 1) > 1 and (row.n_experts or 1) == 1:
        yield "expert parallelism without experts", f"ep = {row.ep}"
    known = preset_of(row)
    if "pattern" not in row.of("model") and not (known and known.pattern) and _STATE_SPACE.search(row.notes):
        yield "layers without attention", "a state-space model by its notes, of no published pattern"
    if states(_OFFLOAD, note_text(row)) and not any(key.startswith("offload") for key in row.of("plan")):
        yield "offload", "stated in the notes"


def beyond_models(row: RunRow) -> Iterator[tuple[str, str]]:
    """(kind, detail) of each feature of the row's model that models here do not have."""
    name = re.sub(r"[\s_/]+", "-", row.model_name.casefold())
    for pattern, mechanism in _NOT_ATTENTION:
        if re.search(pattern, name):
            yield "layers without attention", mechanism
            break
    if found := re.search(_NOT_DECODER, name):
        yield "no decoder", f"{found[0]}: a model that is more, or other, than one stack of causal layers"
    if "peft" not in row.of("plan") and _ADAPTERS.search(f"{row.model_name} {row.framework} {note_text(row)}"):
        yield "adapters", "most parameters are frozen, by its name or notes"
