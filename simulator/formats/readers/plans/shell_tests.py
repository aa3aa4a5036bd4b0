"""Conditions of a shell script that its own variables settle: `[ "$X" = y ]`, `[[ $N -gt 1 ]]`, `-z`, `-n`, `!`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from simulator.formats.readers.plans.shell_words import Word

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


def holds(commands: Sequence[Sequence[Word]], joins: Sequence[str] = ()) -> bool | None:
    """Whether a condition holds: simple tests of known words, joined by && and ||; None if it is anything else.

    joins: what stands before each command behind the first; inside brackets too, where && would bind closer.
    """
    if not commands or len(joins) != len(commands) - 1 or not set(joins) <= {"&&", "||"}:
        return None
    results, brackets = list[bool | None](), ""
    for words in commands:
        result, brackets = _test(words, brackets)
        if brackets and len(set(joins)) > 1:
            return None
        results.append(result)
    found = results[0]
    for join, result in zip(joins, results[1:], strict=True):
        found = _either(found, result) if join == "||" else _both(found, result)
    return None if brackets else found


def _test(words: Sequence[Word], opened: str) -> tuple[bool | None, str]:
    """(value of one test, the bracket that stays open behind it)."""
    texts = [word.text for word in words]
    if not opened and texts[:1] == ["test"]:
        inside = texts[1:]
    elif opened or texts[:1] in (["["], ["[["]):
        opened, inside = opened or texts[0], texts if opened else texts[1:]
        if inside[-1:] == [{"[": "]", "[[": "]]"}[opened]]:
            opened, inside = "", inside[:-1]
    else:
        return None, ""
    if any(word.unknown for word in words):
        return None, opened
    if inside[:1] == ["!"]:
        found = _simple(inside[1:])
        return (None if found is None else not found), opened
    return _simple(inside), opened


def _either(one: bool | None, two: bool | None) -> bool | None:  # noqa: FBT001  values of conditions
    return True if one or two else None if None in (one, two) else False


def _both(one: bool | None, two: bool | None) -> bool | None:  # noqa: FBT001
    return False if one is False or two is False else None if None in (one, two) else True


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
