"""Sums that are equal to the last bit under every Python version.

Since 3.12 the builtin `sum` carries the rounding errors of floats along (github:python/cpython, gh-100425), and 3.11 does not: the
same study then printed another last digit.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import reduce
from typing import TypeVar

T = TypeVar("T")


def summed(values: Iterable[T], start: float = 0) -> T:
    """`values`, numbers, added from left to right, each rounded as it is added."""
    found: T = reduce(operator.add, values, start)  # type: ignore[assignment]  # of no values, the start
    return found
