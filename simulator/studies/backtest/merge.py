"""Merging nested tables: a row's keys replace those below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` updated with the keys of `above`, recursively."""
    both = {**below, **above}
    for key in above.keys() & below.keys():
        if isinstance(above[key], Mapping) and isinstance(below[key], Mapping):
            both[key] = merged(below[key], above[key])
    return both
