"""Traced arrivals: a CSV of when requests came and of tokens, a line a request (docs/reference/inference-file.md)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from simulator.formats.readers.csv_table import CellError, WholeTable, integer_cell, shown
from simulator.studies.serving.workload import Request, Requests

_TIME = re.compile(r"[0-9]{1,15}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,2})?")
_MOMENT = re.compile(r"[0-9]{4}(-[0-9]{2}){2}[ T][0-9]{2}(:[0-9]{2}){2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})?")
# Columns as published traces of chat services call them, in small letters, blanks and underscores left out
_NAMES: Final = {
    "timestamp": "arrival_s", "contexttokens": "prompt_tokens", "requesttokens": "prompt_tokens",
    "generatedtokens": "output_tokens", "responsetokens": "output_tokens",
}  # fmt: skip


def read_arrivals(path: str | Path) -> Requests:
    """The requests of a trace in order of arrival. Times are shifted so that the first is 0.

    Raises TableError with every fault, by line; no request is left out.
    """
    found = _TRACE.read(Path(path))
    first_s = found[0].arrival_s
    return Requests.of(replace(request, arrival_s=request.arrival_s - first_s) for request in found)


def _clash(request: Request, _: int, before: Sequence[Request]) -> Iterator[tuple[str, str, str]]:
    if before and request.arrival_s < before[-1].arrival_s:
        problem = f"{request.arrival_s:g} s is before the {before[-1].arrival_s:g} s of the line above"
        yield "arrival_s", problem, "lines in order of arrival"


def _time_cell(cell: str) -> float:
    """Seconds from any time on. A moment without a zone is UTC."""
    if _MOMENT.fullmatch(cell):
        with suppress(ValueError):  # the 31st of February
            moment = datetime.fromisoformat(cell)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    value = float(cell) if _TIME.fullmatch(cell) else math.nan
    if not math.isfinite(value):
        raise CellError(
            f"{shown(cell)} is not a time", "seconds as a decimal number, 0 or more, or 2026-01-31 18:15:46.68"
        )
    return value


def _own_names(header: Sequence[str]) -> list[str]:
    return [_NAMES.get(re.sub(r"[ _]", "", name.casefold()), name) for name in header]


def _tokens_cell(cell: str) -> int:
    if not cell:
        raise CellError("is blank", "a whole number of at least 1")
    try:
        return integer_cell(cell) or 0
    except CellError:
        raise CellError(f"{shown(cell)} is no number of tokens", "a whole number of at least 1, in digits") from None


_TRACE: Final = WholeTable(
    parsers={"arrival_s": _time_cell, "prompt_tokens": _tokens_cell, "output_tokens": _tokens_cell},
    required=("arrival_s", "prompt_tokens", "output_tokens"),
    item=lambda cells, line: Request(**cells, line=line),
    clash=_clash,
    noun="request",
    most=10**7,
    remedy="a line a request",
    own=_own_names,
    others=True,
)
