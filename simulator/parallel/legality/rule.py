"""A rule of legality as data: which fields it reads, what must hold, the equation where it does not, and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final, Generic, Literal, Protocol, TypeVar

from simulator.base.errors import Fault
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.model.experts import Experts
from simulator.spec.model.hybrid import Mamba
from simulator.spec.plan import Plan
from simulator.spec.plan.schedules import EQUAL, Schedule, Split
from simulator.spec.software.stack import Stack

S = TypeVar("S")

# What a rule is asked about: the plan alone; the plan with the cluster, with the model, with its pipeline; with all that
# meets in a run; with the framework that should run it; with how torch is to play it
Reads = Literal["plan", "cluster", "model", "pipeline", "run", "software", "played"]


class Heads(Protocol):
    """What of a model decides whether a plan can split it."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def experts(self) -> Experts | None: ...
    @property
    def mamba(self) -> Mamba | None: ...
    @property
    def layer_kinds(self) -> tuple[str, ...]: ...


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
    model: Heads


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages, micro-batches and chunks under a schedule, and the layers that are dealt to them."""

    schedule: Schedule
    num_stages: int
    num_micro_batches: int
    num_chunks: int = 1
    num_layers: int = 1
    split: Split = EQUAL

    @classmethod
    def of(cls, plan: Plan, model: Heads) -> Pipeline:
        """A plan's own."""
        counts = plan.pp, plan.num_micro_batches, plan.pipeline.virtual_stages
        return cls(plan.pipeline_schedule, *counts, model.num_layers, plan.split)


@dataclass(frozen=True, slots=True)
class Run:
    """A plan with everything it meets. tensor_group: how its groups of tp lie on the cluster, which it fills."""

    plan: Plan
    model: Heads
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

    where: the field at which a fault is reported. at: whose field, if not the plan's. fields: what of the plan the verdict and its equation read, by the names
    of Plan's fields and of its properties in `RESOLVED`. applies: whether the rule says anything; None: always.
    equation: what is wrong, with the plan's numbers. remedy: the nearest values that are right.
    """

    where: str
    fields: tuple[str, ...]
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

    def read_by(self, plan: Plan) -> frozenset[str]:
        """The fields of this plan on which the verdict rests."""
        return frozenset(name for one in self.fields for name in (RESOLVED[one](plan) if one in RESOLVED else (one,)))


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


# Properties of a plan that stand for several fields; a field that is stated makes the others silent
RESOLVED: Final[dict[str, Callable[[Plan], tuple[str, ...]]]] = {
    "implementation": lambda plan: ("data_parallel",) if plan.data_parallel is not None else ("data_parallel", "zero"),
    "pipeline_schedule": lambda plan: (
        ("schedule",) if plan.pipeline.schedule is not None else ("schedule", "virtual_stages")
    ),
    "split": lambda _: (
        *("first_stage_layers", "last_stage_layers", "stage_layers", "embedding_as_layer", "head_as_layer"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan and what is known of the rest; rules about what is not known are not asked."""

    plan: Plan
    model: Heads | None = None
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
