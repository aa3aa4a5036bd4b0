"""Words of a shell after expansion: which blanks split, what is not known, and the value of an arithmetic expression."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

MARK: Final = 0xE000  # private-use characters stand for what is not known; the index is into Shell.unknown

Char = tuple[str, int]  # a character and the line where it stands
Chars = list[Char]

_OPERATORS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Unknown:
    """Something that only a run knows. kind: variable (unset in the file), condition, command, arguments.

    options: of a variable that a condition sets: the options among the words that it may hold.
    """

    what: str
    kind: str
    line: int
    options: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command after expansion. unknown: what in it is not known."""

    text: str
    line: int
    unknown: tuple[Unknown, ...] = ()


def fields(chars: Chars) -> list[Chars]:
    """Split at the blanks that no quote protects, as a shell does after expansion."""
    found: list[Chars] = []
    current: Chars | None = None
    for char, line in chars:
        if char in " \t\n\r\x02":
            current = None
            continue
        if current is None:
            current = []
            found.append(current)
        current.append((char, line))
    return found


def words_of(chars: Chars, unknown: Sequence[Unknown]) -> list[Word]:
    """The words of an expansion; `unknown` is what the marks in it stand for."""
    return [_word(part, unknown) for part in fields(chars)]


def _word(chars: Chars, unknown: Sequence[Unknown]) -> Word:
    seen = tuple(unknown[index] for c, _ in chars if 0 <= (index := ord(c) - MARK) < len(unknown))
    line = next((line for c, line in chars if c != "\x01"), chars[0][1])
    return Word("".join(bare(c) for c, _ in chars if c != "\x01"), line, seen)


_BLANKS: Final = {" ": "\uf700", "\t": "\uf701", "\n": "\uf702", "\r": "\uf703"}
_BACK: Final = {kept: blank for blank, kept in _BLANKS.items()}


def kept(char: str) -> str:
    """A blank that a quote protects from splitting."""
    return _BLANKS.get(char, char)


def bare(char: str) -> str:
    """The blank that a kept one stands for."""
    return _BACK.get(char, char)


def integer(node: ast.expr) -> int:
    """The value of an arithmetic expression of whole numbers. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -integer(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = integer(node.left), integer(node.right)
        if max(abs(left), abs(right)) > 2**62:
            raise ValueError(node)
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError(node)
