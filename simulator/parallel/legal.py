"""Whether a plan can be run, and modelled, with everything it meets."""

from __future__ import annotations

from simulator.base.errors import PlanError
from simulator.parallel.legality import Case, Software, faults
from simulator.parallel.legality.rule import TensorGroup
from simulator.parallel.mesh import Mesh
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack


def case_of(model: Model, plan: Plan, cluster: Cluster, stack: Stack, software: Software | None = None) -> Case:
    """A plan with all that is known in a run; with the framework too, where only what that runs is legal."""

    def tensor_group() -> TensorGroup:
        return Mesh(plan, cluster).group_shape("tp")

    return Case(plan=plan, model=model, cluster=cluster, stack=stack, tensor_group=tensor_group, software=software)


def legal(model: Model, plan: Plan, cluster: Cluster, stack: Stack) -> None:
    """Raise PlanError where the plan cannot be run, or cannot be modelled, with this model on this cluster."""
    found = faults(case_of(model, plan, cluster, stack))
    PlanError.raise_for(found)
