"""The strict base of everything a person writes: frozen, no unknown keys, no NaN or infinity, every fault at once."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from simulator.errors import Fault, InputError


class Strict(BaseModel):
    """Base of the nouns that come from files and flags."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, data: object, place: str, error: type[InputError]) -> Self:
        """Validate `data`, turning every pydantic fault into ours. `place` names the file or flag."""
        try:
            return cls.model_validate(data)
        except ValidationError as exc:
            raise error(faults_of(exc, place)) from None


def faults_of(exc: ValidationError, place: str) -> list[Fault]:
    """One `Fault` a pydantic error, its location written as in the file: `links[2].bytes_per_s`."""
    return [Fault(place=_where(place, e["loc"]), problem=e["msg"].removeprefix("Value error, ")) for e in exc.errors()]


def _where(place: str, loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return f"{place}: {path}" if path else place


def read_toml(path: Path, error: type[InputError]) -> dict[str, Any]:
    """A TOML file as plain data; TOML itself refuses duplicate keys, NaN and infinity are refused here."""
    text = _read_text(path, error)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise error(Fault(place=str(path), problem=f"not TOML: {exc}")) from None
    _refuse_non_finite(data, str(path), error)
    return data


def read_json(path: Path, error: type[InputError]) -> Any:  # noqa: ANN401  JSON is any of six types
    """A JSON file as plain data; duplicate keys, NaN and infinity are refused."""
    text = _read_text(path, error)
    faults: list[Fault] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [k for k, _ in pairs]
        faults.extend(
            Fault(place=str(path), problem=f"key {k!r} stands twice", remedy="keep one")
            for k in sorted({k for k in keys if keys.count(k) > 1})
        )
        return dict(pairs)

    def constant(name: str) -> float:
        faults.append(Fault(place=str(path), problem=f"{name} is not a number", remedy="write a finite number"))
        return 0.0

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except (json.JSONDecodeError, RecursionError) as exc:
        raise error(Fault(place=str(path), problem=f"not JSON: {exc}")) from None
    if faults:
        raise error(faults)
    _refuse_non_finite(data, str(path), error)
    return data


def _read_text(path: Path, error: type[InputError]) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise error(Fault(place=str(path), problem=f"cannot be read: {exc}")) from None


def _refuse_non_finite(data: object, place: str, error: type[InputError]) -> None:
    faults = [Fault(place=f"{place}: {p}", problem="is not a finite number") for p in _non_finite(data, "")]
    if faults:
        raise error(faults)


def _non_finite(data: object, path: str) -> list[str]:
    if isinstance(data, dict):
        return [p for k, v in data.items() for p in _non_finite(v, f"{path}.{k}" if path else str(k))]
    if isinstance(data, list):
        return [p for i, v in enumerate(data) for p in _non_finite(v, f"{path}[{i}]")]
    return [path] if isinstance(data, float) and not math.isfinite(data) else []
