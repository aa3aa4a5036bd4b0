"""peft's adapter_config.json as flags of a plan (peft 0.13 to 0.21: tuners/*/config.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import Fault, InputError
from simulator.base.schema import nearest, read_json
from simulator.formats.readers.peft_words import is_pattern, matched, with_ranks

_METHODS: Final = {"LORA": "lora", "IA3": "ia3", "PREFIX_TUNING": "prefix"}
_MOST_BYTES: Final = 2**20
# Key of the file -> flag
_COUNTS: Final = {"r": "lora_rank", "num_virtual_tokens": "prefix_tokens"}
_LISTS: Final = {"target_modules": "lora_targets", "modules_to_save": "train_modules"}
# What no plan can express: refused unless it is empty
_UNMODELLED: Final = ("layer_replication", "target_parameters", "exclude_modules", "trainable_token_indices")
_STACKS: Final = ("layers", "layer", "h", "blocks", "block")  # names of the list of layers, in models of all libraries


def read_adapter_config(path: Path) -> dict[str, str]:
    """Flags of Plan's fields, as text, and `model`, the base's name as it stands. Raises InputError with every fault of the file."""
    if path.is_file() and path.stat().st_size > _MOST_BYTES:
        raise InputError.at(str(path), f"larger than {_MOST_BYTES} bytes", "adapter_config.json")
    data = read_json(path, InputError)
    if not isinstance(data, dict) or "peft_type" not in data:
        raise InputError.at(str(path), "no peft_type", "peft's adapter_config.json")
    faults = [Fault(place=f"{path}: {key}", problem=problem, remedy=remedy) for key, problem, remedy in _faults(data)]
    InputError.raise_for(faults)
    flags = {"peft": "dora" if data.get("use_dora") else _METHODS[data["peft_type"]]}
    flags |= {flag: str(data[key]) for key, flag in _COUNTS.items() if data.get(key) is not None}
    flags |= {flag: ",".join(_words(data[key])) for key, flag in _LISTS.items() if data.get(key)}
    if data["peft_type"] == "LORA":
        flags = {"lora_rank": "8", **flags, "lora_targets": ",".join(_targets(data)[0])}  # peft's own rank
    base = data.get("base_model_name_or_path")
    flags |= {"model": base} if isinstance(base, str) and base else {}
    return flags | ({"lora_dropout": str(data["lora_dropout"])} if data.get("lora_dropout") else {})


def _words(value: str | list[str]) -> tuple[str, ...]:
    """A name, a pattern of paths, or several names."""
    if not isinstance(value, str):
        return tuple(value)
    return matched(value) if is_pattern(value) else (value,)


def _targets(data: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """Modules in some layers, with ranks of their own; and faults of `rank_pattern`."""
    layers, ranks = data.get("layers_to_transform"), data.get("rank_pattern") or {}
    usual = _words(data.get("target_modules") or ["q", "v"])  # of Llama and similar models (utils/constants.py)
    return with_ranks(usual, [layers] if isinstance(layers, int) else layers or None, ranks)


def _faults(data: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    kind = data["peft_type"]
    if not isinstance(kind, str) or kind not in _METHODS:
        yield "peft_type", f"{str(kind)[:60]!r} is not modelled", nearest(str(kind), _METHODS) or ", ".join(_METHODS)
    for key in _COUNTS:
        value = data.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            yield key, f"must be a whole number; it is {str(value)[:60]!r}", "for example 16"
    for key in _LISTS:
        value = data.get(key)
        one = isinstance(value, str) or (isinstance(value, list) and all(isinstance(word, str) for word in value))
        if value is not None and not one:
            yield key, f"must be a list of modules; it is {str(value)[:60]!r}", 'for example ["q_proj", "v_proj"]'
        elif isinstance(value, str) and is_pattern(value) and not matched(value):
            yield key, "the pattern matches no module of a layer", "the modules' names, or all-linear"
    dropout = data.get("lora_dropout")
    if dropout is not None and (isinstance(dropout, bool) or not isinstance(dropout, int | float)):
        yield "lora_dropout", f"must be a number; it is {str(dropout)[:60]!r}", "for example 0.05"
    for key in _UNMODELLED:
        if data.get(key):
            yield key, "is not modelled", f"without {key}"
    yield from _layer_faults(data)


def _layer_faults(data: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Of what differs by layer."""
    layers, ranks, stack = (data.get(key) for key in ("layers_to_transform", "rank_pattern", "layers_pattern"))
    numbers = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in numbers):
        yield "layers_to_transform", f"must be numbers of layers; it is {str(layers)[:60]!r}", "for example [0, 1, 2]"
    elif numbers and isinstance(data.get("target_modules"), str):
        problem = "peft refuses it beside target_modules that is no list"
        yield "layers_to_transform", problem, "target_modules as a list of names"
    if stack and set([stack] if isinstance(stack, str) else stack) - set(_STACKS):
        yield "layers_pattern", f"{str(stack)[:60]!r} is no list of layers", "layers"
    if ranks is None or (isinstance(ranks, dict) and not all(isinstance(key, str) for key in ranks)):
        return
    if not isinstance(ranks, dict):
        yield "rank_pattern", f"must be a table of ranks; it is {str(ranks)[:60]!r}", 'for example {"q_proj": 32}'
        return
    for key, problem in with_ranks([], None, ranks)[1]:
        yield f"rank_pattern.{key[:60]}", problem, "a module's name or path, and a whole number"
