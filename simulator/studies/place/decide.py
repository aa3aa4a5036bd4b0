"""place(): the rank mapping of a plan, and its gain over the default order, by one simulated step on each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.parallel.mesh import GroupShape
from simulator.predict import Prediction
from simulator.predict.difference import Difference, difference, sharing, timed
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.rank_mapping import shortest
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.place.cost import Call, PlacementPricer, step_calls
from simulator.studies.place.local import Local, place_node
from simulator.studies.place.orders import blocks_of, composed
from simulator.studies.place.rails import on_their_rails
from simulator.studies.place.trial import Choice, OnProgress, Score, Trials, is_better
from simulator.studies.place.uneven import MOST_TRIALS, suited
from simulator.work.collectives.ports import port_of

_WORTH_TELLING = 1e-3  # of a step
_Found = list[tuple[str, Choice, Local]]  # rank order, seats under it, and the node that they came from


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPath:
    """What one set of groups, or messages, finds. price_s: seconds a step, alone; bytes_per_s: of the slowest group, data sheet."""

    price_s: float
    link: str
    bytes_per_s: float
    num_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The routes of one axis, or of messages between stages, in the order of ranks and as placed."""

    what: str
    default: GroupPath
    placed: GroupPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The answer. cluster: with its rank mapping (seats); plan: with its layers redistributed, if requested and useful.

    default, placed: a step in the default order with the given plan, and as placed; equal if nothing is better.
    own: a step on the mapping that the cluster came with; None if it has none. It is `placed` itself if nothing is better.
    own_crosses: the given mapping is no worse, but was not kept because it puts more of the largest traffic on PCIe.
    rank_order: the axes in the order in which they fill nodes. exact: every placement of a node was priced, up to
    symmetry. num_priced, num_played: placements that were priced, and simulated. exhausted: the limit of simulated steps
    was reached. passed_over_s: the shorter step of a placement that was rejected because it crosses PCIe more.
    """

    model: str
    plan: Plan
    given: Plan
    cluster: Cluster
    default: Prediction
    placed: Prediction
    gains: tuple[Gain, ...]
    rank_order: str
    exact: bool
    num_priced: int
    num_played: int
    exhausted: bool
    passed_over_s: float | None = None
    own: Prediction | None = None
    own_crosses: bool = False

    @property
    def gain(self) -> float:
        """Share of the default order's step that the placement saves."""
        return 1 - self.placed.step_s / self.default.step_s

    @property
    def against_default(self) -> Difference:
        """The placed step over the default's: kernel errors are shared and cancel; errors of other links do not."""
        return self._against(self.default)

    @property
    def against_own(self) -> Difference | None:
        """The same over the step of the given mapping; None if there is none, or if it is kept."""
        return None if self.own is None or self.own is self.placed else self._against(self.own)

    def _against(self, other: Prediction) -> Difference:
        before, after = (
            replace(timed(p.step_s, p.spread, p.stack_sigma, self.given), traffic=name)
            for name, p in (("before", other), ("placed", self.placed))
        )
        return difference(*sharing(after, before))

    @property
    def is_default(self) -> bool:
        return not self.cluster.seats and self.plan == self.given


def place(
    model: Model,
    plan: Plan,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: Stack | None = None,
    *,
    across_nodes: bool = False,
    deal_layers: bool = False,
    on_progress: OnProgress = lambda _, __: None,
) -> Placement:
    """The best rank mapping found for a plan. The cluster's own is simulated too, and kept if none found is better.

    across_nodes: ranks may move to another node than the one of their number. deal_layers: if GPUs differ, the layers of
    stages may change. on_progress: called with the number of placements priced and of steps simulated. Only a simulated step
    confirms an answer. Raises InputError as `predict` does.
    """
    rank_mapping, cluster = shortest(cluster.seats, cluster.gpus_per_node), cluster.with_rank_mapping(())
    trials = Trials(
        model=model,
        cluster=cluster,
        stack=stack or Stack.of(plan),
        calibration=calibration or Calibration.for_device(cluster.device),
        on_progress=on_progress,
    )
    start = Choice(plan, ())
    default = trials.prediction(start)
    calls = step_calls(trials.lowering(start))
    best, found = _of_equal_nodes(trials, start, calls, across_nodes=across_nodes)
    best = on_their_rails(trials, best)
    best = suited(trials, best, deal=deal_layers)
    own = Choice(plan, rank_mapping) if rank_mapping else None
    return _answer(trials, start, default, best, own, calls, found)


def _answer(
    trials: Trials,
    start: Choice,
    default: Prediction,
    best: Choice,
    own: Choice | None,
    calls: tuple[Call, ...],
    found: _Found,
) -> Placement:
    """The best choice beside the start, if whole predictions say that it is better: they know allocator's stalls too."""
    given, crosses = trials.prediction(own) if own is not None else None, False
    short = shortest(best.rank_mapping, trials.cluster.gpus_per_node)
    placed = trials.prediction(Choice(best.plan, short)) if best != start else default
    if not is_better(_score_of(placed), _score_of(default)):
        best, short, placed = start, (), default
    if own is not None and given is not None:
        if (best.plan, short) == (own.plan, own.rank_mapping):
            given = placed
        elif not is_better(_score_of(placed), _score_of(given)):
            crosses = _crosses_more(trials, start, own, calls)
            best, short, placed = (best, short, placed) if crosses else (own, own.rank_mapping, given)
    return Placement(
        model=trials.model.name,
        plan=best.plan,
        given=start.plan,
        cluster=trials.cluster.with_rank_mapping(short),
        default=default,
        placed=placed,
        gains=_gains(trials, start, best, calls),
        rank_order=next((name for name, choice, _ in found if choice == best), ""),
        exact=all(local.exact for _, _, local in found),
        num_priced=sum({id(local): local.num_priced for _, _, local in found}.values()),
        num_played=len(trials.scores),
        exhausted=len(trials.scores) >= MOST_TRIALS,
        passed_over_s=_passed_over_s(trials, best, found),
        own=given,
        own_crosses=crosses,
    )


