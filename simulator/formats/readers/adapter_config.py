"""peft's adapter_config.json as flags of a plan (peft 0.13 to 0.21: tuners/*/config.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import Fault, InputError
from simulator.base.schema import nearest, read_json

_METHODS: Final = {"LORA": "lora", "IA3": "ia3", "PREFIX_TUNING": "prefix"}
_MOST_BYTES: Final = 2**20
# Key of the file -> flag
_COUNTS: Final = {"r": "lora_rank", "num_virtual_tokens": "prefix_tokens"}
_LISTS: Final = {"target_modules": "lora_targets", "modules_to_save": "train_modules"}
# What a pair of another shape, or another number of them, would need: refused unless it is empty
_UNMODELLED: Final = ("layers_to_transform", "layers_pattern", "rank_pattern", "layer_replication", "target_parameters",
                      "exclude_modules", "trainable_token_indices")  # fmt: skip


def read_adapter_config(path: Path) -> dict[str, str]:
    """Flags of Plan's fields, as text. Raises InputError with every fault of the file."""
    if path.is_file() and path.stat().st_size > _MOST_BYTES:
        raise InputError(
            Fault(place=str(path), problem=f"larger than {_MOST_BYTES} bytes", remedy="adapter_config.json")
        )
    data = read_json(path, InputError)
    if not isinstance(data, dict) or "peft_type" not in data:
        raise InputError(Fault(place=str(path), problem="no peft_type", remedy="peft's adapter_config.json"))
    faults = [Fault(place=f"{path}: {key}", problem=problem, remedy=remedy) for key, problem, remedy in _faults(data)]
    if faults:
        raise InputError(faults)
    flags = {"peft": "dora" if data.get("use_dora") else _METHODS[data["peft_type"]]}
    flags |= {flag: str(data[key]) for key, flag in _COUNTS.items() if data.get(key) is not None}
    flags |= {flag: _words(data[key]) for key, flag in _LISTS.items() if data.get(key)}
    return flags | ({"lora_dropout": str(data["lora_dropout"])} if data.get("lora_dropout") else {})


def _words(value: str | list[str]) -> str:
    """A name, or several."""
    return value if isinstance(value, str) else ",".join(value)


def _faults(data: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    kind = data["peft_type"]
    if not isinstance(kind, str) or kind not in _METHODS:
        yield (
            "peft_type",
            f"{str(kind)[:60]!r} is not modelled",
            nearest(str(kind), _METHODS) or "LORA, IA3, PREFIX_TUNING",
        )
    for key in _COUNTS:
        value = data.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            yield key, f"must be a whole number; it is {str(value)[:60]!r}", "for example 16"
    for key in _LISTS:
        value = data.get(key)
        one = isinstance(value, str) or (isinstance(value, list) and all(isinstance(word, str) for word in value))
        if value is not None and not one:
            yield key, f"must be a list of modules; it is {str(value)[:60]!r}", 'for example ["q_proj", "v_proj"]'
    dropout = data.get("lora_dropout")
    if dropout is not None and (isinstance(dropout, bool) or not isinstance(dropout, int | float)):
        yield "lora_dropout", f"must be a number; it is {str(dropout)[:60]!r}", "for example 0.05"
    for key in _UNMODELLED:
        if data.get(key):
            yield key, "adapters that differ by layer are not modelled", f"without {key}"
