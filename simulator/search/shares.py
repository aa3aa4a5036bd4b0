"""Shares of a model, remembered: a search asks for the same few thousands of times."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.model import Model
from simulator.plan import Plan
from simulator.share import share_of

_Key = tuple[object, ...]


@dataclass(slots=True)
class Shares:
    """The parts of one model on the ranks of plans."""

    model: Model
    _found: dict[_Key, Model] = field(default_factory=dict)

    def of(self, plan: Plan, stage: int = 0) -> Model:
        """As `share_of`."""
        if plan.tp * plan.pp * plan.ep == 1:
            return self.model
        key = (
            plan.tp,
            plan.pp,
            plan.ep,
            plan.etp,
            plan.schedule,
            plan.virtual_stages,
            plan.data_parallel,
            plan.zero,
            stage,
        )
        share = self._found.get(key)
        if share is None:
            share = self._found[key] = share_of(self.model, plan, stage)
        return share
