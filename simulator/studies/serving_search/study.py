"""What a search over serving plans is asked: the model, the GPUs, the requests, the limits, and what may vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from simulator.base.errors import Fault, InputError
from simulator.base.schema import nearest
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.search.study import identity_of
from simulator.studies.serving import InferencePlan, Slo, Workload, with_defaults

Disaggregated = Literal["both", "yes", "no"]
DISAGGREGATED: Final[tuple[Disaggregated, ...]] = ("both", "yes", "no")
# What is searched unless fixed
DEGREES: Final = ("tp", "pp", "dp", "experts", "prefill_tp", "prefill_pp", "prefill_pcp", "prefill_dp")
MOST_NODES: Final = 1024  # that are looked at where as many as needed may be taken
_ENGINE_NODES: Final = 8  # of one engine, then


@dataclass(frozen=True, kw_only=True)
class ServingSearch:
    """A search. plan: what is stated of all fields that are not searched. fixed: field of the plan -> the values it may have.

    max_gpus: no more of the cluster's. any_nodes: as many of its nodes as needed. disaggregated: prompts on engines of
    their own: yes, no, or both ways. top: rows of the table. every: every layout that meets the limits, and every pair of
    pools. exhaustive: nothing is pruned or skipped, for tests.
    Raises InputError where the requests or the limits cannot be searched with.
    """

    model: Model
    cluster: Cluster
    plan: InferencePlan
    workload: Workload
    slo: Slo
    stack: Stack
    calibration: Calibration | None = None
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    max_gpus: int | None = None
    any_nodes: bool = False
    disaggregated: Disaggregated = "both"
    top: int = 10
    every: bool = False
    exhaustive: bool = False

    def __post_init__(self) -> None:
        faults: list[Fault] = []
        if not self.slo.any:
            faults.append(Fault("slo", "a search needs a limit to meet", "--slo-ttft, --slo-tpot or --slo-latency"))
        if self.workload.trace is not None:
            faults.append(Fault("workload: trace", "a trace has its own rate", "a rate, and distributions of lengths"))
        elif self.workload.concurrency:
            problem, remedy = "a closed loop has no rate to find GPUs for", "a rate, or `--users` and `--every`"
            faults.append(Fault("workload: concurrency", problem, remedy))
        elif not self.workload.rate:
            problem = "all requests at once: no rate to find GPUs for"
            faults.append(Fault("workload: rate", problem, "requests a second, as 10"))
        if self.workload.burstiness != 1:
            problem = "equal engines are simulated once, at a random share of a Poisson process"
            faults.append(Fault("workload: burstiness", problem, "leave it out"))
        if self.max_gpus is not None and self.max_gpus < 1:
            faults.append(Fault("max_gpus", f"must be at least 1; it is {self.max_gpus}"))
        if self.disaggregated == "yes" and not self.hands_over:
            problem = "states of mixers, and caches of dcp or attention_dp, are not handed over: it is not modelled"
            faults.append(Fault("--disaggregated", problem, "both, which leaves such plans whole, or no"))
        InputError.raise_for(faults)

    @property
    def hands_over(self) -> bool:
        """Caches of the model under every plan can be handed over."""
        alone = any(self.fixed.get("attention_dp", (self.plan.attention_dp,)))
        return self.model.mamba is None and not alone and max(self.fixed.get("dcp", (self.plan.dcp,))) == 1

    def resolved(self, plan: InferencePlan) -> InferencePlan:
        """The plan as the engine has it where nothing is stated."""
        return with_defaults(plan, self.stack, self.cluster.device, self.model)

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.workload.rate

    @property
    def seen(self) -> Cluster:
        """The nodes that answers may take."""
        return self.cluster.with_nodes(MOST_NODES) if self.any_nodes else self.cluster

    @property
    def most_devices(self) -> int:
        """GPUs of an answer at most."""
        return min(self.seen.num_devices, self.max_gpus or self.seen.num_devices)

    @property
    def largest_engine(self) -> int:
        """GPUs of one engine at most."""
        nodes = max(self.cluster.num_nodes, _ENGINE_NODES if self.any_nodes else 0)
        return min(self.most_devices, nodes * self.cluster.gpus_per_node)

    @property
    def numbers(self) -> tuple[Calibration, LinkCurves]:
        """Of kernels and links."""
        calibration = self.calibration or Calibration.for_device(self.cluster.device)
        return calibration, calibration.links or default_curves()

    def inputs(self) -> dict[str, Any]:
        """What was asked, as plain data."""
        return {
            "model": self.model.name,
            "cluster": self.cluster.name,
            "nodes": None if self.any_nodes else self.cluster.num_nodes,
            "calibration": self.calibration.name if self.calibration else None,
            "inference": self.resolved(self.plan).model_dump(mode="json", exclude=set(DEGREES)),
            "workload": self.workload.model_dump(mode="json"),
            "slo": [asdict(limit) for limit in self.slo.limits],
            "fixed": {name: list(values) for name, values in self.fixed.items()},
            "max_gpus": self.max_gpus,
            "disaggregated": self.disaggregated,
            "top": self.top,
            "every": self.every,
        }

    @property
    def identity(self) -> str:
        """A hash of everything that a finished part depends on."""
        return identity_of("serving", self.inputs(), self.model, self.cluster, self.stack, self.calibration)


def degrees_given(plan: InferencePlan) -> dict[str, tuple[Any, ...]]:
    """Degrees set in the plan, which a search keeps."""
    return {name: (getattr(plan, name),) for name in DEGREES if name in plan.model_fields_set}


def fix_faults(name: str, values: Sequence[Any], place: str) -> list[Fault]:
    """What is wrong with values that a field of the plan may take."""
    if name == "stack":
        return [Fault(place, "cannot be searched", "one software a search: stack")]
    if name not in InferencePlan.model_fields:
        return [Fault(place, "is no field of a serving plan", nearest(name, list(InferencePlan.model_fields)))]
    found: list[Fault] = []
    for value in values:
        try:
            InferencePlan.parse({name: value}, place, InputError, from_file=True)
        except InputError as exc:
            found += [replace(fault, place=place) for fault in exc.faults]
    return found
