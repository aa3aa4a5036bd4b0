"""A rule of legality as data: what must hold, the equation where it does not, and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar, Final, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel

from simulator.base.errors import Fault
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.schedules import EQUAL, Schedule, Split
from simulator.spec.software.stack import Stack

S = TypeVar("S")

# What a rule is asked about: the plan alone; the plan with the cluster, with the model, with its pipeline; with all that
# meets in a run; with the framework that should run it; with how torch is to play it
Reads = Literal["plan", "cluster", "model", "pipeline", "run", "software", "played"]


class TensorGroup(Protocol):
    """How the groups of tp lie on the nodes."""

    @property
    def spans_domain(self) -> bool: ...
    @property
    def ranks_per_node(self) -> int: ...


@dataclass(frozen=True, slots=True)
class OnCluster:
    """A plan on a cluster."""

    plan: Plan
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class OfModel:
    """A plan for a model."""

    plan: Plan
    model: Model


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages, micro-batches and chunks under a schedule, and the layers that are dealt to them."""

    schedule: Schedule
    num_stages: int
    num_micro_batches: int
    num_chunks: int = 1
    num_layers: int = 1
    split: Split = EQUAL

    @property
    def has_passes(self) -> bool:
        """At least one stage, micro-batch and chunk, as every plan has."""
        return min(self.num_stages, self.num_micro_batches, self.num_chunks) >= 1

    @property
    def has_layers(self) -> bool:
        """At least one layer, stage and chunk, as every plan has."""
        return min(self.num_layers, self.num_stages, self.num_chunks) >= 1

    @classmethod
    def of(cls, plan: Plan, model: Model) -> Pipeline:
        """A plan's own."""
        counts = plan.pp, plan.num_micro_batches, plan.pipeline.virtual_stages
        return cls(plan.pipeline_schedule, *counts, model.num_layers, plan.split)


@dataclass(frozen=True, slots=True)
class Run:
    """A plan with everything it meets. tensor_group: how its groups of tp lie on the cluster, which it fills."""

    plan: Plan
    model: Model
    cluster: Cluster
    stack: Stack
    tensor_group: Callable[[], TensorGroup]


