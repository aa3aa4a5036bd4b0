"""What groups of a node's GPUs find between them: the routes NCCL takes, and how fast a ring or an all-to-all gets over them.

A route is the GPUs' own cable, one relay through a GPU of the group (NCCL's NVB), PCIe peer to peer where the path is
close enough, else host memory (NCCL's SHM): up one GPU's link, down the other's. Groups of one axis run at once, so what
they share (cables, PCIe switches, the CPUs' link, host memory) is divided among them.

A ring's bandwidth over cables is the most that Hamiltonian cycles pack into them, NCCL's channels taken as divisible. Over
PCIe it is one cycle that enters every socket, switch and island once: a second would load the same links again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, pairwise, permutations
from typing import Final

from simulator.base.errors import ClusterError
from simulator.base.remembered import remembered
from simulator.base.sums import summed
from simulator.spec.cluster.parts import Host, Intra, Pcie
from simulator.spec.cluster.routing import Link, components, shortest_route
from simulator.spec.cluster.topology import Topology

# One CPU to another, one way, by the generation of its PCIe: two UPI links of Skylake at 10.4 GT/s, three of Ice Lake at
# 11.2, three of Sapphire Rapids at 16 (2 bytes a transfer; Intel's data sheets). AMD's xGMI is faster.
SOCKET_BYTES_PER_S: Final = {"pcie3": 41.6e9, "pcie4": 67.2e9, "pcie5": 96e9, "c2c": 100e9}
P2P_LEVELS: Final = ("none", "PIX", "PXB", "PHB", "NODE", "SYS")
_MOST_CLUSTERS = 256
_MOST_CYCLED = 8  # GPUs of which all cycles are tried: 5,040
_AMD_PAIR = 2  # NCCL lets so many GPUs reach each other over any path on AMD (src/graph/paths.cc, ncclTopoCheckP2p)
Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GpuRoute:
    """How one GPU sends to another. word: NV (own cable), NVB (a relay), P2P (PCIe, directly), SHM (host memory)."""

    word: str
    links: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What each of several groups at once gets: bytes/s of one ring or of one GPU's sends.

    on_pcie: some hops go by PCIe. in_memory: which part of those passes host memory. loads: of each link, per byte.
    """

    bytes_per_s: float
    on_pcie: bool
    in_memory: float
    loads: Mapping[str, float] = field(compare=False, hash=False)


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """The routes of one node, one object for equal nodes (see `of`). memory_bytes_per_s: the host's memory, 0 if unknown."""

    intra: Intra
    host: Host | None
    pcie: Pcie | None
    num_gpus: int
    memory_bytes_per_s: float

    @classmethod
    def of(cls, cluster: Topology) -> Wiring:
        """A node of `cluster`."""
        return _of_cluster(cluster)

    @property
    def is_even(self) -> bool:
        """Every GPU reaches every other at full port speed, whatever the others do."""
        return self.intra.shape == "switch" or (self.intra.shape == "pcie" and self.pcie is None)

    def route(self, src: int, dst: int, group: Sequence[int]) -> GpuRoute:
        """From one GPU to another of its group. Without a host any GPUs relay. Raises ClusterError where nothing does."""
        rates = self.rates
        if _cable(src, dst) in rates:
            return GpuRoute("NV", (_cable(src, dst),))
        relays = [via for via in group if {_cable(src, via), _cable(via, dst)} <= rates.keys()]
        if relays:
            best = max(relays, key=lambda via: (min(rates[_cable(src, via)], rates[_cable(via, dst)]), -via))
            return GpuRoute("NVB", (_cable(src, best), _cable(best, dst)))
        return self._over_pcie(src, dst, len(group)) if self.host else self._relayed(src, dst)

    @property
    def rates(self) -> Mapping[str, float]:
        """Bytes/s of every link by name, one way."""
        return _rates(self)

    def rings(self, groups: Sequence[Group]) -> Found:
        """Bus bandwidth of a ring in each group, all at once."""
        loads: Counter[str] = Counter()
        words: Counter[str] = Counter()
        for group in groups:
            ring, hops = _ring(self, group)
            loads.update(ring)
            words.update(hops)
        return self._found(loads, words)

    def all_pairs(self, groups: Sequence[Group]) -> Found:
        """What each GPU sends in an all-to-all of each group, all at once."""
        return self._sends([(a, b, group, 1 / (len(group) - 1)) for group in groups for a, b in permutations(group, 2)])

    def neighbours(self, groups: Sequence[Group]) -> Found:
        """What each GPU sends to the next of its group, all at once."""
        return self._sends([(a, b, group, 1.0) for group in groups for a, b in pairwise((*group, group[0]))])

    def path(self, src: int, dst: int) -> str:
        """The word of the PCIe path: PIX below one switch, PHB on one CPU, SYS between two."""
        pcie = self.pcie or Pcie()
        if any(src in switch and dst in switch for switch in pcie.switches):
            return "PIX"
        return "PHB" if self.socket(src) == self.socket(dst) else "SYS"

    def socket(self, gpu: int) -> int:
        """The CPU of a GPU."""
        sockets = self.pcie.sockets if self.pcie else ()
        return next((index for index, gpus in enumerate(sockets) if gpu in gpus), 0)

    def switch(self, gpu: int) -> int | None:
        """The PCIe switch above a GPU."""
        switches = self.pcie.switches if self.pcie else ()
        return next((index for index, gpus in enumerate(switches) if gpu in gpus), None)

    def _relayed(self, src: int, dst: int) -> GpuRoute:
        cables = (Link(kind="", src=a, dst=b, bytes_per_s=r) for (a, b), r in self._cables())
        found = shortest_route(cables, f"gpu{src}", f"gpu{dst}")
        if found is None:
            raise ClusterError.at("intra.edges", f"no path leads from GPU {src} to GPU {dst}")
        return GpuRoute("NVB", tuple(f"{link.src}>{link.dst}" for link in found))

    def _cables(self) -> Iterator[tuple[tuple[str, str], float]]:
        for name, rate in self.rates.items():
            src, arrow, dst = name.partition(">")
            if arrow and src.startswith("gpu"):
                yield (src, dst), rate

    def _over_pcie(self, src: int, dst: int, num_ranks: int) -> GpuRoute:
        if self.pcie is None:
            return GpuRoute("P2P", (f"up{src}", f"down{dst}"))
        path, level = self.path(src, dst), self.pcie.p2p
        if level is None:
            level = "SYS" if self.pcie.cpu == "amd" and num_ranks <= _AMD_PAIR else "PXB"
        is_direct = P2P_LEVELS.index(path) <= P2P_LEVELS.index(level)
        middle = [] if path == "PIX" and is_direct else list(self._between(src, dst))
        word, memory = ("P2P", []) if is_direct else ("SHM", ["memory"] if "memory" in self.rates else [])
        return GpuRoute(word, (f"up{src}", *middle, *memory, f"down{dst}"))

    def _between(self, src: int, dst: int) -> Iterator[str]:
        up, down, (a, b) = self.switch(src), self.switch(dst), (self.socket(src), self.socket(dst))
        if up is not None:
            yield f"switch{up} up"
        if a != b:
            yield f"socket{a}>{b}"
        if down is not None:
            yield f"switch{down} down"

    def _sends(self, sends: Sequence[tuple[int, int, Group, float]]) -> Found:
        loads: Counter[str] = Counter()
        words: Counter[str] = Counter()
        for src, dst, group, part in sends:
            route = self.route(src, dst, group)
            words[route.word] += 1
            for link in route.links:
                loads[link] += part  # type: ignore[assignment]  # a Counter adds fractions as well
        return self._found(loads, words)

    def _found(self, loads: Mapping[str, float], words: Mapping[str, int]) -> Found:
        """The rate at which the most loaded link is full; `loads` are per unit of rate."""
        direct, staged = words.get("P2P", 0), words.get("SHM", 0)
        share = staged / (direct + staged) if staged else 0.0
        return Found(_speed(self.rates, loads), bool(direct or staged), share, loads)


