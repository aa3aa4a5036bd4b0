"""Nested tables of keys: the ones that a row states over the ones that they replace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` with the keys of `above` in their place, table by table."""
    both = {**below, **above}
    for key in above.keys() & below.keys():
        if isinstance(above[key], Mapping) and isinstance(below[key], Mapping):
            both[key] = merged(below[key], above[key])
    return both
