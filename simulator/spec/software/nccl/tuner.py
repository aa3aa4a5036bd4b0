"""Tables of a tuner plugin, in the CSV form of NCCL's example plugin (NVIDIA/nccl, plugins/tuner/example).

A line: collective, min_bytes, max_bytes, algorithm, protocol, channels, nodes, ranks[, pipe_ops[, registered]]; -1 matches
anything (for channels: NCCL's own). `#` begins a comment. The first line that matches a call decides. The plugin itself
reads an unknown word as all-reduce, ring or simple; here it is a fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from simulator.base.errors import Fault, InputError
from simulator.base.schema import read_text
from simulator.base.units import whole
from simulator.spec.software.nccl.names import FUNCTIONS, PROTOCOLS

# NCCL_ALGO's, with underscores between their words
_ALGORITHMS: Final = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
_FIELDS: Final = (
    "collective",
    "min_bytes",
    "max_bytes",
    "algorithm",
    "protocol",
    "channels",
    "nodes",
    "ranks",
    "pipe_ops",
    "registered",
)
_REQUIRED: Final = 8
_MOST_BYTES: Final = 2**20
_ANY: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerRule:
    """One line: which calls it is for, and what it makes of them. channels: None leaves NCCL's own."""

    kind: str
    min_bytes: int
    max_bytes: int
    algorithm: str
    protocol: str
    channels: int | None
    nodes: int
    ranks: int
    pipe_ops: int
    registered: int

    def matches(self, kind: str, size_bytes: int, num_nodes: int, num_ranks: int) -> bool:
        """A lone call (one pipelined operation) of buffers that are not registered."""
        mine = ((self.nodes, num_nodes), (self.ranks, num_ranks), (self.pipe_ops, 1), (self.registered, 0))
        fits = all(stated in (_ANY, own) for stated, own in mine)
        return kind == self.kind and self.min_bytes <= size_bytes <= self.max_bytes and fits


def read_tuner(path: Path) -> tuple[TunerRule, ...]:
    """The rules of the table in their order. Raises InputError with every faulty line."""
    rules: list[TunerRule] = []
    faults: list[Fault] = []
    for number, line in enumerate(read_text(path, InputError, _MOST_BYTES).splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            rule = _rule(line, f"{path}: line {number}", faults)
            rules += [rule] if rule else []
    if not rules and not faults:
        faults.append(Fault(str(path), "has no rule", ",".join(_FIELDS)))
    InputError.raise_for(faults)
    return tuple(rules)


def _rule(line: str, place: str, faults: list[Fault]) -> TunerRule | None:
    cells = [cell.strip() for cell in line.split(",")]
    before = len(faults)
    if not _REQUIRED <= len(cells) <= len(_FIELDS):
        faults.append(Fault(place, f"has {len(cells)} fields", f"{_REQUIRED} to {len(_FIELDS)}: {','.join(_FIELDS)}"))
        return None
    row = dict(zip(_FIELDS, cells, strict=False))
    for name, legal in (("collective", FUNCTIONS), ("algorithm", _ALGORITHMS), ("protocol", PROTOCOLS)):
        if row[name] not in legal:
            faults.append(Fault(f"{place}: {name}", f"{row[name]!r} is unknown", ", ".join(legal)))
    numbers = {name: _number(name, row.get(name, "-1"), place, faults) for name in _FIELDS[1:3] + _FIELDS[5:]}
    if numbers["min_bytes"] > numbers["max_bytes"] and len(faults) == before:
        faults.append(Fault(place, "min_bytes is above max_bytes", "min,max"))
    if len(faults) > before:
        return None
    channels = numbers.pop("channels")
    return TunerRule(
        kind=FUNCTIONS[row["collective"]],
        algorithm=row["algorithm"].replace("_", ""),
        protocol=row["protocol"],
        channels=None if channels == _ANY else channels,
        **numbers,
    )


def _number(name: str, cell: str, place: str, faults: list[Fault]) -> int:
    lowest, number = 0 if name.endswith("_bytes") else _ANY, whole(cell)
    if cell == str(_ANY):
        number = _ANY
    if number is None or number < lowest:
        remedy = "bytes from 0" if lowest == 0 else "a count, or -1 for any"
        faults.append(Fault(f"{place}: {name}", f"{cell[:40]!r} is not a count", remedy))
        return lowest
    if name == "channels" and number == 0:
        faults.append(Fault(f"{place}: {name}", "no channel carries nothing", "1 to 64, or -1"))
    if name == "registered" and number > 1:
        faults.append(Fault(f"{place}: {name}", f"{cell} is neither yes nor no", "0, 1 or -1"))
    return number
