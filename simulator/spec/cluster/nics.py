"""Which NICs a node's groups use, by what path, and how fast: NCCL's routes between GPUs and NICs.

Read in NVIDIA/nccl 2.30.7 (commit 5067397c2676), src/graph/paths.cc and search.cc:
- a ring enters a node by a NIC and its nearest GPU, and leaves by the same card: from a second GPU beside it, else over
  NVLink and the GPU beside it (PXN), else by another NIC (cross-NIC), else from a GPU farther away;
- NICs behind a CPU serve a ring only where no NIC is beside a GPU of the group;
- a message of an all-to-all arrives by its receiver's nearest NIC, and leaves by the NIC of the same number, over
  NVLink and the GPU beside it; without PXN by the sender's own;
- a path farther than GPUDirect's level is staged: written to and read from the memory of the GPU's socket.

Groups of one axis run at once, so what they share (NICs, PCIe switches, the CPUs' link, memory) is divided among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from simulator.spec.cluster.parts import Inter, NicPlace
from simulator.spec.cluster.topology import Topology
from simulator.spec.cluster.wiring import Group, Wiring

# Near to far. P2C: over the link between GPU and CPU where that is C2C; NCCL treats it as near (GPUDirect, PXN).
PathType = Literal["PIX", "P2C", "PXN", "PHB", "SYS"]
PATH_TYPES: Final[tuple[PathType, ...]] = ("PIX", "P2C", "PXN", "PHB", "SYS")
Pattern = Literal["ring", "all_to_all", "send"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NicRules:
    """What NCCL may do. direct: furthest word at which NICs reach GPU memory, None for never.

    direct_reads: NICs read GPU memory too, for sends. pxn: over a peer's NVLink to its NIC. cross: a ring may leave
    by another NIC than it came in by. same_nic: without PXN a message still leaves by its receiver's NIC.
    """

    direct: PathType | None = "P2C"
    direct_reads: bool = True
    pxn: bool = True
    cross: bool = True
    same_nic: bool = False


@dataclass(frozen=True, slots=True)
class NicPaths:
    """bytes_per_s: into a node, and out of it, for each group, while all of them run.

    word: furthest path. in_memory: part of what crosses GPUs and NICs that is staged in host memory. off_rail: part of
    what leaves that goes to a NIC of another number. loads: of each link, per byte into the node of each group.
    """

    bytes_per_s: float
    word: PathType
    in_memory: float
    off_rail: float
    loads: Mapping[str, float] = field(compare=False, hash=False)


@dataclass(slots=True)
class _Tally:
    """Link loads while routes are added, and the shares of traffic that are staged or leave their rail."""

    loads: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    words: set[PathType] = field(default_factory=set)
    total: float = 0.0
    staged: float = 0.0
    off_rail: float = 0.0


def places_of(cluster: Topology) -> tuple[NicPlace, ...]:
    """The position of each NIC of a node: as stated, else spread evenly beside the GPUs."""
    return _places(cluster.inter, cluster.gpus_per_node) if cluster.inter else ()


def reached(cluster: Topology, groups: Sequence[Group], rules: NicRules, pattern: Pattern) -> NicPaths:
    """What each of several equal groups on a node gets of the network, all at once. `cluster` has NICs."""
    assert cluster.inter is not None
    wiring, tier = Wiring.of(cluster), cluster.host_tier
    memory = wiring.rates.get("memory") or (tier.memory_bytes_per_s / 2 if tier else 0.0)
    return _reached(wiring, cluster.inter, tuple(groups), rules, pattern, memory)


def path_type(wiring: Wiring, place: NicPlace, gpu: int) -> PathType:
    """The path between a GPU and a NIC, without PXN."""
    if gpu in place.gpus:
        return "PIX"
    if wiring.socket(gpu) != socket_of(wiring, place):
        return "SYS"
    return "P2C" if wiring.host is not None and wiring.host.kind == "c2c" else "PHB"


def socket_of(wiring: Wiring, place: NicPlace) -> int:
    """The CPU to which a NIC is attached."""
    return wiring.socket(place.gpus[0]) if place.gpus else place.socket or 0


def nearest(wiring: Wiring, places: Sequence[NicPlace], gpu: int) -> tuple[tuple[int, ...], PathType]:
    """The NICs at a GPU's closest path, and the path's name."""
    words = [path_type(wiring, place, gpu) for place in places]
    best = min(words, key=PATH_TYPES.index)
    return tuple(nic for nic, word in enumerate(words) if word == best), best


@lru_cache(maxsize=256)
def _places(inter: Inter, num_gpus: int) -> tuple[NicPlace, ...]:
    """The n-th NIC beside the n-th GPU; GPUs, or NICs, in excess side by side with their neighbours."""
    if inter.cards:
        return inter.cards
    nics = inter.num_nics
    if nics >= num_gpus:
        return tuple(NicPlace(gpus=(nic * num_gpus // nics,)) for nic in range(nics))
    sets = [tuple(gpu for gpu in range(num_gpus) if gpu * nics // num_gpus == nic) for nic in range(nics)]
    return tuple(NicPlace(gpus=gpus) for gpus in sets)


@lru_cache(maxsize=4096)
def _reached(
    wiring: Wiring,
    inter: Inter,
    groups: tuple[Group, ...],
    rules: NicRules,
    pattern: Pattern,
    memory_bytes_per_s: float,
) -> NicPaths:
    roads = _NicRoutes(wiring, _places(inter, wiring.num_gpus), rules, stated=bool(inter.cards))
    for group in groups:
        if pattern == "all_to_all":
            roads.all_to_all(group)
        elif pattern == "send" or len(group) == 1:
            for gpu in group:
                roads.alone(gpu, group)
        else:
            roads.ring(group)
    found = roads.tally
    rates = _rates(wiring, inter, memory_bytes_per_s)
    reach = min(rates[link] / load for link, load in found.loads.items() if link in rates)
    word = max(found.words, key=PATH_TYPES.index)
    return NicPaths(reach, word, found.staged / found.total, found.off_rail / len(groups), dict(found.loads))


def _rates(wiring: Wiring, inter: Inter, memory_bytes_per_s: float) -> Mapping[str, float]:
    """Bytes/s of the node's links, one way, and of what is staged in its memory (0: unknown)."""
    own = {
        f"nic{nic} {direction}": inter.nic_bytes_per_s for nic in range(inter.num_nics) for direction in ("in", "out")
    }
    memory = {"memory": memory_bytes_per_s} if memory_bytes_per_s else {}
    return {**wiring.rates, **own, **memory}


