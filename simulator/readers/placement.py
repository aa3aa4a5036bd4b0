"""Where each rank sits: a table with the columns rank, node and gpu, as the launch kit's `ranks.tsv` is one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from simulator.errors import Fault, PlanError

_MAX_BYTES: Final = 2**26
_NEEDED: Final = ("rank", "node", "gpu")


def read_placement(path: Path) -> tuple[tuple[int, int], ...]:
    """(node, GPU) of each rank, from 0 on. Raises PlanError with every faulty line, ranks that lack or stand twice."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise PlanError(Fault(place=str(path), problem=f"is larger than {_MAX_BYTES} bytes"))
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise PlanError(Fault(place=str(path), problem=f"cannot be read: {exc}")) from None
    head = lines[0].split("\t") if lines else []
    if missing := [name for name in _NEEDED if name not in head]:
        remedy = "a first line of names between tabs, as in a launch kit's ranks.tsv"
        raise PlanError(Fault(place=f"{path}:1", problem=f"has no column {', '.join(missing)}", remedy=remedy))
    columns = [head.index(name) for name in _NEEDED]
    seats: dict[int, tuple[int, int]] = {}
    faults: list[Fault] = []
    for number, line in enumerate(lines[1:], start=2):
        cells = line.split("\t")
        texts = [cells[column] if column < len(cells) else "" for column in columns]
        if not all(text.isdecimal() and len(text) < 9 for text in texts):
            faults.append(Fault(place=f"{path}:{number}", problem="rank, node and gpu are no whole numbers"))
            continue
        rank, node, gpu = map(int, texts)
        if rank in seats:
            faults.append(Fault(place=f"{path}:{number}", problem=f"rank {rank} stands twice", remedy="each rank once"))
        seats[rank] = (node, gpu)
    lacking = [rank for rank in range(len(seats)) if rank not in seats]
    if lacking:
        faults.append(Fault(place=str(path), problem=f"rank {lacking[0]} is missing", remedy="ranks from 0 on"))
    if faults:
        raise PlanError(faults)
    return tuple(seats[rank] for rank in range(len(seats)))
