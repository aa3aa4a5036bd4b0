"""Routing: which links a transfer crosses. Links are directed; a cable is two of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

HOST_KINDS = ("pcie3", "pcie4", "pcie5", "c2c")

# A way through the host is two of its links. It loses against one relay over NVLink (NCCL's NVB path) and wins against
# two relays, which NCCL never takes.
_HOST_HOP = 1.4


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Link:
    """One direction of a connection. `bytes_per_s` is that direction's; `latency_s` is what one message waits."""

    kind: str
    src: str
    dst: str
    bytes_per_s: float
    latency_s: float = 0.0


def shortest_route(links: Iterable[Link], src: str, dst: str) -> tuple[Link, ...] | None:
    """The links from `src` to `dst`: fewest hops, then the fastest bottleneck, then by name; None if there is no way.

    Hops over the host's PCIe count 1.4, so one relay through a GPU is preferred to the host, the host to two relays.
    """
    leaving: dict[str, list[Link]] = {}
    for link in links:
        leaving.setdefault(link.src, []).append(link)
    # cost, −bottleneck, names (ties in a written order), links
    queue: list[tuple[float, float, tuple[str, ...], tuple[Link, ...]]] = [(0.0, float("-inf"), (src,), ())]
    done: set[str] = set()
    while queue:
        cost, bottleneck, names, path = heapq.heappop(queue)
        here = names[-1]
        if here == dst:
            return path
        if here in done:
            continue
        done.add(here)
        for link in leaving.get(here, ()):
            if link.dst not in done:
                hop = _HOST_HOP if link.kind in HOST_KINDS else 1.0
                slowest = max(bottleneck, -link.bytes_per_s)
                heapq.heappush(queue, (cost + hop, slowest, (*names, link.dst), (*path, link)))
    return None


def components(num_nodes: int, edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Nodes 0..n−1 in connected sets (directions ignored), each sorted, sets by their first node."""
    root = list(range(num_nodes))

    def find(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for a, b in edges:
        low, high = sorted((find(a), find(b)))
        root[high] = low
    sets: dict[int, list[int]] = {}
    for node in range(num_nodes):
        sets.setdefault(find(node), []).append(node)
    return tuple(tuple(members) for members in sets.values())
