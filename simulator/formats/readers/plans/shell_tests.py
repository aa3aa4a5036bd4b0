"""Conditions of a shell script that its own variables settle: `[ "$X" = y ]`, `[[ $N -gt 1 && … ]]`, `-z`, `-n`, `!`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

from simulator.formats.readers.plans.shell_words import Chars, Word

_NUMBERS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_TEXTS: Final[Mapping[str, Callable[[str, str], bool]]] = {
    "=": fnmatchcase,
    "==": fnmatchcase,
    "!=": lambda one, two: not fnmatchcase(one, two),
}
_CLOSES: Final = {"[": "]", "[[": "]]"}
_DIGITS: Final = 18

Place = tuple[int, int]  # a character's index, and its line


@dataclass
class Block:
    """An open block. end: the word that closes it. live: what is in it runs (None: only a run knows).

    settled: some arm of the condition ran, so no later one does; open: nobody knows whether one did. begun: commands
    before its condition; testing: the condition is being read. assumed: the condition holds only if a variable is
    unset, as it is in the file. doubtful: `open` before this arm. tested: variables of this arm's condition, with what
    they are compared with. start: where a loop begins again. name, values: a `for`'s variable, and what is still to
    come. subject: a `case`'s word.
    """

    end: str
    line: int
    live: bool | None = None
    settled: bool = False
    open: bool = False
    begun: int = 0
    testing: bool = False
    assumed: bool = False
    doubtful: bool = False
    tested: list[tuple[str, str]] = field(default_factory=list)
    start: Place | None = None
    until: bool = False
    name: str = ""
    values: list[Chars] = field(default_factory=list)
    subject: Word | None = None

    def begin_arm(self, result: bool | None) -> None:  # noqa: FBT001  the condition's value
        """The arm runs if its condition holds and no earlier arm ran."""
        self.doubtful, self.testing = self.open, False
        self.live = False if self.settled or result is False else None if self.open else result
        self.settled = self.settled or self.live is True
        self.open = self.open or result is None

    def begin_else(self) -> None:
        """`else`: the last arm runs if no other did."""
        self.live = False if self.settled else None if self.open else True
        self.tested = []

    def leave(self) -> None:
        """The script ends in this arm, which no run that trains takes."""
        self.live, self.open = False, self.doubtful
        self.settled = self.settled and not self.assumed


@dataclass
class Conditions:
    """Judges conditions. tested: (variable, what it is compared with) of the last one; assumed: it took one as unset."""

    tested: list[tuple[str, str]] = field(default_factory=list)
    assumed: list[Word] = field(default_factory=list)

    def hold(self, commands: Sequence[Sequence[Word]], joins: Sequence[str] = ()) -> bool | None:
        """Whether simple tests of known words, joined by && and ||, hold; None if it is anything else."""
        self.tested, self.assumed = [], []
        if not commands or len(joins) != len(commands) - 1 or not set(joins) <= {"&&", "||"}:
            return None
        found = self.one(commands[0])
        for join, words in zip(joins, commands[1:], strict=True):
            result = self.one(words)
            found = either(found, result) if join == "||" else both(found, result)
        return found

    def one(self, words: Sequence[Word]) -> bool | None:
        """One command as a condition; None where only a run knows."""
        first = words[0].text if words else ""
        if first == "!":
            return _not(self.one(words[1:]))
        if first in ("true", ":", "false"):
            return first != "false"
        if first == "((" and len(words) == 2 and not words[1].unknown:
            return words[1].text != "0"
        if first == "test":
            return self._any(words[1:])
        if first in _CLOSES and words[-1].text == _CLOSES[first]:
            return self._any(words[1:-1])
        return None

    def _any(self, words: Sequence[Word]) -> bool | None:
        """Alternatives inside brackets: && binds closer than ||."""
        found: bool | None = False
        for part in _split(words, ("||", "-o")):
            every: bool | None = True
            for piece in _split(part, ("&&", "-a")):
                every = both(every, self._simple(piece))
            found = either(found, every)
        return found

    def _simple(self, words: Sequence[Word]) -> bool | None:
        texts = [word.text for word in words]
        if texts[:1] == ["!"]:
            return _not(self._simple(words[1:]))
        if texts[:1] in (["-z"], ["-n"]) and len(words) == 2 and words[1].is_unset:
            self.assumed.append(words[1])
            return texts[0] == "-z"
        if len(words) == 3 and texts[1] in _TEXTS:
            self.tested += [(u.variable, two.text) for one, two in ((words[0], words[2]), (words[2], words[0]))
                            for u in one.unknown if not two.unknown]  # fmt: skip
        return None if any(word.unknown for word in words) else _known(texts)


def either(one: bool | None, two: bool | None) -> bool | None:  # noqa: FBT001  values of conditions
    """|| of values that may be unknown."""
    return True if one or two else None if None in (one, two) else False


def both(one: bool | None, two: bool | None) -> bool | None:  # noqa: FBT001
    """&& of values that may be unknown."""
    return False if one is False or two is False else None if None in (one, two) else True


def _not(value: bool | None) -> bool | None:  # noqa: FBT001
    return None if value is None else not value


def _split(words: Sequence[Word], signs: tuple[str, ...]) -> list[list[Word]]:
    parts: list[list[Word]] = [[]]
    for word in words:
        if word.text in signs:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _known(texts: Sequence[str]) -> bool | None:
    found: bool | None = None
    match texts:
        case ["-n", text] | [text] if text not in ("-n", "-z", "!") and not text.startswith("("):
            found = bool(text)
        case ["-z"] | ["-z", ""]:
            found = True
        case ["-z", _]:
            found = False
        case [sign, _] if sign in _TEXTS:  # an empty word that no quotes protect
            found = sign == "!="
        case [one, sign, two] if sign in _NUMBERS and _is_number(one) and _is_number(two):
            found = _NUMBERS[sign](int(one), int(two))
        case [one, sign, two] if sign in _TEXTS:
            found = _TEXTS[sign](one, two)
    return found


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) <= _DIGITS
