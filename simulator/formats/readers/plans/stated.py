"""A file's settings as plain data, overridden by the options of the command that names it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

ReadJson = Callable[[str], Mapping[str, Any]]
_NEVER: Final = "\0"  # these files' "auto" is a value like others


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """Settings of one run.

    data: tables and values. read_json: reads a DeepSpeed file by the path that the settings name. given: Plan's fields that the
    caller states. places: (as it is spelled, where it stands) of settings that a command line states, by their dotted names.
    unset: what values hang on that only a run knows, which are `auto` in data; cures: flags that would give them.
    program: the part of a library that a command runs, as `dpo` of trl. num_devices, num_nodes: of the job, where a launcher says so.
    """

    data: Mapping[str, Any]
    file: str
    read_json: ReadJson
    given: Collection[str] = ()
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    unset: Mapping[str, str] = field(default_factory=dict)
    cures: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    auto: str = _NEVER
    program: str = ""
    num_devices: int | None = None
    num_nodes: int | None = None
