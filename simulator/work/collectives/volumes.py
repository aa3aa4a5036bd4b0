"""Closed forms: the bytes that each algorithm moves and the steps it takes, exact, per byte of the full tensor.

Legend: S bytes of the full tensor (nccl-tests' convention), n ranks, N nodes, r ranks per node.
port: bytes out of (and into) the busiest GPU's port of its node, over S. nic: bytes into the busiest node, over S.
Derivations: docs/background/collectives.md; tests/theory plays every algorithm chunk by chunk and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from simulator.base.errors import PlanError

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv"]
Algorithm = Literal[
    "ring", "tree", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat", "hierarchical", "p2p", "send"
]
KINDS: tuple[Kind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "send_recv",
)
POINT_TO_POINT: dict[Kind, Algorithm] = {"all_to_all": "p2p", "send_recv": "send"}
_DATA_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """What one algorithm costs a group: traffic over S, and the steps that follow one another."""

    port: Fraction
    nic: Fraction
    local_steps: int
    network_steps: int

    loop_steps: int = 0  # steps of one loop of a ring, peers of an all-to-all; 0 where nothing loops


@lru_cache(maxsize=4096)
def volume(kind: Kind, algorithm: Algorithm, num_ranks: int, num_nodes: int) -> Volume:
    """The closed form of `algorithm` for `kind` on num_ranks, spread evenly over num_nodes."""
    n, big_n = num_ranks, num_nodes
    r = -(-n // big_n)
    if n == 1:
        return Volume(port=Fraction(0), nic=Fraction(0), local_steps=0, network_steps=0)
    return _FORMS[algorithm](kind, n, big_n, r)


def _ring(kind: Kind, n: int, big_n: int, r: int) -> Volume:
    """One flat ring through all ranks. Every hop carries (n−1)/n·S, twice for all-reduce (Patarasuk & Yuan 2009).

    The ring enters and leaves a node once, so its NICs carry what a hop carries; the other r−1 of the node's r hops
    are on ports, and channels rotate the rank that stands at the border. Broadcast and reduce pass all of S on.
    """
    passes = _DATA_STEPS.get(kind, 1)
    hop = Fraction(passes * (n - 1), n) if kind in _DATA_STEPS else Fraction(1)
    steps = passes * (n - 1)
    network_steps = passes * (big_n - 1)
    alone = big_n == 1
    return Volume(
        port=hop if alone else hop * Fraction(r - 1, r),
        nic=Fraction(0) if alone else hop,
        local_steps=steps - network_steps,
        network_steps=network_steps,
        loop_steps=steps if kind in _DATA_STEPS else 0,
    )


def _tree(_kind: Kind, _n: int, big_n: int, r: int) -> Volume:
    """Double binary tree over nodes (Sanders, Speck, Träff 2009), a chain inside each: S goes up and comes down."""
    port = Fraction(min(r - 1, 2))
    network_steps = 2 * (big_n.bit_length() - 1)
    return Volume(port=port, nic=tree_nic(big_n), local_steps=2 * (r - 1), network_steps=network_steps)


def _nvlstree(_kind: Kind, _n: int, big_n: int, r: int) -> Volume:
    """All-reduce in the NVSwitch: each GPU owns S/r, reads it reduced and multicasts the result.

    Out of each port: all of S (its owners read it through the switch) and the S/r it multicasts.
    Over nodes the owners' results go up and down the double binary tree.
    """
    nic = tree_nic(big_n)
    return Volume(port=1 + Fraction(1, r), nic=nic, local_steps=1, network_steps=2 * (big_n.bit_length() - 1))


def _nvls(_kind: Kind, _n: int, big_n: int, r: int) -> Volume:
    """As NVLS tree inside a node; over nodes the network's switches add the owners' results up: S goes out, S comes in."""
    far = int(big_n > 1)
    return Volume(port=1 + Fraction(1, r), nic=Fraction(far), local_steps=1, network_steps=far)


def _collnetdirect(_kind: Kind, _n: int, _big_n: int, r: int) -> Volume:
    """Scatter S/r to each of a node's r heads, reduce it there, once through the network's switches, and gather.

    Graham et al. 2016 (SHARP), doi 10.1109/COMHPC.2016.006: a switch sends the sum of what enters it.
    """
    hop = Fraction(r - 1, r)
    return Volume(port=2 * hop, nic=Fraction(1), local_steps=2 * min(1, r - 1), network_steps=1)


def _collnetchain(_kind: Kind, _n: int, _big_n: int, r: int) -> Volume:
    """Up a chain of the node's r GPUs, once through the network's switches, down the chain."""
    return Volume(port=Fraction(min(r - 1, 2)), nic=Fraction(1), local_steps=2 * (r - 1), network_steps=1)


def _pat(_kind: Kind, _n: int, big_n: int, r: int) -> Volume:
    """Parallel aggregated trees: Bruck's doubling (1997) with bounded buffers, far ranks first.

    Every part has a binomial tree over all ranks, whose edges are 2^k ranks long: N − 1 of them leave a node, where nodes
    hold a power of two, and the other n − N stay inside one. So a part enters each other node once.
    """
    return Volume(
        port=Fraction(r - 1, r),
        nic=Fraction(big_n - 1, big_n),
        local_steps=(r - 1).bit_length(),
        network_steps=(big_n - 1).bit_length(),
    )


def _hierarchical(kind: Kind, _n: int, big_n: int, r: int) -> Volume:
    """Two levels: rings inside the nodes, and r rings over nodes, each with its own S/r.

    All-gather: first over nodes, so that every rank holds S/r of N nodes, then inside; reduce-scatter the other way round;
    all-reduce: reduce-scatter inside, all-reduce over nodes, all-gather inside. NCCL has it for no collective.
    """
    passes = _DATA_STEPS[kind]
    return Volume(
        port=passes * Fraction(r - 1, r),
        nic=passes * Fraction(big_n - 1, big_n),
        local_steps=passes * (r - 1),
        network_steps=passes * (big_n - 1),
        loop_steps=passes * (r - 1),
    )


def _all_to_all(_kind: Kind, n: int, _big_n: int, r: int) -> Volume:
    """Every rank sends S/n to each other rank: r−1 of them in its node, n−r elsewhere."""
    port, nic = Fraction(r - 1, n), Fraction(r * (n - r), n)
    return Volume(port=port, nic=nic, local_steps=r - 1, network_steps=n - r, loop_steps=n - 1)


def _send(_kind: Kind, _n: int, big_n: int, r: int) -> Volume:
    """Every rank sends S to one peer, all in its node or all (as between pipeline stages) in the next."""
    if big_n == 1:
        return Volume(port=Fraction(1), nic=Fraction(0), local_steps=1, network_steps=0)
    return Volume(port=Fraction(0), nic=Fraction(r), local_steps=0, network_steps=1)


_FORMS: dict[Algorithm, Callable[[Kind, int, int, int], Volume]] = {
    "ring": _ring,
    "tree": _tree,
    "collnetdirect": _collnetdirect,
    "collnetchain": _collnetchain,
    "nvls": _nvls,
    "nvlstree": _nvlstree,
    "pat": _pat,
    "hierarchical": _hierarchical,
    "p2p": _all_to_all,
    "send": _send,
}


@lru_cache(maxsize=1024)
def tree_nic(num_nodes: int) -> Fraction:
    """Bytes into the busiest node of a double binary tree over S: half of S per child (up), half from a parent (down)."""
    half = Fraction(1, 2)
    loads = [Fraction(0)] * num_nodes
    for node, up in tree_edges(num_nodes):
        loads[up] += half
        loads[node] += half
    return max(loads)


def tree_edges(num_nodes: int) -> list[tuple[int, int]]:
    """(child, parent) pairs of both trees. The second is the first mirrored (even) or shifted by one (odd).

    In-order numbering: a node's parent clears its lowest set bit b and sets the next, or only clears it where that
    number does not exist; so inner nodes are even, and each node is a leaf in at least one of the trees.
    """
    first = []
    for node in range(1, num_nodes):
        bit = node & -node
        up = (node ^ bit) | (bit << 1)
        first.append((node, up if up < num_nodes else node ^ bit))
    if num_nodes % 2 == 0:
        second = [(num_nodes - 1 - a, num_nodes - 1 - b) for a, b in first]
    else:
        second = [((a + 1) % num_nodes, (b + 1) % num_nodes) for a, b in first]
    return first + second


def minimum(kind: Kind, num_ranks: int, num_nodes: int) -> Volume:
    """What no algorithm can beat: each rank and each node receives what it lacks once.

    All-gather: into a node the (N−1)/N·S that its ranks do not hold. All-reduce: a port receives the reduced S (the
    switch may have reduced it); without such help between nodes, (N−1)/N·S twice: partial sums in, sums out.
    """
    if kind not in _DATA_STEPS:
        return volume(kind, POINT_TO_POINT.get(kind, "ring"), num_ranks, num_nodes)
    passes = _DATA_STEPS[kind]
    local = -(-num_ranks // num_nodes)
    port = Fraction(min(passes * (local - 1), local), local)
    return Volume(port=port, nic=Fraction(passes * (num_nodes - 1), num_nodes), local_steps=0, network_steps=0)


def checked_kind(kind: str) -> Kind:
    """`kind` if it is one. Raises PlanError with the legal ones."""
    found = next((k for k in KINDS if k == kind), None)
    if found is None:
        raise PlanError.at("collective", f"no kind {kind!r}", f"one of {', '.join(KINDS)}")
    return found
