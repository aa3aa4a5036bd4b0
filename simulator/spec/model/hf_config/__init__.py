"""Hugging Face `config.json` -> fields of a Model. It is read as data: code that `auto_map` names is never fetched or run.

What a family's configuration class fills in where a key is missing is filled in here too; sizes are required, but in a nested
section, which is written as differences from its class's defaults. Every fault of the file is reported at once.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from simulator.base.errors import Fault, InputError, ModelError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import read_json, read_toml, unreadable
from simulator.spec.model.files import MAX_FILE_BYTES, PRESETS, model_fields, preset_names
from simulator.spec.model.hf_config.families import Family, families_by_file, family, family_names, key_facts
from simulator.spec.model.hf_config.keys import Keys
from simulator.spec.model.tower import Tower

Fields = dict[str, Any]


def file_fields(path: str | Path, like: str | None = None) -> tuple[Fields, str]:
    """A model's fields of a config.json, and the place that faults of theirs have. Raises ModelError with every fault of the file.

    A nested section of text is followed. like: the family to read it as, whatever it says.
    """
    file = Path(path)
    data = _object(_load(file), str(file))
    name = data.get("_name_or_path")
    if not isinstance(name, str) or not name:
        name = file.parent.name if file.name == "config.json" and file.parent.name else file.stem
    config, place = _language_model(data, str(file))
    tower = _tower_fields(data, str(file))
    if tower is not None:
        config = {key: value for key, value in config.items() if key != "vision_config"}
    fields = config_fields(config, place, name[:200], like=like, nested=place != str(file))
    if tower is None:
        why = _tower_note(data)
        sources = {key: text + why * (key == "not modelled") for key, text in fields["sources"].items()}
        return {**fields, "sources": sources}, place
    return {**fields, "tower": tower}, place


def _tower_fields(data: Mapping[str, Any], place: str) -> dict[str, Any] | None:
    """A tower's fields of a whole file; None where it has none that is read. Raises ModelError with every fault of its section."""
    vision, parts = data.get("vision_config"), _chain("joints", _family_word(data))
    if not isinstance(vision, dict) or not vision or not parts:
        return None
    joint = {key: value for part in parts for key, value in part.items()}
    file, place, kinds, kind = place, f"{place}: vision_config", joint.get("encoders"), joint["encoder"]
    if kinds and (kind := vision.get("model_type", kind)) not in kinds:
        raise ModelError(
            Fault(f"{place}.model_type", f"a tower of {str(kind)[:100]!r} is not read", f"one of {', '.join(kinds)}")
        )
    keys = Keys({**vision, "whole": data}, place, _tower_family(str(data["model_type"]), kind), sizes_default=True)
    found = keys.fields()
    faults = (replace(one, place=one.place.replace(f"{place}: whole.", f"{file}: ")) for one in keys.faults)
    ModelError.raise_for(list(dict.fromkeys(faults)))
    Tower.parse(found, place, ModelError)
    return found


def _family_word(data: Mapping[str, Any]) -> str:
    """The file's model_type; what is no text is no family's."""
    word = data.get("model_type")
    return word if isinstance(word, str) else ""


def _tower_note(data: Mapping[str, Any]) -> str:
    """Why a whole file's tower is not read, where that is known."""
    why = _facts()["refused"].get(_family_word(data))
    return f" ({data['model_type']}: {why})" if why else ""


@cache
def _facts() -> dict[str, Any]:
    return read_toml(TOPOLOGIES / "families" / "towers.toml", ModelError)


@cache
def _tower_family(name: str, encoder: str) -> Family:
    """An encoder with what it takes from the one it is like, and what joins it in files of a model_type."""
    encoders = _chain("encoders", encoder)
    parts = *encoders, *_chain("joints", name)
    values, fields = ({k: v for part in parts for k, v in part.get(of, {}).items()} for of in ("values", "fields"))
    refuse = next((part["refuse"] for part in reversed(parts) if "refuse" in part), ())
    return Family(
        name=name,
        config_class=encoders[-1]["class"],
        values=values,
        fields=fields,
        tables={},
        refuse=tuple(refuse),
        notes=(),
    )


def _chain(table: str, name: str) -> tuple[dict[str, Any], ...]:
    """An entry behind those that it is like; none where the name is unknown."""
    found = _facts()[table].get(name)
    return (*_chain(table, found.get("like", "")), found) if found else ()


