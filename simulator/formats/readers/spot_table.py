"""Spot offers: a CSV of hour, price_per_gpu_hour, nodes, a line whenever one changes (docs/guides/goodput.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from simulator.formats.readers.csv_table import CellError, WholeTable, integer_cell, shown
from simulator.studies.goodput.elastic import Offer

_NUMBER: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{0,12})?", re.ASCII)


def read_offers(path: Path) -> tuple[Offer, ...]:
    """What is offered from each hour on, in order. Hours count from any zero. Raises TableError with every fault, by line."""
    return tuple(_OFFERS.read(path))


def _clash(offer: Offer, _: int, before: Sequence[Offer]) -> Iterator[tuple[str, str, str]]:
    if before and offer.hour <= before[-1].hour:
        yield "hour", f"{offer.hour:g} is not after the {before[-1].hour:g} of the line above", "ascending hours"


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


_OFFERS: Final = WholeTable(
    parsers={"hour": _number_cell, "price_per_gpu_hour": _number_cell, "nodes": _nodes_cell},
    required=("hour", "price_per_gpu_hour", "nodes"),
    item=lambda cells, _: Offer(**cells),
    clash=_clash,
    noun="offer",
    most=10**6,
    remedy="hour,price_per_gpu_hour,nodes",
)
