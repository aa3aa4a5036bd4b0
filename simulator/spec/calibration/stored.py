"""Calibrations that a user's own machine was measured for: a folder from which they are taken without being named."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from simulator.spec.calibration.document import SUFFIX

VARIABLE: Final = "SHARDWISE_CALIBRATIONS"


def folder() -> Path | None:
    """The folder that the variable names; XDG's place for settings if it is unset; None if it is empty: then none is taken."""
    variable = os.environ.get(VARIABLE)
    if variable is not None:
        return Path(variable) if variable else None
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111  never raises
    return Path(home) / "shardwise" / "calibrations"


def stored_file(device: str) -> Path | None:
    """The file of a device's own calibration, if one was kept."""
    path = place(device)
    return path if path is not None and path.is_file() else None


def place(device: str) -> Path | None:
    """Where a device's calibration is kept."""
    where = folder()
    return where / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', device)}{SUFFIX}" if where is not None else None
