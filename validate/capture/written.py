"""Capture files are written here: repeated events once, as `simulator.work.captured.folding` says, gzip of one JSON object."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.base.files import write_whole
from simulator.formats.readers.capture import VERSION
from simulator.work.captured.capture import Kind
from simulator.work.captured.folding import AGAIN, ALONE, NAMED, NUMBER, RANK, Standing, Token

_SHORTEST = 12  # tokens that are worth a repetition
_LOOKED_AT = 4  # tokens by which a repetition is found


def write_capture(path: Path, data: Mapping[str, Any]) -> None:
    """The file, whole or not at all; the same capture gives the same bytes. Raises InputError."""
    text = json.dumps(folded(data) if data.get("version") == VERSION else data, separators=(",", ":")).encode()
    write_whole(path, gzip.compress(text, mtime=0), "-o")


def folded(data: Mapping[str, Any]) -> dict[str, Any]:
    """A capture's JSON as its file keeps it: paths without their first number, and one row of tokens for all ranks."""
    names, paths = _split(data["names"])
    kinds = sorted({name for one in data["ranks"] for name in one["categories"].values()})
    tokens: list[Token] = []
    for one in data["ranks"]:
        tokens.append((RANK,))
        numbers = {int(storage): kinds.index(name) for storage, name in one["categories"].items()}
        relative = _Relative(paths, numbers)
        tokens += [relative.token(event) for event in one["events"]]
    heads = [
        {name: value for name, value in one.items() if name not in ("events", "categories")} for one in data["ranks"]
    ]
    return {**data, "names": names, "kinds": kinds, "ranks": heads, "tokens": [list(one) for one in _once(tokens)]}


def _split(names: Iterable[str]) -> tuple[list[str], list[tuple[int, int]]]:
    """Names with `NUMBER` for their first number, each once; and of each name (its place there, that number or -1)."""
    numbers: dict[str, int] = {}
    paths = []
    for name in names:
        found = re.search(r"(?<!\d)(?:0|[1-9]\d{0,8})(?!\d)", name)
        text = name if found is None else f"{name[: found.start()]}{NUMBER}{name[found.end() :]}"
        paths.append((numbers.setdefault(text, len(numbers)), -1 if found is None else int(found[0])))
    return list(numbers), paths


class _Relative:
    """Events of a rank to tokens. paths: of each name. categories: of each storage."""

    def __init__(self, paths: Sequence[tuple[int, int]], categories: Mapping[int, int]) -> None:
        self._paths, self._categories, self._at = paths, categories, Standing()

    def token(self, event: Sequence[int]) -> Token:
        kind, *values = event
        at = self._at
        if kind == Kind.ALLOCATE:
            return (kind, *self._begun(values[0]), *values[1:])
        if kind in (Kind.FREE, Kind.RECORD_STREAM):
            return (kind, *self._found(values[0], ends=kind == Kind.FREE), *values[1:])
        if kind == Kind.MESSAGE and values[-1] >= 0:
            batch, values[-1] = values[-1], values[-1] - at.numbers["batches"]
            at.passed("batches", batch)
        elif kind == Kind.MESSAGE:
            values[-1] = ALONE
        place, counted = at.place(kind)
        if place >= 0:
            value, values[place] = values[place], at.numbers[counted] - values[place]
            at.passed(counted, value)
        named = NAMED.get(kind)
        if named is not None:
            values[named : named + 1] = self._path(values[named])
        return (kind, *values)

    def _begun(self, storage: int) -> tuple[int, int, int]:
        """(whether it begins again, its number from the newest or from the last that did, its category)."""
        again, category = storage in self._at.categories, self._categories[storage]
        offset = storage - self._at.numbers["again" if again else "born"]
        self._at.begin(storage, category)
        return int(again), offset, category

    def _found(self, storage: int, *, ends: bool) -> tuple[int, int]:
        """(its category, how many of that are newer)."""
        category = self._categories[storage]
        row = self._at.alive[category]
        newer = row[::-1].index(storage)
        if ends:
            del row[len(row) - 1 - newer]
            self._at.living.discard(storage)
        return category, newer

    def _path(self, name: int) -> tuple[int, int]:
        path, number = self._paths[name]
        if number < 0:
            return path, 0
        step = number - self._at.paths.get(path, 0)
        self._at.paths[path] = number
        return path, step


def _once(tokens: list[Token]) -> list[Token]:
    """Tokens with repetitions of at least `_SHORTEST` told as such, the nearest one first."""
    found: list[Token] = []
    seen: dict[tuple[Token, ...], int] = {}
    at, back = 0, 0
    while at < len(tokens):
        nearest = at - seen.get(tuple(tokens[at : at + _LOOKED_AT]), at)
        count, distance = max((_alike(tokens, at, one), one) for one in {nearest, back})
        if count >= _SHORTEST:
            found.append((AGAIN, distance, count))
            back = distance
        else:
            found.append(tokens[at])
            count = 1
        for index in range(at, at + count):
            seen[tuple(tokens[index : index + _LOOKED_AT])] = index
        at += count
    return found


def _alike(tokens: list[Token], at: int, back: int) -> int:
    """How many tokens from `at` on equal those `back` positions earlier."""
    count = 0
    if 0 < back <= at:
        while at + count < len(tokens) and tokens[at + count - back] == tokens[at + count]:
            count += 1
    return count
