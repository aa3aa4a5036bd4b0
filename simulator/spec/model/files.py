"""Files of models: the presets that ship, by name, and TOML files that may be like one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from simulator.base.errors import Fault, ModelError
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import nearest, read_toml, unknown_name

PRESETS = TOPOLOGIES / "models"
MAX_FILE_BYTES = 4 * 2**20  # a config.json has some kilobytes; what is larger is not one


@cache
def preset_names() -> tuple[str, ...]:
    """Names that `Model.load` knows, sorted."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def unknown_model(name: str, alike: Sequence[str] = ()) -> Fault:
    """The fault of an unknown model name, with the nearest names. alike: presets whose name it has, but not whose layers."""
    if alike and not name.endswith(".py"):
        other = f"it has other layers than {alike[0]} (a tower for images or sound, another size, attention or task)"
        problem = f"no preset is called {name!r}: {other}"
        alone = f"{alike[0]} for a language model alone, with an image's tokens in the prompt"
        return Fault("model", problem, f"the path of its config.json; {alone}")
    return unknown_name("model", name, preset_names(), "a config.json or .toml")


def model_fields(path: Path, depth: int = 0) -> dict[str, Any]:
    """The file's fields over those of the preset it is `like`. Its name defaults to the file's."""
    if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
        raise ModelError.at(str(path), f"larger than {MAX_FILE_BYTES} bytes", "a model file")
    return fields_like({"name": path.stem, **read_toml(path, ModelError)}, str(path), depth)


def fields_like(written: Mapping[str, Any], place: str, depth: int = 0) -> dict[str, Any]:
    """Fields over those of the preset that their `like` names. Raises ModelError where it is none."""
    data = dict(written)
    like = data.pop("like", None)
    if like is None:
        return data
    if not isinstance(like, str) or like not in preset_names() or depth > 3:
        raise ModelError.at(f"{place}: like", f"{like!r} is not a preset", nearest(str(like), preset_names()))
    base = model_fields(PRESETS / f"{like}.toml", depth + 1)
    tables = {
        key: {**of_preset, **mine}
        for key, mine in data.items()
        if isinstance(mine, dict) and isinstance(of_preset := base.get(key), dict)
    }
    return {**base, **data, **tables}
