"""Settings of a Python file, which is parsed and never run: its assignments, and the arguments of its calls."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Mapping
from typing import Any, Final

from simulator.base.errors import PlanError

_MATHS: Final = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv,
}  # fmt: skip
_MOST: Final = 2**62


def python_settings(text: str, file: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What names of the module are assigned; arguments by the last part of the callee's name, a first one without name as "".

    What is no constant stays text, as it is written: `torch.float16`. Raises PlanError where the file is no Python.
    """
    try:
        tree = ast.parse(text)
        known: dict[str, Any] = {}
        for node in tree.body:
            _assign(node, known)
        calls: dict[str, dict[str, Any]] = {}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call):
                calls.setdefault(ast.unparse(call.func).rpartition(".")[2], {}).update(_arguments(call, known))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise PlanError.at(file, f"not Python: {str(exc)[:80] or type(exc).__name__}") from None
    return known, calls


def _assign(node: ast.stmt, known: dict[str, Any]) -> None:
    match node:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(target=ast.Name(id=name), value=value)
        ):
            if value is not None:
                known[name] = _value(value, known)
        case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
            known[name] = _value(ast.BinOp(left=target, op=op, right=value), known)
        case _:
            pass


def _arguments(node: ast.Call, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"": _value(node.args[0], known) if node.args else None} | {
        one.arg: _value(one.value, known) for one in node.keywords if one.arg is not None
    }


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:  # noqa: ANN401, PLR0911  plain data of each kind
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id=name):
            return known.get(name, name)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return _values(parts, known)
        case ast.Dict(keys=keys, values=parts) if all(isinstance(key, ast.Constant) for key in keys):
            return dict(
                zip(
                    [str(key.value) for key in keys if isinstance(key, ast.Constant)],
                    _values(parts, known),
                    strict=True,
                )
            )
        case ast.Call(func=ast.Name(id="dict"), args=[]):
            return {name: one for name, one in _arguments(node, known).items() if name}
        case ast.UnaryOp(op=ast.USub(), operand=operand) if isinstance(number := _value(operand, known), int | float):
            return -number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _MATHS:
            both = _values((left, right), known)
            if all(isinstance(one, int | float) and abs(one) < _MOST for one in both) and (
                both[1] or type(op) in _SAFE
            ):
                return _MATHS[type(op)](*both)
    return ast.unparse(node)


_SAFE: Final = (ast.Add, ast.Sub, ast.Mult)


def _values(parts: Iterable[ast.expr], known: Mapping[str, Any]) -> list[Any]:
    return [_value(one, known) for one in parts]
