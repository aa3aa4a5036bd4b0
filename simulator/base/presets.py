"""Where the data files that ship with the project lie: devices, clusters, models, stacks, calibrations; tables beside modules."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Final

TOPOLOGIES: Final = Path(__file__).resolve().parents[2] / "topologies"


@cache
def facts(module: str, name: str) -> dict[str, Any]:
    """The table of facts `name`.toml beside (or in a folder beside) the module whose `__file__` is given."""
    return tomllib.loads(Path(module).parent.joinpath(f"{name}.toml").read_text(encoding="utf-8"))
