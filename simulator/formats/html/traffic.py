"""Traffic of a step: matrices between GPUs and between nodes, and loads of a node's links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from simulator.base.errors import InputError
from simulator.play.lower import Lowering
from simulator.predict.link_loads import Loads, idle_links, loads_of_lowering
from simulator.spec.cluster import Cluster
from simulator.studies.place.cost import Call, step_calls
from simulator.work.collectives.volumes import POINT_TO_POINT, checked_kind, volume

MOST_ROWS: Final = 64  # of a matrix on the page


def traffic_of(lowering: Lowering, step_s: float) -> dict[str, Any]:
    """The calls of a step, bytes between GPUs of the first node and between the first nodes, and the loads of links."""
    calls = step_calls(lowering)
    found: dict[str, Any] = {"calls": _call_rows(calls, lowering)}
    if not calls:
        return found
    cluster = lowering.cluster
    try:
        found["node"] = links_json(loads_of_lowering(lowering, step_s))
        found["gpus"] = _matrix(lowering, calls, min(cluster.gpus_per_node, MOST_ROWS), 1)
        if cluster.num_nodes > 1:
            found["nodes"] = _matrix(lowering, calls, min(cluster.num_nodes, MOST_ROWS), cluster.gpus_per_node)
            found["num_nodes"] = cluster.num_nodes
    except InputError:  # nodes differ: they have no one picture
        pass
    return found


def links_json(loads: Loads) -> dict[str, Any]:
    """A node's links as plain data."""
    links = [
        {
            "name": link.name,
            "src": link.src,
            "dst": link.dst,
            "bytes_per_s": float(link.bytes_per_s),
            "step_bytes": float(link.step_bytes),
            "busy": loads.busy(link),
        }
        for link in loads.links
    ]
    return {"num_gpus": loads.num_gpus, "cluster": loads.cluster, "links": links}


def cluster_links(cluster: Cluster) -> dict[str, Any] | None:
    """The links of a cluster's node with nothing on them; None where nodes differ."""
    try:
        return links_json(idle_links(cluster))
    except InputError:
        return None


def _sent(call: Call, lowering: Lowering) -> float:
    """Bytes that a rank sends in one call, over whichever links."""
    if isinstance(call.where, tuple):
        return call.size_bytes
    shape = lowering.mesh.group_shape(call.where)
    form = volume(checked_kind(call.kind), POINT_TO_POINT.get(checked_kind(call.kind), "ring"), shape.num_ranks, 1)
    return float(form.port * call.size_bytes)


def _call_rows(calls: Iterable[Call], lowering: Lowering) -> list[dict[str, Any]]:
    """The calls as rows; messages between stages of one size are one, counted a rank."""
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for call in calls:
        axis = "pp, to a neighbour" if isinstance(call.where, tuple) else call.where
        shape = None if isinstance(call.where, tuple) else lowering.mesh.group_shape(call.where)
        row: dict[str, Any] = {"kind": call.kind, "axis": axis, "ranks": shape.num_ranks if shape else 2}
        row |= {
            "nodes": shape.num_nodes if shape else None,
            "size_bytes": call.size_bytes,
            "times": 0.0,
            "sent_bytes": 0.0,
        }
        row = rows.setdefault((call.kind, axis, call.size_bytes), row)
        row["times"] += call.count
        row["sent_bytes"] += call.count * _sent(call, lowering)
    return list(rows.values())


def _matrix(lowering: Lowering, calls: Iterable[Call], rows: int, per_row: int) -> list[list[int]]:
    """Bytes a step from the GPUs of a row to those of a column; a group's are spread over its other members."""
    mesh, cluster = lowering.mesh, lowering.cluster
    found = [[0.0] * rows for _ in range(rows)]
    ranks = [rank for gpu in range(rows * per_row) if (rank := cluster.rank_on(gpu)) < mesh.num_ranks]
    for call in calls:
        sent = call.count * _sent(call, lowering)
        for pairs, peers in _pairs(lowering, call, ranks, per_row):
            for (row, column), number in pairs.items():
                if column < rows and (row != column or per_row == 1):
                    found[row][column] += number * sent / peers
    return [[round(one) for one in row] for row in found]


def _pairs(
    lowering: Lowering, call: Call, ranks: Iterable[int], per_row: int
) -> Iterator[tuple[dict[tuple[int, int], int], int]]:
    """How many ranks of a row send to how many of a column, and to how many each sends, for each group of these ranks."""
    mesh = lowering.mesh

    def row_of(rank: int) -> int:
        return lowering.cluster.gpu_of(rank) // per_row

    if isinstance(call.where, tuple):
        source, target = call.where
        for here in (coordinates for rank in ranks if (coordinates := mesh.coordinates(rank))["pp"] == source):
            yield {(row_of(mesh.rank(here)), row_of(mesh.rank({**here, "pp": target}))): 1}, 1
        return
    waiting = dict.fromkeys(ranks)
    while waiting:
        group = mesh.group_of(call.where, next(iter(waiting)))
        senders = Counter(row_of(rank) for rank in group if rank in waiting)
        members = Counter(row_of(rank) for rank in group)
        pairs = {(one, other): senders[one] * members[other] for one in senders for other in members}
        for row, number in senders.items():
            pairs[row, row] -= number  # nobody sends to itself
        for rank in group:
            waiting.pop(rank, None)
        if len(group) > 1:
            yield pairs, len(group) - 1
