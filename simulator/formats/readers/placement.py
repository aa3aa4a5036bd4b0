"""Rank mapping: a table with the columns rank, node and gpu (or pci_bus_id), such as the launch kit's `ranks.tsv`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from simulator.base.errors import Fault, PlanError
from simulator.base.schema import nearest, read_text
from simulator.base.units import whole
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.rank_mapping import RankMapping, shortest

if TYPE_CHECKING:
    from simulator.spec.cluster.host import Host

_MAX_BYTES: Final = 2**26
_MOST_FAULTS: Final = 1000  # nobody reads more of them
_NO_ID: Final = ("", "-")
_SHOWN: Final = 8  # ranks or GPUs named in one fault


def read_placement(path: Path, cluster: Cluster, host: Host | None = None) -> RankMapping:
    """The rank mapping in the table, for a cluster. host: one of its nodes, for bus ids.

    Raises PlanError with every fault: lines that cannot be read, ranks that lack or stand twice, GPUs that hold two ranks,
    none, or do not exist, bus ids that no GPU has.
    """
    table = _Table(path, cluster, _ids(host))
    table.read()
    if table.faults:
        raise PlanError(table.faults)
    return shortest([table.rank_mapping[rank] for rank in range(cluster.num_devices)], cluster.gpus_per_node)


def _ids(host: Host | None) -> Mapping[str, int]:
    """PCI bus id -> local GPU."""
    return {} if host is None else {gpu.pci.lower(): number for number, gpu in enumerate(host.gpus) if gpu.pci}


@dataclass(slots=True)
class _Table:
    """A table while it is read. ids: GPUs of a node by bus id; seats: GPU by rank, counted over the nodes."""

    path: Path
    cluster: Cluster
    ids: Mapping[str, int]
    rank_mapping: dict[int, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def read(self) -> None:
        """Every line, then the checks that need all lines."""
        head, *lines = self._lines()
        named = "gpu" in head or "pci_bus_id" in head
        if missing := [name for name in ("rank", "node") if name not in head] + ([] if named else ["gpu"]):
            remedy = "a first line of names between tabs, as in a launch kit's ranks.tsv"
            self.faults.append(Fault(f"{self.path}:1", f"has no column {', '.join(missing)}", remedy))
            return
        for number, cells in enumerate(lines, start=2):
            row = dict(zip(head, cells, strict=False))
            self.faults += self._row(row, f"{self.path}:{number}")
            if len(self.faults) >= _MOST_FAULTS:
                self.faults.append(Fault(f"{self.path}:{number}", "the lines behind it were not read"))
                return
        self.faults += self._incomplete()

    def _lines(self) -> list[list[str]]:
        text = read_text(self.path, PlanError, _MAX_BYTES)
        return [line.split("\t") for line in text.splitlines()] or [[]]

    def _row(self, row: Mapping[str, str], place: str) -> Iterator[Fault]:
        """Map one rank to its GPU."""
        numbers = {name: whole(row.get(name, "")) for name in ("rank", "node")}
        if wrong := [name for name, number in numbers.items() if number is None]:
            yield Fault(place, f"{' and '.join(wrong)}: not a whole number", "0, 1, …")
        rank, node, per_node = numbers["rank"], numbers["node"], self.cluster.gpus_per_node
        gpu, fault = self._gpu(row, place)
        if fault is not None:
            yield fault
        if node is not None and node >= self.cluster.num_nodes:
            remedy = f"0 to {self.cluster.num_nodes - 1}"
            yield Fault(place, f"names node {node}; there are {self.cluster.num_nodes}", remedy)
        if gpu is not None and gpu >= per_node:
            yield Fault(place, f"names GPU {gpu}; a node has {per_node}", f"0 to {per_node - 1}")
        if rank is None:
            return
        if rank >= self.cluster.num_devices:
            problem = f"names rank {rank}; there are {self.cluster.num_devices}"
            yield Fault(place, problem, f"0 to {self.cluster.num_devices - 1}")
        elif rank in self.rank_mapping:
            yield Fault(place, f"rank {rank} appears twice", "each rank once")
        else:
            sits = node is not None and gpu is not None and node < self.cluster.num_nodes and gpu < per_node
            self.rank_mapping[rank] = node * per_node + gpu if sits else -1  # type: ignore[operator]  # sits: both are numbers

    def _gpu(self, row: Mapping[str, str], place: str) -> tuple[int | None, Fault | None]:
        """The local GPU of a line: by bus id where a source states those, else by number."""
        bus, text = row.get("pci_bus_id", ""), row.get("gpu", "")
        number = whole(text)
        if number is None and text not in _NO_ID:
            return None, Fault(place, f"gpu: {text!r} is not a whole number", "0, 1, …")
        if bus in _NO_ID or (not self.ids and number is not None):
            lacks = Fault(place, "names no GPU", "a number, or a bus id") if number is None else None
            return number, lacks
        if not self.ids:
            return None, Fault(place, f"no source tells whose bus id {bus} is", "the gpu column, or --topology")
        known = self.ids.get(bus.lower())
        if known is None:
            return number, Fault(place, f"no GPU has bus id {bus}", nearest(bus.lower(), self.ids))
        if number not in (None, known):
            return number, Fault(place, f"bus id {bus} is GPU {known}'s, not GPU {number}'s", "one of them")
        return known, None

    def _incomplete(self) -> Iterator[Fault]:
        """Ranks without a line, GPUs of several ranks and of none."""
        place, per_node = str(self.path), self.cluster.gpus_per_node
        if lacking := [rank for rank in range(self.cluster.num_devices) if rank not in self.rank_mapping]:
            yield Fault(place, f"rank {_listed(lacking)} is missing", "each rank once")
        ranks: dict[int, list[int]] = {}
        for rank, gpu in sorted(self.rank_mapping.items()):
            ranks.setdefault(gpu, []).append(rank)
        ranks.pop(-1, None)
        for gpu, on_gpu in sorted(ranks.items()):
            if len(on_gpu) > 1:
                problem = f"GPU {gpu % per_node} of node {gpu // per_node} has ranks {_listed(on_gpu)}"
                yield Fault(place, problem, "each GPU once")
        left = [gpu for gpu in range(self.cluster.num_devices) if gpu not in ranks]
        if left:
            names = [f"{gpu % per_node} of node {gpu // per_node}" for gpu in left[:_SHOWN]]
            more = f", and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
            yield Fault(place, f"GPU {', '.join(names)}{more} has no rank", "each GPU once")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_SHOWN])) + (", …" if len(numbers) > _SHOWN else "")
