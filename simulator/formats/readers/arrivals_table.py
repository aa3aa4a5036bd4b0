"""Traced arrivals: a CSV of arrival_s, prompt_tokens, output_tokens, a line a request (docs/reference/inference-file.md)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from simulator.formats.readers.csv_table import CellError, WholeTable, integer_cell, shown
from simulator.studies.serving.workload import Request, Requests

_TIME = re.compile(r"[0-9]{1,15}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,2})?")


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
    value = float(cell) if _TIME.fullmatch(cell) else math.nan
    if not math.isfinite(value):
        raise CellError(f"{shown(cell)} is not a time in seconds", "a decimal number, 0 or more")
    return value


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
)
