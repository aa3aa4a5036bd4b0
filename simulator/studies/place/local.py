"""The GPU of each local rank, equal on all nodes: exhaustive if symmetry leaves few orders, else assignment and exchange.

The start is a quadratic assignment problem (Koopmans and Beckmann, Econometrica 25, 1957): bytes between places times
seconds a byte between GPUs. A greedy one puts the pair that talks most on the fastest route; scipy's is FAQ (Vogelstein et
al., PLOS ONE 10(4), 2015). From each start pairs of seats are exchanged while that lowers the price (2-opt; Croes,
Operations Research 6, 1958; for assignment: Burkard, Dell'Amico, Martello, Assignment Problems, SIAM 2012, chapter 8). The price is not
quadratic, as groups share roads: so it decides, and the assignment only starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from simulator.spec.cluster.wiring import Wiring
from simulator.studies.place.cost import PlacementPrice, PlacementPricer
from simulator.studies.place.symmetry import count, distinct, equal_gpus, free_lines
from simulator.studies.place.trial import OnProgress

Order = tuple[int, ...]
MOST_EXACT: Final = 45_000  # placements that are all priced; more than 8! = 40,320
_PROGRESS_EVERY: Final = 500  # orders, from one word on progress to the next
_SEEDS: Final = 4  # random starts of the assignment, beside its barycentre
_TIE: Final = 1e-9  # relative: sums in another order
_MAX_CANDIDATES: Final = 8  # placements that are handed on to be simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Orders of a node's GPUs, the best first, each with other prices than the others.

    crossings: of each, who crosses PCIe (`PlacementPrice`); price_s: of each. num_priced: how many were. exact: no other order of
    the node crosses less, or as little and is cheaper.
    """

    orders: tuple[Order, ...]
    crossings: tuple[tuple[int, ...], ...]
    price_s: tuple[float, ...]
    num_priced: int
    exact: bool


def place_node(pricer: PlacementPricer, on_progress: OnProgress = lambda _, __: None) -> Local:
    """The cheapest GPUs for a node's places. on_progress: gets how many orders were priced."""
    classes, lines = equal_gpus(pricer.cluster), free_lines(pricer)
    exact = count(classes, lines) <= MOST_EXACT
    tried = distinct(classes, lines) if exact else _exchanged(pricer, classes)
    priced: dict[PlacementPrice, Order] = {}
    num = 0
    for order in tried:
        num += 1
        priced.setdefault(_rounded(pricer.evaluated(order)), order)
        if num % _PROGRESS_EVERY == 0:
            on_progress("priced", num)
    best = _best_placements(priced)
    return Local(
        orders=tuple(priced[one] for one in best),
        crossings=tuple(one.crossings for one in best),
        price_s=tuple(one.price_s for one in best),
        num_priced=num,
        exact=exact,
    )


def _rounded(evaluated: PlacementPrice) -> PlacementPrice:
    """Rounded, since sums in another order differ in their last digits."""
    return PlacementPrice(evaluated.crossings, tuple(float(f"{price:.9g}") for price in evaluated.prices_s))


