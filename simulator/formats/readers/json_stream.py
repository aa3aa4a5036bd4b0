"""A large JSON document read piece by piece: one array of it is never held as a whole.

The top level is an object with that array under a known key (other values are small), or the array itself.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from simulator.base.files import ordinary

CHUNK = 2**20
MAX_VALUE = 2**24  # characters of one value: an event has some hundred
_NUMBER = 64  # characters within which a number has ended
_NO_SPACE = re.compile(r"[^ \t\r\n]")


class Broken(ValueError):  # noqa: N818  an end, reported to the reader
    """The document ends early or is no JSON from here on."""


def open_text(path: Path) -> TextIO:
    """The file's text, gzipped or not; bytes that are no UTF-8 are replaced. Raises OSError."""
    with ordinary(path).open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    raw = gzip.open(path, "rb") if zipped else path.open("rb")  # noqa: SIM115  closed by the wrapper
    return TextIOWrapper(raw, encoding="utf-8", errors="replace")


class JsonStream:
    """Values of a document, in order."""

    def __init__(self, file: TextIO, key: str) -> None:
        self._file = file
        self._key = key
        self._text = ""
        self._at = 0
        self._read = 0
        self._decode = json.JSONDecoder().raw_decode
        self.head: dict[str, Any] = {}

    @property
    def position(self) -> int:
        """Characters read so far."""
        return self._read - len(self._text) + self._at

    def items(self) -> Iterator[Any]:
        """The array's elements; the other values are in `head` when they have been met. Raises Broken."""
        first = self._peek()
        if first == "[":
            yield from self._array()
            return
        if first != "{":
            raise Broken("it begins with neither { nor [")
        self._at += 1
        while self._peek() != "}":
            name = self._value()
            if not isinstance(name, str) or self._peek() != ":":
                raise Broken("a key is missing")
            self._at += 1
            if name == self._key and self._peek() == "[":
                yield from self._array()
            else:
                self.head[name] = self._value()
            if self._peek() == ",":
                self._at += 1

    def _array(self) -> Iterator[Any]:
        self._at += 1
        while self._peek() != "]":
            yield self._value()
            if self._peek() == ",":
                self._at += 1
        self._at += 1

    def _peek(self) -> str:
        """The next character that is no space. Raises Broken at the end."""
        while (found := _NO_SPACE.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not self._more():
                raise Broken("it ends early")
        self._at = found.start()
        return found.group()

    def _more(self) -> bool:
        """Read more text; text already used is dropped."""
        try:
            chunk = self._file.read(CHUNK)
        except (OSError, EOFError, zlib.error) as exc:  # gzip ends early, or is damaged
            raise Broken(str(exc)) from None
        self._text = self._text[self._at :] + chunk
        self._at = 0
        self._read += len(chunk)
        return bool(chunk)

    def _value(self) -> Any:  # noqa: ANN401  any JSON
        self._peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except RecursionError:
                raise Broken("a value is nested too deeply") from None
            except ValueError as exc:
                if len(self._text) - self._at > MAX_VALUE:
                    raise Broken(f"a value is longer than {MAX_VALUE} characters, or damaged") from None
                if not self._more():
                    raise Broken(f"it ends early ({exc})") from None
                continue
            cut = isinstance(value, (int, float)) and len(self._text) - self._at < _NUMBER  # it may go on: -1|.5
            length = end - self._at
            if cut and self._more():
                continue
            self._at += length  # reading on has moved the text
            return value
