"""Folding: repeated captured events are stored once: layers, micro-batches, and equal stages.

Events become tokens in which numbers that grow (calls, events, the first number of a module's path) are told from where
they stand, and storages by how many of their category began after them and are alive, so that equal layers have equal
tokens in both directions. A token [-1, back, count] stands for `count` tokens that
begin `back` tokens before it, over which it may run (Ziv and Lempel, 1977). All ranks are one row of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from simulator.work.captured.capture import ARITY, Kind

_AGAIN = -1
_SHORTEST = 12  # tokens that are worth a repetition
_LOOKED_AT = 4  # tokens by which a repetition is found
_RANK = -2  # the next rank begins
_NUMBER = "\0"  # in a path, where its first number stood
_MOST = 1 << 26  # tokens of a file: what claims more is damaged

Token = tuple[int, ...]

# Kinds with a value that counts up, and its place behind the kind: calls (collectives and messages), and events
_CALLS: dict[int, int] = {Kind.COLLECTIVE: 0, Kind.WAIT_WORK: 1, Kind.MESSAGE: 0}
_EVENTS: dict[int, int] = {Kind.RECORD: 0, Kind.WAIT_EVENT: 1, Kind.WAIT_HOST: 0}
_NAMED: dict[int, int] = {Kind.OPERATOR: 2, Kind.COLLECTIVE: 1}  # where a kind has a name
# How many values a token has behind its kind: paths have two, storages two, where they begin three
TOKEN_VALUES = {
    **{int(kind): values + (kind in _NAMED) for kind, values in ARITY.items()},
    Kind.ALLOCATE: ARITY[Kind.ALLOCATE] + 2, Kind.FREE: 2, Kind.RECORD_STREAM: 3, _AGAIN: 2, _RANK: 0,
}  # fmt: skip
_ALONE = -(1 << 30)  # in place of a batch
_OPERATOR, _ALLOCATE, _FREE, _RECORD_STREAM = map(int, (Kind.OPERATOR, Kind.ALLOCATE, Kind.FREE, Kind.RECORD_STREAM))


def folded(data: Mapping[str, Any]) -> dict[str, Any]:
    """A capture's JSON as its file keeps it: paths without their first number, and one row of tokens for all ranks."""
    names, paths = _split(data["names"])
    kinds = sorted({name for one in data["ranks"] for name in one["categories"].values()})
    tokens: list[Token] = []
    for one in data["ranks"]:
        tokens.append((_RANK,))
        numbers = {int(storage): kinds.index(name) for storage, name in one["categories"].items()}
        relative = _Relative(paths, numbers)
        tokens += [relative.token(event) for event in one["events"]]
    heads = [
        {name: value for name, value in one.items() if name not in ("events", "categories")} for one in data["ranks"]
    ]
    return {**data, "names": names, "kinds": kinds, "ranks": heads, "tokens": [list(one) for one in _once(tokens)]}


def unfolded(data: Mapping[str, Any]) -> dict[str, Any]:
    """The capture's JSON with every event. Raises ValueError, TypeError, LookupError where the tokens mean nothing."""
    tokens = _again(data["tokens"])
    begins = [at for at, token in enumerate(tokens) if token[0] == _RANK]
    rows = [tokens[begin + 1 : end] for begin, end in pairwise([*begins, len(tokens)])]
    if begins[:1] != [0]:
        raise ValueError("no rank begins")
    names: dict[str, int] = {}
    ranks = []
    for one, row in zip(data["ranks"], rows, strict=True):
        absolute = _Absolute(data["names"], names)
        events = absolute.events(row)
        categories = {storage: data["kinds"][kind] for storage, kind in absolute.categories.items()}
        ranks.append({**one, "events": events, "categories": categories})
    rest = {name: value for name, value in data.items() if name not in ("tokens", "kinds")}
    return {**rest, "names": list(names), "ranks": ranks}


def _split(names: Iterable[str]) -> tuple[list[str], list[tuple[int, int]]]:
    """Names with `_NUMBER` for their first number, each once; and of each name (its place there, that number or -1)."""
    numbers: dict[str, int] = {}
    paths = []
    for name in names:
        found = re.search(r"(?<!\d)(?:0|[1-9]\d{0,8})(?!\d)", name)
        text = name if found is None else f"{name[: found.start()]}{_NUMBER}{name[found.end() :]}"
        paths.append((numbers.setdefault(text, len(numbers)), -1 if found is None else int(found[0])))
    return list(numbers), paths


