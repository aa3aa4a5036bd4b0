"""Which network cards a node's groups use, by what path, and how fast: NCCL's roads between GPUs and cards.

Read in NVIDIA/nccl 2.30.7 (commit 5067397c2676), src/graph/paths.cc and search.cc:
- a ring enters a node by a card and its nearest GPU, and leaves by the same card: from a second GPU beside it, else over
  NVLink and the GPU beside it (PXN), else by another card (cross-NIC), else from a GPU farther away;
- cards behind a CPU serve a ring only where no card is beside a GPU of the group;
- a message of an all-to-all arrives by its receiver's nearest card, and leaves by the card of the same number, over
  NVLink and the GPU beside it; without PXN by the sender's own;
- a path farther than GPUDirect's level is staged: written to and read from the memory of the GPU's socket.

Groups of one axis run at once, so what they share (cards, PCIe switches, the CPUs' link, memory) is divided among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

from simulator.topology.parts import CardPlace, Inter
from simulator.topology.wiring import Group, Wiring

if TYPE_CHECKING:
    from simulator.topology.cluster import Cluster

# Near to far. P2C: over the link between GPU and CPU where that is C2C; NCCL treats it as near (GPUDirect, PXN).
Word = Literal["PIX", "P2C", "PXN", "PHB", "SYS"]
WORDS: Final[tuple[Word, ...]] = ("PIX", "P2C", "PXN", "PHB", "SYS")
Pattern = Literal["ring", "all_to_all", "send"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRules:
    """What NCCL may do. direct: furthest word at which cards reach GPU memory, None for never.

    direct_reads: cards read GPU memory too, for sends. pxn: over a peer's NVLink to its card. cross: a ring may leave
    by another card than it came in by. same_card: without PXN a message still leaves by its receiver's card.
    """

    direct: Word | None = "P2C"
    direct_reads: bool = True
    pxn: bool = True
    cross: bool = True
    same_card: bool = False


@dataclass(frozen=True, slots=True)
class CardsReached:
    """bytes_per_s: into a node, and out of it, for each group, while all of them run.

    word: furthest path. in_memory: part of what crosses GPUs and cards that is staged in host memory. off_rail: part of
    what leaves that goes to a card of another number. loads: of each link, per byte into the node of each group.
    """

    bytes_per_s: float
    word: Word
    in_memory: float
    off_rail: float
    loads: Mapping[str, float] = field(compare=False, hash=False)


@dataclass(slots=True)
class _Tally:
    """Loads while roads are laid, and what parts of the traffic are staged or leave their rail."""

    loads: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    words: set[Word] = field(default_factory=set)
    total: float = 0.0
    staged: float = 0.0
    off_rail: float = 0.0


def places_of(cluster: Cluster) -> tuple[CardPlace, ...]:
    """Where each card of a node sits: as stated, else spread evenly beside the GPUs."""
    return _places(cluster.inter, cluster.gpus_per_node) if cluster.inter else ()


def reached(cluster: Cluster, groups: Sequence[Group], rules: CardRules, pattern: Pattern) -> CardsReached:
    """What each of several equal groups on a node gets of the network, all at once. `cluster` has cards."""
    assert cluster.inter is not None
    wiring, tier = Wiring.of(cluster), cluster.host_tier
    memory = wiring.rates.get("memory") or (tier.memory_bytes_per_s / 2 if tier else 0.0)
    return _reached(wiring, cluster.inter, tuple(groups), rules, pattern, memory)


def word_of(wiring: Wiring, place: CardPlace, gpu: int) -> Word:
    """The path between a GPU and a card, without PXN."""
    if gpu in place.gpus:
        return "PIX"
    if wiring.socket(gpu) != socket_of(wiring, place):
        return "SYS"
    return "P2C" if wiring.host is not None and wiring.host.kind == "c2c" else "PHB"


def socket_of(wiring: Wiring, place: CardPlace) -> int:
    """The CPU that a card hangs on."""
    return wiring.socket(place.gpus[0]) if place.gpus else place.socket or 0


def nearest(wiring: Wiring, places: Sequence[CardPlace], gpu: int) -> tuple[tuple[int, ...], Word]:
    """The cards at a GPU's closest path, and its word."""
    words = [word_of(wiring, place, gpu) for place in places]
    best = min(words, key=WORDS.index)
    return tuple(card for card, word in enumerate(words) if word == best), best


