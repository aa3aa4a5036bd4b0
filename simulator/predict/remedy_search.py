"""Remedies: candidate changes are predicted, and those that fit are listed, cheapest first.

Changes are first estimated on short models: memory of 4 and 8 layers (2 and 4 of each pipeline stage) is carried on in a
line to the layers that the model has, and time ranks them. The cheapest of those that seem to fit are then predicted in full, and only what that
confirms is listed. Where no single change will do, changes are put on top of each other, at most three. Effort is
counted in predictions, so it is bounded and the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from simulator.base.errors import InputError
from simulator.base.fit import Fit
from simulator.base.remembered import made_once
from simulator.memory import MemoryUse, memory_uses, outside_torch_bytes, step_live_bytes, window_bytes, write_history
from simulator.memory.allocator import AllocatorSettings
from simulator.memory.outside import workspace_bytes
from simulator.memory.pools import asks_for_pool
from simulator.memory.use import RESERVED_HIGH
from simulator.parallel.legality import check
from simulator.parallel.pipeline import Split
from simulator.parallel.schedule_traits import filling
from simulator.play.lower import Lowering, lower, unpriced_blocks
from simulator.predict.changes import EXPANDABLE, EXPANDABLE_SEGMENTS, Change, changes
from simulator.predict.play import num_played, play, step_seconds
from simulator.predict.prediction import Remedy
from simulator.predict.tiers import with_lower_tiers
from simulator.predict.verdict import with_stalls
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

NUM_REMEDIES, _OF_TUNING = 3, 6  # of a fine-tuning run more: adapters are another kind of answer
_DEPTH = 3  # changes on top of each other
_WIDTH = 10  # combinations that are estimated at each depth
_MEMORY_LAYERS = 4, 8  # of the models that estimates are made on; every_k's pattern of 2 fits both
_TIME_LAYERS, _TIME_MICRO_BATCHES = 4, 2
# Micro-batches a stage from which on each further one adds as much: of gpipe its activations, of others buffers
_FILLED, _BUFFERED = 2, 16
_SLACK = 1.1  # effects of two changes multiply, to this
_MORE_DEVICES = 2.0
_PROOFS, _PROOF_LAYERS = 10, 1000  # full predictions, and the layers in them all
_PIPELINE_PROOFS = 4
_PROOF_PASSES = 8_000  # layers in all micro-batches of a pipeline's predictions, a millisecond each
_ESTIMATED_LAYERS = 1000  # in all short models


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """Live bytes that stay between steps, those that a step adds at its peak, and device-seconds a token.

    Of a plan, or of a change as ratios: changes act on each of the three by themselves, so their ratios multiply.
    """

    resident: float
    added: float
    cost: float

    @property
    def live(self) -> float:
        return self.resident + self.added

    def __mul__(self, ratio: _Figures) -> _Figures:
        return _Figures(
            resident=self.resident * ratio.resident, added=self.added * ratio.added, cost=self.cost * ratio.cost
        )

    def over(self, other: _Figures) -> _Figures:
        return _Figures(
            resident=self.resident / other.resident, added=self.added / other.added, cost=self.cost / other.cost
        )


_NO_EFFECT = _Figures(resident=1.0, added=1.0, cost=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A changed plan on its cluster, and an estimate of its figures."""

    change: Change
    plan: Plan
    cluster: Cluster
    stack: Stack
    figures: _Figures
    kinds: frozenset[str] = frozenset()

    @property
    def rank(self) -> float:
        """Device-seconds a token; more devices must be had first, so they rank as if a token cost twice as much."""
        return self.figures.cost * (1 if self.change.nodes == 1 else _MORE_DEVICES)


