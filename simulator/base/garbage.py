"""A simulation makes many objects and few cycles: Python need not look for those as often as it does by itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

COLLECT: Final = 50_000, 20, 50


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Meanwhile Python looks as rarely as `COLLECT` says, unless it does so more rarely already."""
    before = gc.get_threshold()
    often = 0 < before[0] < COLLECT[0]
    if often:
        gc.set_threshold(*COLLECT)
    try:
        yield
    finally:
        if often:
            gc.set_threshold(*before)