@lru_cache(maxsize=256)
def _places(inter: Inter, num_gpus: int) -> tuple[CardPlace, ...]:
    """The n-th card beside the n-th GPU; GPUs, or cards, in excess side by side with their neighbours."""
    if inter.cards:
        return inter.cards
    cards = inter.num_nics
    if cards >= num_gpus:
        return tuple(CardPlace(gpus=(card * num_gpus // cards,)) for card in range(cards))
    sets = [tuple(gpu for gpu in range(num_gpus) if gpu * cards // num_gpus == card) for card in range(cards)]
    return tuple(CardPlace(gpus=gpus) for gpus in sets)


@lru_cache(maxsize=4096)
def _reached(
    wiring: Wiring,
    inter: Inter,
    groups: tuple[Group, ...],
    rules: CardRules,
    pattern: Pattern,
    memory_bytes_per_s: float,
) -> CardsReached:
    roads = _Roads(wiring, _places(inter, wiring.num_gpus), rules, stated=bool(inter.cards))
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
    word = max(found.words, key=WORDS.index)
    return CardsReached(reach, word, found.staged / found.total, found.off_rail / len(groups), dict(found.loads))


def _rates(wiring: Wiring, inter: Inter, memory_bytes_per_s: float) -> Mapping[str, float]:
    """Bytes/s of the node's links, one way, and of what is staged in its memory (0: unknown)."""
    own = {f"nic{card} {way}": inter.nic_bytes_per_s for card in range(inter.num_nics) for way in ("in", "out")}
    memory = {"memory": memory_bytes_per_s} if memory_bytes_per_s else {}
    return {**wiring.rates, **own, **memory}


class _Roads:
    """Lays the roads of groups, one after the other.

    stated: somebody said where the cards sit. Where nobody did, a card is as fast as it is, whatever its GPU's PCIe link.
    """

    def __init__(self, wiring: Wiring, places: tuple[CardPlace, ...], rules: CardRules, *, stated: bool) -> None:
        self.wiring, self.places, self.rules, self.stated = wiring, places, rules, stated
        self.tally = _Tally()

    def alone(self, gpu: int, group: Group) -> None:
        """A GPU that sends and receives by its own nearest cards, or by a peer's where those are behind a CPU."""
        part = 1 / len(group)
        for card, share in self.arrivals(gpu, group):
            self.enter(card, gpu, part * share, group)
            peer = self.peer(card, gpu, group)
            self.leave(card, gpu if peer is None else peer, part * share, via_peer=peer is not None)

    def all_to_all(self, group: Group) -> None:
        """What each GPU receives from other nodes, and what it sends to their GPUs."""
        part = 1 / len(group)
        arriving = [(card, part * share, gpu) for gpu in group for card, share in self.arrivals(gpu, group)]
        by_card: dict[int, float] = defaultdict(float)
        for card, share, gpu in arriving:
            self.enter(card, gpu, share, group)
            by_card[card] += share
        for gpu in group:
            for card, share in by_card.items():
                self.send(card, gpu, share / len(group), group)

    def send(self, card: int, gpu: int, part: float, group: Group) -> None:
        """To a receiver whose card has this number."""
        peer = self.peer(card, gpu, group)
        own, _ = nearest(self.wiring, self.places, gpu)
        if card in own or self.rules.same_card:
            self.leave(card, gpu, part)
        elif peer is not None:
            self.leave(card, peer, part, via_peer=True)
        else:
            self.tally.off_rail += part
            for one in own:
                self.leave(one, gpu, part / len(own))

    def ring(self, group: Group) -> None:
        """Rings through all GPUs of the group, as many as it has cards that serve them."""
        used = self.ring_cards(group)
        part = 1 / len(used)
        for index, (card, gates) in enumerate(used):
            for gate in gates:
                self.enter(card, gate, part / len(gates), group)
            if len(gates) > 1:
                for gate in gates:
                    self.leave(card, gate, part / len(gates))
            else:
                self.ring_exit(card, gates[0], part, group, used[(index + 1) % len(used)])

    def ring_cards(self, group: Group) -> list[tuple[int, Group]]:
        """The cards that serve a group's rings, each with the GPUs closest to it: near cards only, if there are any."""
        words = [min((word_of(self.wiring, p, g) for g in group), key=WORDS.index) for p in self.places]
        best = min(words, key=WORDS.index)
        limit = max(WORDS.index(best), WORDS.index("P2C"))
        return [
            (card, tuple(gpu for gpu in group if word_of(self.wiring, self.places[card], gpu) == word))
            for card, word in enumerate(words)
            if WORDS.index(word) <= limit
        ]

    def ring_exit(self, card: int, gate: int, part: float, group: Group, other: tuple[int, Group]) -> None:
        """Out of a node whose ring came in over the only GPU beside a card."""
        rest = [gpu for gpu in group if gpu != gate]
        alike = [gpu for gpu in rest if self.level(card, gpu) <= self.level(card, gate)]  # staged: any of its socket
        if alike:
            for gpu in alike:
                self.leave(card, gpu, part / len(alike))
        elif self.rules.pxn and self.is_gate(card, gate) and any(self.joined(gpu, gate) for gpu in rest):
            self.leave(card, gate, part, via_peer=True)
        elif self.rules.cross and other[1] != (gate,):
            self.tally.off_rail += part
            self.leave(other[0], other[1][0], part)
        else:
            self.leave(
                card, min(rest, key=lambda g: (WORDS.index(word_of(self.wiring, self.places[card], g)), g)), part
            )

    def arrivals(self, gpu: int, group: Group) -> Iterator[tuple[int, float]]:
        """The cards by which a GPU receives: its nearest, or those that a peer reaches better."""
        own, word = nearest(self.wiring, self.places, gpu)
        if WORDS.index(word) > WORDS.index("PXN"):
            by_peer = tuple(c for c in range(len(self.places)) if self.peer(c, gpu, group) is not None)
            own = by_peer or own
        for card in own:
            yield card, 1 / len(own)

    def peer(self, card: int, gpu: int, group: Group) -> int | None:
        """The GPU beside a card through which NCCL's PXN sends; None where it does not."""
        if not self.rules.pxn or word_of(self.wiring, self.places[card], gpu) in ("PIX", "P2C"):
            return None
        gates = [other for other in group if self.is_gate(card, other) and self.joined(gpu, other)]
        return gates[0] if gates else None

    def is_gate(self, card: int, gpu: int) -> bool:
        """The card reads this GPU's memory and is no farther than PXN allows."""
        word = word_of(self.wiring, self.places[card], gpu)
        return word in ("PIX", "P2C") and self.is_direct(word) and self.rules.direct_reads

    def level(self, card: int, gpu: int) -> int:
        """How far a card is as NCCL sees it: over the CPU where it does not reach the GPU's memory."""
        word = word_of(self.wiring, self.places[card], gpu)
        return WORDS.index(word if self.is_direct(word) else max(word, "PHB", key=WORDS.index))

    def joined(self, a: int, b: int) -> bool:
        """By their own cables or a switch."""
        return self.wiring.intra.shape == "switch" or f"gpu{a}>gpu{b}" in self.wiring.rates

    def is_direct(self, word: Word) -> bool:
        return self.rules.direct is not None and WORDS.index(word) <= WORDS.index(self.rules.direct)

    def enter(self, card: int, gpu: int, part: float, group: Group) -> None:
        """From a card to a GPU. NCCL takes the word of a path that PXN helps with for what the card may write to."""
        word = word_of(self.wiring, self.places[card], gpu)
        helped = self.peer(card, gpu, group) is not None
        self.lay(card, gpu, part, word, staged=not (helped or self.is_direct(word)), inwards=True)

    def leave(self, card: int, gpu: int, part: float, *, via_peer: bool = False) -> None:
        """From the memory of a GPU to a card."""
        word = word_of(self.wiring, self.places[card], gpu)
        staged = not (self.is_direct(word) and self.rules.direct_reads)
        self.lay(card, gpu, part, word, staged=staged, inwards=False)
        if via_peer:
            self.tally.words.add("PXN")

    def lay(self, card: int, gpu: int, part: float, word: Word, *, staged: bool, inwards: bool) -> None:
        place, wiring, tally = self.places[card], self.wiring, self.tally
        tally.words.add(max(word, "PHB", key=WORDS.index) if staged else word)  # NCCL: by way of the CPU then
        tally.total += part
        tally.staged += part if staged else 0.0
        links = [f"nic{card} in" if inwards else f"nic{card} out"]
        if self.stated or word != "PIX" or staged:
            links.append(f"down{gpu}" if inwards else f"up{gpu}")
        if word != "PIX" or staged:
            near, far = socket_of(wiring, place), wiring.socket(gpu)
            above = [wiring.switch(gpu), wiring.switch(place.gpus[0]) if place.gpus else None]
            ways = ("down", "up") if inwards else ("up", "down")
            links += [f"switch{s} {way}" for s, way in zip(above, ways, strict=True) if s is not None]
            if near != far:
                links.append(f"socket{near}>{far}" if inwards else f"socket{far}>{near}")
        if staged:
            links.append("memory")
        for link in links:
            tally.loads[link] += part
