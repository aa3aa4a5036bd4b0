"""Conditions of a shell script that its own variables settle: `[ "$X" = y ]`, `[[ $N -gt 1 ]]`, `-z`, `-n`, `!`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from simulator.readers.plans.shell_words import Word

_NUMBERS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_TEXTS: Final[Mapping[str, Callable[[str, str], bool]]] = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_DIGITS: Final = 18


@dataclass
class Block:
    """An open block. end: the word that closes it. live: what is in it runs (None: only a run knows).

    settled: some arm of the condition ran, so no later one does; open: nobody knows whether one did. begun: commands
    before its condition.
    """

    end: str
    line: int
    live: bool | None = None
    settled: bool = False
    open: bool = False
    begun: int = 0

    def begin_arm(self, result: bool | None) -> None:  # noqa: FBT001  the condition's value
        """`then`: the arm runs if its condition holds and no earlier arm ran."""
        self.live = False if self.settled or result is False else None if self.open else result
        self.settled = self.settled or self.live is True
        self.open = self.open or result is None

    def begin_else(self) -> None:
        """`else`: the last arm runs if no other did."""
        self.live = False if self.settled else None if self.open else True


def holds(commands: Sequence[Sequence[Word]]) -> bool | None:
    """Whether a condition holds; None where it is more than one simple test of known words."""
    if len(commands) != 1:
        return None
    words = list(commands[0])
    if not words or any(word.unknown for word in words):
        return None
    texts = [word.text for word in words]
    if texts[0] == "test":
        inside = texts[1:]
    elif (texts[0], texts[-1]) in {("[", "]"), ("[[", "]]")}:
        inside = texts[1:-1]
    else:
        return None
    if inside and inside[0] == "!":
        found = _simple(inside[1:])
        return None if found is None else not found
    return _simple(inside)


def _simple(texts: Sequence[str]) -> bool | None:
    match texts:
        case ["-n", text]:
            return bool(text)
        case ["-z"]:
            return True
        case ["-z", text]:
            return not text
        case [one, sign, two] if sign in _NUMBERS and _is_number(one) and _is_number(two):
            return _NUMBERS[sign](int(one), int(two))
        case [one, sign, two] if sign in _TEXTS and not set(two) & set("*?["):
            return _TEXTS[sign](one, two)
        case _:
            return None


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) <= _DIGITS
