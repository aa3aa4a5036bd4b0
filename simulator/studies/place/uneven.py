"""Rank mapping and layers if GPUs differ: which ranks run on the slow ones, and how many layers their stage holds.

Ranks that colour refinement does not tell apart are tried once (`simulator.play.fold`), so trials grow with the kinds of GPUs
and the stages, not with the cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

from simulator.base.sums import summed
from simulator.parallel.pipeline import stage_layers
from simulator.spec.cluster.gpu_kinds import GpuKinds
from simulator.spec.cluster.rank_mapping import RankMapping, gpu_at, ranks_on
from simulator.studies.place.trial import Choice, Trials, is_better

MOST_TRIALS: Final = 120  # steps that are played for one answer
_DEALT: Final = ("gpipe", "1f1b", "zb_h1")  # schedules whose stages hold one chunk each
Unit = tuple[tuple[int, ...], int]  # GPUs that change seats together, and which kind they are


def suited(trials: Trials, start: Choice, *, deal: bool) -> Choice:
    """A better mapping and layers than the start's, by simulated steps."""
    kinds = GpuKinds.of(trials.cluster)
    if not kinds.of_rank:
        return start
    best = start
    for choice in _grouped(trials, start, kinds):
        best = _better(trials, best, choice, kinds, deal=deal)
    best = _swapped(trials, best, kinds, deal=deal)
    return moved_layers(trials, best, kinds) if deal and _may_deal(best) else best


def _better(trials: Trials, best: Choice, other: Choice, kinds: GpuKinds, *, deal: bool) -> Choice:
    """The best of these, the other also with its layers in proportion to the pace of its stages."""
    options = [other]
    if deal and _may_deal(other):
        options.append(in_proportion(trials, other, kinds))
    for one in options:
        if len(trials.scores) < MOST_TRIALS and is_better(trials.score(one), trials.score(best)):
            best = one
    return best


def _units(trials: Trials, kinds: GpuKinds) -> list[Unit]:
    """Whole nodes if each has equal GPUs, else single GPUs."""
    cluster, each = trials.cluster, trials.cluster.gpus_per_node
    labels = [kinds.number(gpu) for gpu in range(cluster.num_devices)]
    nodes = [tuple(range(first, first + each)) for first in range(0, cluster.num_devices, each)]
    if cluster.num_nodes > 1 and all(len({labels[gpu] for gpu in node}) == 1 for node in nodes):
        return [(node, labels[node[0]]) for node in nodes]
    return [((gpu,), label) for gpu, label in enumerate(labels)]


