"""Survey: every legal plan of a branch with its bounds. Plans that cannot fit are dropped first, then slow ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from simulator.base.remembered import made_once
from simulator.memory import outside_torch_bytes
from simulator.memory.use import RESERVED_HIGH
from simulator.parallel.legality.pipeline import layer_faults
from simulator.parallel.legality.rule import Pipeline
from simulator.predict.play import num_played
from simulator.spec.plan import Plan
from simulator.studies.search.context import AROUND, ModelShards
from simulator.studies.search.memory_floor import MemoryFloor
from simulator.studies.search.outcome import bound_group_of, key_of, layout_of
from simulator.studies.search.space import Branch, Fields, Pruned, plan_at_rest
from simulator.studies.search.study import SearchStudy
from simulator.studies.search.time_floor import TimeFloor
from simulator.work.ops import recompute_ops

# Layers' worth of playing that a layer's blocks and live tensors cost, as measured (docs/benchmarks.md)
_MEMORY: Final = 2
_RESERVED: Final = 2  # and what the allocator makes of them, where they fit
_UNBOUNDED: Final = ("comm_hook", "one_bit", "zeropp", "sync_every_steps", "hierarchical_gather")


@dataclass(frozen=True, slots=True)
class Prospect:
    """A plan that may fit: the least that its objective can be.

    layout: how it splits the model and the batch, and whose software does. share: of the memory for tensors, at least.
    work: of its simulation, see `work_of`; memory_work: the part that decides whether it fits. bound_group: see `bound_group_of`.
    """

    floor: float
    key: str
    layout: str
    share: float
    work: int = 0
    memory_work: int = 0
    bound_group: str = ""

    @property
    def surely(self) -> bool:
        """The upper end of its memory may fit too."""
        return self.share * RESERVED_HIGH <= 1


def work_of(plan: Plan, num_layers: int) -> tuple[int, int]:
    """What a simulation takes, and the part of it that decides whether the plan fits: layers of a micro-batch that are played.

    Layers whose parameters or gradients are communicated by themselves in every micro-batch are played one by one, others
    a pipeline's chunk at a time.
    """
    alone = plan.gathers or plan.syncs_every_micro_batch
    played = num_played(plan) * (num_layers if alone else plan.pp * plan.pipeline.virtual_stages)
    return (_MEMORY + _RESERVED) * num_layers + played, _MEMORY * num_layers


def bounded(branch: Branch) -> bool:
    """The floors hold. Of what they do not know (GPUs that differ, compressed or staged traffic) all is simulated."""
    fields, known = branch.fields, Plan.flat_fields()
    usual = all(fields.get(name, known[name].default) == known[name].default for name in _UNBOUNDED)
    return usual and not branch.cluster.exceptions


@dataclass(slots=True)
class Survey:
    """What was found in branches: num_legal plans, of which some are too large, some too slow, and others prospects.

    num_unchecked: candidates that are too slow or too large whether they are legal or not. num_equal: plans that recompute nothing where
    they say that they do, and are the ones that do not say it.
    """

    num_unchecked: int = 0
    num_legal: int = 0
    num_equal: int = 0
    num_too_large: int = 0
    num_too_slow: int = 0
    prospects: list[Prospect] = field(default_factory=list)
    pruned: Pruned = field(default_factory=Pruned)

    def merge(self, other: Survey) -> None:
        self.num_unchecked += other.num_unchecked
        self.num_legal += other.num_legal
        self.num_equal += other.num_equal
        self.num_too_large += other.num_too_large
        self.num_too_slow += other.num_too_slow
        self.prospects += other.prospects
        self.pruned.merge(other.pruned)


@dataclass(slots=True)
class LimitFilter:
    """Drops the plans of a branch whose compute alone takes longer than the limit, or whose layers' inputs do not fit.

    Both are the same for plans that differ in their schedule, and in what is sharded over which ranks.
    """

    study: SearchStudy
    memory: MemoryFloor
    time: TimeFloor
    limit: float
    num_dropped: int = 0
    _leasts: dict[tuple[int, str], float] = field(default_factory=dict)

    def passing(self, branch: Branch, flow: Fields, leaves: Sequence[Fields]) -> Sequence[int]:
        """The numbers of the leaves with which the flow may be quick enough, and small enough."""
        passing: list[int] = []
        if self._least(branch, flow, "none") <= self.limit:  # recomputing only adds to it
            passing = [n for n, leaf in enumerate(leaves) if self._least(branch, flow, leaf["recompute"]) <= self.limit]
        self.num_dropped += len(leaves) - len(passing)
        return passing

    def _least(self, branch: Branch, flow: Fields, recompute: str) -> float:
        key = (flow["micro_batch_size"], recompute)
        return made_once(self._leasts, key, lambda: self._value(plan_at_rest(branch, flow, recompute)))

    def _value(self, plan: Plan) -> float:
        if self.memory.inputs_bytes(plan) > self.memory.room(plan):
            return math.inf
        if self.limit == math.inf or self.study.objective == "memory":
            return 0.0
        if layer_faults(Pipeline.of(plan, self.study.space.model)):  # whoever checks the plan says so
            return 0.0
        return self.study.value(self.time.least_s(plan), plan.num_devices, plan.tokens_per_step, 0)


@dataclass(slots=True)
class ScoutFilter:
    """Keeps the smallest micro-batches of a branch in the usual order, without recomputation or with all of it: for scouts."""

    others: LimitFilter
    _smallest: int = 0

    def passing(self, branch: Branch, flow: Fields, leaves: Sequence[Fields]) -> Sequence[int]:
        """The numbers of such leaves."""
        self._smallest = self._smallest or flow["micro_batch_size"]
        if flow["micro_batch_size"] > self._smallest or flow["schedule"] not in (None, "1f1b"):
            return ()
        return [n for n in self.others.passing(branch, flow, leaves) if leaves[n]["recompute"] != "selective"]


@dataclass(slots=True)
class Surveyor:
    """Surveys branches one after another; neighbours share blocks and prices."""

    study: SearchStudy
    _shares: dict[str, ModelShards] = field(default_factory=dict)  # by how the software cuts experts
    _floors: dict[object, tuple[MemoryFloor, TimeFloor]] = field(default_factory=dict)
    _alike: object = None  # what the blocks of the last floors hang on
    _last: TimeFloor | None = None
    _idle: dict[int, bool] = field(default_factory=dict)

    def survey(self, branch: Branch, limit: float = math.inf, *, scouts: bool = False) -> Survey:
        """The legal plans of the branch that may have a value up to `limit`; the others are counted.

        scouts: only the simplest ones.
        """
        found, known = Survey(), bounded(branch)
        memory, time = self._of(branch)
        leaf_filter = LimitFilter(self.study, memory, time, limit) if known else None
        chosen = ScoutFilter(leaf_filter) if leaf_filter and scouts else leaf_filter
        for plan in self.study.space.plans(branch, found.pruned, chosen):
            found.num_legal += 1
            if known and self._repeats(plan, time):
                found.num_equal += 1
                continue
            room = memory.room(plan)
            used = memory.num_bytes(plan, room) if known else 0
            if used > room:
                found.num_too_large += 1
                continue
            floor = self._floor(plan, used, time, limit) if known else 0.0
            if floor > limit:
                found.num_too_slow += 1
                continue
            nodes = branch.cluster.num_nodes
            work = work_of(plan, self.study.space.model.num_layers)
            names = key_of(plan, nodes), layout_of(plan, nodes)
            found.prospects.append(Prospect(floor, *names, used / room, *work, bound_group_of(plan)))
        found.num_unchecked = leaf_filter.num_dropped if leaf_filter else 0
        return found

    def _floor(self, plan: Plan, used: int, time: TimeFloor, limit: float) -> float:
        """The least value of a plan, or something above `limit` that is no more."""
        study = self.study
        if study.objective == "memory":
            device = time.context.cluster.device
            return study.value(0.0, plan.num_devices, plan.tokens_per_step, used + outside_torch_bytes(device, plan))
        # no table asks for more than the steps that reach its limit
        most_s = limit / study.value(1.0, plan.num_devices, plan.tokens_per_step, 0)
        return study.value(time.seconds(plan, most_s), plan.num_devices, plan.tokens_per_step, 0)

    def _repeats(self, plan: Plan, time: TimeFloor) -> bool:
        """Another plan of the space is this one: with this software, selective recomputation recomputes nothing."""
        if plan.recompute.mode != "selective" or "none" not in self.study.space.recomputes:
            return False
        shape, stack = time.shapes.of(plan), time.context.stack
        kinds = shape.blocks.kinds  # shapes live as long as their BlockShapes
        return made_once(self._idle, id(shape), lambda: not any(recompute_ops(one, plan, stack) for one in kinds))

    def _of(self, branch: Branch) -> tuple[MemoryFloor, TimeFloor]:
        """The floors of a branch; those of another start are forgotten, as branches come in order, but for equal blocks."""
        chosen = ("data_parallel", "zero", "tp", "cp", "pp", "ep", "sequence_parallel", "memory_fraction")
        start = tuple((name, repr(value)) for name, value in branch.fields.items() if name not in chosen)
        key = (branch.cluster.num_nodes, start)
        if key not in self._floors:
            equal = branch.cluster.usual  # floors are those of equal nodes, and asked of these alone
            context = self.study.context(equal, branch.fields.get("stack", Plan().stack))
            shares = self._shares.setdefault(context.stack.kernels.expert_shards, ModelShards(context.model))
            alike = branch.cluster.num_nodes, tuple(one for one in start if one[0] not in AROUND)
            if alike != self._alike:
                self._alike, self._last = alike, None
                self._idle.clear()
            time = self._last = TimeFloor(context, shares, self._last)
            self._floors = {key: (MemoryFloor(context, shares, time.shapes), time)}
        return self._floors[key]
