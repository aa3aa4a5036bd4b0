"""A configuration's keys under its family's defaults, and the expressions over them. Faults are collected, not raised."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Final

from simulator.base.errors import Fault
from simulator.spec.model.hf_config.families import Family, key_facts
from simulator.spec.model.hf_config.functions import FUNCTIONS, WrongValueError, short

_OPERATORS: Final[dict[type[ast.AST], Callable[..., Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.USub: operator.neg, ast.Not: operator.not_, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
}  # fmt: skip


class Keys:
    """Typed access to a file's keys.

    sizes_default: a size that the file does not state is its class's. assumed: those, with their values. renamed: keys that
    stand in the file under another name, with that name. read: names of the file that were looked at.
    """

    def __init__(self, config: Mapping[str, Any], place: str, family: Family, *, sizes_default: bool) -> None:
        self._config, self._place, self._family, self._sizes_default = config, place, family, sizes_default
        self.faults: list[Fault] = []
        self.assumed: dict[str, Any] = {}
        self.renamed: dict[str, str] = {}
        self.read: set[str] = set()

    def fault(self, key: str, problem: str, remedy: str = "") -> None:
        self.faults.append(Fault(place=f"{self._place}: {key}", problem=problem, remedy=remedy))

    def evaluate(self, expression: object) -> Any:  # noqa: ANN401  a field may be of any type
        """What an expression of the family's table comes to; a value that is none is itself."""
        return self._of(parsed(expression)) if isinstance(expression, str) else expression

    def fields(self) -> dict[str, Any]:
        """The fields and tables of the family's expressions, without those that come to None."""
        known, fields = self._family, dict[str, Any]()
        for table, written in (("", known.fields), *known.tables.items()):
            found = {}
            for field, expression in written.items():
                try:
                    found[field] = self.evaluate(expression)
                except WrongValueError:  # reported already
                    continue
                if field == "when" and not found["when"]:
                    break
            if found.pop("when", True):
                found = {field: value for field, value in found.items() if value is not None}
                fields |= {table: found} if table else found
        for rule in known.refuse:
            if not self.faults and self.holds(rule["when"]):
                self.fault(rule["key"], rule["problem"], rule["remedy"])
        return fields

    def holds(self, condition: object) -> bool:
        """A condition of the family's table; one over a value that cannot stand there, which is a fault, does not."""
        try:
            return bool(self.evaluate(condition))
        except WrongValueError:  # reported already
            return False

    def value(self, key: str) -> Any:  # noqa: ANN401  JSON is any of six types
        """The file's value, else the default of the family's class; None if there is neither."""
        name, found = self._stated(key)
        default = self._family.values.get(key)
        if found is None:
            if name in self._written(key) and key in key_facts()["nullable"]:
                return None
            return self._default(key, default)
        self.read.add(name.partition(".")[0])
        if name != key:
            self.renamed[key] = name
        problem = _wrong(key, found, default)
        if problem:
            self.fault(name, f"{short(found)} {problem}")
            return default if default is not None else 1
        return found

    def stated(self, key: str) -> bool:
        """The key is there, under any name, and not null."""
        return self._stated(key)[1] is not None

    def _written(self, key: str) -> list[str]:
        """Names of the key, this first, that the file has."""
        return [name for name in (key, *key_facts()["synonyms"].get(key, ())) if _at(self._config, name) is not _ABSENT]

    def _stated(self, key: str) -> tuple[str, Any]:
        found = ((name, _at(self._config, name)) for name in self._written(key))
        return next(((name, value) for name, value in found if value is not None), (key, None))

    def _default(self, key: str, default: Any) -> Any:  # noqa: ANN401  as value's
        size = key in key_facts()["sizes"] and default != 0
        if not size and (not isinstance(default, int) or default <= 1 or key in key_facts()["quiet"]):
            return default
        if size and (default is None or not self._sizes_default):
            usual = f"; {self._family.config_class}'s own is {default}" if default else ""
            self.fault(key, "is missing", f"a positive integer{usual}")
            return default or 1
        self.assumed[key] = default
        return default

    def _of(self, node: ast.expr) -> Any:  # noqa: ANN401, PLR0911  as evaluate's; a case a kind of node
        match node:
            case ast.Constant(value):
                return value
            case ast.Name() | ast.Attribute():
                return self.value(ast.unparse(node))
            case ast.BoolOp(op, values):
                return self._either(values, isinstance(op, ast.Or))
            case ast.BinOp(left, op, right):
                return self._applied(op, left, right)
            case ast.UnaryOp(op, operand):
                return self._applied(op, operand)
            case ast.Compare(left, ops, comparators):
                sides = (left, *comparators)
                return all(self._applied(op, *sides[i : i + 2]) for i, op in enumerate(ops))
            case ast.IfExp(test, body, orelse):
                return self._of(body if self._of(test) else orelse)
            case ast.Call(ast.Name(name), arguments):
                return self._called(name, arguments)
        raise TypeError(ast.unparse(node))

    def _either(self, nodes: list[ast.expr], last: bool) -> Any:  # noqa: ANN401, FBT001  as evaluate's
        """The first value that is as true as `last`, else the last one."""
        first, *rest = nodes
        value = self._of(first)
        return value if bool(value) == last or not rest else self._either(rest, last)

    def _applied(self, operation: ast.AST, *operands: ast.expr) -> Any:  # noqa: ANN401  as evaluate's
        values = [self._of(each) for each in operands]
        try:
            return _OPERATORS[type(operation)](*values)
        except (TypeError, ZeroDivisionError, OverflowError):
            raise self._at_operand(WrongValueError("is not a number that fits the others"), operands) from None

    def _at_operand(self, wrong: WrongValueError, operands: Iterable[ast.expr]) -> WrongValueError:
        """The fault of a function or an operator, at the first key that it was given."""
        names = [ast.unparse(n) for a in operands for n in ast.walk(a) if isinstance(n, ast.Name | ast.Attribute)]
        self.fault(next(self._stated(n)[0] for n in names if n not in FUNCTIONS), wrong.problem, wrong.remedy)
        return wrong

    def _called(self, name: str, arguments: list[ast.expr]) -> Any:  # noqa: ANN401  as evaluate's
        values = [self._of(each) for each in arguments]
        if name == "stated":
            return self.stated(*values)
        try:
            return FUNCTIONS[name](*values)
        except WrongValueError as wrong:
            raise self._at_operand(wrong, arguments) from None
        except (TypeError, ValueError, ArithmeticError):
            raise self._at_operand(WrongValueError("is not a value that can stand here"), arguments) from None


_ABSENT: Final = object()
MAX_LAYERS: Final = 10_000  # of a Model


@cache
def parsed(expression: str) -> ast.expr:
    """An expression of a family's table."""
    return ast.parse(expression, mode="eval").body


def _at(config: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401  as value's
    """The value at a dotted name."""
    found: object = config
    for part in name.split("."):
        found = found.get(part, _ABSENT) if isinstance(found, Mapping) else _ABSENT
    return found


def _wrong(key: str, value: object, default: object) -> str:
    """The fault of a value's type or sign, judged by the class's default; "" if there is none."""
    if key in key_facts()["open"] or isinstance(default, str | list):
        return ""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "is neither true nor false"
    if isinstance(default, float):
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30
        return "" if number else "is not a number above 0"
    if default is None and not isinstance(value, int):
        return "" if isinstance(value, str | dict | list | float) else "is not a positive integer"
    if key == "num_hidden_layers" and isinstance(value, int) and value > MAX_LAYERS:
        return f"is more than {MAX_LAYERS} layers"
    least = 0 if default == 0 or key in key_facts()["zero"] else 1
    count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    return "" if count or (default is None and isinstance(value, bool)) else "is not a positive integer"
