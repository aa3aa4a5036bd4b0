"""Measured bus bandwidths of a network, by collective, node count and message size.

Bus bandwidth is nccl-tests' (doc/PERFORMANCE.md): a call of S bytes over n ranks takes factor(n) × S over it, with sizes as
nccl-tests counts them. docs/reference/cluster-file.md has the forms in which a file may say it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Final, Literal

from pydantic import Field

from simulator.base.errors import ClusterError, Fault
from simulator.base.schema import Strict, more_than_once, nearest
from simulator.base.units import Bytes, BytesPerS

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv"]
COLLECTIVES: Final[Mapping[str, Collective]] = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
}
# Of a number without a size: large enough that a call is its bytes, and what reports of bandwidth usually quote
DEFAULT_BYTES: Final = 256 * 2**20
LEAST_ALONE_BYTES: Final = 2**20  # below, a call is its latency: one number says nothing of larger ones
_MOST_NODES: Final = 65536
_PASSES: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
_OVER: Final = 1.02  # what rounding of data sheets may leave above the wire
_KEYS: Final = ("size_bytes", "gpus_per_node")
_FORM: Final = 'all_reduce = { 2 = "343GB/s", 4 = "161GB/s" }'


class Bandwidth(Strict):
    """One number: the bus bandwidth of `collective` in calls of `size_bytes` over `nodes` whole nodes.

    gpus_per_node: how many GPUs of each node took part; all unless stated.
    """

    collective: Collective
    nodes: int = Field(ge=1, le=_MOST_NODES)
    bus_bytes_per_s: BytesPerS = Field(gt=0)
    size_bytes: Bytes = Field(gt=0, default=DEFAULT_BYTES)
    gpus_per_node: int | None = Field(ge=1, le=1024, default=None)

    def time_s(self, num_ranks: int) -> float:
        """Seconds of the call over so many ranks."""
        return float(bus_factor(self.collective, num_ranks)) * self.size_bytes / self.bus_bytes_per_s


def scaled(one: Bandwidth, *, near: float, far: float, domain: int) -> Bandwidth:
    """The number on links so many times as fast inside NVLink domains, of so many nodes each, and between them."""
    factor = near if one.nodes <= max(1, domain) else far
    return one.model_copy(update={"bus_bytes_per_s": factor * one.bus_bytes_per_s})


def canonical(name: str) -> Collective | None:
    """The collective of a name, however it is spelled: allreduce, all_reduce, all-reduce."""
    return COLLECTIVES.get(name.lower().replace("_", "").replace("-", ""))


def bus_factor(collective: str, num_ranks: int) -> Fraction:
    """Bus over algorithm bandwidth: the part of the bytes that passes a rank's link in the best ring."""
    if collective in ("broadcast", "reduce", "send_recv"):
        return Fraction(1)
    return Fraction(_PASSES.get(collective, 1) * (num_ranks - 1), num_ranks)


def wire_bus_bytes_per_s(
    collective: str, num_domains: int, ranks_per_domain: int, port_bytes_per_s: float, domain_bytes_per_s: float
) -> float:
    """The bus bandwidth at which the links' data sheets end, whatever the algorithm; switches that reduce are allowed.

    port_bytes_per_s: of a GPU into its NVLink domain or node; domain_bytes_per_s: of all NICs of one.
    """
    n, r = num_domains * ranks_per_domain, ranks_per_domain
    if collective in _PASSES:
        port = Fraction(min(_PASSES[collective] * (r - 1), r), r)
        nic = Fraction(1) if collective == "all_reduce" else Fraction(num_domains - 1, num_domains)
    elif collective == "all_to_all":
        port, nic = Fraction(r - 1, n), Fraction(r * (n - r), n)
    else:
        port, nic = Fraction(int(num_domains == 1)), Fraction(r if collective == "send_recv" else 1)
    seconds = [float(port) / port_bytes_per_s]
    if num_domains > 1:
        seconds.append(float(nic) / domain_bytes_per_s if domain_bytes_per_s else 0.0)
    slowest = max(seconds)
    return float(bus_factor(collective, n)) / slowest if slowest else float("inf")


def read_measured(given: object, place: str) -> tuple[tuple[Bandwidth, ...], list[Fault]]:
    """The numbers of a `[fabric.measured]` table, of a list of tables or of Bandwidths, and every fault in them."""
    found, faults = list[Bandwidth](), list[Fault]()
    for where, one in _each(given, place, faults):
        if isinstance(one, Bandwidth):
            found.append(one)
            continue
        try:
            found.append(Bandwidth.parse(one, where, ClusterError, from_file=not isinstance(given, tuple)))
        except ClusterError as exc:
            faults += exc.faults
    faults += _repeats(found, place)
    return tuple(sorted(found, key=_key)), faults


