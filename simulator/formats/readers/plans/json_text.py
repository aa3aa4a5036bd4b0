"""JSON as people keep it: comments, commas before a closing bracket, and the placeholders of a template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from simulator.formats.readers.plans.reading import AUTO

_TOKEN: Final = re.compile(
    r"""(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<comment>//[^\n]*|/\*.*?\*/|\#[^\n]*)|(?P<comma>,)(?=(?:\s|//[^\n]*|/\*.*?\*/|\#[^\n]*)*[\]}])
    |(?P<word>\$\{?[A-Za-z_]\w*\}?|<[A-Za-z][\w .-]*>|(?<![\w.+-])[A-Za-z_]\w*)""",
    re.DOTALL | re.VERBOSE,
)
_KNOWN: Final = {"true", "false", "null", "NaN", "Infinity"}
OPENS: Final = re.compile(r"(?:\s|//[^\n]*\n|/\*.*?\*/)*\{", re.DOTALL)  # a file that holds an object


def strict(text: str, define: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """The text as JSON has it, and its placeholders: words outside quotes. What `define` does not give is "auto"."""
    found: list[str] = []

    def one(match: re.Match[str]) -> str:
        if match["comment"] or match["comma"]:
            return " " * len(match.group())
        word = match["word"]
        if word is None or word in _KNOWN:
            return match.group()
        name = word.strip("${}<>")
        if name in define:
            return define[name] if _is_plain(define[name]) else json.dumps(define[name])
        found.append(name)
        return json.dumps(AUTO)

    return _TOKEN.sub(one, text), tuple(dict.fromkeys(found))


def _is_plain(value: str) -> bool:
    return re.fullmatch(r"true|false|null|-?\d[\d.]*(?:[eE][+-]?\d+)?", value) is not None
