"""How many examples a law gets: in `ci`, whose examples are the same each time, half of its number or as few as it says; many in `nightly`."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

USUAL = 50
IN_CI = 0.5  # times as many
NIGHTLY = 20  # times as many


def load() -> None:
    """Register the profiles, and load the one that HYPOTHESIS_PROFILE names."""
    usual: dict[str, Any] = {"deadline": None, "max_examples": USUAL}
    many = {**usual, "max_examples": NIGHTLY * USUAL}
    settings.register_profile("ci", derandomize=True, **{**usual, "max_examples": round(IN_CI * USUAL)})
    settings.register_profile("nightly", derandomize=False, print_blob=True, database=None, **many)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def examples(number: int, *, ci: int | None = None, **others: Any) -> settings:
    """Settings of a law. ci: as many as a run of a few minutes has time for, where a single example is slow."""
    scale = settings.default.max_examples / USUAL
    count = ci if ci is not None and scale < 1 else max(1, round(scale * number))
    return settings(max_examples=count, **others)
