"""Triton where it is not installed: modules that define its kernels can be imported, and a launch is written down.

On a machine with GPUs it comes with torch; a laptop's torch lacks it. torch itself goes on seeing that it is absent. What a
kernel does nobody knows here: it may write to each tensor that it is given, and is priced by their bytes.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

VERSION = "3.5.0"  # for code that asks which one it is


def install() -> None:
    """For what is imported from now on."""
    if find_spec("triton") is not None:
        return
    original, triton = builtins.__import__, _Module("triton")

    def found(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002
        if level or not name.startswith("triton"):  # torch imports within its functions: this runs at every operator
            return original(name, globals, locals, fromlist, level)
        asks = (globals or {}).get("__name__") or ""
        if name.partition(".")[0] != "triton" or asks.partition(".")[0] == "torch":
            return original(name, globals, locals, fromlist, level)
        module: Any = triton
        for part in name.split(".")[1:] if fromlist else ():
            module = getattr(module, part)
        return module

    builtins.__import__ = found


class _Module(ModuleType):
    """A module of Triton's: what decorates gives the function back, the rest are names."""

    __version__ = VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _SAID.get(name) or _Name(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Name(_Module):
    """A type, a constant, a submodule: whatever is done with it gives another."""

    def __call__(self, *_: object, **__: object) -> _Name:
        return self

    def __getitem__(self, _: object) -> _Name:
        return self

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()


class Kernel:
    """A kernel in Triton's language."""

    launched: ClassVar[Callable[..., None]] = staticmethod(
        lambda *_: None
    )  # what writes a launch down: its name, arguments

    def __init__(self, function: Any) -> None:
        self.fn = getattr(function, "fn", function)
        self.__name__, self.__doc__ = self.fn.__name__, self.fn.__doc__
        self.arg_names = list(inspect.signature(self.fn).parameters)

    def __getitem__(self, _: object) -> Any:
        return self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        type(self).launched(self.__name__, args, kwargs)


def _decorator(*given: Any, **_: object) -> Any:
    """triton.jit, triton.autotune(…): a kernel of the function."""
    return Kernel(given[0]) if len(given) == 1 and callable(given[0]) else Kernel


_SAID: dict[str, Any] = {
    "cdiv": lambda a, b: -(-a // b),
    "next_power_of_2": lambda number: 1 << max(number - 1, 0).bit_length(),
    **dict.fromkeys(("jit", "autotune", "heuristics"), _decorator),
}
