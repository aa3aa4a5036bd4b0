"""Tables of tensors: name, bytes, uses_s (moments, separated by blanks), and the GPU that uses them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final

from simulator.base.errors import Fault, TableError
from simulator.base.units import UnitError, parse_bytes, whole
from simulator.formats.readers.csv_table import CellError, Parser, open_table, parse_record, shown, until_hopeless
from simulator.studies.backtest.rows import BadRow
from simulator.work.offload.tiered import Tensor

COLUMNS: Final = ("name", "gpu", "bytes", "uses_s")
_REQUIRED: Final = ("name", "bytes", "uses_s")
MOST: Final = 20_000
_SHOWN: Final = 20
_TIME: Final = re.compile(r"[0-9]{1,15}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,2})?")


def read_tensors(file: Path, num_gpus: int) -> tuple[Tensor, ...]:
    """The tensors of a table, for a node of so many GPUs. Raises TableError with every fault, by line."""
    found: list[Tensor] = []
    faults: list[Fault] = []
    seen: dict[str, int] = {}
    with open_table(file, COLUMNS, _REQUIRED) as (header, records):
        for record in until_hopeless(records, faults):
            row = parse_record(record, header, _PARSERS, "")
            if isinstance(row, BadRow):
                faults += row.faults
                continue
            one = Tensor(name=str(row["name"]), gpu=row.get("gpu") or 0, num_bytes=row["bytes"], uses_s=row["uses_s"])  # type: ignore[arg-type]
            place = f"line {record.line}"
            if one.gpu >= num_gpus:
                faults.append(Fault(place=f"{place}: gpu", problem=f"is {one.gpu}", remedy=f"0 to {num_gpus - 1}"))
            if one.name in seen:
                faults.append(
                    Fault(place=f"{place}: name", problem=f"is {shown(one.name)}, as on line {seen[one.name]}")
                )
            seen.setdefault(one.name, record.line)
            found.append(one)
            if len(found) > MOST:
                faults.append(Fault(place=place, problem=f"more than {MOST:,} tensors"))
                break
    if not found and not faults:
        faults.append(Fault(place="line 2", problem="there is no tensor", remedy="a line a tensor"))
    if faults:
        more = [Fault(place="table", problem=f"at least {len(faults) - _SHOWN} more")] if len(faults) > _SHOWN else []
        listed = (*faults[:_SHOWN], *more)
        raise TableError(
            [Fault(place=f"{file}: {one.place}", problem=one.problem, remedy=one.remedy) for one in listed]
        )
    return tuple(found)


def _gpu(cell: str) -> int:
    number = whole(cell.strip() or "0")
    if number is None or number >= 10**5:
        raise CellError(f"{shown(cell)} is no GPU", "the number of a GPU of the node, from 0")
    return number


def _name(cell: str) -> str:
    if not cell.strip():
        raise CellError("is blank", "a name for each tensor")
    return cell.strip()[:200]


def _bytes(cell: str) -> int:
    try:
        size = whole(cell.strip()) or parse_bytes(cell.strip())
    except UnitError as exc:
        raise CellError(exc.problem, exc.remedy) from None
    if not 0 < size < 2**60:
        raise CellError(f"is {shown(cell)}", "a size above 0")
    return size


def _uses(cell: str) -> tuple[float, ...]:
    parts = cell.split()
    wrong = [one for one in parts if not _TIME.fullmatch(one) or not math.isfinite(float(one))]
    if not parts or wrong:
        raise CellError(
            f"{shown(wrong[0]) if wrong else 'is blank'} is no moment", "seconds, separated by blanks: 0.1 0.25"
        )
    moments = tuple(map(float, parts))
    if list(moments) != sorted(moments):
        raise CellError(f"{shown(cell)} goes back in time", "moments in order")
    return moments


_PARSERS: Final[dict[str, Parser]] = {"name": _name, "gpu": _gpu, "bytes": _bytes, "uses_s": _uses}