class Framework(Protocol):
    """What of a training framework a fault names."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Hosted:
    """A plan and the framework that should run it."""

    plan: Plan
    software: Framework


@dataclass(frozen=True, slots=True)
class Played:
    """A plan that torch itself is to play. mode: "full", "solo", "cpu" or "fake"."""

    plan: Plan
    model: Model
    stack: Stack
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rule(Generic[S]):
    """One rule.

    where: the field at which a fault is reported. at: whose field, if not the plan's. applies: whether the rule says
    anything; None: always.
    equation: what is wrong, with the plan's numbers. remedy: the nearest values that are right.
    """

    where: str
    holds: Callable[[S], bool]
    equation: str | Callable[[S], str]
    remedy: str | Callable[[S], str]
    applies: Callable[[S], bool] | None = None
    at: str | Callable[[S], str] = ""
    reads: ClassVar[Reads]

    def broken(self, subject: S) -> bool:
        """The rule says something of this subject, and it does not hold."""
        return (self.applies is None or self.applies(subject)) and not self.holds(subject)

    def fault(self, subject: S, place: str = "plan") -> Fault:
        """What is wrong with a subject that breaks it."""
        equation, remedy, at = self.equation, self.remedy, self.at
        noun = (at if isinstance(at, str) else at(subject)) or place
        return Fault(
            place=f"{noun}: {self.where}" if self.where else noun,
            problem=equation if isinstance(equation, str) else equation(subject),
            remedy=remedy if isinstance(remedy, str) else remedy(subject),
        )

    @property
    def name(self) -> str:
        """The plan's field at which it reports, without what is inside it; empty where that is another noun's."""
        return "" if self.at else self.where.partition(".")[0]


class PlanRule(Rule[Plan]):
    """Asks the plan alone."""

    reads = "plan"


class ClusterRule(Rule[OnCluster]):
    """Asks the plan and the cluster."""

    reads = "cluster"


class ModelRule(Rule[OfModel]):
    """Asks the plan and the model."""

    reads = "model"


class PipelineRule(Rule[Pipeline]):
    """Asks the pipeline, also one that belongs to no plan."""

    reads = "pipeline"


class RunRule(Rule[Run]):
    """Asks everything that meets in a run."""

    reads = "run"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SoftwareRule(Rule[Hosted]):
    """Asks the plan and the framework. by: the names of those that cannot run what breaks the rule."""

    by: frozenset[str]
    reads = "software"


class PlayRule(Rule[Played]):
    """Asks the plan, the model and the stack that torch is to play, and how."""

    reads = "played"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan and what is known of the rest; rules about what is not known are not asked."""

    plan: Plan
    model: Model | None = None
    cluster: Cluster | None = None
    stack: Stack | None = None
    tensor_group: Callable[[], TensorGroup] | None = None
    software: Framework | None = None

    @cached_property
    def subjects(self) -> dict[Reads, object]:
        """What there is to ask about."""
        plan, model, cluster, stack = self.plan, self.model, self.cluster, self.stack
        found: dict[Reads, object] = {"plan": plan}
        if cluster is not None:
            found["cluster"] = OnCluster(plan, cluster)
        if model is not None:
            found["model"] = OfModel(plan, model)
            found["pipeline"] = Pipeline.of(plan, model)
        if model is not None and cluster is not None and stack is not None and self.tensor_group is not None:
            found["run"] = Run(plan, model, cluster, stack, self.tensor_group)
        if self.software is not None:
            found["software"] = Hosted(plan, self.software)
        return found

    def read_by(self, rule: Rule[Any]) -> frozenset[str]:
        """The fields of the plan, by flat name, on which a rule's verdict and its equation rest."""
        seen: set[str] = set()
        noted: Any = _Noted(self.plan, (), seen)
        subject: Any = self.subjects[rule.reads]
        if rule.reads == "pipeline":
            noted = _NotedPipeline(noted, subject)
        elif rule.reads != "plan":
            noted = replace(subject, plan=noted)
        if rule.broken(noted) and not isinstance(rule.equation, str):
            rule.equation(noted)
        return frozenset(seen)


_FLAT: Final = {place: flat for flat, place in Plan.flat_names.items()}


class _Noted:
    """A plan, or a record in it, that notes which fields are read, also by its own properties."""

    def __init__(self, real: BaseModel, place: tuple[str, ...], seen: set[str]) -> None:
        self._real, self._place, self._seen = real, place, seen

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  of any field
        kind, place = type(self._real), (*self._place, name)
        found = getattr(kind, name, None)
        if isinstance(found, property):
            return found.__get__(self)
        value = getattr(self._real, name)
        if isinstance(value, BaseModel) and name in kind.model_fields:
            return _Noted(value, place, self._seen)
        if name in kind.model_fields:
            self._seen.add(_FLAT.get(".".join(place[:2])) or _FLAT[place[0]])
        else:  # a method may read them all
            self._seen |= {
                flat for path, flat in _FLAT.items() if path.split(".")[: len(self._place)] == [*self._place]
            }
        return value


_OF_PIPELINE: Final = {
    "schedule": "pipeline_schedule",
    "num_stages": "pp",
    "num_micro_batches": "num_micro_batches",
    "num_chunks": "pipeline.virtual_stages",
    "split": "split",
}


class _NotedPipeline:
    """A plan's pipeline that notes what is read of the plan."""

    has_passes = has_layers = True

    def __init__(self, plan: Any, real: Any) -> None:  # noqa: ANN401  what stands for them
        self._plan, self._real = plan, real

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  of any field
        field = _OF_PIPELINE.get(name)
        return getattr(self._real, name) if field is None else attrgetter(field)(self._plan)
