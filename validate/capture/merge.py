"""Merge: what several ranks did as one file. Operators, names and groups that they share are written once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from simulator.work.captured.capture import Kind

_RANK = ("rank", "steady", "categories", "answers")


def merged(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tables of all ranks together, and each rank with events that look into them."""
    tables: dict[str, _Table] = {name: _Table() for name in ("signatures", "names", "groups")}
    found = []
    costs: dict[str, Any] = {}
    for one in ranks:
        new = {name: [table.add(each) for each in one[name]] for name, table in tables.items()}
        events = [_moved(event, new["signatures"], new["names"], new["groups"]) for event in one["events"]]
        costs |= {str(new["signatures"][int(number)]): cost for number, cost in one.get("costs", {}).items()}
        facts = {name: one[name] for name in (*_RANK, "host") if name in one}
        found.append({**facts, "events": events})
    optional = {"costs": costs} if costs else {}
    return {**{name: table.entries for name, table in tables.items()}, **optional, "ranks": found}


def _moved(event: list[int], signatures: list[int], names: list[int], groups: list[int]) -> list[int]:
    kind = event[0]
    if kind == Kind.OPERATOR:
        return [kind, signatures[event[1]], event[2], names[event[3]], event[4]]
    if kind == Kind.COLLECTIVE:
        return [kind, event[1], names[event[2]], groups[event[3]], *event[4:]]
    if kind == Kind.MESSAGE:
        return [kind, event[1], event[2], groups[event[3]], *event[4:]]
    return event


class _Table:
    """Entries, each once."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def add(self, entry: Any) -> int:
        """The number of an entry."""
        key = _frozen(entry)
        if key not in self._numbers:
            self._numbers[key] = len(self.entries)
            self.entries.append(entry)
        return self._numbers[key]


def _frozen(value: Any) -> Hashable:
    return tuple(map(_frozen, value)) if isinstance(value, list) else (type(value), value)