@remembered(_MOST_CLUSTERS)
def _of_cluster(cluster: Topology) -> Wiring:
    tier = cluster.host_tier if cluster.pcie else None
    memory = tier.memory_bytes_per_s if tier else 0.0
    return _made(cluster.intra, cluster.host_link, cluster.pcie, cluster.gpus_per_node, memory)


@lru_cache(maxsize=256)
def _made(intra: Intra, host: Host | None, pcie: Pcie | None, num_gpus: int, memory_bytes_per_s: float) -> Wiring:
    return Wiring(intra, host, pcie, num_gpus, memory_bytes_per_s)


def _cable(src: int, dst: int) -> str:
    return f"gpu{src}>gpu{dst}"


@lru_cache(maxsize=256)
def _rates(wiring: Wiring) -> Mapping[str, float]:
    intra, host, pcie = wiring.intra, wiring.host, wiring.pcie
    found: dict[str, float] = {}
    for edge in intra.edges:
        for src, dst in ((edge.src, edge.dst), (edge.dst, edge.src)) if edge.both_ways else ((edge.src, edge.dst),):
            found[_cable(src, dst)] = edge.bytes_per_s
    if intra.shape == "mesh" and not intra.edges:
        share = intra.bytes_per_s / max(1, wiring.num_gpus - 1)
        found |= {_cable(a, b): share for a, b in permutations(range(wiring.num_gpus), 2)}
    if host is None:
        return found
    for gpu in range(wiring.num_gpus):
        found[f"up{gpu}"] = found[f"down{gpu}"] = host.bytes_per_s
    if pcie is None:
        return found
    uplink = pcie.switch_bytes_per_s or host.bytes_per_s
    found |= {
        f"switch{index} {direction}": uplink for index in range(len(pcie.switches)) for direction in ("up", "down")
    }
    between = pcie.socket_bytes_per_s or SOCKET_BYTES_PER_S[host.kind]
    found |= {f"socket{a}>{b}": between for a, b in permutations(range(len(pcie.sockets)), 2)}
    memory = pcie.host_bytes_per_s or wiring.memory_bytes_per_s / 2
    return found | ({"memory": memory} if memory else {})


