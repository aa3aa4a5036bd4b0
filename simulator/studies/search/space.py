"""Space: every legal plan of a model on a cluster for one global batch, in a fixed order.

A plan is chosen level by level: first the fields fixed for the whole search and the data-parallel implementation, then
degrees, then micro-batches and their schedule, then sharding, recomputation and offload. What is legal, and what the
stack's framework can run, is decided by `simulator.parallel.legality` alone: on every level, a plan whose later fields have
neutral values is checked, and a fault in a field that is already chosen ends the branch. So most of the space is refused
without being enumerated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, Final, Protocol

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.remembered import made_once
from simulator.base.schema import nearest
from simulator.parallel.legal import case_of
from simulator.parallel.legality import RULES, Rule, Software, first_fault, software_of
from simulator.parallel.legality.software import SOFTWARE
from simulator.parallel.pipeline import SCHEDULES
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Offload, Plan
from simulator.spec.software.stack import Stack

Fields = dict[str, Any]

OFFLOADS: Final[Mapping[str, Offload]] = {
    "none": Offload(),
    "activations": Offload(activations="host"),
    "optimizer": Offload(optimizer="host"),
    "states": Offload(optimizer="host", parameters="host"),
}
# Fields that the search chooses by itself, level by level, and where a fault in a field chosen so far is reported.
_FIRST: Final = ("data_parallel", "zero")
_DEGREES: Final = ("tp", "cp", "pp", "ep", "sequence_parallel")
_FLOWS: Final = ("micro_batch_size", "schedule", "virtual_stages")
_LAST: Final = ("dp_replicate", "recompute", "offload")
CHOSEN: Final = (*_FIRST, *_DEGREES, *_FLOWS, *_LAST)
DERIVED: Final = ("dp_shard", "num_micro_batches", "seq_len", "sharding_strategy")
_DEGREE_PLACES: Final = (
    *("zero", "degrees", "tp", "cp", "ep", "etp", "rank_order", "cp_exchange", "seq_len", "sequence_parallel"),
    *("vocab_parallel", "precision"),
)
_FLOW_PLACES: Final = ("pp", "num_micro_batches", "virtual_stages", "schedule", "layers", "first_stage_layers")
_LEAF_PLACES: Final = ("data_parallel", "dp_shard", "dp_replicate", "recompute", "offload")
_Rules = tuple[Rule[Any], ...]
_SELECTIVE: Final = frozenset(name for rule in SOFTWARE for name in rule.by)  # frameworks that do not run everything
_OF_DEGREES: Final = tuple(
    rule for rule in RULES if rule.name in _DEGREE_PLACES or (rule.reads == "software" and rule.name in _DEGREES)
)
_OF_FLOWS: Final = tuple(rule for rule in RULES if rule.name in _FLOW_PLACES)
_OF_LEAVES: Final = tuple(rule for rule in RULES if rule.name in _LEAF_PLACES)
BATCH: Final = "global batch"
MOST_DEVICES: Final = "max-gpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The degrees and all that is chosen before them: plans below it share blocks, groups and prices."""

    cluster: Cluster
    fields: Fields


