"""Minimum cuts between the domains of a host: the largest flow from one to another over the known links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

from simulator.spec.cluster.host.parts import Cable, Host, Path
from simulator.spec.cluster.host.structure import domains, islands, pcie_groups

if TYPE_CHECKING:
    import networkx as nx

_MOST_DOMAINS = 16  # 120 pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Between two domains, by index. closest: the best path of their GPUs; bytes_per_s: one way, None if unknown."""

    a: int
    b: int
    closest: Path | None
    bytes_per_s: float | None


def cuts(host: Host) -> tuple[Cut, ...]:
    """One for each pair of domains; none where there are too many to show."""
    found = domains(host)
    pairs = combinations(range(len(found)), 2) if len(found) <= _MOST_DOMAINS else ()
    graph = _graph(host) if host.cables and len(found) > 1 else None
    return tuple(
        Cut(
            a=a,
            b=b,
            closest=_closest(host, found[a], found[b]),
            bytes_per_s=None if graph is None else _flow(host, graph, found[a], found[b]),
        )
        for a, b in pairs
    )


def rated(host: Host, port_bytes_per_s: float, pcie_bytes_per_s: float, speeds: str) -> Host:
    """The same host with cables at stated speeds, for sources that count links only; bytes/s one way.

    port_bytes_per_s: all direct links of a GPU together (the best-joined GPU is taken to have them all).
    pcie_bytes_per_s: of each GPU, and of each switch that GPUs or a NIC share, towards the CPUs; what joins the CPUs
    is unknown and left unlimited, so a cut over it is an upper bound.
    """
    found = islands(host)
    most = max(links for island in found for links in island.links)
    cables = list(_pcie_cables(host, pcie_bytes_per_s))
    for index, island in enumerate(found if most else ()):
        if island.shape == "switch":
            for gpu, links in zip(island.gpus, island.links, strict=True):
                rate = port_bytes_per_s * links / most
                cables.append(Cable(a=host.gpus[gpu].name, b=f"switch of island {index}", bytes_per_s=rate))
        else:
            for (i, j), path in island.pairs.items():
                rate = port_bytes_per_s * path.count / most
                cables.append(Cable(a=host.gpus[i].name, b=host.gpus[j].name, bytes_per_s=rate))
    return replace(host, cables=tuple(cables), speeds=speeds)


def _pcie_cables(host: Host, bytes_per_s: float) -> Iterator[Cable]:
    """GPUs to the switch they share, if any, and from there one link to the CPUs."""
    for index, group in enumerate(pcie_groups(host, "PXB")):
        above = f"PCIe switch {index}" if len(group) > 1 else "CPUs"
        for gpu in group:
            yield Cable(a=host.gpus[gpu].name, b=above, bytes_per_s=bytes_per_s)
        if len(group) > 1:
            yield Cable(a=above, b="CPUs", bytes_per_s=bytes_per_s)


def _closest(host: Host, a: tuple[int, ...], b: tuple[int, ...]) -> Path | None:
    between = (host.path(host.gpus[i].name, host.gpus[j].name) for i in a for j in b)
    return min((path for path in between if path is not None), key=lambda path: path.rank, default=None)


def _graph(host: Host) -> nx.DiGraph[str]:
    import networkx as nx

    graph: nx.DiGraph[str] = nx.DiGraph()
    for cable in host.cables:
        for src, dst in ((cable.a, cable.b), (cable.b, cable.a)):
            before = graph.edges[src, dst]["capacity"] if graph.has_edge(src, dst) else 0.0
            graph.add_edge(src, dst, capacity=before + cable.bytes_per_s)
    return graph


def _flow(host: Host, graph: nx.DiGraph[str], a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """Maximum flow, all GPUs of one domain sending and all of the other receiving; other GPUs do not relay."""
    import networkx as nx

    others = {gpu.name for i, gpu in enumerate(host.gpus) if i not in (*a, *b)}
    part = graph.subgraph([name for name in graph if name not in others]).copy()
    part.add_edges_from(("source", host.gpus[gpu].name) for gpu in a)  # no capacity: as much as it likes
    part.add_edges_from((host.gpus[gpu].name, "sink") for gpu in b)
    flow: float = nx.maximum_flow_value(part, "source", "sink")
    return flow
