"""The meaning of each key of an answer: answer_keys.toml, used by pages and by the reference of `--json`."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from simulator.base.schema import Strict
from simulator.spec.plan import Plan
from simulator.studies.goodput import LongRun

_FILE: Final = Path(__file__).with_name("answer_keys.toml")
_COMMON: Final = "common"
_LINK: Final = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_ASKED: Final = "as it was asked, or a default; what the answer rests on tells which"
_RECORDS: Final[Mapping[str, type[Strict]]] = {"inputs/plan/": Plan, "inputs/run/": LongRun}
_INT: Final = r"(_bytes|_per_step|tokens|_version|steps|nodes|gpus|rank|seed|/n)$|(^|/)(num|counts)[_/]"
_FLOAT: Final = r"_s(/[^/]*)?$|_token$|(^|/)([mh]fu|ratio|share|low|high)$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Of a value: what it is, how it is made of others, and whence. inputs: keys beside its own; from the top with "/" in front.

    kind: its type in JSON. origins: entries of the answer's `sources` that it rests on. own: False where only what it stands in
    is described.
    """

    means: str
    kind: str = ""
    formula: str = ""
    inputs: tuple[str, ...] = ()
    source: str = ""
    origins: tuple[str, ...] = ()
    own: bool = True

    def as_data(self) -> dict[str, Any]:
        """Plain data without what is empty, and without markup."""
        parts = {"means": self.means, "formula": self.formula, "source": self.source}
        texts: dict[str, Any] = {name: _LINK.sub(r"\1", text).replace("`", "") for name, text in parts.items() if text}
        return texts | {name: list(found) for name, found in (("inputs", self.inputs), ("from", self.origins)) if found}


def key_of(path: str) -> str:
    """A path without its indices: plans/3/step_s is plans/step_s."""
    return "/".join(part for part in path.split("/") if not part.isdecimal())


def beside(path: str, name: str) -> str:
    """The path of an input of the value at `path`: its last name replaced, indices behind it kept."""
    if name.startswith("/"):
        return name[1:]
    parts = path.split("/")
    last = max((i for i, part in enumerate(parts) if not part.isdecimal()), default=0)
    return "/".join([*parts[:last], name, *parts[last + 1 :]])


@functools.cache
def meaning_of(kind: str, key: str) -> Meaning | None:
    """Of a key (a path without indices) in an answer of this kind; None where it is not described."""
    found = _listed(kind, key) or _field(key)
    tail = key
    while found is None and tail:
        found, tail = _listed(_COMMON, tail), tail.partition("/")[2]
    if found is None:
        return _above(kind, key)
    source = _ASKED if key.startswith("inputs/") else _file().get(kind, {}).get("source", "")
    return found if found.source else Meaning(**{**_fields(found), "source": source})


def drawn_meaning(key: str) -> Meaning | None:
    """The same of a number that pages draw beside their answers."""
    entry = _file()[_COMMON]["drawn"].get(key)
    return None if entry is None else _meaning(entry, key)


def _above(kind: str, key: str) -> Meaning | None:
    """The enclosing key, for a key without an entry of its own."""
    above = key.rpartition("/")[0]
    found = meaning_of(kind, above) if above else None
    return None if found is None else Meaning(**{**_fields(found), "own": False})


def _fields(meaning: Meaning) -> dict[str, Any]:
    return {name: getattr(meaning, name) for name in Meaning.__slots__}


@functools.cache
def _file() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


@functools.cache
def _patterns(kind: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    """The keys with a `*`, the most specific first."""
    keys = [key for key in _file().get(kind, {}).get("keys", {}) if "*" in key]
    keys.sort(key=lambda key: -len(key.replace("*", "")))
    return tuple((re.compile(re.escape(key).replace(r"\*", "[^/]*")), key) for key in keys)


def _listed(kind: str, key: str) -> Meaning | None:
    keys = _file().get(kind, {}).get("keys", {})
    name = key if key in keys else next((name for form, name in _patterns(kind) if form.fullmatch(key)), None)
    return None if name is None else _meaning(keys[name], name)


def _meaning(entry: str | Mapping[str, Any], key: str) -> Meaning:
    fields: dict[str, Any] = {"means": entry} if isinstance(entry, str) else dict(entry)
    kind, divided, means = fields.pop("means").partition(" | ")
    if not divided:
        kind, means = "int" if re.search(_INT, key) else "float" if re.search(_FLOAT, key) else "number", kind
    fields["inputs"], fields["origins"] = tuple(fields.get("inputs", ())), tuple(fields.pop("from", ()))
    return Meaning(kind=kind, means=means, **fields)


def _field(key: str) -> Meaning | None:
    """The meaning of a study's field, from its description."""
    for place, record in _RECORDS.items():
        name = key.removeprefix(place)
        if name != key:
            info = record.written_fields().get(name.partition("/")[0])
            return Meaning(means=info.description) if info is not None and info.description else None
    return None


def table(kind: str) -> Iterator[str]:
    """The lines of the reference's table of this kind."""
    yield "| key | type | meaning | made of |"
    yield "| --- | --- | --- | --- |"
    for key, entry in _file()[kind]["keys"].items():
        if kind == _COMMON and key.startswith("inputs/"):
            continue  # fields of studies, which have pages of their own
        one = _meaning(entry, key)
        cells = " | ".join(text.replace("|", "\\|") for text in (one.kind, one.means, one.formula))
        yield f"| `{key.replace('/', '.')}` | {cells} |"
