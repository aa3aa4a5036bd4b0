"""Tables of tensors: name, bytes, uses_s (moments, separated by blanks), and the GPU that uses them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from simulator.base.units import UnitError, parse_bytes, whole
from simulator.formats.readers.csv_table import CellError, WholeTable, shown
from simulator.work.offload.tiered import Tensor

_TIME: Final = re.compile(r"[0-9]{1,15}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,2})?")


def read_tensors(file: Path, num_gpus: int) -> tuple[Tensor, ...]:
    """The tensors of a table, for a node of so many GPUs. Raises TableError with every fault, by line."""
    first_line: dict[str, int] = {}

    def clash(one: Tensor, line: int, _: Sequence[Tensor]) -> Iterator[tuple[str, str, str]]:
        if one.gpu >= num_gpus:
            yield "gpu", f"is {one.gpu}", f"0 to {num_gpus - 1}"
        if (first := first_line.setdefault(one.name, line)) != line:
            yield "name", f"is {shown(one.name)}, as on line {first}", ""

    table = WholeTable(
        parsers={"name": _name, "gpu": _gpu, "bytes": _bytes, "uses_s": _uses},
        required=("name", "bytes", "uses_s"),
        item=_tensor,
        clash=clash,
        noun="tensor",
        most=20_000,
        remedy="a line a tensor",
    )
    return tuple(table.read(file))


def _tensor(cells: dict[str, Any], _: int) -> Tensor:
    return Tensor(name=cells["name"], gpu=cells.get("gpu") or 0, num_bytes=cells["bytes"], uses_s=cells["uses_s"])


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
