"""How modules import each other, beyond what the contracts of import-linter say: never by a string, never in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import MODULES, ROOT, nodes, tree

PACKAGES = ("simulator", "validate")
BY_STRING = {"import_module", "__import__", "exec", "runpy"}

# They run what the command line names (a program that is not ours), stand in the place of an import that such a program makes, and
# do what `python -m` would
ALLOWED = {
    "validate.capture.child",
    "validate.capture.path",
    "validate.capture.triton_absent",
    "validate.rehearse.forked",
}


@cache
def modules() -> Mapping[str, ast.Module]:
    """Every module's tree by its dotted name; a package by its own."""
    return {_name(path): tree(path.read_text(encoding="utf-8")) for path in MODULES}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_imported_by_a_string(package: str) -> None:
    found = [
        f"{name}:{node.lineno}"
        for path in MODULES
        if (name := _name(path)).partition(".")[0] == package and name not in ALLOWED
        for node in nodes(path.read_text(encoding="utf-8"))
        if isinstance(node, ast.Name | ast.Attribute | ast.alias) and _last_word(node) in BY_STRING
    ]
    assert not found


def _last_word(node: ast.Name | ast.Attribute | ast.alias) -> str:
    match node:
        case ast.Name(id=word):
            return word
        case ast.Attribute(attr=word):
            return word
        case ast.alias(name=word):
            return word
    raise AssertionError(node)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Those inside functions and those for type checkers count too."""
    graph = {name: set(_imported_by(name, found)) - {name} for name, found in modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        pytest.fail(" <- ".join(exc.args[1]))


def _imported_by(name: str, tree: ast.Module) -> Iterator[str]:
    for statement in _statements(tree.body):
        match statement:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name in modules())
            case ast.ImportFrom(module=str(source), names=names, level=0) if source in modules():
                inside = [f"{source}.{alias.name}" for alias in names]
                yield from (module if module in modules() else source for module in inside)
            case ast.ImportFrom(level=level) if level:
                pytest.fail(f"{name} imports relatively")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's statements, also those inside functions and those for type checkers."""
    for statement in body:
        match statement:
            case ast.If(body=then, orelse=rest):
                yield from _statements([*then, *rest])
            case ast.Try(body=then, handlers=handlers, orelse=rest):
                yield from _statements([*then, *rest, *(line for handler in handlers for line in handler.body)])
            case ast.Match(cases=cases):
                yield from _statements([line for case in cases for line in case.body])
            case (
                ast.FunctionDef(body=then)
                | ast.AsyncFunctionDef(body=then)
                | ast.With(body=then)
                | ast.For(body=then)
                | ast.ClassDef(body=then)
            ):
                yield from _statements(then)
            case _:
                yield statement
