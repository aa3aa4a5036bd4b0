"""Folding: repeated captured events are stored once: layers, micro-batches, and equal stages.

Events become tokens in which numbers that grow (calls, events, the first number of a module's path) are told from where
they stand, and storages by how many of their category began after them and are alive, so that equal layers have equal
tokens in both directions. A token [-1, back, count] stands for `count` tokens that
begin `back` tokens before it, over which it may run (Ziv and Lempel, 1977). All ranks are one row of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from simulator.work.captured.capture import ARITY, Kind

AGAIN = -1
RANK = -2  # the next rank begins
NUMBER = "\0"  # in a path, where its first number stood
_MOST = 1 << 26  # tokens of a file: what claims more is damaged

Token = tuple[int, ...]

# Kinds with a value that counts up, and its place behind the kind: calls (collectives and messages), and events
_CALLS: dict[int, int] = {Kind.COLLECTIVE: 0, Kind.WAIT_WORK: 1, Kind.MESSAGE: 0}
_EVENTS: dict[int, int] = {Kind.RECORD: 0, Kind.WAIT_EVENT: 1, Kind.WAIT_HOST: 0}
NAMED: dict[int, int] = {Kind.OPERATOR: 2, Kind.COLLECTIVE: 1}  # where a kind has a name
# How many values a token has behind its kind: paths have two, storages two, where they begin three
TOKEN_VALUES = {
    **{int(kind): values + (kind in NAMED) for kind, values in ARITY.items()},
    Kind.ALLOCATE: ARITY[Kind.ALLOCATE] + 2, Kind.FREE: 2, Kind.RECORD_STREAM: 3, AGAIN: 2, RANK: 0,
}  # fmt: skip
ALONE = -(1 << 30)  # in place of a batch
_OPERATOR, _ALLOCATE, _FREE, _RECORD_STREAM = map(int, (Kind.OPERATOR, Kind.ALLOCATE, Kind.FREE, Kind.RECORD_STREAM))


def unfolded(data: Mapping[str, Any]) -> dict[str, Any]:
    """The capture's JSON with every event. Raises ValueError, TypeError, LookupError where the tokens mean nothing."""
    tokens = _again(data["tokens"])
    begins = [at for at, token in enumerate(tokens) if token[0] == RANK]
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


class Standing:
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


class _Absolute:
    """Tokens of a rank to events. names: of all ranks, filled on the way."""

    def __init__(self, paths: Sequence[str], names: dict[str, int]) -> None:
        self._paths, self._names, self._at = paths, names, Standing()
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
        named = NAMED.get(kind)
        if named is not None:
            values[named : named + 2] = [self._name(values[named], values[named + 1])]
        place, counted = at.place(kind)
        if place >= 0:
            values[place] = at.numbers[counted] - values[place]
            at.passed(counted, values[place])
        if kind == Kind.MESSAGE and values[-1] != ALONE:
            values[-1] += at.numbers["batches"]
            at.passed("batches", values[-1])
        elif kind == Kind.MESSAGE:
            values[-1] = -1
        return [kind, *values]

    def _name(self, path: int, step: int) -> int:
        text = self._paths[path]
        if NUMBER in text:
            number = self._at.paths[path] = self._at.paths.get(path, 0) + step
            text = text.replace(NUMBER, str(number), 1)
        return self._names.setdefault(text, len(self._names))


def _again(tokens: Iterable[Sequence[int]]) -> list[Token]:
    """All tokens. Raises ValueError where a repetition begins before the first."""
    found: list[Token] = []
    for token in tokens:
        if token[0] != AGAIN:
            found.append(tuple(token))
            continue
        _, back, count = token
        if not 0 < back <= len(found) or not 0 < count <= _MOST - len(found):
            raise ValueError(f"{token!r} repeats what is not there")
        for start in range(0, count, back):
            found += found[-back : len(found) - back + min(back, count - start)]
    return found
