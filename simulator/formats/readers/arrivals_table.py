"""Traced arrivals: a CSV of arrival_s, prompt_tokens, output_tokens, a line a request (docs/reference/inference-file.md)."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from simulator.base.errors import Fault, TableError
from simulator.formats.readers.csv_table import (
    CellError,
    Parser,
    integer_cell,
    open_table,
    parse_record,
    shown,
    until_hopeless,
)
from simulator.studies.backtest.rows import BadRow
from simulator.studies.serving.workload import Request, Requests

COLUMNS: Final = ("arrival_s", "prompt_tokens", "output_tokens")
MAX_REQUESTS: Final = 10**7
_SHOWN = 20
_TIME = re.compile(r"[0-9]{1,15}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,2})?")


def read_arrivals(path: str | Path) -> Requests:
    """The requests of a trace, whose lines stand in order of arrival. Times count from any zero; the first becomes 0.

    Raises TableError with every fault, by line; no request is left out.
    """
    file = Path(path)
    faults: list[Fault] = []
    found: list[Request] = []
    with open_table(file, COLUMNS, COLUMNS) as (header, records):
        for record in until_hopeless(records, faults):
            row = parse_record(record, header, _PARSERS, "")
            if isinstance(row, BadRow):
                faults += row.faults
                continue
            request = Request(**row, line=record.line)  # type: ignore[arg-type]
            if found and request.arrival_s < found[-1].arrival_s:
                problem = f"{request.arrival_s:g} s is before the {found[-1].arrival_s:g} s of the line above"
                place = f"line {record.line}: arrival_s"
                faults.append(Fault(place=place, problem=problem, remedy="lines in order of arrival"))
            found.append(request)
            if len(found) > MAX_REQUESTS:
                faults.append(Fault(place=f"line {record.line}", problem=f"more than {MAX_REQUESTS} requests"))
                break
    if not found and not faults:
        faults.append(Fault(place="line 2", problem="there is no request", remedy="a line a request"))
    if faults:
        more = [Fault(place="trace", problem=f"at least {len(faults) - _SHOWN} more")] if len(faults) > _SHOWN else []
        raise TableError([_placed(fault, file) for fault in (*faults[:_SHOWN], *more)])
    first_s = found[0].arrival_s
    return Requests.of(replace(request, arrival_s=request.arrival_s - first_s) for request in found)


def _placed(fault: Fault, file: Path) -> Fault:
    return Fault(place=f"{file}: {fault.place}", problem=fault.problem, remedy=fault.remedy)


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


_PARSERS: Final[dict[str, Parser]] = {
    "arrival_s": _time_cell,
    "prompt_tokens": _tokens_cell,
    "output_tokens": _tokens_cell,
}
