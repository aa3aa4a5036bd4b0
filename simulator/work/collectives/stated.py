"""Measured calls: the bandwidths that a cluster states (`fabric.measured`), as calls of the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster
from simulator.spec.software.nccl import Nccl
from simulator.work.collectives.call import Call, Links, Placement, Stated
from simulator.work.collectives.volumes import Kind

# Kinds whose numbers stand for one another where a kind has none of its own: what moves its bytes along the same paths
# first (a ring of neighbours; pairs), then any
_STANDS_FOR: Final[Mapping[str, tuple[Kind, ...]]] = {
    "all_reduce": ("all_reduce", "reduce_scatter", "all_gather"),
    "all_gather": ("all_gather", "reduce_scatter", "broadcast", "all_reduce"),
    "reduce_scatter": ("reduce_scatter", "all_gather", "reduce", "all_reduce"),
    "broadcast": ("broadcast", "all_gather", "reduce", "all_reduce"),
    "reduce": ("reduce", "reduce_scatter", "broadcast", "all_reduce"),
    "all_to_all": ("all_to_all", "send_recv", "all_gather", "reduce_scatter", "all_reduce"),
    "send_recv": ("send_recv", "all_gather", "reduce_scatter", "all_to_all", "all_reduce"),
}


def of_stated(one: Stated, nccl: Nccl, size_bytes: int | None = None) -> Call:
    """Such a call, of another size where one is given."""
    return Call(one.kind, one.size_bytes if size_bytes is None else size_bytes, one.place, one.links, nccl)


class _Shared(tuple[Stated, ...]):
    """What all calls of a kind on one cluster share: told apart by identity, as a sweep's hash would cost more than the call."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def nearest_kinds(known: Mapping[str, Sequence[Stated]], kind: str) -> tuple[Stated, ...]:
    """The numbers that `kind` follows inside nodes and between them: its own, or the nearest kind's."""
    found: list[Stated] = []
    for far in (False, True):
        mine = ([s for s in known.get(one, ()) if (s.place.num_domains > 1) == far] for one in _STANDS_FOR[kind])
        found += next(filter(None, mine), [])
    return _Shared(found)


def of_kind(cluster: Cluster, kind: Kind, nccl: Nccl) -> list[Stated]:
    """Every number of one kind. A group takes the first GPUs of each node, as nccl-tests does."""
    found, seen = [], dict[tuple[int, int], tuple[Placement, Links]]()
    plain = cluster.fabric.model_copy(update={"measured": (), "speed": 1.0, "wait": 1.0})
    for one in cluster.fabric.measured:
        if one.collective != kind:
            continue
        gpus, nodes = who = one.gpus_per_node or cluster.gpus_per_node, one.nodes
        if who not in seen:
            spans = nodes * cluster.gpus_per_node > cluster.nvlink_domain_size
            shape = GroupShape(
                num_ranks=gpus * nodes, num_nodes=nodes, ranks_per_node=gpus, num_groups_per_node=1, spans_domain=spans
            )
            links = Links.of(cluster.model_copy(update={"fabric": plain}), shape, kind, nccl)
            seen[who] = Placement.of(shape, links), links
        found.append(Stated(kind, one.size_bytes, one.time_s(gpus * nodes), *seen[who]))
    return found
