"""The tower for images of a `config.json` -> fields of a Tower, by `topologies/families/towers.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from simulator.base.errors import Fault, ModelError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import read_toml
from simulator.spec.model.hf_config.families import Family
from simulator.spec.model.hf_config.keys import Keys

_SECTION = "vision_config"


def tower_fields(data: Mapping[str, Any], place: str) -> dict[str, Any] | None:
    """A tower's fields of a whole file; None where it has none that is read. Raises ModelError with every fault of its section."""
    vision, joint = data.get(_SECTION), _facts()["joints"].get(data.get("model_type"))
    if not isinstance(vision, dict) or joint is None:
        return None
    place = f"{place}: {_SECTION}"
    kind = vision.get("model_type") or joint["encoder"]
    kinds = joint.get("encoders", [])
    if kinds and kind not in kinds:
        remedy = f"one of {', '.join(kinds)}; --images 0 leaves the tower out"
        raise ModelError(Fault(f"{place}.model_type", f"a tower of {str(kind)[:100]!r} is not read", remedy))
    known = _tower_family(str(data["model_type"]), kind if kinds else joint["encoder"])
    keys = Keys({**vision, "whole": data}, place, known, sizes_default=True)
    found = keys.fields()
    if keys.faults:
        raise ModelError(dict.fromkeys(keys.faults))
    return found


def tower_note(data: Mapping[str, Any]) -> str:
    """Why a whole file's tower is not read, where that is known."""
    why = _facts()["refused"].get(data.get("model_type"))
    return f" ({data['model_type']}: {why})" if why else ""


@cache
def _facts() -> dict[str, Any]:
    return read_toml(TOPOLOGIES / "families" / "towers.toml", ModelError)


@cache
def _tower_family(name: str, encoder: str) -> Family:
    """An encoder with what it takes from the one it is like, and what joins it in files of a model_type."""
    written, values, fields = _facts()["encoders"], {}, {}
    chain = [encoder]
    while "like" in written[chain[0]]:
        chain.insert(0, written[chain[0]]["like"])
    for part in (*(written[one] for one in chain), _facts()["joints"][name]):
        values |= part.get("values", {})
        fields |= part.get("fields", {})
    return Family(
        name=name, config_class=written[encoder]["class"], values=values, fields=fields, tables={}, refuse=(), notes=()
    )