def _each(given: object, place: str, faults: list[Fault]) -> Iterator[tuple[str, object]]:
    if isinstance(given, Mapping):
        yield from _of_table(given, place, faults)
    elif isinstance(given, Sequence) and not isinstance(given, str):
        for index, one in enumerate(given):
            named = _named(one) if isinstance(one, Mapping) else one
            yield f"{place}[{index}]", named
    else:
        faults.append(Fault(place, f"must be a table; it is {given!r}", _FORM))


def _named(one: Mapping[str, object]) -> dict[str, object]:
    name = one.get("collective")
    return {**one, "collective": (canonical(name) or name) if isinstance(name, str) else name}


def _of_table(table: Mapping[str, object], place: str, faults: list[Fault]) -> Iterator[tuple[str, object]]:
    """all_reduce = { 2 = "343GB/s", 4 = { "64MiB" = "120GB/s", "1GiB" = "161GB/s" } }."""
    common = {key: table[key] for key in _KEYS if key in table}
    for name, by_nodes in table.items():
        kind, where = canonical(name), f"{place}.{name}"
        if name in _KEYS:
            continue
        if kind is None:
            near = nearest(name, [*dict.fromkeys(COLLECTIVES.values()), *_KEYS])
            faults.append(Fault(where, "no collective is called so", near))
        elif not isinstance(by_nodes, Mapping):
            faults.append(Fault(where, f"must be a table by node count; it is {by_nodes!r}", _FORM))
        else:
            yield from _of_counts(by_nodes, {**common, "collective": kind}, where, faults)


def _of_counts(
    by_nodes: Mapping[object, object], common: Mapping[str, object], place: str, faults: list[Fault]
) -> Iterator[tuple[str, object]]:
    for count, value in by_nodes.items():
        where, text = f"{place}.{count}", str(count)
        if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= _MOST_NODES):
            faults.append(Fault(where, "is no count of nodes", f"1 to {_MOST_NODES}"))
        elif isinstance(value, Mapping):
            for size, rate in value.items():
                sized = {**common, "nodes": int(text), "size_bytes": size, "bus_bytes_per_s": rate}
                yield f"{where}.{size}", sized
        else:
            yield where, {**common, "nodes": int(text), "bus_bytes_per_s": value}


def _key(one: Bandwidth) -> tuple[str, int, int, int]:
    return one.collective, one.nodes, one.gpus_per_node or 0, one.size_bytes


def _repeats(found: Sequence[Bandwidth], place: str) -> Iterator[Fault]:
    keys = [_key(one) for one in found]
    for key in sorted(more_than_once(keys)):
        problem = f"{key[0]} on {key[1]} nodes in calls of {key[3]} bytes is stated twice"
        yield Fault(place, problem, "one number for each")
    for group in sorted({key[:3] for key in keys}):
        sizes = [key[3] for key in keys if key[:3] == group]
        if len(sizes) == 1 and sizes[0] < LEAST_ALONE_BYTES:
            problem = f"{group[0]} on {group[1]} nodes is stated for calls of {sizes[0]} bytes alone, which are latency"
            yield Fault(place, problem, "a size of 64MiB or more, or several sizes")


def wire_faults(
    found: Sequence[Bandwidth], place: str, *, gpus_per_node: int, domain: int, port: float, node: float
) -> Iterator[Fault]:
    """Numbers that the links' data sheets cannot give. domain: GPUs of an NVLink domain; port, node: bytes/s one way."""
    for one in found:
        gpus = one.gpus_per_node or gpus_per_node
        where = f"{place}.{one.collective}.{one.nodes}"
        if gpus > gpus_per_node or gpus * one.nodes < 2:
            problem = f"{gpus} GPUs on each of {one.nodes} nodes of {gpus_per_node}"
            yield Fault(where, problem, f"gpus_per_node from 1 to {gpus_per_node}, two GPUs in all")
            continue
        trays = max(1, domain // gpus_per_node)
        domains = -(-one.nodes // trays)
        most = wire_bus_bytes_per_s(one.collective, domains, gpus * min(trays, one.nodes), port, node * trays)
        if one.bus_bytes_per_s > _OVER * most:
            problem = f"{one.bus_bytes_per_s / 1e9:.4g}GB/s is more than the links can give ({most / 1e9:.4g}GB/s)"
            yield Fault(where, problem, "GB/s of the bus (Gb/s are bits), or faster links in the file")
