"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from simulator.base.errors import Fault, InputError


def write_whole(path: Path, data: str | bytes, flag: str = "") -> None:
    """Write the file, text as UTF-8. What stood there stays where that fails; InputError then says why, at `flag`."""
    content = data.encode() if isinstance(data, str) else data
    try:
        if path.exists() and not path.is_file():  # a pipe or a terminal has nothing to lose
            path.write_bytes(content)
            return
        target = path.resolve()
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            beside.write_bytes(content)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as exc:
        place, problem = f"{flag} {path}".strip(), f"cannot be written: {exc.strerror or exc}"
        raise InputError(Fault(place=place, problem=problem, remedy="a path that can be written")) from None