@lru_cache(maxsize=1024)
def _ring(wiring: Wiring, group: Group) -> tuple[Mapping[str, float], Mapping[str, int]]:
    """(load of each link per byte/s of the ring, its routes by word): the faster of cables alone and one mixed cycle."""
    packed = _packed(wiring, group)
    if packed and wiring.host is None:
        return packed, {"NV": len(group)}
    cycle: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for a, b in _hops(_in_order(wiring, group)):
        route = wiring.route(a, b, group)
        words[route.word] += 1
        cycle.update(route.links)
    if packed and _speed(wiring.rates, packed) >= _speed(wiring.rates, cycle):
        return packed, {"NV": len(group)}
    return cycle, words


def _speed(rates: Mapping[str, float], loads: Mapping[str, float]) -> float:
    return min(rates[link] / load for link, load in loads.items())


def _hops(order: Group) -> Iterator[tuple[int, int]]:
    return pairwise((*order, order[0]))


def _in_order(wiring: Wiring, group: Group) -> Group:
    """Neighbours by socket, then by island, then by switch."""
    position = {gpu: index for index, gpu in enumerate(group)}
    joined = [
        (position[a], position[b])
        for a, b in combinations(group, 2)
        if {_cable(a, b), _cable(b, a)} & wiring.rates.keys()
    ]
    island = {group[i]: number for number, part in enumerate(components(len(group), joined)) for i in part}
    last = wiring.num_gpus
    return tuple(sorted(group, key=lambda g: (wiring.socket(g), island[g], _or(wiring.switch(g), last), g)))


def _or(number: int | None, other: int) -> int:
    return other if number is None else number


def _packed(wiring: Wiring, group: Group) -> Mapping[str, float]:
    """Loads of the best packing of cycles over the group's cables, per byte/s of all together; empty without a cycle."""
    rates = wiring.rates
    if wiring.intra.shape == "mesh" and not wiring.intra.edges:  # every cable alike: all of them carry 1/(r-1)
        return {_cable(a, b): 1 / (len(group) - 1) for a, b in permutations(group, 2)}
    if any(summed(_cable(gpu, peer) in rates for peer in group) < min(2, len(group) - 1) for gpu in group):
        return {}  # no cycle passes a GPU that has a cable to one of them only
    if len(group) > _MOST_CYCLED:
        cycles = [list(_hops(group))]
    else:
        cycles = [list(_hops((group[0], *rest))) for rest in permutations(group[1:])]
    used = [[_cable(a, b) for a, b in cycle] for cycle in cycles]
    used = [cycle for cycle in used if all(link in rates for link in cycle)]
    if not used:
        return {}
    amounts = [1.0] if len(used) == 1 else _most(used, rates)
    loads: Counter[str] = Counter()
    for cycle, amount in zip(used, amounts, strict=True):
        for link in cycle if amount else ():
            loads[link] += amount / summed(amounts)  # type: ignore[assignment]
    return loads


def _most(cycles: Sequence[Sequence[str]], rates: Mapping[str, float]) -> list[float]:
    """The rate of each cycle that maximises their sum without overloading a link (a linear programme)."""
    import numpy as np
    from scipy.optimize import linprog

    links = sorted({link for cycle in cycles for link in cycle})
    row = {link: index for index, link in enumerate(links)}
    loads = np.zeros((len(links), len(cycles)))
    for column, cycle in enumerate(cycles):
        loads[[row[link] for link in cycle], column] = 1.0
    scale = max(rates[link] for link in links)
    limits = [rates[link] / scale for link in links]
    solved = linprog(-np.ones(len(cycles)), A_ub=loads, b_ub=limits, method="highs-ds")
    return [float(amount) if amount > 1e-9 else 0.0 for amount in np.asarray(solved.x)]