def _best_placements(priced: Iterable[PlacementPrice]) -> list[PlacementPrice]:
    """The best, and those that no earlier one beats in every call, since overlap is not known here.

    Half of those kept cross PCIe as little as can be; the others may be quicker nevertheless.
    """
    ranked = sorted(priced, key=lambda one: (one.crossings, one.price_s, one.prices_s))
    least = [one for one in ranked if one.crossings == ranked[0].crossings]
    front = _front(least, [], _MAX_CANDIDATES // 2)
    return _front(sorted(ranked, key=lambda one: (one.price_s, one)), front, _MAX_CANDIDATES)


def _front(ranked: Iterable[PlacementPrice], front: list[PlacementPrice], most: int) -> list[PlacementPrice]:
    """`front` with those in order that nothing in it beats in every call, up to `most`."""
    for one in ranked:
        if len(front) == most:
            break
        if not any(all(a <= b for a, b in zip(other.prices_s, one.prices_s, strict=True)) for other in front):
            front.append(one)
    return front


def _exchanged(pricer: PlacementPricer, classes: Sequence[int]) -> Iterator[Order]:
    """From every start, exchanges while they lower the price; each local optimum, and the order as it is."""
    problem = Problem.of(pricer)
    yield tuple(range(pricer.num_places))
    for start in _starts(problem):
        yield two_opt(pricer, problem, start, classes)


@dataclass(frozen=True, slots=True)
class Problem:
    """The assignment: flows are bytes a step between places, distances seconds a byte between GPUs."""

    flows: NDArray[np.float64]
    distances: NDArray[np.float64]

    @classmethod
    def of(cls, pricer: PlacementPricer) -> Problem:
        """Of a node's places and GPUs."""
        return cls(flows_of(pricer), distances_of(pricer))

    def cost_s(self, order: Sequence[int]) -> float:
        """Σ flow × distance."""
        at = list(order)
        return float((self.flows * self.distances[at][:, at]).sum())


def two_opt(pricer: PlacementPricer, problem: Problem, order: Order, classes: Sequence[int]) -> Order:
    """Exchange two seats while that crosses PCIe less, or lowers the price, or leaves it and lowers the assignment's cost.

    The price is that of the slowest group of an axis: most single exchanges leave it as it is.
    """
    at = list(order)
    best, improved = (*_key(pricer, at), problem.cost_s(at)), True
    while improved:
        improved = False
        for a, b in combinations(range(len(at)), 2):
            if classes[at[a]] == classes[at[b]]:
                continue
            at[a], at[b] = at[b], at[a]
            crossings, price = _key(pricer, at)
            same = crossings == best[0] and price <= best[1] * (1 + _TIE)
            cost = problem.cost_s(at) if same else float("inf")
            cheaper = crossings == best[0] and price < best[1] * (1 - _TIE)
            if crossings < best[0] or cheaper or cost < best[2] * (1 - _TIE):
                best, improved = (crossings, price, problem.cost_s(at)), True
            else:
                at[a], at[b] = at[b], at[a]
    return tuple(at)


def _key(pricer: PlacementPricer, order: Sequence[int]) -> tuple[tuple[int, ...], float]:
    evaluated = pricer.evaluated(order)
    return evaluated.crossings, evaluated.price_s


def flows_of(pricer: PlacementPricer) -> NDArray[np.float64]:
    """Bytes a step between places of the first node: those of a group are spread over its pairs."""
    flows = np.zeros((pricer.num_places, pricer.num_places))
    for call in pricer.calls:
        for pattern in pricer.shapes[call.where].patterns:
            for group in pattern:
                for a, b in combinations(group, 2):
                    flows[a, b] += call.count * call.size_bytes / (len(group) - 1)
    both: NDArray[np.float64] = flows + flows.T
    return both


def distances_of(pricer: PlacementPricer) -> NDArray[np.float64]:
    """Seconds a byte between any two GPUs of a node, while all that can share the links of their route do."""
    wiring, size = Wiring.of(pricer.cluster), pricer.num_places
    found = np.zeros((size, size))
    if wiring.is_even:
        return found + (1 - np.eye(size)) / pricer.cluster.intra.bytes_per_s
    routes = {(a, b): wiring.route(a, b, (a, b)).links for a, b in permutations(range(size), 2)}
    ends: dict[str, tuple[set[int], set[int]]] = {}
    for (a, b), links in routes.items():
        for link in links:
            sources, targets = ends.setdefault(link, (set(), set()))
            sources.add(a)
            targets.add(b)
    for pair, links in routes.items():
        found[pair] = max(min(map(len, ends[link])) / wiring.rates[link] for link in links)
    both: NDArray[np.float64] = np.maximum(found, found.T)
    return both


def _starts(problem: Problem) -> Iterator[Order]:
    """The order as it is, the greedy one, and scipy's from its barycentre and from seeded random starts."""
    from scipy.optimize import quadratic_assignment

    flows, distances = problem.flows, problem.distances
    yield tuple(range(len(flows)))
    yield greedy(problem)
    for seed in range(_SEEDS + 1):
        start: Literal["barycenter", "randomized"] = "randomized" if seed else "barycenter"
        solved = quadratic_assignment(
            flows, distances, method="faq", options={"rng": np.random.default_rng(seed), "P0": start}
        )
        yield tuple(int(gpu) for gpu in solved.col_ind)


def greedy(problem: Problem) -> Order:
    """Place by place: the one that communicates most with those already placed, on the GPU nearest to them."""
    flows, distances, size = problem.flows, problem.distances, len(problem.flows)
    rank_mapping: dict[int, int] = {0: 0}
    while len(rank_mapping) < size:
        open_places = [place for place in range(size) if place not in rank_mapping]
        place = max(open_places, key=lambda p: (sum(flows[p, q] for q in rank_mapping), -p))
        free = [gpu for gpu in range(size) if gpu not in rank_mapping.values()]
        rank_mapping[place] = min(
            free, key=lambda g: (sum(flows[place, q] * distances[g, h] for q, h in rank_mapping.items()), g)
        )
    return tuple(rank_mapping[place] for place in range(size))
