"""Shares of a model, remembered: a search asks for the same few thousands of times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from simulator.model import Model
from simulator.plan import Plan
from simulator.share import Share, share_of

_Key = tuple[object, ...]


@dataclass(slots=True)
class Shares:
    """The parts of one model on the ranks of plans."""

    model: Model
    _found: dict[_Key, Model] = field(default_factory=dict)
    _bodies: dict[tuple[int, int], Counter[str]] = field(default_factory=dict)
    _chunks: dict[int, tuple[Counter[str], ...]] = field(default_factory=dict)

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

    def body(self, share: Model, every: int = 1) -> Counter[str]:
        """How many blocks of each kind a share has between the model's ends; each `every`-th of them."""
        key = (id(share), every)  # shares live as long as their Shares
        found = self._bodies.get(key)
        if found is None:
            found = self._bodies[key] = Counter(share.body[::every])
        return found

    def chunks(self, share: Share) -> tuple[Counter[str], ...]:
        """The same of each pipeline chunk."""
        found = self._chunks.get(id(share))
        if found is None:
            found = self._chunks[id(share)] = tuple(map(Counter, share.body_chunks))
        return found