class _Standing:
    """How far the numbers of a rank have come, and what is alive."""

    def __init__(self) -> None:
        self.numbers = {"calls": 0, "events": 0, "batches": 0, "born": 0, "again": 0}
        self.paths: dict[int, int] = {}  # the number that each had last
        self.categories: dict[int, int] = {}  # by storage
        self.alive: dict[int, list[int]] = {}  # by category, the newest last
        self.living = set[int]()  # all of these

    def place(self, kind: int) -> tuple[int, str]:
        """Where a kind has its growing value, and what that counts; -1: nowhere."""
        if kind in _CALLS:
            return _CALLS[kind], "calls"
        return (_EVENTS[kind], "events") if kind in _EVENTS else (-1, "")

    def passed(self, counted: str, value: int) -> None:
        """A number was seen."""
        self.numbers[counted] = max(self.numbers[counted], value + 1)

    def begin(self, storage: int, category: int) -> None:
        """A storage begins, or begins again. Raises ValueError where it is there, or none."""
        numbers = self.numbers
        if storage in self.living or storage < 0:
            raise ValueError(f"storage {storage} begins twice, or is none")
        self.living.add(storage)
        if storage in self.categories:
            numbers["again"] = storage
        self.categories[storage] = category
        self.alive.setdefault(category, []).append(storage)
        if storage >= numbers["born"]:
            numbers["born"] = storage + 1


class _Relative:
    """Events of a rank to tokens. paths: of each name. categories: of each storage."""

    def __init__(self, paths: Sequence[tuple[int, int]], categories: Mapping[int, int]) -> None:
        self._paths, self._categories, self._at = paths, categories, _Standing()

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
            values[-1] = _ALONE
        place, counted = at.place(kind)
        if place >= 0:
            value, values[place] = values[place], at.numbers[counted] - values[place]
            at.passed(counted, value)
        named = _NAMED.get(kind)
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


class _Absolute:
    """Tokens of a rank to events. names: of all ranks, filled on the way."""

    def __init__(self, paths: Sequence[str], names: dict[str, int]) -> None:
        self._paths, self._names, self._at = paths, names, _Standing()
        self.categories = self._at.categories
        self._operators: dict[tuple[Token, int], list[int]] = {}  # by token and the number that its path has had last

    def events(self, row: Iterable[Token]) -> list[list[int]]:
        """Of all of a rank's tokens. Most are storages' and operators': no calls for those."""
        found: list[list[int]] = []
        numbers, alive, paths, begin = self._at.numbers, self._at.alive, self._at.paths, self._at.begin
        end = self._at.living.discard
        for token in row:
            kind = token[0]
            if kind == _FREE:
                _, category, newer = token
                storage = alive[category].pop(~newer)
                end(storage)
                found.append([kind, storage])
            elif kind == _ALLOCATE:
                _, again, step, category, size, stream = token
                storage = numbers["again" if again else "born"] + step
                begin(storage, category)
                found.append([kind, storage, size, stream])
            elif kind == _OPERATOR and token[4] == 0:  # as the same of its path before, whatever layer that is
                key = token, paths.get(token[3], 0)
                if key not in self._operators:
                    self._operators[key] = self._other(token)
                found.append(self._operators[key])
            elif kind == _RECORD_STREAM:
                _, category, newer, *rest = token
                found.append([kind, alive[category][~newer], *rest])
            else:
                found.append(self._other(token))
        return found

    def _other(self, token: Token) -> list[int]:
        kind, *values = token
        at = self._at
        named = _NAMED.get(kind)
        if named is not None:
            values[named : named + 2] = [self._name(values[named], values[named + 1])]
        place, counted = at.place(kind)
        if place >= 0:
            values[place] = at.numbers[counted] - values[place]
            at.passed(counted, values[place])
        if kind == Kind.MESSAGE and values[-1] != _ALONE:
            values[-1] += at.numbers["batches"]
            at.passed("batches", values[-1])
        elif kind == Kind.MESSAGE:
            values[-1] = -1
        return [kind, *values]

    def _name(self, path: int, step: int) -> int:
        text = self._paths[path]
        if _NUMBER in text:
            number = self._at.paths[path] = self._at.paths.get(path, 0) + step
            text = text.replace(_NUMBER, str(number), 1)
        return self._names.setdefault(text, len(self._names))


def _once(tokens: list[Token]) -> list[Token]:
    """Tokens with repetitions of at least `_SHORTEST` told as such, the nearest one first."""
    found: list[Token] = []
    seen: dict[tuple[Token, ...], int] = {}
    at, back = 0, 0
    while at < len(tokens):
        nearest = at - seen.get(tuple(tokens[at : at + _LOOKED_AT]), at)
        count, distance = max((_alike(tokens, at, one), one) for one in {nearest, back})
        if count >= _SHORTEST:
            found.append((_AGAIN, distance, count))
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


def _again(tokens: Iterable[Sequence[int]]) -> list[Token]:
    """All tokens. Raises ValueError where a repetition begins before the first."""
    found: list[Token] = []
    for token in tokens:
        if token[0] != _AGAIN:
            found.append(tuple(token))
            continue
        _, back, count = token
        if not 0 < back <= len(found) or not 0 < count <= _MOST - len(found):
            raise ValueError(f"{token!r} repeats what is not there")
        for start in range(0, count, back):
            found += found[-back : len(found) - back + min(back, count - start)]
    return found