class _NicRoutes:
    """Lays the routes of groups, one after the other.

    stated: the cluster says where the NICs sit. Where it does not, a NIC is as fast as it is, whatever its GPU's PCIe link.
    """

    def __init__(self, wiring: Wiring, places: tuple[NicPlace, ...], rules: NicRules, *, stated: bool) -> None:
        self.wiring, self.places, self.rules, self.stated = wiring, places, rules, stated
        self.tally = _Tally()

    def alone(self, gpu: int, group: Group) -> None:
        """A GPU that sends and receives by its own nearest NICs, or by a peer's where those are behind a CPU."""
        part = 1 / len(group)
        for nic, share in self.arrivals(gpu, group):
            self.enter(nic, gpu, part * share, group)
            peer = self.peer(nic, gpu, group)
            self.leave(nic, gpu if peer is None else peer, part * share, via_peer=peer is not None)

    def all_to_all(self, group: Group) -> None:
        """What each GPU receives from other nodes, and what it sends to their GPUs."""
        part = 1 / len(group)
        arriving = [(nic, part * share, gpu) for gpu in group for nic, share in self.arrivals(gpu, group)]
        by_card: dict[int, float] = defaultdict(float)
        for nic, share, gpu in arriving:
            self.enter(nic, gpu, share, group)
            by_card[nic] += share
        for gpu in group:
            for nic, share in by_card.items():
                self.send(nic, gpu, share / len(group), group)

    def send(self, nic: int, gpu: int, part: float, group: Group) -> None:
        """To a receiver whose NIC has this number."""
        peer = self.peer(nic, gpu, group)
        own, _ = nearest(self.wiring, self.places, gpu)
        if nic in own or self.rules.same_nic:
            self.leave(nic, gpu, part)
        elif peer is not None:
            self.leave(nic, peer, part, via_peer=True)
        else:
            self.tally.off_rail += part
            for one in own:
                self.leave(one, gpu, part / len(own))

    def ring(self, group: Group) -> None:
        """Rings through all GPUs of the group, as many as it has NICs that serve them."""
        used = self.ring_nics(group)
        part = 1 / len(used)
        for index, (nic, gates) in enumerate(used):
            for gate in gates:
                self.enter(nic, gate, part / len(gates), group)
            if len(gates) > 1:
                for gate in gates:
                    self.leave(nic, gate, part / len(gates))
            else:
                self.ring_exit(nic, gates[0], part, group, used[(index + 1) % len(used)])

    def ring_nics(self, group: Group) -> list[tuple[int, Group]]:
        """The NICs that serve a group's rings, each with the GPUs closest to it: near NICs only, if there are any."""
        words = [min((path_type(self.wiring, p, g) for g in group), key=PATH_TYPES.index) for p in self.places]
        best = min(words, key=PATH_TYPES.index)
        limit = max(PATH_TYPES.index(best), PATH_TYPES.index("P2C"))
        return [
            (nic, tuple(gpu for gpu in group if path_type(self.wiring, self.places[nic], gpu) == word))
            for nic, word in enumerate(words)
            if PATH_TYPES.index(word) <= limit
        ]

    def ring_exit(self, nic: int, gate: int, part: float, group: Group, other: tuple[int, Group]) -> None:
        """Out of a node whose ring came in over the only GPU beside a NIC."""
        rest = [gpu for gpu in group if gpu != gate]
        alike = [gpu for gpu in rest if self.level(nic, gpu) <= self.level(nic, gate)]  # staged: any of its socket
        if alike:
            for gpu in alike:
                self.leave(nic, gpu, part / len(alike))
        elif self.rules.pxn and self.is_gate(nic, gate) and any(self.joined(gpu, gate) for gpu in rest):
            self.leave(nic, gate, part, via_peer=True)
        elif self.rules.cross and other[1] != (gate,):
            self.tally.off_rail += part
            self.leave(other[0], other[1][0], part)
        else:
            self.leave(
                nic, min(rest, key=lambda g: (PATH_TYPES.index(path_type(self.wiring, self.places[nic], g)), g)), part
            )

    def arrivals(self, gpu: int, group: Group) -> Iterator[tuple[int, float]]:
        """The NICs by which a GPU receives: its nearest, or those that a peer reaches better."""
        own, word = nearest(self.wiring, self.places, gpu)
        if PATH_TYPES.index(word) > PATH_TYPES.index("PXN"):
            by_peer = tuple(c for c in range(len(self.places)) if self.peer(c, gpu, group) is not None)
            own = by_peer or own
        for nic in own:
            yield nic, 1 / len(own)

    def peer(self, nic: int, gpu: int, group: Group) -> int | None:
        """The GPU beside a NIC through which NCCL's PXN sends; None where it does not."""
        if not self.rules.pxn or path_type(self.wiring, self.places[nic], gpu) in ("PIX", "P2C"):
            return None
        gates = [other for other in group if self.is_gate(nic, other) and self.joined(gpu, other)]
        return gates[0] if gates else None

    def is_gate(self, nic: int, gpu: int) -> bool:
        """The NIC reads this GPU's memory and is no farther than PXN allows."""
        word = path_type(self.wiring, self.places[nic], gpu)
        return word in ("PIX", "P2C") and self.is_direct(word) and self.rules.direct_reads

    def level(self, nic: int, gpu: int) -> int:
        """How far a NIC is as NCCL sees it: over the CPU where it does not reach the GPU's memory."""
        word = path_type(self.wiring, self.places[nic], gpu)
        return PATH_TYPES.index(word if self.is_direct(word) else max(word, "PHB", key=PATH_TYPES.index))

    def joined(self, a: int, b: int) -> bool:
        """By their own cables or a switch."""
        return self.wiring.intra.shape == "switch" or f"gpu{a}>gpu{b}" in self.wiring.rates

    def is_direct(self, word: PathType) -> bool:
        return self.rules.direct is not None and PATH_TYPES.index(word) <= PATH_TYPES.index(self.rules.direct)

    def enter(self, nic: int, gpu: int, part: float, group: Group) -> None:
        """From a NIC to a GPU. NCCL takes the word of a path that PXN helps with for what the NIC may write to."""
        word = path_type(self.wiring, self.places[nic], gpu)
        helped = self.peer(nic, gpu, group) is not None
        self.lay(nic, gpu, part, word, staged=not (helped or self.is_direct(word)), inwards=True)

    def leave(self, nic: int, gpu: int, part: float, *, via_peer: bool = False) -> None:
        """From the memory of a GPU to a NIC."""
        word = path_type(self.wiring, self.places[nic], gpu)
        staged = not (self.is_direct(word) and self.rules.direct_reads)
        self.lay(nic, gpu, part, word, staged=staged, inwards=False)
        if via_peer:
            self.tally.words.add("PXN")

    def lay(self, nic: int, gpu: int, part: float, word: PathType, *, staged: bool, inwards: bool) -> None:
        place, wiring, tally = self.places[nic], self.wiring, self.tally
        tally.words.add(max(word, "PHB", key=PATH_TYPES.index) if staged else word)  # NCCL: by way of the CPU then
        tally.total += part
        tally.staged += part if staged else 0.0
        links = [f"nic{nic} in" if inwards else f"nic{nic} out"]
        if self.stated or word != "PIX" or staged:
            links.append(f"down{gpu}" if inwards else f"up{gpu}")
        if word != "PIX" or staged:
            near, far = socket_of(wiring, place), wiring.socket(gpu)
            above = [wiring.switch(gpu), wiring.switch(place.gpus[0]) if place.gpus else None]
            directions = ("down", "up") if inwards else ("up", "down")
            links += [f"switch{s} {direction}" for s, direction in zip(above, directions, strict=True) if s is not None]
            if near != far:
                links.append(f"socket{near}>{far}" if inwards else f"socket{far}>{near}")
        if staged:
            links.append("memory")
        for link in links:
            tally.loads[link] += part