def _crosses_more(trials: Trials, start: Choice, own: Choice, calls: tuple[Call, ...]) -> bool:
    """Whether the largest traffic crosses PCIe more than in the default order."""
    gpus = range(trials.cluster.gpus_per_node)
    order, given = (
        PlacementPricer(trials.lowering(start), calls, rank_mapping).evaluated(gpus).crossings
        for rank_mapping in ((), own.rank_mapping)
    )
    return given > order


def _passed_over_s(trials: Trials, best: Choice, found: _Found) -> float | None:
    """The shortest step of the equal nodes' placements, where that of the best is longer by more than a thousandth."""
    shortest_s = min((trials.score(choice)[1] for _, choice, _ in found), default=float("inf"))
    return shortest_s if shortest_s < trials.score(best)[1] * (1 - _WORTH_TELLING) else None


def _score_of(prediction: Prediction) -> Score:
    return float(not prediction.fits), prediction.step_s


def _of_equal_nodes(
    trials: Trials, start: Choice, calls: tuple[Call, ...], *, across_nodes: bool
) -> tuple[Choice, _Found]:
    """The best order of a node's GPUs, equal on all nodes, over all orders of axes.

    Of those that beat the start and cross PCIe no more than it, who does so least; of these, whose step is the shortest.
    """
    found: _Found = []
    limit = PlacementPricer(trials.lowering(start), calls).evaluated(range(trials.cluster.gpus_per_node)).crossings
    ranked: list[tuple[tuple[int, ...], Score, int]] = []
    for name, blocks in blocks_of(start.plan, trials.cluster, across_nodes=across_nodes):
        local = place_node(PlacementPricer(trials.lowering(start), calls, blocks), trials.on_progress)
        for order, crossings in zip(local.orders, local.crossings, strict=True):
            rank_mapping = composed(blocks, order, trials.cluster.num_devices)
            choice = Choice(start.plan, shortest(rank_mapping, trials.cluster.gpus_per_node))
            score = trials.score(choice)
            if crossings <= limit and is_better(score, trials.score(start)):
                ranked.append((crossings, score, len(found)))
            found.append((name, choice, local))
    return (found[min(ranked)[2]][1] if ranked else start), found


def _gains(trials: Trials, start: Choice, best: Choice, calls: tuple[Call, ...]) -> tuple[Gain, ...]:
    """Axis by axis, and all messages between stages together, the default's dearest first."""
    before, after = (_group_paths(trials, choice, calls) for choice in (start, best))
    gains = [Gain(what=axis, default=path, placed=after[axis]) for axis, path in before.items()]
    return tuple(sorted(gains, key=lambda gain: (-gain.default.price_s, gain.what)))


def _group_paths(trials: Trials, choice: Choice, calls: tuple[Call, ...]) -> dict[str, GroupPath]:
    """By axis; the calls are those of the plan as given, so that routes are compared and not plans."""
    seats = choice.rank_mapping or tuple(range(trials.cluster.gpus_per_node))
    pricer = PlacementPricer(trials.lowering(Choice(choice.plan, ())), calls, seats)
    prices = pricer.evaluated(range(pricer.num_places)).prices_s
    found: dict[str, GroupPath] = {}
    for call, price in zip(calls, prices, strict=True):
        name = "messages between stages" if isinstance(call.where, tuple) else call.where
        path = _group_path(trials.cluster, pricer.shapes[call.where], call.kind, price)
        known = found.get(name)
        if known is not None:
            slowest = min(known, path, key=lambda one: one.bytes_per_s)
            total = known.price_s + price
            path = GroupPath(
                price_s=total,
                link=slowest.link,
                bytes_per_s=slowest.bytes_per_s,
                num_nodes=max(known.num_nodes, path.num_nodes),
            )
        found[name] = path
    return found


def _group_path(cluster: Cluster, shape: GroupShape, kind: str, price_s: float) -> GroupPath:
    """The narrowest of a group's links: inside its nodes, or what its node's NICs leave it."""
    port = port_of(cluster.usual, shape, kind)
    inside = GroupPath(price_s=price_s, link=port.kind, bytes_per_s=port.reached_bytes_per_s, num_nodes=shape.num_nodes)
    if shape.num_nodes == 1 or cluster.inter is None or not shape.spans_domain:
        return inside
    share = cluster.node_bytes_per_s / max(1, shape.num_groups_per_node)
    if shape.ranks_per_node > 1 and inside.bytes_per_s < share:
        return inside
    return GroupPath(price_s=price_s, link=cluster.inter.kind, bytes_per_s=share, num_nodes=shape.num_nodes)
