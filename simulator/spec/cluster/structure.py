"""Faults that concern several fields of a cluster at once.

They are found in plain data, so that a file whose single fields are wrong too still gets every fault in one go: what is
missing or malformed here is skipped (its own field says so).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from simulator.base.errors import Fault
from simulator.base.units import UnitError, parse_bytes_per_s
from simulator.spec.cluster.exceptions import as_table, exception_faults
from simulator.spec.cluster.measured import read_measured, wire_faults
from simulator.spec.cluster.parts import MAX_NODES
from simulator.spec.cluster.rank_mapping import rank_mapping_faults
from simulator.spec.cluster.routing import components

_NEEDS_EDGES = ("cube_mesh", "pairs")
_FORBIDS_EDGES = ("switch", "pcie")
_MOST_OF_A_MESH = 128  # no GPU has so many links: beyond, a switch was meant


def structure_faults(data: Mapping[str, object], place: str) -> list[Fault]:
    """Every fault between fields; `place` is the file or the name."""
    return [
        *_edge_faults(data, place),
        *_island_faults(data, place),
        *_domain_faults(data, place),
        *_net(data, place),
        *_tree_faults(data, place),
        *_nic_faults(data, place),
        *exception_faults(data, place),
        *_level_faults(data, place),
        *_measured_faults(data, place),
        *rank_mapping_faults(data, place),
    ]


def _edge_faults(data: Mapping[str, object], place: str) -> Iterator[Fault]:
    intra, gpus = _table(data, "intra"), _int(data, "gpus_per_node")
    shape = intra.get("shape")
    if shape in _NEEDS_EDGES and not intra.get("edges"):
        yield Fault(
            f"{place}: intra.edges",
            f"shape {shape!r} does not say who is joined to whom",
            "edges = [{src = 0, dst = 1, bytes_per_s = '25GB/s'}, …]",
        )
    if shape in _FORBIDS_EDGES and intra.get("edges"):
        yield Fault(
            f"{place}: intra.edges",
            f"shape {shape!r} has no edges: all GPUs are equal",
            "shape = 'mesh', 'cube_mesh' or 'pairs'; or no edges",
        )
    if shape == "mesh" and gpus is not None and gpus > _MOST_OF_A_MESH:
        problem = f"a mesh of {gpus} GPUs: each has a cable to {gpus - 1} others"
        yield Fault(f"{place}: intra.shape", problem, f"shape = 'switch', or at most {_MOST_OF_A_MESH} GPUs")
    seen: set[tuple[int, int]] = set()
    for index, edge in enumerate(_edges(data)):
        src, dst, where = edge.get("src"), edge.get("dst"), f"{place}: intra.edges[{index}]"
        if not isinstance(src, int) or not isinstance(dst, int):
            continue
        if src == dst:
            yield Fault(where, f"joins GPU {src} to itself", "src ≠ dst")
        if gpus is not None and max(src, dst) >= gpus:
            yield Fault(where, f"names GPU {max(src, dst)}; there are {gpus}", f"0 to {gpus - 1}")
        directions = {(src, dst)} | ({(dst, src)} if edge.get("both_ways", True) else set())
        if directions & seen:
            yield Fault(where, f"joins {src} and {dst} a second time", "one edge with the sum")
        seen |= directions
    yield from _overfull(data, place)


def _overfull(data: Mapping[str, object], place: str) -> Iterator[Fault]:
    """The edges of a GPU cannot carry more than all its links."""
    limit = _rate(_table(data, "intra").get("bytes_per_s"))
    leaving: dict[int, float] = {}
    for edge in _edges(data):
        rate = _rate(edge.get("bytes_per_s"))
        ends = (edge.get("src"), edge.get("dst")) if edge.get("both_ways", True) else (edge.get("src"),)
        for end in ends:
            if isinstance(end, int) and rate is not None:
                leaving[end] = leaving.get(end, 0.0) + rate
    for gpu, total in sorted(leaving.items()):
        if limit is not None and total > limit * (1 + 1e-9):
            problem = f"the edges of GPU {gpu} sum to {total / 1e9:g}GB/s, its links to {limit / 1e9:g}GB/s"
            yield Fault(f"{place}: intra.edges", problem, f"bytes_per_s = '{total / 1e9:g}GB/s'")


def _island_faults(data: Mapping[str, object], place: str) -> Iterator[Fault]:
    """GPUs that nothing joins: several islands and no host between them."""
    gpus, edges = _int(data, "gpus_per_node"), _edges(data)
    if gpus is None or not edges or data.get("host"):
        return
    pairs = [(e.get("src"), e.get("dst")) for e in edges]
    known = [
        (a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int) and 0 <= min(a, b) <= max(a, b) < gpus
    ]
    islands = components(gpus, known)
    if len(islands) > 1:
        names = ", ".join("{" + ", ".join(map(str, island)) + "}" for island in islands)
        yield Fault(
            f"{place}: intra.edges",
            f"nothing joins the islands {names}",
            "add edges, or a [host] link that all GPUs share",
        )


def _domain_faults(data: Mapping[str, object], place: str) -> Iterator[Fault]:
    gpus, domain = _int(data, "gpus_per_node"), _int(data, "nvlink_domain_size")
    if gpus is None or domain is None:
        return
    where = f"{place}: nvlink_domain_size"
    if domain % gpus and gpus % domain:
        near = max(domain // gpus, 1) * gpus
        yield Fault(where, f"{domain} is not a multiple of gpus_per_node = {gpus}", f"for example {near}")
    shape = _table(data, "intra").get("shape")
    if domain > gpus and shape is not None and shape != "switch":
        problem = f"{domain} GPUs on nodes of {gpus} need a switch between nodes; the shape is {shape!r}"
        yield Fault(where, problem, f"shape = 'switch', or {gpus}")


def _net(data: Mapping[str, object], place: str) -> Iterator[Fault]:
    nodes = _int(data, "num_nodes")
    if nodes is not None and nodes > 1 and not data.get("inter"):
        problem = f"num_nodes = {nodes}, but nothing joins the nodes"
        yield Fault(f"{place}: inter", problem, "add [inter], or num_nodes = 1")


def _tree_faults(data: Mapping[str, object], place: str) -> Iterator[Fault]:
    """Sockets and switches: GPUs that do not exist, stand twice, or are left out; a switch between two sockets."""
    gpus, pcie, where = _int(data, "gpus_per_node"), _table(data, "pcie"), f"{place}: pcie"
    if not data.get("pcie") or gpus is None:
        return
    if not data.get("host") and _table(data, "intra").get("shape") not in (None, "pcie"):
        yield Fault(where, "a PCIe tree, but no GPU has a link to it", "add [host]")
    sockets, switches = (_sets(pcie.get(key)) for key in ("sockets", "switches"))
    for key, sets in (("sockets", sockets), ("switches", switches)):
        seen = [gpu for members in sets for gpu in members]
        for gpu in sorted({gpu for gpu in seen if gpu >= gpus}):
            yield Fault(f"{where}.{key}", f"names GPU {gpu}; there are {gpus}", f"0 to {gpus - 1}")
        for gpu in sorted({gpu for gpu in seen if seen.count(gpu) > 1}):
            yield Fault(f"{where}.{key}", f"GPU {gpu} appears in two of them", "one for each GPU")
    left = sorted(set(range(gpus)) - {gpu for members in sockets for gpu in members})
    if sockets and left:
        names = ", ".join(map(str, left[:8])) + (", …" if len(left) > 8 else "")
        yield Fault(f"{where}.sockets", f"GPUs {names} sit on none", "every GPU on one")
    for index, members in enumerate(switches):
        if len({number for number, one in enumerate(sockets) for gpu in members if gpu in one}) > 1:
            yield Fault(f"{where}.switches[{index}]", "its GPUs sit on two sockets", "a switch for each socket")


def _nic_faults(data: Mapping[str, object], place: str) -> Iterator[Fault]:
    """Cards: as many places as NICs, each beside GPUs that exist and share a socket, or on a socket."""
    inter, gpus, where = _table(data, "inter"), _int(data, "gpus_per_node"), f"{place}: inter.cards"
    given = inter.get("cards")
    nics = [as_table(nic) for nic in given] if isinstance(given, list | tuple) else []
    if not nics or gpus is None:
        return
    count = inter.get("num_nics")
    if isinstance(count, int) and count != len(nics):
        yield Fault(where, f"{len(nics)} places for {count} cards", "a place for each card")
    sockets = _sets(_table(data, "pcie").get("sockets"))
    for index, nic in enumerate(nics):
        at, here = f"{where}[{index}]", _sets([nic.get("gpus")])
        beside, socket = (here[0] if here else []), nic.get("socket")
        if bool(beside) == (socket is not None):
            problem = "beside GPUs and on a socket" if beside else "neither beside GPUs nor on a socket"
            yield Fault(at, problem, "gpus = [0], or socket = 0")
        for gpu in sorted({gpu for gpu in beside if gpu >= gpus}):
            yield Fault(at, f"names GPU {gpu}; there are {gpus}", f"0 to {gpus - 1}")
        if len({number for number, one in enumerate(sockets) for gpu in beside if gpu in one}) > 1:
            yield Fault(at, "its GPUs sit on two sockets", "those behind its own PCIe switch")
        if isinstance(socket, int) and socket >= max(1, len(sockets)):
            remedy = f"0 to {len(sockets) - 1}" if sockets else "pcie.sockets that says who sits where"
            yield Fault(at, f"names socket {socket}; there are {len(sockets)}", remedy)


def _level_faults(data: Mapping[str, object], place: str) -> Iterator[Fault]:
    """Levels of the fabric: more nodes from one to the next, and leaves that hold what is used of them."""
    fabric, where = _table(data, "fabric"), f"{place}: fabric"
    leaf, used = _int(fabric, "nodes_per_leaf"), _int(fabric, "nodes_used_per_leaf")
    if leaf is not None and used is not None and used > leaf:
        yield Fault(f"{where}.nodes_used_per_leaf", f"{used} nodes used of leaves of {leaf}", f"1 to {leaf}")
    if fabric.get("in_network") is True and (kind := _table(data, "inter").get("kind")) != "infiniband":
        problem = f"switches of {kind} do not sum what crosses them" if kind else "no network joins the nodes"
        yield Fault(f"{where}.in_network", problem, "inter.kind infiniband, or leave it out")
    levels = fabric.get("above")
    below = leaf
    for index, level in enumerate(levels if isinstance(levels, list | tuple) else ()):
        nodes = _int(as_table(level), "nodes")
        if nodes is not None and below is not None and (nodes <= below or nodes % below):
            problem = f"{nodes} nodes above switches of {below}"
            yield Fault(f"{where}.above[{index}]", problem, f"as {2 * below}: several of them")
        below = nodes


def _measured_faults(data: Mapping[str, object], place: str) -> Iterator[Fault]:
    """Bandwidths that are none, and those that the links cannot give."""
    given, where = _table(data, "fabric").get("measured"), f"{place}: fabric.measured"
    if not given:
        return
    found, faults = read_measured(given, where)
    yield from faults
    gpus, inter = _int(data, "gpus_per_node"), _table(data, "inter")
    port, card = _rate(_table(data, "intra").get("bytes_per_s")), _rate(inter.get("nic_bytes_per_s"))
    if gpus is None or not port:
        return
    if any(one.nodes * gpus > (_int(data, "nvlink_domain_size") or gpus) for one in found) and not inter:
        yield Fault(where, "numbers of several nodes, but nothing joins the nodes", "add [inter]")
    node = (card or 0.0) * (_int(inter, "num_nics") or 0)
    domain = _int(data, "nvlink_domain_size") or gpus
    yield from wire_faults(found, where, gpus_per_node=gpus, domain=domain, port=port, node=node)


def _sets(value: object) -> list[list[int]]:
    """Lists of whole numbers; what is anything else is a fault of its own field."""
    lists = value if isinstance(value, list | tuple) else ()
    return [[n for n in one if isinstance(n, int) and n >= 0] for one in lists if isinstance(one, list | tuple)]


def _table(data: Mapping[str, object], key: str) -> Mapping[str, object]:
    return as_table(data.get(key))


def _edges(data: Mapping[str, object]) -> list[Mapping[str, object]]:
    edges = _table(data, "intra").get("edges")
    found = list(edges) if isinstance(edges, list | tuple) else []
    return [as_table(one) for one in found if isinstance(one, Mapping) or hasattr(one, "src")]


def _int(data: Mapping[str, object], key: str) -> int | None:
    """A whole number of a size that a cluster may have; others are faults of their own field."""
    value = data.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_NODES else None


def _rate(value: object) -> float | None:
    if isinstance(value, str):
        try:
            return parse_bytes_per_s(value)
        except UnitError:
            return None
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None