def _grouped(trials: Trials, start: Choice, kinds: GpuKinds) -> Iterator[Choice]:
    """The present order; then units of one kind side by side, at every place where a stage begins."""
    yield start
    units, mesh = _units(trials, kinds), trials.lowering(start).mesh
    if len(units[0][0]) == 1 and trials.cluster.num_nodes > 1:
        return  # ranks stay on their nodes
    labelled = sorted((unit for unit in units if unit[1]), key=lambda unit: unit[1])
    rest = [unit for unit in units if not unit[1]]
    width = max(1, mesh.num_ranks // mesh.axes["pp"] // len(units[0][0]))
    for first in dict.fromkeys([*range(0, len(rest) + 1, width), len(rest)]):
        order = [*rest[:first], *labelled, *rest[first:]]
        gpus = [gpu for unit, _ in order for gpu in unit]
        yield Choice(start.plan, _on(start.rank_mapping, gpus, trials.cluster.num_devices))


def _on(rank_mapping: RankMapping, gpus: Sequence[int], num_devices: int) -> RankMapping:
    """Places whose GPU g becomes gpus[g]."""
    return tuple(gpus[gpu_at(rank_mapping, rank)] for rank in range(num_devices))


def _swapped(trials: Trials, best: Choice, kinds: GpuKinds, *, deal: bool) -> Choice:
    """Exchange each odd unit with one rank of every class, while a step gets shorter (2-opt on the classes)."""
    units = _units(trials, kinds)
    labelled = [unit for unit, label in units if label]
    for unit in labelled:
        for other in _one_of_each(trials, best, units):
            if len(trials.scores) >= MOST_TRIALS:
                return best
            if other == unit or not _may_swap(trials, unit, other):
                continue
            gpus = list(range(trials.cluster.num_devices))
            for a, b in zip(unit, other, strict=True):
                gpus[a], gpus[b] = b, a
            choice = Choice(best.plan, _on(best.rank_mapping, gpus, len(gpus)))
            best = _better(trials, best, choice, kinds, deal=deal)
    return best


def _may_swap(trials: Trials, unit: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Nodes change with nodes, GPUs with those of their node."""
    each = trials.cluster.gpus_per_node
    return len(unit) == each or unit[0] // each == other[0] // each


def _one_of_each(trials: Trials, choice: Choice, units: Sequence[Unit]) -> list[tuple[int, ...]]:
    """A unit of every set of units whose ranks play the same classes."""
    lowering = trials.lowering(choice)
    if lowering.rank_classes is None:
        return []
    colours, cluster = lowering.rank_classes.colours, lowering.full_cluster
    at = [int(colours[rank]) for rank in ranks_on(cluster.seats, range(cluster.num_devices))]
    found: dict[object, tuple[int, ...]] = {}
    for unit, label in units:
        found.setdefault((label, tuple(sorted(at[gpu] for gpu in unit))), unit)
    return list(found.values())


def _may_deal(choice: Choice) -> bool:
    """Layers may be moved between stages: they are not stated, or this module stated them."""
    plan = choice.plan
    split = plan.split
    free = split.first is None and split.last is None and not split.ends_as_layers
    return plan.pp > 1 and plan.pipeline.virtual_stages == 1 and plan.pipeline_schedule in _DEALT and free


def in_proportion(trials: Trials, choice: Choice, kinds: GpuKinds) -> Choice:
    """Layers in proportion to the pace of each stage's slowest GPU (largest remainders), at least one each."""
    return _dealt(choice, proportional(trials.model.num_layers, _paces(trials, choice, kinds)))


def _paces(trials: Trials, choice: Choice, kinds: GpuKinds) -> list[float]:
    """FLOP/s at the peak of each stage's slowest GPU."""
    lowering, plan = trials.lowering(choice), choice.plan
    cluster, stride = lowering.full_cluster, lowering.mesh.stride("pp")
    peaks = [kinds.devices[kind.device].peak(plan.product_dtype) * kind.speed for kind in kinds.kinds]
    found = [float("inf")] * plan.pp
    for rank in range(lowering.mesh.num_ranks):
        stage = rank // stride % plan.pp
        found[stage] = min(found[stage], peaks[kinds.number(cluster.gpu_of(rank))])
    return found


def proportional(num_layers: int, paces: Sequence[float]) -> tuple[int, ...]:
    """Layers of each stage by its pace: largest remainders, the first of equal ones, at least one each."""
    spare, total = num_layers - len(paces), summed(paces)
    exact = [spare * pace / total for pace in paces]
    counts = [1 + int(part) for part in exact]
    ranked = sorted(range(len(paces)), key=lambda s: (int(exact[s]) - exact[s], s))
    for stage in ranked[: num_layers - summed(counts)]:
        counts[stage] += 1
    return tuple(counts)


def moved_layers(trials: Trials, best: Choice, kinds: GpuKinds) -> Choice:
    """Single layers from stages that are behind to those that are ahead, while a step gets shorter or fits better."""
    improved = best.plan.pp > 1
    while improved:
        improved = False
        for choice in _neighbours(trials, best, kinds):
            if len(trials.scores) >= MOST_TRIALS:
                return best
            if is_better(trials.score(choice), trials.score(best)):
                best, improved = choice, True
                break
    return best


def _neighbours(trials: Trials, choice: Choice, kinds: GpuKinds) -> Iterator[Choice]:
    """One layer less on the slowest two stages or the last (the head's), one more on the quickest two or at either end.

    From every stage to every other where something does not fit: whose memory that is, no pace says.
    """
    plan, paces = choice.plan, _paces(trials, choice, kinds)
    layer_counts = stage_layers(trials.model.num_layers, plan.pp, 1, split=plan.split, schedule=plan.pipeline_schedule)
    counts = [summed(map(len, chunks)) for chunks in layer_counts]
    ranked = sorted(range(plan.pp), key=lambda stage: (-counts[stage] / paces[stage], stage))
    few = trials.score(choice)[0] == 0
    sources = dict.fromkeys([*ranked[:2], plan.pp - 1] if few else ranked)
    targets = dict.fromkeys([*ranked[:-3:-1], 0, plan.pp - 1] if few else ranked[::-1])
    for source, target in product(sources, targets):
        if source != target and counts[source] > 1:
            moved = Counter({source: -1, target: 1})
            yield _dealt(choice, tuple(count + moved[stage] for stage, count in enumerate(counts)))


def _dealt(choice: Choice, counts: tuple[int, ...]) -> Choice:
    return Choice(choice.plan.copy_with(stage_layers=counts), choice.rank_mapping)
