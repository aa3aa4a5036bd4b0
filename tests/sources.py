"""The product's own source as trees, parsed once for all tests that look at it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
MODULES: Final = sorted(path for package in ("simulator", "validate") for path in (ROOT / package).rglob("*.py"))


@cache
def tree(source: str) -> ast.Module:
    """A module's source as a tree. Nobody changes it."""
    return ast.parse(source)


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Every node of a module's tree."""
    return tuple(ast.walk(tree(source)))
