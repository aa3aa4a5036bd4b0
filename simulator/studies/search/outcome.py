"""What became of one candidate, as data that a journal keeps and another process sends."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from sys import intern
from typing import Any, Final, Literal

from simulator.base.fit import Fit
from simulator.parallel.legality import unused
from simulator.spec.plan import Plan

_WIDEST: Final = 50.0  # standard deviations of a logarithm
Status = Fit | Literal["failed"]
STATUSES: Final[tuple[Status, ...]] = (*Fit, "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """One simulated plan. key: the plan, and the nodes it runs on, in words that name nothing else.

    Times and breakdown are None and empty where it does not fit, or could not be predicted (reason says why).
    spread, stack_sigma: where the step's uncertainty comes from (`Prediction.spread`).
    """

    key: str
    status: Status
    reason: str = ""
    num_devices: int = 0
    step_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    tokens_per_step: int = 0
    mfu: float | None = None
    used_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    capacity_bytes: int | None = None
    breakdown: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    stack_sigma: float = 0.0

    @property
    def ranked(self) -> bool:
        """It fits, as far as is known, and has a time."""
        return self.status in (Fit.FITS, Fit.TIGHT) and self.step_s is not None

    @property
    def interval_s(self) -> tuple[float, float, float]:
        """Seconds of the step and both ends of its interval, of what is ranked."""
        assert self.step_s is not None
        assert self.low_s is not None
        assert self.high_s is not None
        return self.step_s, self.low_s, self.high_s

    @property
    def sound(self) -> bool:
        """What fits has a step, which is not of nothing, and no uncertainty beyond a factor that a number can hold."""
        timed = self.status not in (Fit.FITS, Fit.TIGHT) or bool(
            self.step_s and self.tokens_per_step and self.num_devices
        )
        return timed and max(self.stack_sigma, *self.spread.values(), 0.0) < _WIDEST

    @property
    def complete(self) -> bool:
        """It has all that a search says of what it ranks."""
        figures = self.low_s, self.high_s, self.mfu, self.used_bytes, self.peak_allocated_bytes, self.capacity_bytes
        return not self.ranked or None not in figures

    @property
    def signature(self) -> object:
        """Equal for plans that run the same script: everything that was predicted, to the last digit."""
        memory = self.used_bytes, self.peak_allocated_bytes
        return self.status, self.num_devices, self.step_s, self.low_s, self.high_s, self.mfu, *memory

    def to_json(self) -> str:
        """One line; `of` reads its table back to the same value, bit by bit, and in the same order."""
        return json.dumps(self._table, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    @classmethod
    def of(cls, data: dict[str, Any]) -> PlanOutcome:
        """From its table. Names of parts are one string for all outcomes: of a million they would fill gigabytes."""
        status = data["status"]
        parts = {
            name: {intern(part): one for part, one in data.get(name, {}).items()} for name in ("breakdown", "spread")
        }
        return cls(**(data | parts | {"status": status if status == "failed" else Fit(status)}))

    @property
    def _table(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanOutcome.of, (self._table,)


def fields_of(plan: Plan) -> dict[str, Any]:
    """The plan's fields that are not at their defaults, as plain data in its order, and the stack where another would run."""
    found = plan.changed_fields()
    return found | {"stack": plan.stack} if plan.traits.core_layers else found


def tidied(plan: Plan, *, experts: bool) -> Plan:
    """The plan without fields that change nothing: those that do not act, and names of what is chosen anyway."""
    given = plan.changed_fields().keys()
    usual = {name: info.default for name, info in Plan.flat_fields().items()}
    idle = given & unused(plan, experts=experts).keys()
    found = plan.copy_with(**{name: usual[name] for name in idle}) if idle else plan
    for name, chosen in (("data_parallel", "implementation"), ("schedule", "pipeline_schedule")):
        without = found.copy_with(**{name: usual[name]}) if name in given else found
        if getattr(without, chosen) == getattr(found, chosen):
            found = without
    return found


def key_of(plan: Plan, num_nodes: int) -> str:
    """Equal for equal plans on equal nodes, and different otherwise."""
    return json.dumps({"nodes": num_nodes, **fields_of(plan)}, sort_keys=True, separators=(",", ":"))


def layout_of(plan: Plan, num_nodes: int) -> str:
    """What plans of one layout have in common: software, sharding and degrees."""
    degrees = (plan.tp, plan.cp, plan.pp, plan.ep, plan.experts.etp, plan.dp_replicate > 1)
    return f"{num_nodes} {plan.stack} {plan.implementation} {plan.zero} {degrees}"


def bound_group_of(plan: Plan) -> str:
    """What decides how far its bounds are from the truth: how states and experts are sharded, and whose software does."""
    return f"{plan.stack} {plan.implementation} {plan.zero} {plan.ep} {plan.experts.etp}"


def parsed(key: str) -> tuple[Plan, int]:
    """The plan and the number of nodes of a key."""
    data = json.loads(key)
    nodes = data.pop("nodes")
    return Plan.model_validate_json(json.dumps(data)), nodes
