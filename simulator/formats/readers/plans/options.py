"""The effect of settings without a field of Plan: one table per format, beside this module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from simulator.base.presets import facts


@dataclass(frozen=True, slots=True)
class Off:
    """A setting whose effect is not modelled, unless it has one of the values that switch it off."""

    why: str
    values: tuple[object, ...] = (False, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """known: settings that the reader asks for. no_effect: what a step neither waits for nor keeps. off: not modelled.

    A name ending in "." stands for all below it.
    """

    known: frozenset[str]
    no_effect: frozenset[str]
    off: Mapping[str, Off]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments(Options):
    """Megatron's. model: those on the model. flags: those without a value. begins: how names of no effect begin."""

    model: frozenset[str]
    flags: frozenset[str]
    begins: re.Pattern[str]

    def has_no_effect(self, name: str) -> bool:
        """A step neither waits for it nor keeps it."""
        return self.begins.match(name) is not None

    def among(self, names: Iterable[str]) -> Options:
        """With those of `names` that have no effect."""
        return replace(self, no_effect=frozenset(filter(self.has_no_effect, names)))


@cache
def options_of(name: str) -> Options:
    """The settings of a format but Megatron's, with those of the one that its table `includes`."""
    table = table_of(name)
    base = options_of(table["includes"]) if "includes" in table else Options(known=_NONE, no_effect=_NONE, off={})
    return Options(
        known=base.known | frozenset(table["known"]),
        no_effect=base.no_effect | frozenset(table["no_effect"]),
        off={**base.off, **{name: _off(entry) for name, entry in table["not_modelled"].items()}},
    )


_NONE: Final[frozenset[str]] = frozenset()


@cache
def megatron_arguments() -> Arguments:
    """Megatron's arguments, with their dashes."""
    table = table_of("megatron")
    model, others, flags = (frozenset(f"--{name}" for name in table[key]) for key in ("model", "known", "flags"))
    return Arguments(
        known=model | others,
        no_effect=frozenset(),
        off={f"--{name}": _off(entry) for name, entry in table["not_modelled"].items()},
        model=model,
        flags=flags,
        begins=re.compile(f"--({'|'.join(table['no_effect'])})"),
    )


def table_of(name: str) -> Mapping[str, Any]:
    """The whole table of a format."""
    return facts(__file__, f"tables/{name}")


def shipped(path: str, table: str) -> tuple[str, Mapping[str, Any]]:
    """The framework that ships a file of that name or end of a path, and what the table has of it; "": none does."""
    ends = (path, "/".join(path.split("/")[-2:]))
    found = ((whose, files[end]) for whose, files in table_of(table).items() for end in ends if end in files)
    return next(found, ("", {}))


def _off(entry: str | Mapping[str, Any]) -> Off:
    return Off(entry) if isinstance(entry, str) else Off(entry["why"], tuple(entry["values"]))