def config_fields(
    config: Mapping[str, Any], place: str, name: str, *, like: str | None = None, nested: bool = False
) -> Fields:
    """A model's fields from the configuration's keys. Raises ModelError with every fault, each with `place` and its key.

    `sources` of the fields say what was assumed, renamed or left out.
    """
    own = config.get("model_type")
    known = _family(config, place, like)
    keys = Keys(config, place, known, sizes_default=nested)
    fields = {"name": name, "family": known.name.removesuffix("_text"), **keys.fields()}
    if "experts" not in known.tables:
        for key in key_facts()["experts"]:
            if isinstance(config.get(key), int) and config[key] > 1:
                suggestion = "; ".join(f"--like {name} reads it" for name in _readers(config)[:1])
                keys.fault(key, f"experts of model_type {known.name!r} are not known", suggestion)
    sources = _sources(keys, known, config, read_as=like if like != own else None)
    if keys.faults:
        raise ModelError(dict.fromkeys(keys.faults))
    return {**fields, "sources": sources}


def _sources(keys: Keys, known: Family, config: Mapping[str, Any], *, read_as: str | None) -> dict[str, str]:
    """What a reader of the file has to know, a line a subject."""
    sources = {}
    if keys.assumed:
        listed = ", ".join(f"{key} {value}" for key, value in keys.assumed.items())
        sources["defaults"] = f"{known.config_class}'s {listed}: the file does not say them"
    if read_as:
        other = "".join(f"; {name} is taken as {key}" for key, name in sorted(keys.renamed.items()))
        unread = ", ".join(_unread(keys, config))
        sources["read as"] = f"{read_as}, as --like says{other}" + (f"; not read: {unread}" if unread else "")
    notes = [note["text"] for note in known.notes if keys.holds(note.get("when", "True"))]
    towers = " and ".join(key for key in _TOWERS if config.get(key))
    notes += [f"{towers}: {_LEFT_OUT}{_RUN if config.get('vision_config') else ''}"] if towers else []
    return {**sources, **({"not modelled": "; ".join(notes)} if notes else {})}


_TOWERS = ("vision_config", "audio_config", "visual", "img_processor", "embd_layer", "mm_vision_tower")
_LEFT_OUT = "towers and their projectors are no part of the model"
_CAPTURED = "`shardwise capture` predicts your own PyTorch step, whatever its model"
_RUN = "; `shardwise capture config.json --recipe fsdp2` runs both"


def _unread(keys: Keys, config: Mapping[str, Any]) -> list[str]:
    """Keys of the file that say something of a shape, perhaps, and that nothing looked at."""
    known = key_facts()["ignored"]
    return [
        key
        for key, value in config.items()
        if key not in keys.read and key not in known["names"] and not re.search(known["patterns"], key)
        and value not in (None, False, [], {}, "")
    ]  # fmt: skip


def _family(config: Mapping[str, Any], place: str, like: str | None) -> Family:
    own = like if like is not None else config.get("model_type")
    if isinstance(own, str) and own in family_names():
        return family(own)
    if like is not None:
        near = difflib.get_close_matches(like, family_names(), n=3) or list(family_names())
        raise ModelError.at(f"--like {like}", "is not a family", f"one of {', '.join(near)}")
    raise ModelError(_unknown_family(config, place))


def _unknown_family(config: Mapping[str, Any], place: str) -> Fault:
    """The fault of a family that is not known, with those as which the file can be read."""
    own = config.get("model_type")
    problem = "is missing" if own is None else f"{str(own)[:100]!r} is not known"
    if why := key_facts()["other_kinds"].get(
        "encoder_decoder" if config.get("is_encoder_decoder") is True else str(own)
    ):
        return Fault(f"{place}: model_type", f"{str(own)[:100]!r} is {why}, which plans do not describe", _CAPTURED)
    near = difflib.get_close_matches(str(own)[:100], family_names(), n=2) if own is not None else []
    readable = _readers(config, near)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    if readable:
        hint += f"--like {readable[0]} reads it as that family"
        hint += f", as do {' and '.join(readable[1:])}" if readable[1:] else ""
    else:
        hint += f"no known family has its keys; {_nearest_size(config)}"
    return Fault(
        f"{place}: model_type", problem, f"{hint}; docs/reference/model-families.md lists all {len(family_names())}"
    )


