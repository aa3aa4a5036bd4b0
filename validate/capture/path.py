"""The program's own folder as the first place that modules come from, also where its modules have this project's names.

Many a repository has a `validate.py`. In a program's process there are both: what this project's files import is this
project's, and what anything else imports is the program's.
"""

from __future__ import annotations

import builtins
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_HOME = Path(__file__).resolve().parents[2]
_OURS = ("simulator", "validate")
_FILES = tuple(f"{_HOME / name}{os.sep}" for name in _OURS)


def begin_at(folder: Path) -> None:
    """Look for modules in this folder first, as Python does for a script in it, then on PYTHONPATH; our own home comes last."""
    home = str(_HOME)
    sys.path[:] = [str(folder), *(place for place in sys.path if place != home), home]
    taken = tuple(name for name in _OURS if not _is_ours(name))
    if taken:
        _keep_apart(taken)


def _is_ours(name: str) -> bool:
    spec = PathFinder.find_spec(name)
    places = (spec.origin, *(spec.submodule_search_locations or ())) if spec is not None else ()
    return any(f"{place}{os.sep}".startswith(_FILES) for place in places)


def _keep_apart(taken: tuple[str, ...]) -> None:
    """From now on our modules of these names are known to our own files alone."""
    original, inside = builtins.__import__, False
    ours = _exchanged(taken, {})

    def found(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002
        nonlocal ours, inside
        theirs = level or inside or not name.startswith(taken)  # at every operator: the cheap question first
        if theirs or not str((globals or {}).get("__file__")).startswith(_FILES):
            return original(name, globals, locals, fromlist, level)
        inside, modules = True, _exchanged(taken, ours)
        try:
            return original(name, globals, locals, fromlist, level)
        finally:
            inside, ours = False, _exchanged(taken, modules)

    builtins.__import__ = found


def _exchanged(names: tuple[str, ...], modules: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """Make these the modules of such names; those that were."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}
    sys.modules.update(modules)
    return before
