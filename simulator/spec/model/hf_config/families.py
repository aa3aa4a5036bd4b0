"""Families of `config.json` files: `topologies/families`, one table per `model_type`, which defines its fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from simulator.base.errors import ModelError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import read_toml

_FILES: Final = ("dense", "mixtures", "hybrids")
_TABLES: Final = ("experts", "latent", "mamba")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`. values: what its class fills in. fields, tables: of a Model, as expressions. refuse, notes: what is not modelled."""

    name: str
    config_class: str
    values: Mapping[str, Any]
    fields: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, Any]]
    refuse: tuple[Mapping[str, str], ...]
    notes: tuple[Mapping[str, str], ...]


def family_names() -> tuple[str, ...]:
    """Every `model_type` that is known, sorted."""
    return tuple(sorted(_written()))


def families_by_file() -> tuple[str, ...]:
    """The same in the order of the files, the simplest first."""
    return tuple(_written())


@cache
def family(name: str) -> Family:
    """The family with what it takes from the one it is like. Raises KeyError where it is unknown."""
    own = _written()[name]
    base = family(own["like"]) if "like" in own else None
    tables = {
        table: {**(base.tables.get(table, {}) if base else {}), **own.get(table, {})}
        for table in _TABLES
        if table in own or (base and table in base.tables)
    }
    return Family(
        name=name,
        config_class=own["class"],
        values={**(base.values if base else {}), **own.get("values", {})},
        fields={**(base.fields if base else {}), **own.get("fields", {})},
        tables=tables,
        refuse=(*(base.refuse if base else ()), *own.get("refuse", ())),
        notes=(*(base.notes if base else ()), *own.get("notes", ())),
    )


@cache
def key_facts() -> dict[str, Any]:
    """What is known of keys whatever the family: `keys.toml`."""
    return read_toml(TOPOLOGIES / "families" / "keys.toml", ModelError)


@cache
def _written() -> dict[str, dict[str, Any]]:
    files = (read_toml(TOPOLOGIES / "families" / f"{name}.toml", ModelError) for name in _FILES)
    return {name: table for file in files for name, table in file.items()}
