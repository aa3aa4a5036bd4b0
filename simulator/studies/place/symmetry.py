"""Which placements of a node are equivalent: GPUs that cannot be distinguished, and ranks that may be exchanged.

GPUs are twins where swapping them leaves cables, sockets, switches and NICs as they are. Along an axis of the mesh ranks
may be renumbered where that leaves all groups as they are; pipeline stages and rings of a fixed order may not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import factorial, prod

from simulator.spec.cluster import Cluster
from simulator.spec.cluster.nics import places_of, socket_of
from simulator.spec.cluster.parts import NicPlace
from simulator.spec.cluster.wiring import Wiring
from simulator.spec.plan import AXES
from simulator.studies.place.cost import PlacementPricer


def equal_gpus(cluster: Cluster) -> tuple[int, ...]:
    """For each GPU of a node, the first GPU that is equivalent to it."""
    found: list[int] = []
    for gpu in range(cluster.gpus_per_node):
        first = (other for other in dict.fromkeys(found) if _are_interchangeable(cluster, other, gpu))
        found.append(next(first, gpu))
    return tuple(found)


def _are_interchangeable(cluster: Cluster, a: int, b: int) -> bool:
    wiring = Wiring.of(cluster)
    if wiring.socket(a) != wiring.socket(b) or wiring.switch(a) != wiring.switch(b):
        return False
    swapped = {a: b, b: a}
    cables = {name: rate for name, rate in wiring.rates.items() if name.startswith("gpu")}
    renamed = {_renamed(name, swapped): rate for name, rate in cables.items()}
    return cables == renamed and (
        not (cluster.inter and cluster.inter.cards) or _places(cluster, wiring, {}) == _places(cluster, wiring, swapped)
    )


def _renamed(name: str, swapped: dict[int, int]) -> str:
    src, _, dst = name.partition(">")
    return ">".join(f"gpu{swapped.get(n, n)}" for n in (int(end.removeprefix("gpu")) for end in (src, dst)))


def _places(cluster: Cluster, wiring: Wiring, swapped: dict[int, int]) -> Counter[tuple[tuple[int, ...], int]]:
    """NICs by what they sit beside, whatever their number."""

    def place(nic: NicPlace) -> tuple[tuple[int, ...], int]:
        return tuple(sorted(swapped.get(gpu, gpu) for gpu in nic.gpus)), socket_of(wiring, nic)

    return Counter(map(place, places_of(cluster)))


@dataclass(frozen=True, slots=True)
class Lines:
    """Places along which ranks may be renumbered: each line starts at place 0. layer: all places that they reach."""

    lines: tuple[tuple[int, ...], ...]
    layer: tuple[int, ...]

    @property
    def order(self) -> int:
        """The largest number of placements that become equivalent by these lines."""
        return prod(factorial(len(line)) for line in self.lines)


def free_lines(pricer: PlacementPricer) -> Lines:
    """The axes of a node along which its ranks may be renumbered."""
    at = _coordinates(pricer)
    axes = [axis for axis in range(len(AXES)) if len({where[axis] for where in at}) > 1]
    sizes = [len({where[axis] for where in at}) for axis in axes]
    if len(set(at)) != len(at) or prod(sizes) != len(at):
        return Lines((), (0,))
    place = {where: index for index, where in enumerate(at)}
    free = [axis for axis in axes if _is_free(pricer, at, place, axis)]
    first = at[0]
    lines = tuple(tuple(place[_with(first, axis, value)] for value in _values(at, axis)) for axis in free)
    layer = [place[w] for w in at if all(w[axis] == first[axis] for axis in range(len(AXES)) if axis not in free)]
    return Lines(lines, tuple(sorted(layer)))


def _coordinates(pricer: PlacementPricer) -> list[tuple[int, ...]]:
    """Of the rank at each place of the first node."""
    mesh = pricer.mesh
    ranks = (mesh.cluster.rank_on(place) for place in range(pricer.num_places))
    return [tuple(mesh.coordinates(rank)[axis] for axis in AXES) for rank in ranks]


def _values(at: Sequence[tuple[int, ...]], axis: int) -> list[int]:
    """Indices along an axis, that of place 0 first."""
    first = at[0][axis]
    return [first, *sorted({where[axis] for where in at} - {first})]


def _with(where: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*where[:axis], value, *where[axis + 1 :])


def _is_free(
    pricer: PlacementPricer, at: Sequence[tuple[int, ...]], place: dict[tuple[int, ...], int], axis: int
) -> bool:
    """Swapping any two indices of the axis leaves every group as it is."""
    values = _values(at, axis)
    still = tuple(range(len(at)))
    for a, b in pairwise(values):
        swap = {a: b, b: a}
        order = [place[_with(where, axis, swap.get(where[axis], where[axis]))] for where in at]
        if any(pricer.moved(where, order) != pricer.moved(where, still) for where in pricer.shapes):
            return False
    return True


def count(classes: Sequence[int], lines: Lines) -> float:
    """How many placements are left, about."""
    return factorial(len(classes)) / prod(map(factorial, Counter(classes).values())) / lines.order


def distinct(classes: Sequence[int], lines: Lines) -> Iterator[tuple[int, ...]]:
    """The GPU of each place, for one placement or more of every kind that symmetry leaves.

    The lowest class of the layer goes to place 0, and classes do not descend along a line: what groups allow to be
    renumbered can always be renumbered so.
    """
    left = Counter(classes)
    before = {line[i]: line[i - 1] for line in lines.lines for i in range(1, len(line))}
    layer, total = set(lines.layer) if lines.lines else set(), len(classes)
    chosen: list[int] = []

    def extended() -> Iterator[tuple[int, ...]]:
        here = len(chosen)
        if here == total:
            yield _gpus(classes, chosen)
            return
        lowest = max(
            chosen[before[here]] if before.get(here, total) < here else -1, chosen[0] if here in layer and here else -1
        )
        for one in sorted(left):
            if left[one] and one >= lowest:
                left[one] -= 1
                chosen.append(one)
                yield from extended()
                chosen.pop()
                left[one] += 1

    yield from extended()


def _gpus(classes: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """GPUs of the chosen classes, those of a class in order."""
    members = {one: iter([gpu for gpu, its in enumerate(classes) if its == one]) for one in set(classes)}
    return tuple(next(members[one]) for one in chosen)
