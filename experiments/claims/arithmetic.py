"""Numbers with their interval, and the arithmetic that claims may use: + - * / and four functions of named numbers."""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

LITERALS: Final = (0, 1, 2)  # of the formula itself; any other number has a name and a source
OPERATORS: Final[dict[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
FUNCTIONS: Final[dict[str, Callable[..., float]]] = {"min": min, "max": max, "log2": math.log2, "sqrt": math.sqrt}


@dataclass(frozen=True)
class Number:
    """A figure with the ends of its 90 % interval; equal ends: it is counted, not estimated."""

    value: float
    low: float
    high: float

    @property
    def counted(self) -> bool:
        """No interval: bytes, counts and sizes that follow from the plan."""
        return self.low == self.high


def exact(value: float) -> Number:
    """A number without an interval."""
    return Number(value, value, value)


def names_in(formula: str) -> set[str]:
    """The names of a formula. Raises ValueError for anything but arithmetic with names and `LITERALS`."""
    found: set[str] = set()
    try:
        _walk(ast.parse(formula, mode="eval").body, found)
    except SyntaxError as exc:
        raise ValueError(f"{formula}: is no formula") from exc
    return found


def _walk(node: ast.expr, found: set[str]) -> None:
    match node:
        case ast.Name():
            found.add(node.id)
        case ast.Constant(value=int(value)) if value in LITERALS:
            pass
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            _walk(node.left, found)
            _walk(node.right, found)
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS and not node.keywords:
            for argument in node.args:
                _walk(argument, found)
        case _:
            raise ValueError(
                f"{ast.unparse(node)}: only + - * /, {', '.join(FUNCTIONS)}, names, and the numbers 0, 1, 2"
            )


def evaluate(formula: str, known: Mapping[str, Number]) -> Number:
    """The formula's value, and the least and most that it takes at the ends of its names' intervals.

    The ends are taken in every combination, as if the names were independent: never narrower than they are.
    """
    body = ast.parse(formula, mode="eval").body
    names = sorted(names_in(formula))
    ends = [{known[name].value, known[name].low, known[name].high} for name in names]
    reached = [_value(body, dict(zip(names, corner, strict=True))) for corner in itertools.product(*ends)]
    middle = _value(body, {name: known[name].value for name in names})
    return Number(middle, min(reached), max(reached))


def _value(node: ast.expr, known: Mapping[str, float]) -> float:
    match node:
        case ast.Name():
            return known[node.id]
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp():
            return OPERATORS[type(node.op)](_value(node.left, known), _value(node.right, known))
        case ast.Call(func=ast.Name(id=name)):
            return FUNCTIONS[name](*(_value(argument, known) for argument in node.args))
        case _:
            raise AssertionError(node)
