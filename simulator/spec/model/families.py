"""Families of models by their public names, `topologies/names/models.toml`: facts that follow from the name alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from simulator.base.errors import ModelError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import read_toml
from simulator.spec.model.files import preset_names

_FILE = TOPOLOGIES / "names" / "models.toml"


@cache
def plain_name(name: str) -> str:
    """Small letters, without the owner, words joined by `-`: `GPT-3 (175B)` is gpt-3-175b."""
    return re.sub(r"[\s_()\[\]]+", "-", name.casefold().rpartition("/")[2]).strip("-")


@cache
def presets_of(name: str) -> tuple[str, ...]:
    """Presets that a name may be of, the likeliest first; sizes tell which it is."""
    plain = plain_name(name)
    return tuple(preset for pattern, preset in _presets() if re.search(pattern, plain))


def preset_of(name: str) -> str | None:
    """The preset that a public name is of, where nothing else is known; None for a name of other layers but a preset's own."""
    plain, others = plain_name(name), _families()["another"]
    if any(re.search(pattern, plain) for pattern in others):
        own = (one for one in preset_names() if plain.startswith(one))
        return next((one for one in own if any(re.search(pattern, one) for pattern in others)), None)
    return next(iter(presets_of(name)), None)


def vocabulary_of(name: str) -> int | None:
    """Tokens of the family's tokenizer, before padding."""
    return next((entry["vocab"] for entry in _entries("vocabulary", name)), None)


def mlp_of(name: str) -> str:
    """The family's activation; "" where nothing says it."""
    return next((entry["mlp"] for entry in _entries("mlp", name)), "")


def weights_of(name: str) -> str | None:
    """What the weights of a checkpoint with that name are stored in, of `serving.plan.Weights`; None: nothing says it, so 16 bits."""
    return next((entry["weights"] for entry in _entries("weights", name)), None)


def structure_of(name: str) -> dict[str, Any] | None:
    """Keys of a model beyond its sizes."""
    return next((entry["fields"] for entry in _entries("structure", name)), None)


def _entries(table: str, name: str) -> Iterator[dict[str, Any]]:
    """Those of a table of the file whose pattern is in the name."""
    plain = plain_name(name)
    return (entry for entry in _families()[table] if re.search(entry["name"], plain))


@cache
def _families() -> dict[str, list[Any]]:
    return read_toml(_FILE, ModelError)


@cache
def _presets() -> tuple[tuple[str, str], ...]:
    """(pattern, preset): names that no file shows, then the files' own, the longer first: "llama3.1-8b" before "llama-7b"."""
    named = sorted(preset_names(), key=lambda name: (-len(name), name))
    also = ((entry["name"], entry["preset"]) for entry in _families()["preset"])
    return *also, *((_pattern(name), name) for name in named)


def _pattern(preset: str) -> str:
    """`llama3.1-8b`: those letters, digits and versions in that order, other words between them."""
    family, *rest = preset.split("-")
    head = re.sub(r"(?<=[a-z])(?=\d)", "-?", re.escape(family))
    parts = [rf"(?<![a-z]){head}(?![.\d])", *(rf"(?<![\d.]){re.escape(part)}(?![.\da-z])" for part in rest)]
    return r"-(?:[a-z0-9.]+-)*?".join(parts)
