"""How far off predictions were on measured runs like one: static/record.toml, looked up."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any, Final

_FILE: Final = Path(__file__).parent / "static" / "record.toml"


@functools.cache
def _record() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def record_of(device: str, precision: str, stack: str) -> dict[str, Any] | None:
    """Errors on runs under this software stack, and on this kind of GPU in this precision; None where there are none."""
    rows = [row for row in _record()["row"] if (row["device"], row["precision"]) == (device, precision)]
    under = [row for row in _record()["stack"] if row["name"] == stack]
    stack_rows = [{**row, "runs_of": f"software {stack}", "gpu": "all", "precision": "all"} for row in under]
    found = [*stack_rows, *sorted(rows, key=lambda row: (-row["n"], row["runs_of"]))]
    on = f"on {device} in {precision}" if rows else ""
    like = " and ".join(part for part in (f"under {stack}" if under else "", on) if part)
    return {"like": like, "rows": found} if found else None