@dataclass(slots=True, kw_only=True)
class _Search:
    """The fixed inputs, the effects of single changes, and the remaining effort."""

    model: Model
    calibration: Calibration
    curves: LinkCurves
    memory: MemoryUse  # of the plan as it is
    tunes: bool = False
    last: bool = False  # of the ends of the pipeline, the last holds more
    proofs: int = _PROOFS
    proof_layers: int = _PROOF_LAYERS
    estimated_layers: int = _ESTIMATED_LAYERS
    effects: dict[frozenset[object], _Figures] = field(default_factory=dict)  # of single changes
    overflowing: dict[frozenset[object], bool] = field(default_factory=dict)  # changes whose lower tiers were looked at
    fitting: set[frozenset[str]] = field(default_factory=set)  # kinds of changes that were found to fit

    @property
    def wanted(self) -> int:
        """Remedies that are enough."""
        return _OF_TUNING if self.tunes else NUM_REMEDIES

    @property
    def effort_left(self) -> bool:
        """One more full prediction is allowed."""
        return self.proofs > 0 and self.proof_layers >= self.model.num_layers

    def lower(self, of: _Candidate, num_layers: int | None = None) -> Lowering:
        """The plan made concrete. Raises InputError where the inputs refuse it."""
        model = self.model if num_layers is None else self._shortened(num_layers)
        return lower(model, of.plan, of.cluster, of.stack, self.calibration, self.curves)

    def _shortened(self, num_layers: int) -> Model:
        return self.model.model_copy(update={"num_layers": num_layers})

    def _short(self, plan: Plan, num_layers: int) -> int:
        """Layers of a short model: half of them for each pipeline stage, at least one a chunk; all where a split is given."""
        if plan.pp == 1:
            return min(num_layers, self.model.num_layers)
        chunks = plan.pp * plan.pipeline.virtual_stages
        wanted = chunks * max(num_layers // (2 * plan.pipeline.virtual_stages), 1)
        return self.model.num_layers if plan.split != Split() else min(wanted, self.model.num_layers)

    def estimate(self, of: _Candidate) -> _Figures:
        """The plan's figures: memory carried on from two short models in a line, the cost of a short one."""
        plan, layers = of.plan, self.model.num_layers
        short, long = (self._short(plan, size) for size in _MEMORY_LAYERS)
        self.estimated_layers -= short + long + self._short(plan, _TIME_LAYERS)
        beyond = (layers - long) / max(long - short, 1)
        few, more = (self._live(of, n) for n in (short, long))
        resident, added = (b + (b - a) * beyond for a, b in zip(few, more, strict=True))
        return _Figures(resident=resident, added=added, cost=self._cost(of))

    def _live(self, of: _Candidate, num_layers: int) -> tuple[float, float]:
        """The same of a model of so many layers; of very many micro-batches carried on in a line from two smaller numbers."""
        plan = of.plan
        few = plan.pp * (_FILLED if plan.pipeline_schedule == "gpipe" else _BUFFERED)
        if plan.pp == 1 or plan.num_micro_batches <= 3 * few:
            return self._played_live(of, num_layers)
        fewer, more = (
            self._played_live(replace(of, plan=plan.copy_with(num_micro_batches=n)), num_layers)
            for n in (few, few + plan.pp)
        )
        beyond = (plan.num_micro_batches - few) / plan.pp
        resident, added = (a + (b - a) * beyond for a, b in zip(fewer, more, strict=True))
        return resident, added

    def look_at_ends(self, start: _Candidate) -> None:
        """Look from here on at the end of the pipeline that holds more in the plan as it is."""
        few, ends = self._short(start.plan, _MEMORY_LAYERS[0]), list[float]()
        for self.last in (False, True) if start.plan.pp > 1 else (False,):
            ends.append(sum(self._live(start, few)))
        self.last = ends[-1] > ends[0]

    def _played_live(self, of: _Candidate, num_layers: int) -> tuple[int, int]:
        """Live bytes that stay, and those that a step adds. Raises PlanError where the plan cannot be run."""
        model, workspaces = self._shortened(num_layers), workspace_bytes(of.cluster.usual.device)
        blocks = unpriced_blocks(model, of.plan, of.cluster, of.stack)
        stage = of.plan.pp - 1 if self.last else 0
        history = write_history(model, of.plan, of.stack, blocks, workspaces, stage=stage, steps=1)
        live = step_live_bytes(history)
        return live.resident, live.peak[0] - live.resident

    def _cost(self, of: _Candidate) -> float:
        """Of few layers and micro-batches: enough to rank changes by."""
        fill = of.plan.pp * (2 if of.plan.pipeline_schedule.startswith("dualpipe") else 1)
        few = min(of.plan.num_micro_batches, max(_TIME_MICRO_BATCHES, fill))
        short = of.plan.copy_with(num_micro_batches=few)
        lowering = self.lower(replace(of, plan=short), self._short(of.plan, _TIME_LAYERS))
        return device_s_per_token(short, step_seconds(lowering))

    def _overflows(self, candidate: _Candidate) -> bool:
        try:
            lowering = self.lower(candidate)
        except InputError:
            return True
        return bool(with_lower_tiers(self.memory, lowering).binding.name)

    def fits(self, candidate: _Candidate, slack: float = 1.0) -> bool:
        """Live bytes are at most `slack` times those for which the allocator's interval fits, and no lower tier overflows."""
        plan, stack = candidate.plan, candidate.stack
        outside = outside_torch_bytes(candidate.cluster.device, plan, stack=stack)
        outside += window_bytes(self.model, plan, stack)
        if candidate.figures.live > slack * (self.memory.capacity_bytes - outside) / RESERVED_HIGH:
            return False
        return not plan.offload.any or not made_once(self.overflowing, candidate.change.key, self._overflows, candidate)


def _pipeline_proofs(plan: Plan, num_layers: int) -> int:
    """How many full predictions a pipeline is worth, at least one: a long one's take seconds."""
    return max(1, min(_PIPELINE_PROOFS, _PROOF_PASSES // (num_played(plan) * num_layers)))


def _held(plan: Plan) -> int:
    """Times as many micro-batches that a full prediction plays in memory as of a pipeline that is filled twice."""
    return max(filling(plan.pipeline_schedule, plan.pp, plan.num_micro_batches) // (2 * plan.pp), 1)


def device_s_per_token(plan: Plan, step_s: float) -> float:
    """Device-seconds per token of a step."""
    return step_s * plan.num_devices / plan.tokens_per_step


def remedies(lowering: Lowering, step_s: float, memory: MemoryUse) -> tuple[Remedy, ...]:
    """Up to three changes (six of a fine-tuning run) under which the plan surely fits, the cheapest in device-seconds a token first.

    Where fewer fit by themselves, others are put on top of each other; what fits is never added to.
    step_s, memory: of the plan as it is. Deterministic; empty where nothing that was tried fits.
    """
    plan, cluster = lowering.plan, lowering.cluster
    search = _Search(
        model=lowering.model,
        calibration=lowering.calibration,
        curves=lowering.curves,
        memory=memory,
        tunes=plan.peft.method != "none",
        proofs=_PROOFS if plan.pp == 1 else _pipeline_proofs(plan, lowering.model.num_layers),
    )
    start = _Candidate(
        change=Change(kind=""), plan=plan, cluster=cluster, stack=lowering.given_stack, figures=_NO_EFFECT
    )
    search.look_at_ends(start)
    unchanged = search.estimate(start)
    frontier = [replace(start, figures=unchanged)]
    found: list[Remedy] = []
    for depth in range(_DEPTH):
        frontier = list(_estimated(search, _promising(search, frontier)))
        if depth == 0:
            search.effects = {c.change.key: c.figures.over(unchanged) for c in frontier}
        fitting = [c for c in frontier if search.fits(c)]
        found += _proved(search, sorted(fitting, key=lambda c: c.rank), device_s_per_token(plan, step_s))
        if len(found) == search.wanted or not search.effort_left:
            break
        frontier = [c for c in frontier if c.kinds not in search.fitting]
    return tuple(sorted(found, key=lambda remedy: remedy.cost))


def _promising(search: _Search, frontier: Iterable[_Candidate]) -> list[_Candidate]:
    """One more change on each candidate, its effect taken from the change alone: the cheapest that may fit.

    Where none may, those that leave least alive. Single changes are unknown, so all of them are taken.
    """
    children: dict[frozenset[object], _Candidate] = {}
    for parent in frontier:
        alone = () if parent.kinds else (EXPANDABLE_SEGMENTS,)
        for change in (*alone, *changes(parent.plan, parent.cluster, parent.stack)):
            if change.kind in parent.kinds:
                continue
            child = _child(search, parent, change)
            if child is not None and not any(kinds < child.kinds for kinds in search.fitting):
                children.setdefault(child.change.key, child)
    if not search.effects:
        return list(children.values())
    may = [c for c in children.values() if search.fits(c, _SLACK)]
    return sorted(may or children.values(), key=lambda c: c.rank if may else c.figures.live)[:_WIDTH]


def _child(search: _Search, parent: _Candidate, change: Change) -> _Candidate | None:
    try:
        plan = change.applied(parent.plan)
        check(plan)
        cluster = parent.cluster
        if change.nodes > 1:
            cluster = cluster.with_nodes(cluster.num_nodes * change.nodes)
    except (InputError, ValueError):  # no legal plan, or more nodes than a cluster may have
        return None
    return _Candidate(
        change=parent.change + change,
        plan=plan,
        cluster=cluster,
        stack=parent.stack.copy_with(**change.stack) if change.stack else parent.stack,
        figures=parent.figures * search.effects.get(change.key, _NO_EFFECT),
        kinds=parent.kinds | {change.kind},
    )


def _estimated(search: _Search, candidates: list[_Candidate]) -> Iterator[_Candidate]:
    """The candidates with their estimates, without those that the inputs refuse."""
    for candidate in candidates:
        if search.estimated_layers <= 0:
            return
        with suppress(InputError):
            yield replace(candidate, figures=search.estimate(candidate))


def _proved(search: _Search, candidates: Iterable[_Candidate], cost_before: float) -> Iterator[Remedy]:
    """The first of them that a full prediction confirms, one of each combination of kinds.

    What leaves as much alive as something that failed, split as it is, is not worth a full prediction.
    """
    too_much: dict[int, float] = {}  # tp -> live bytes
    for candidate in candidates:
        if candidate.kinds in search.fitting or candidate.figures.live >= too_much.get(candidate.plan.tp, math.inf):
            continue
        if not search.effort_left or len(search.fitting) == search.wanted:
            return
        search.proofs -= 1
        search.proof_layers -= search.model.num_layers * _held(candidate.plan)
        remedy = _proof(search, candidate, cost_before)
        if remedy is None:
            too_much[candidate.plan.tp] = candidate.figures.live
        else:
            search.fitting.add(candidate.kinds)
            yield remedy


def _proof(search: _Search, candidate: _Candidate, cost_before: float) -> Remedy | None:
    """A full prediction, with expandable segments, which cost no time, where it does not fit without."""
    plan, lowering = candidate.plan, search.lower(candidate)
    pools = _pools(plan)[candidate.change.expandable :]
    uses = memory_uses(search.model, plan, candidate.stack, lowering.blocks, lowering.device, pools)
    for pool, use in zip(pools, uses, strict=True):
        if with_lower_tiers(use, lowering).fit is Fit.FITS:
            change = candidate.change + EXPANDABLE_SEGMENTS if pool and pool.expandable_segments else candidate.change
            step_s = step_seconds(lowering)
            if use.pool is not None:
                step_s = float(with_stalls(play(lowering), use, lowering.calibration).step_s)
            return _remedy(change, plan, use, step_s, cost_before)
    return None


def _pools(plan: Plan) -> list[AllocatorSettings | None]:
    """The plan's own pool; where it asks for none, PyTorch's as it is, and with expandable segments."""
    return [None] if asks_for_pool(plan) else [AllocatorSettings(expandable_segments=on) for on in (False, True)]


def _remedy(change: Change, plan: Plan, memory: MemoryUse, step_s: float, cost_before: float) -> Remedy:
    return Remedy(
        change=change.words,
        plan=change.fields,
        environment=EXPANDABLE if change.expandable else "",
        num_devices=plan.num_devices,
        tokens_per_step=plan.tokens_per_step,
        step_s=step_s,
        cost=device_s_per_token(plan, step_s) / cost_before,
        peak_allocated_bytes=memory.peak_allocated_bytes,
        peak_reserved_bytes=memory.peak_reserved_bytes,
        used_bytes=memory.used_bytes,
        changes_numerics=change.numerics,
    )
