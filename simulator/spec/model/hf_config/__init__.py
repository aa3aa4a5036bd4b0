"""Hugging Face `config.json` -> fields of a Model. It is read as data: code that `auto_map` names is never fetched or run.

What a family's configuration class would fill in when a key is missing is filled in here too (its documented
default); keys without a default are required. Every fault of the file is reported at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from simulator.base.errors import Fault, InputError, ModelError
from simulator.base.schema import read_json, unreadable
from simulator.spec.model.files import MAX_FILE_BYTES
from simulator.spec.model.hf_config import dense, hybrids, mixtures
from simulator.spec.model.hf_config.keys import Fields, Keys

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def file_fields(path: str | Path) -> tuple[Fields, str]:
    """A model's fields of a config.json, and the place that faults of theirs have. Raises ModelError with every fault of the file.

    A nested `text_config` is followed.
    """
    file = Path(path)
    data = _object(_load(file), str(file))
    name = data.get("_name_or_path")
    if not isinstance(name, str) or not name:
        name = file.parent.name if file.name == "config.json" and file.parent.name else file.stem
    nested = data.get("text_config")
    place = str(file) if nested is None else f"{file}: text_config"
    return config_fields(data if nested is None else _object(nested, place), place, name[:200]), place


def config_fields(config: Mapping[str, Any], place: str, name: str) -> Fields:
    """A model's fields from the configuration's keys. Raises ModelError with every fault, each with `place` and its key."""
    keys = Keys(config, place)
    family = config.get("model_type")
    reader = _FAMILIES.get(family) if isinstance(family, str) else None
    if reader is None:
        raise ModelError(_unknown_family(family, place))
    if family not in _MIXTURES:
        for key in _EXPERTS:
            if isinstance(config.get(key), int) and config[key] > 1:
                keys.fault(key, f"experts of model_type {family!r} are not known", f"one of {', '.join(_MIXTURES)}")
    fields = {"name": name, "family": str(family).removesuffix("_text"), **reader(keys)}
    if keys.faults:
        raise ModelError(dict.fromkeys(keys.faults))
    return fields


def _load(file: Path) -> object:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(Fault(place=str(file), problem=f"larger than {MAX_FILE_BYTES} bytes", remedy="a config"))
        return read_json(file, ModelError)
    except InputError:
        raise
    except OSError as exc:
        raise ModelError(unreadable(file, exc)) from None
    except (RecursionError, ValueError) as exc:  # nested too deep; an integer of thousands of digits
        raise ModelError(Fault(place=str(file), problem=f"not a configuration: {exc}")) from None


def _object(data: object, place: str) -> dict[str, Any]:
    if isinstance(data, dict):
        return data
    raise ModelError(Fault(place=place, problem="is not a JSON object", remedy="the config.json of a model"))


def _unknown_family(family: object, place: str) -> Fault:
    known = ", ".join(sorted(_FAMILIES))
    if family is None:
        return Fault(place=f"{place}: model_type", problem="is missing", remedy=f"one of {known}")
    near = difflib.get_close_matches(str(family)[:100], _FAMILIES, n=2)
    remedy = f"nearest: {', '.join(near)}; known: {known}" if near else f"known: {known}"
    return Fault(place=f"{place}: model_type", problem=f"{str(family)[:100]!r} is not known", remedy=remedy)


_FAMILIES: dict[str, Callable[[Keys], Fields]] = {
    "llama": dense.llama,
    "mistral": dense.mistral,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "gemma": dense.gemma,
    "gemma2": dense.gemma2,
    "gemma3_text": dense.gemma3,
    "gpt2": dense.gpt2,
    "gpt_neox": dense.gpt_neox,
    "mpt": dense.mpt,
    "falcon": dense.falcon,
    "mixtral": mixtures.mixtral,
    "qwen2_moe": mixtures.qwen2_moe,
    "qwen3_moe": mixtures.qwen3_moe,
    "deepseek_v2": partial(mixtures.deepseek, score="softmax"),
    "deepseek_v3": partial(mixtures.deepseek, score="sigmoid"),
    "kimi_k2": partial(mixtures.deepseek, score="sigmoid"),
    "gpt_oss": mixtures.gpt_oss,
    "nemotron_h": hybrids.nemotron_h,
}
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_oss", "nemotron_h")
