"""Regular expressions that a stranger's file or a command line brings."""

from __future__ import annotations

import re
import warnings
from typing import Final

_MOST_LETTERS: Final = 400
# Trying takes for ever where a group is repeated, or many repetitions share what they match
_REPEATED_GROUP: Final = re.compile(r"\)\s*[*+{]")
_REPETITION: Final = re.compile(r"[*+{]")
_MOST_REPETITIONS: Final = 5  # a name of 60 letters then takes some hundredths of a second at the worst


def compiled(pattern: str, before: str = "") -> re.Pattern[str] | None:
    """The compiled pattern after a prefix; None if it is invalid or could take exponential time."""
    many = len(_REPETITION.findall(pattern)) > _MOST_REPETITIONS
    if many or len(pattern) > _MOST_LETTERS or _REPEATED_GROUP.search(pattern):
        return None
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # what a later Python may read otherwise
            return re.compile(f"{before}(?:{pattern})" if before else pattern)
    except (re.error, RecursionError, OverflowError):
        return None