@dataclass(slots=True, kw_only=True)
class Pruned:
    """Candidates that each rule refused, and an example of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, rule: str, count: int, example: str) -> None:
        if count:
            self.counts[rule] += count
            self.examples.setdefault(rule, example)

    def merge(self, other: Pruned) -> None:
        for rule, count in other.counts.items():
            self.add(rule, count, other.examples[rule])


class LeafFilter(Protocol):
    """Drops plans of a branch before anyone checks whether they are legal."""

    def passing(self, branch: Branch, flow: Fields, leaves: Sequence[Fields]) -> Sequence[int]:
        """The numbers of the leaves that are worth a check with this flow."""
        ...


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is searched.

    clusters: the same nodes in different numbers. fixed: field of Plan -> the values it may take; a field that the
    search does not choose by itself is free to have several too; without a precision, it is the GPU's 16 bits.
    max_devices: no plan on more.
    """

    model: Model
    clusters: tuple[Cluster, ...]
    global_batch: int
    seq_len: int
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    max_devices: int | None = None

    def __post_init__(self) -> None:
        """A value that is given twice is one; the precision is one that the GPU has units for."""
        once = {name: tuple({repr(value): value for value in values}.values()) for name, values in self.fixed.items()}
        if (half := self.clusters[0].device.half) != Plan().precision.compute:
            once.setdefault("precision", (half,))
        object.__setattr__(self, "fixed", once)

    def starts(self) -> Iterator[tuple[Cluster, Fields]]:
        """What is chosen before the degrees, in order."""
        others = [name for name in self.fixed if name not in CHOSEN]
        for values in product(*(self.fixed[name] for name in others)):
            base = {"seq_len": self.seq_len, **dict(zip(others, values, strict=True))}
            for parallel, zero in product(self._implementations(base), self._values("zero", (0, 1, 2, 3))):
                start = {**base, "data_parallel": parallel, "zero": zero}
                yield from ((cluster, start) for cluster in self.clusters)

    def branches(self, pruned: Pruned) -> Iterator[Branch]:
        """The branches in order; what is refused on the way is counted in `pruned`."""
        for cluster, start in self.starts():
            yield from self.degrees(cluster, start, pruned)

    def degrees(self, cluster: Cluster, start: Fields, pruned: Pruned) -> Iterator[Branch]:
        """The branches of a start."""
        devices = cluster.num_devices
        sizes = _divisors(devices)
        experts = sizes if self.model.experts is not None else (1,)
        habits = [habit for habit in self._software(start).habits if habit.field not in self.fixed]
        values = [self._values(name, sizes) for name in ("tp", "cp", "pp")]
        too_many = self.max_devices is not None and devices > self.max_devices
        for tp, cp, pp, ep in product(*values, self._values("ep", experts)):
            chosen = {**start, "tp": tp, "cp": cp, "pp": pp, "ep": ep}
            sequences = self._values("sequence_parallel", (False, True) if tp > 1 else (False,))
            ranks, rest = divmod(devices, tp * cp * pp)
            if too_many or rest:
                problem = f"tp {tp} × cp {cp} × pp {pp} do not divide {devices} devices"
                rule, example = (MOST_DEVICES, f"{devices} devices") if too_many else ("degrees", problem)
                size = self._size(Branch(cluster=cluster, fields=chosen), ranks if too_many else 1)
                pruned.add(rule, len(sequences) * size, example)
                continue
            for sequence in sequences:
                fields = {**chosen, "sequence_parallel": sequence}
                fields |= {habit.field: habit.value for habit in habits if habit.when(fields)}
                branch = Branch(cluster=cluster, fields=fields)
                fault = self._probe(branch, {**fields, **_at_rest(fields, ranks)}, _OF_DEGREES)
                if fault is None:
                    yield branch
                else:
                    pruned.add(_rule(fault), self._size(branch, ranks), str(fault))

    def plans(self, branch: Branch, pruned: Pruned, leaf_filter: LeafFilter | None = None) -> Iterator[Plan]:
        """The legal plans of a branch, in order; what the leaf_filter drops is not checked.

        No rule depends both on the flow of micro-batches and on the fields of a leaf. So a flow that is legal with some
        leaf and a leaf that is legal with some flow are legal together, without a check (tests/unit/test_search.py).
        """
        chosen = branch.fields
        ranks = branch.cluster.num_devices // (chosen["tp"] * chosen["cp"] * chosen["pp"])
        leaves = self.leaves(branch, ranks)
        flows = self._whole_flows(branch, ranks, len(leaves), pruned)
        legal = [
            (flow, leaf_filter.passing(branch, flow, leaves) if leaf_filter else range(len(leaves))) for flow in flows
        ]
        uses = Counter(number for _, numbers in legal for number in numbers)
        below = {number for number, count in uses.items() if self._holds(branch, leaves[number], count, pruned)}
        with_flow: set[int] = set()  # numbers of leaves that are legal with some flow
        for flow, numbers in legal:
            still = [number for number in numbers if number in below]
            fault = self._probe(branch, {**chosen, **_at_rest(chosen, ranks), **flow}, _OF_FLOWS) if still else None
            if fault is not None:
                pruned.add(_rule(fault), len(still), str(fault))
                continue
            runs = False  # with some leaf
            for number in still:
                fields = {**chosen, **flow, **leaves[number]}
                if runs and number in with_flow:
                    yield Plan(**fields)
                    continue
                plan = self._legal(branch, fields, pruned)
                if plan is not None:
                    runs = True
                    with_flow.add(number)
                    yield plan

    def _whole_flows(self, branch: Branch, ranks: int, num_leaves: int, pruned: Pruned) -> list[Fields]:
        """The flows of micro-batches that the global batch divides by."""
        found: list[Fields] = []
        for size, schedule, chunks in self.flows(branch):
            count, rest = divmod(self.global_batch, ranks * size)
            if rest:
                problem = f"{ranks} data-parallel ranks × {size} sequences do not divide a batch of {self.global_batch}"
                pruned.add(BATCH, num_leaves, problem)
                continue
            flow = {"micro_batch_size": size, "num_micro_batches": count}
            found.append(flow | {"schedule": schedule, "virtual_stages": chunks})
        return found

    def _holds(self, branch: Branch, leaf: Fields, num_flows: int, pruned: Pruned) -> bool:
        """Whether the fields of a leaf have no fault of their own."""
        rest = _at_rest(branch.fields, leaf["dp_replicate"] * leaf["dp_shard"])
        fault = self._probe(branch, {**branch.fields, **rest, **leaf}, _OF_LEAVES)
        if fault is not None:
            pruned.add(_rule(fault), num_flows, str(fault))
        return fault is None

    def _legal(self, branch: Branch, fields: Fields, pruned: Pruned) -> Plan | None:
        plan, fault = self._judged(branch, fields, RULES)
        if fault is not None:
            pruned.add(_rule(fault), 1, str(fault))
            return None
        return plan

    def _probe(self, branch: Branch, fields: Fields, rules: _Rules) -> Fault | None:
        """The first fault by one of `rules`, if any."""
        return self._judged(branch, fields, rules)[1]

    def _judged(self, branch: Branch, fields: Fields, rules: _Rules) -> tuple[Plan | None, Fault | None]:
        """The plan of these fields, and the first fault by one of `rules`, if any."""
        try:
            plan = Plan(**fields)
        except ValueError as exc:
            return None, Fault(place="plan", problem=str(exc))
        stack = loaded_stack(plan.stack)
        software = software_of(stack.framework, plan.implementation)
        case = case_of(self.model, plan, branch.cluster, stack, software if software.name in _SELECTIVE else None)
        return plan, first_fault(case, rules)

    def num_sizes(self, branch: Branch) -> int:
        """Sizes of a micro-batch that the global batch divides by."""
        chosen = branch.fields
        ranks = branch.cluster.num_devices // (chosen["tp"] * chosen["cp"] * chosen["pp"])
        sizes = self._values("micro_batch_size", _divisors(self.global_batch))
        return sum(self.global_batch % (ranks * size) == 0 for size in sizes)

    def flows(self, branch: Branch) -> Iterator[tuple[int, str | None, int]]:
        """(sequences of a micro-batch, schedule, chunks) that are tried."""
        for size in self._values("micro_batch_size", _divisors(self.global_batch)):
            for schedule in self._values("schedule", (None,) if branch.fields["pp"] == 1 else SCHEDULES):
                for chunks in self._values("virtual_stages", self._chunks(schedule)):
                    yield size, schedule, chunks

    def _chunks(self, schedule: str | None) -> tuple[int, ...]:
        """Virtual stages that are tried: what a schedule asks for, and for interleaving what may deal layers evenly."""
        if schedule in ("dualpipe", "dualpipe_v"):
            return (2,)
        return _divisors(self.model.num_layers)[1:] if schedule == "interleaved" else (1,)

    def leaves(self, branch: Branch, ranks: int) -> list[Fields]:
        """The choices of a leaf: sharding, recomputation and offload."""
        chosen = branch.fields
        leaves: list[Fields] = []
        for replicas in self._values("dp_replicate", _replicas(chosen, ranks, branch.cluster)):
            if ranks % replicas:
                continue
            degrees = {"dp_replicate": replicas, "dp_shard": ranks // replicas}
            leaves += [
                {**degrees, "recompute": recompute, "offload": OFFLOADS[offload]}
                for recompute, offload in product(self.recomputes, self._values("offload", ("none",)))
            ]
        return leaves

    @property
    def recomputes(self) -> Sequence[str]:
        """Modes of recomputation that are tried."""
        return self._values("recompute", ("none", "selective", "full"))

    def _size(self, branch: Branch, ranks: int) -> int:
        """Candidates below a branch that was refused."""
        chosen, ranks = branch.fields, max(ranks, 1)
        key = (branch.cluster.num_nodes, chosen["pp"] == 1, chosen["zero"], chosen["tp"] * chosen["cp"], ranks)
        return made_once(self._sizes, key, lambda: sum(1 for _ in self.flows(branch)) * len(self.leaves(branch, ranks)))

    @cached_property
    def _sizes(self) -> dict[object, int]:
        return {}

    def _values(self, name: str, default: Sequence[Any]) -> Sequence[Any]:
        return self.fixed.get(name, default)

    def _implementations(self, base: Fields) -> Sequence[str]:
        if "data_parallel" in self.fixed:
            return self.fixed["data_parallel"]
        return self._software(base).implementations

    def _software(self, chosen: Fields) -> Software:
        """The framework that runs what is chosen."""
        framework = loaded_stack(chosen.get("stack", Plan().stack)).framework
        return software_of(framework, chosen.get("data_parallel"))


@lru_cache(maxsize=64)
def loaded_stack(name: str) -> Stack:
    """By its name; read once."""
    return Stack.load(name)


def _at_rest(chosen: Fields, ranks: int) -> Fields:
    """Fields below the degrees that say nothing about them."""
    axis = "dp_replicate" if chosen["zero"] == 0 else "dp_shard"
    return {axis: ranks, "schedule": None if chosen["pp"] == 1 else "1f1b"}


def plan_at_rest(branch: Branch, flow: Fields, recompute: str) -> Plan:
    """A plan of the branch with so many micro-batches, in the simplest schedule, sharded in the simplest way."""
    chosen = branch.fields
    ranks = branch.cluster.num_devices // (chosen["tp"] * chosen["cp"] * chosen["pp"])
    counts = {name: flow[name] for name in ("micro_batch_size", "num_micro_batches")}
    return Plan(**{**chosen, **_at_rest(chosen, ranks), **counts, "recompute": recompute})


def _replicas(chosen: Fields, ranks: int, cluster: Cluster) -> tuple[int, ...]:
    """Replicas that are tried: all ranks where nothing is sharded; else one, or one a node."""
    if chosen["zero"] == 0:
        return (ranks,)
    inside, rest = divmod(cluster.gpus_per_node, chosen["tp"] * chosen["cp"])
    if rest or inside < 2 or ranks % inside or ranks == inside:
        return (1,)
    return 1, ranks // inside


def _rule(fault: Fault) -> str:
    """The field to which a fault belongs."""
    return fault.place.removeprefix("plan: ").partition(".")[0]


def _divisors(number: int) -> tuple[int, ...]:
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(dict.fromkeys((*low, *(number // d for d in reversed(low)))))


def tightest(pruned: Pruned, fixed: Collection[str] = ()) -> Fault:
    """The fault of an empty space: how many candidates each rule refused, those of fixed fields first, then the hardest.

    Degrees that do not fill the cluster are in every space, and come last where others refuse too.
    """
    ranked = sorted(
        pruned.counts.items(), key=lambda item: (item[0] not in fixed, item[0] == "degrees", -item[1], item[0])
    )
    if not ranked:
        return Fault(place="search", problem="no candidate at all", remedy="at least one value for every field")
    rule, count = ranked[0]
    total = sum(pruned.counts.values())
    others = ", ".join(f"{name} {number:,}" for name, number in ranked[1:])
    problem = f"no legal plan among {total:,} candidates: {rule} refuses {count:,} ({pruned.examples[rule]})"
    return Fault(place="search", problem=problem + (f"; then {others}" if others else ""), remedy=f"loosen {rule}")


def fix_faults(
    name: str, values: Sequence[object], place: str, *, others: str, at: str = "", from_file: bool = True
) -> list[Fault]:
    """What is wrong with values that a field of the plan may take. others: what gives the derived ones; at: where values stand."""
    if name in DERIVED:
        remedy = f"fix dp_replicate or micro_batch_size; {others} give the rest"
        return [Fault(place, "follows from the others", remedy)]
    if name not in Plan.flat_fields():
        return [Fault(place, "is not a field of a plan", nearest(name, Plan.flat_fields()))]
    if name == "offload":
        return [Fault(place, str(each), f"one of {', '.join(OFFLOADS)}") for each in values if each not in OFFLOADS]
    found: list[Fault] = []
    for value in values:
        with Collected(found):
            Plan.parse({name: value}, at or place, InputError, from_file=from_file)
    return found
