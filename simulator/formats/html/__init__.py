"""Answers as pages: one file each that opens anywhere, asks no network for anything, and holds the JSON it shows.

Templates and scripts lie beside this module. A page is the same bytes for the same answer. The browser is told to load
nothing (Content-Security-Policy) and to run and style only what stands in the file, by its hash; every word of an answer
is escaped (Jinja2's autoescape, and no `<` inside the JSON).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from simulator.base.files import write_whole
from simulator.base.units import counted
from simulator.formats.answer_keys import Meaning, beside, drawn_meaning, key_of, meaning_of
from simulator.formats.html.figures import found, shown, unit_of, words

__all__ = ["MOST_BYTES", "page", "write_page"]

MOST_BYTES: Final = 1_000_000  # of a page
_HERE: Final = Path(__file__).parent
# Of what scripts and pictures leave: an answer's rows stand in the page as JSON and, up to some hundred, as a table; where that
# is too much still, fewer
_List = tuple[int, str, list[Any], int]  # bytes, name, rows and how many they were
_SHARES: Final = (0.42, 0.25, 0.12, 0.05)
_SCRIPTS: Final = (
    *("format", "scale", "bars", "points", "dom", "tables", "numbers", "memory", "interval"),
    *("timeline_plot", "timeline", "pipeline", "matrix", "node", "points_plot", "bars_plot", "record", "charts"),
)
# scripts of a kind of page
_FURTHER: Final = {"explore": ("explored", "whatif_plot", "whatif"), "live": ("toml", "completion", "live")}
_ALLOWED: Final = {"live": "connect-src 'self'; frame-src 'self'; "}  # beyond what stands in a page
_ANSWERS: Final = {"live": "predict"}  # kinds of page that show an answer of another kind
_UNDRAWN: Final = dict.fromkeys(("memory", "timeline", "traffic", "pipeline", "record"))
_ESCAPES: Final = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def write_page(path: Path, kind: str, answer: Mapping[str, Any], drawing: Mapping[str, Any] | None = None) -> None:
    """Write the page of an answer whole. Raises InputError, at --html, where the file cannot be written."""
    write_whole(path, page(kind, answer, drawing), "--html")


def page(kind: str, answer: Mapping[str, Any], drawing: Mapping[str, Any] | None = None) -> str:
    """The page of an answer. kind: of templates/KIND.html. answer: as `--json` prints it. drawing: what pictures need beside it."""
    script = _script((*_SCRIPTS, *_FURTHER.get(kind, ()), "main"))
    parts = _Parts(kind, script, _static("page.css"), _embedded(drawing or {}), {**_UNDRAWN, **(drawing or {})})
    room = MOST_BYTES - sum(len(one.encode()) for one in (parts.script, parts.style, parts.drawn))
    document: dict[str, Any] = json.loads(json.dumps(answer))
    total, lists = _size(document), list[_List]()
    if total > min(_SHARES) * room:
        lists = sorted(_lists(document), key=lambda one: -one[0])
    text = ""
    for share in _SHARES:
        cut = _cut(lists, total, int(room * share))
        text = parts.page(document, cut)
        if len(text.encode()) <= MOST_BYTES or not cut:  # nothing to cut: another share cuts nothing either
            break
    return text


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a page is made of besides its answer. drawn: `drawing` as JSON."""

    kind: str
    script: str
    style: str
    drawn: Markup
    drawing: Mapping[str, Any]

    def page(self, answer: Mapping[str, Any], cut: str) -> str:
        """The page of an answer. cut: what is said of its rows that are left out."""
        meanings = _Meanings(_ANSWERS.get(self.kind, self.kind))
        theme = _static("theme.js")
        template = _environment().get_template(f"{self.kind}.html")
        text = template.render(
            answer=answer,
            drawing=self.drawing,
            cut=cut,
            answer_json=_embedded(answer),
            drawing_json=self.drawn,
            meaning=meanings.meaning,
            drawn_meaning=meanings.drawn,
            meanings_json=lambda: _embedded(meanings.requested),
            script=Markup(self.script),  # noqa: S704  our own files
            style=Markup(self.style),  # noqa: S704
            theme=Markup(theme),  # noqa: S704
            policy=_policy((theme, self.script), self.style, _ALLOWED.get(self.kind, "")),
        )
        return text + "\n"


def _embedded(data: object) -> Markup:
    """JSON escaped so that it cannot close its script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.translate(_ESCAPES))  # noqa: S704  it holds no < any more


def _policy(scripts: tuple[str, ...], style: str, more: str) -> str:
    """Content security policy: no external resources; only these scripts and this style."""
    return (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; {more}"
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _cut(lists: Iterable[_List], total: int, most: int) -> str:
    """Cut the longest lists of a document of `total` bytes at a limit, which is no more than before; how much of them is shown."""
    cuts = list[str]()
    for size, name, rows, count in lists:
        if total <= most:
            break
        total -= size
        del rows[max(1, count * max(0, most - total) // size) :]
        total += size * len(rows) // count
        cuts.append(f"the first {len(rows):,} of {count:,} {words(name)}")
    return f"This page holds {' and '.join(cuts)}; --json has all." if cuts else ""


def _lists(document: Mapping[str, Any]) -> Iterator[_List]:
    """The lists that may be cut; of a list of one, those in it."""
    for name, value in document.items():
        if isinstance(value, list) and len(value) > 1:
            yield _size(value), name, value, len(value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from _lists(value[0])


def _size(data: object) -> int:
    return len(_embedded(data).encode())


@functools.cache
def _static(name: str) -> str:
    return (_HERE / "static" / name).read_text(encoding="utf-8").rstrip("\n")


@functools.cache
def _script(names: tuple[str, ...]) -> str:
    """The scripts as one, in a scope of its own; what only Node needs stays harmless in a browser."""
    body = "\n".join(_static(f"{name}.js") for name in names)
    return f"(() => {{\n'use strict';\n{body}\n}})();"


@functools.cache
def _environment() -> Environment:
    found_here = FileSystemLoader(_HERE / "templates")
    environment = Environment(
        loader=found_here, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"shown": lambda value, name: shown(name, value), "words": words}
    environment.globals |= {
        "found": found,
        "counted": counted,
        "beside": beside,
        "unit_of": unit_of,
        "numeric": _numeric,
    }
    return environment


def _numeric(rows: Sequence[Any], key: str) -> bool:
    """Whether a column of a table has numbers."""
    values = (found(row, key) for row in rows)
    return any(isinstance(one, int | float) and not isinstance(one, bool) for one in values)


class _Meanings:
    """What stands behind each number that a page shows. requested: of all that were, by key; pages open it from there."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.requested: dict[str, dict[str, Any]] = {}

    def meaning(self, path: str) -> Meaning | None:
        """Of the value at a path of the answer."""
        return self._noted(key_of(path), meaning_of(self._kind, key_of(path)))

    def drawn(self, path: str) -> Meaning | None:
        """Of the value at a path of the drawing."""
        return self._noted(f"drawing/{key_of(path)}", drawn_meaning(key_of(path)))

    def _noted(self, key: str, meaning: Meaning | None) -> Meaning | None:
        if meaning is not None:
            self.requested[key] = meaning.as_data()
        return meaning
