"""A search's study: everything that decides its answer, and nothing that only decides how long it takes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Literal

from pydantic import BaseModel
from typing_extensions import override

from simulator.base.errors import InputError
from simulator.base.remembered import made_once
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.software.stack import Stack
from simulator.studies.search.context import SearchContext
from simulator.studies.search.outcome import PlanOutcome
from simulator.studies.search.space import Space, loaded_stack

Objective = Literal["step", "throughput", "cost", "memory"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("step", "throughput", "cost", "memory")


class _Contexts(dict[tuple[int, bool, str], SearchContext]):
    """By number of nodes, whether they differ, and stack; a copy in another process begins with none."""

    @override
    def __reduce__(self) -> tuple[type[_Contexts], tuple[()]]:
        return type(self), ()


class SearchBrokenError(InputError):
    """What a search needs is gone, its workers or its journal's disk: no part of it has an answer."""


@dataclass(frozen=True, kw_only=True)
class SearchStudy:
    """The space, the machine's numbers, and what is looked for.

    stack: None for the plans' own by name. objective: step seconds, seconds a token, device-seconds a token, or bytes.
    top: how many plans the table has; no better one is ever pruned. fits_only: even the upper end of a plan's memory
    must fit. layouts: the best plan of each layout instead, those first that surely fit, after simulations that take at most the work of `budget`
    layers of a micro-batch (`survey.work_of`).
    """

    space: Space
    calibration: Calibration | None = None
    stack: Stack | None = None
    objective: Objective = "step"
    top: int = 10
    fits_only: bool = False
    layouts: bool = False
    budget: int = 20_000
    _contexts: _Contexts = field(default_factory=_Contexts, init=False, repr=False, compare=False)

    def context(self, cluster: Cluster, stack_name: str) -> SearchContext:
        """What plans under that stack on that many nodes share: files are read once, and times of kernels kept."""
        key = cluster.num_nodes, bool(cluster.exceptions), stack_name
        return made_once(self._contexts, key, self._context, cluster, stack_name)

    def _context(self, cluster: Cluster, stack_name: str) -> SearchContext:
        stack = self.stack or loaded_stack(stack_name)
        calibration = self.calibration or Calibration.for_device(cluster.device)
        if calibration.learned is not None:  # plans far apart are ranked by what coefficients say of all of them
            calibration = calibration.model_copy(update={"learned": calibration.learned.alone})
        return SearchContext(
            model=stack.stored(self.space.model),
            cluster=cluster,
            stack=calibration.learned.of(stack) if calibration.learned is not None else stack,
            calibration=calibration,
        )

    def cluster(self, num_nodes: int) -> Cluster:
        return next(each for each in self.space.clusters if each.num_nodes == num_nodes)

    def value(self, step_s: float, num_devices: int, tokens: int, used_bytes: float) -> float:
        """What is minimised."""
        match self.objective:
            case "step":
                return step_s
            case "throughput":
                return step_s / tokens
            case "cost":
                return step_s * num_devices / tokens
            case "memory":
                return used_bytes

    def value_of(self, outcome: PlanOutcome) -> float | None:
        """Of a simulated plan; None where it does not fit."""
        if not outcome.ranked or outcome.step_s is None or outcome.used_bytes is None:
            return None
        return self.value(outcome.step_s, outcome.num_devices, outcome.tokens_per_step, outcome.used_bytes)

    def inputs(self) -> dict[str, Any]:
        """What was asked, as plain data."""
        space = self.space
        return {
            "model": space.model.name,
            "cluster": space.clusters[0].name,
            "nodes": [cluster.num_nodes for cluster in space.clusters],
            "global_batch": space.global_batch,
            "seq_len": space.seq_len,
            "fixed": {name: list(values) for name, values in space.fixed.items()},
            "max_gpus": space.max_devices,
            "calibration": self.calibration.name if self.calibration else None,
            "objective": self.objective,
            "top": self.top,
            "fits_only": self.fits_only,
            "layouts": self.layouts,
            "budget": self.budget if self.layouts else None,
        }

    @property
    def identity(self) -> str:
        """A hash of everything that an outcome depends on: model, clusters, stack and calibration to the last digit."""
        return identity_of(self.inputs(), self.space.model, *self.space.clusters, self.calibration, self.stack)


def software_version() -> str:
    """Which shardwise predicts."""
    try:
        return version("shardwise")
    except PackageNotFoundError:  # a checkout that nobody installed
        return "unknown"


def identity_of(*asked: object) -> str:
    """A hash of this version and all that a journal's rows depend on: records, and plain data."""
    plain = [one.model_dump(mode="json") if isinstance(one, BaseModel) else one for one in asked]
    text = json.dumps([software_version(), *plain], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