def _readers(config: Mapping[str, Any], alike: Sequence[str] = ()) -> list[str]:
    """Three families that can read a file: those that use most of its keys first, then those with similar names."""
    scores = {name: _score(config, name) for name in (*alike, *families_by_file())}
    return sorted((name for name in scores if scores[name]), key=lambda name: -scores[name])[:3]


def _nearest_size(config: Mapping[str, Any]) -> str:
    """The preset nearest to a file in width and layers, as a way to go on."""
    keys = Keys(config, "", family("llama"), sizes_default=True)
    width, layers = keys.value("hidden_size"), keys.value("num_hidden_layers")
    if keys.assumed or keys.faults:
        return "a .toml file can say its sizes"

    def distance(name: str) -> float:
        preset = model_fields(PRESETS / f"{name}.toml")
        deep = preset.get("num_layers") or len(preset["pattern"])
        return abs(math.log(preset["d_model"] / width)) + abs(math.log(deep / layers))

    near = min(preset_names(), key=distance)
    return f"--model {near} is the preset nearest in size, and a .toml file can say what differs"


def _score(config: Mapping[str, Any], name: str) -> int:
    """Keys of a file that a family looks at; 0 where it cannot read the file."""
    known = family(name)
    keys = Keys(config, "", known, sizes_default=False)
    keys.fields()
    experts = any(isinstance(config.get(key), int) and config[key] > 1 for key in key_facts()["experts"])
    return 0 if keys.faults or experts != ("experts" in known.tables) else len(keys.read)


def _language_model(data: dict[str, Any], place: str) -> tuple[dict[str, Any], str]:
    """The part of a file that holds its language model, and its place. Ties are the whole model's to say."""
    facts = key_facts()
    classes, own = facts["section_classes"], data.get("model_type")
    section = next((name for name in facts["sections"] if data.get(name) is not None), None)
    if section is None and not (isinstance(own, str) and own in classes and own not in family_names()):
        return data, place
    below = {} if section is None else _object(data[section], f"{place}: {section}")
    if section is not None and isinstance(below.get("text_config"), dict):
        below, section = below["text_config"], f"{section}.text_config"
    above = {key: data[key] for key in ("tie_word_embeddings", *_TOWERS) if data.get(key) is not None}
    if own in facts["tied_by_either"] and below.get("tie_word_embeddings") is True:
        above.pop("tie_word_embeddings", None)
    default = {"model_type": classes[own]} if isinstance(own, str) and own in classes else {}
    return {**default, **below, **above}, f"{place}: {section or 'text_config'}"


def stored_weights(name_or_path: str) -> str | None:
    """What the weights beside a configuration are stored in, by its quantization_config; None: in 16 bits, or it is no such file."""
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    data = _object(_load(path), str(path)) if path.suffix == ".json" and path.is_file() else {}
    said = data.get("quantization_config") or _plain(data.get("text_config")).get("quantization_config")
    said = _plain(said)
    named = f"{said.get('quant_method')} {said.get('quant_algo')}".casefold()
    found = next((kind for kind in ("mxfp4", "nvfp4", "fp8") if kind in named), None)
    group = _plain(next(iter(_plain(said.get("config_groups")).values()), None))  # of compressed-tensors
    weights = _plain(group.get("weights"))
    bits = (
        weights.get("num_bits")
        or said.get("bits")
        or (4 if said.get("load_in_4bit") else said.get("load_in_8bit") and 8)
    )
    key = (bits, weights.get("type") == "float") if isinstance(bits, int) else None
    return found or {(4, False): "int4", (8, False): "int8", (8, True): "fp8", (4, True): "nvfp4"}.get(
        key or (0, False)
    )


def _plain(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _load(file: Path) -> object:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ModelError.at(str(file), f"larger than {MAX_FILE_BYTES} bytes", "a config")
        return read_json(file, ModelError, finite=False)
    except InputError:
        raise
    except OSError as exc:
        raise ModelError(unreadable(file, exc)) from None
    except (RecursionError, ValueError) as exc:  # nested too deep; an integer of thousands of digits
        raise ModelError.at(str(file), f"not a configuration: {exc}") from None


def _object(data: object, place: str) -> dict[str, Any]:
    if isinstance(data, dict):
        return data
    raise ModelError.at(place, "is not a JSON object", "the config.json of a model")
