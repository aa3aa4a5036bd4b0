"""Words of a shell after expansion: splitting at blanks, unknown parts, and arithmetic expressions."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from simulator.base.errors import Fault, PlanError
from simulator.base.units import whole

MARK: Final = 0xE000  # private-use characters stand for what is not known; the index is into Shell.unknown

Char = tuple[str, int]  # a character and the line where it stands
Chars = list[Char]
CommandT = TypeVar("CommandT")

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

    options: of a variable that a condition sets: the options among the words that it may hold. name: the variable that
    holds it, where it has no name of its own. asks: variables that the condition tests.
    """

    what: str
    kind: str
    line: int
    options: frozenset[str] = frozenset()
    name: str = ""
    asks: frozenset[str] = frozenset()

    @property
    def variable(self) -> str:
        """Its name for `--define`; empty: it has none."""
        own = self.what.split()[0].lstrip("$") if self.kind in ("variable", "condition") else ""
        return own if own.isidentifier() or (own.isdecimal() and not self.name) else self.name


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command after expansion. unknown: its unknown parts."""

    text: str
    line: int
    unknown: tuple[Unknown, ...] = ()

    @property
    def is_unset(self) -> bool:
        """Nothing but a variable that the file does not set."""
        return len(self.text) == len(self.unknown) == 1 and self.unknown[0].kind == "variable"


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
    """The words of an expansion; `unknown`: what each placeholder in it means."""
    return [_word(part, unknown) for part in fields(chars)]


def _word(chars: Chars, unknown: Sequence[Unknown]) -> Word:
    seen = tuple(unknown[index] for c, _ in chars if 0 <= (index := ord(c) - MARK) < len(unknown))
    line = next((line for c, line in chars if c != "\x01"), chars[0][1])
    return Word("".join(unprotected(c) for c, _ in chars if c != "\x01"), line, seen)


_BLANKS: Final = {" ": "\uf700", "\t": "\uf701", "\n": "\uf702", "\r": "\uf703"}
_BACK: Final = {mark: blank for blank, mark in _BLANKS.items()}


def protected(char: str) -> str:
    """A private character in place of a blank that a quote protects from splitting."""
    return _BLANKS.get(char, char)


def unprotected(char: str) -> str:
    """The blank of a protected one; other characters unchanged."""
    return _BACK.get(char, char)


_COMPARE: Final[Mapping[type[ast.cmpop], Callable[[int, int], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def arithmetic(text: str) -> int:
    """The value of `$((…))` without variables, in Python's operators. Raises ValueError for what is not known."""
    if found := re.fullmatch(r"(?s)([^?]+)\?([^:?]+):([^:?]+)", text):
        test, yes, no = found.groups()
        return arithmetic(yes if arithmetic(test) else no)
    text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    try:
        return integer(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError, OverflowError) as exc:
        raise ValueError(text) from exc


def integer(node: ast.expr) -> int:
    """The value of an arithmetic expression of whole numbers. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        value = integer(node.operand)
        return -value if isinstance(node.op, ast.USub) else int(not value)
    if isinstance(node, ast.BoolOp):
        values = [bool(integer(value)) for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        return int(_COMPARE[type(node.ops[0])](integer(node.left), integer(node.comparators[0])))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = integer(node.left), integer(node.right)
        if max(abs(left), abs(right)) > 2**62:
            raise ValueError(node)
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError(node)


def chosen_command(commands: Sequence[CommandT], lines: Sequence[int], file: str, chosen: str) -> CommandT:
    """The only command that trains, or the one whose number is `chosen`. Raises PlanError where that does not say which."""
    if 1 <= (number := whole(chosen) or 0) <= len(commands):
        return commands[number - 1]
    if len(commands) == 1:
        return commands[0]
    problem = f"{len(commands)} commands train, at lines {', '.join(map(str, lines))}"
    remedy = f"keep one, or --define command=N, 1 to {len(commands)}"
    raise PlanError(Fault(place=file, problem=problem, remedy=remedy, flags=(("--define", "command=1"),)))
