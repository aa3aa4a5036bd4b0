"""Spot offers: a CSV of hour, price_per_gpu_hour, nodes, a line whenever one changes (docs/guides/goodput.md)."""

from __future__ import annotations

import re
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
from simulator.studies.goodput.elastic import Offer

COLUMNS: Final = ("hour", "price_per_gpu_hour", "nodes")
MAX_OFFERS: Final = 10**6
_SHOWN: Final = 20
_NUMBER: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{0,12})?", re.ASCII)


def read_offers(path: Path) -> tuple[Offer, ...]:
    """What is offered from each hour on, in order. Hours count from any zero. Raises TableError with every fault, by line."""
    faults: list[Fault] = []
    found: list[Offer] = []
    with open_table(path, COLUMNS, COLUMNS) as (header, records):
        for record in until_hopeless(records, faults):
            row = parse_record(record, header, _PARSERS, "")
            if isinstance(row, BadRow):
                faults += row.faults
                continue
            offer = Offer(**row)  # type: ignore[arg-type]
            if found and offer.hour <= found[-1].hour:
                problem = f"{offer.hour:g} is not after the {found[-1].hour:g} of the line above"
                faults.append(Fault(place=f"line {record.line}: hour", problem=problem, remedy="ascending hours"))
            found.append(offer)
            if len(found) > MAX_OFFERS:
                faults.append(Fault(place=f"line {record.line}", problem=f"more than {MAX_OFFERS} offers"))
                break
    if not found and not faults:
        faults.append(Fault(place="line 2", problem="there is no offer", remedy="hour,price_per_gpu_hour,nodes"))
    if faults:
        more = [Fault(place="offers", problem=f"at least {len(faults) - _SHOWN} more")] if len(faults) > _SHOWN else []
        shown_faults = (*faults[:_SHOWN], *more)
        raise TableError([Fault(place=f"{path}: {f.place}", problem=f.problem, remedy=f.remedy) for f in shown_faults])
    return tuple(found)


def _number_cell(cell: str) -> float:
    if not _NUMBER.fullmatch(cell):
        raise CellError(f"{shown(cell)} is not a number", "a decimal number, 0 or more")
    return float(cell)


def _nodes_cell(cell: str) -> int:
    if cell.strip() == "0":
        return 0
    found = integer_cell(cell)
    if found is None:
        raise CellError("is blank", "a whole number of nodes; 0: none")
    return found


_PARSERS: Final[dict[str, Parser]] = {"hour": _number_cell, "price_per_gpu_hour": _number_cell, "nodes": _nodes_cell}
