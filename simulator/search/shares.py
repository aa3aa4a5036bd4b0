"""Shares of a model, remembered: a search asks for the same few thousands of times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from simulator.model import Model
from simulator.pipeline import Schedule, held_at_first_backward
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
    _contents: dict[int, int] = field(default_factory=dict)
    _numbers: dict[_Key, int] = field(default_factory=dict)
    _flying: dict[_Key, tuple[int, ...]] = field(default_factory=dict)

    def of(self, plan: Plan, stage: int = 0) -> Model:
        """As `share_of`."""
        wide = (plan.first_layers_bf16, plan.last_layers_bf16) if plan.narrow else (0, 0)
        if plan.tp * plan.pp * plan.ep == 1 and not any(wide):
            return self.model
        key = (
            *wide,
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

    def content(self, share: Model) -> int:
        """A number for what a share holds, the same for shares that hold the same in other chunks."""
        found = self._contents.get(id(share))  # shares live as long as their Shares
        if found is None:
            ends = (share.holds_embedding, share.holds_head) if isinstance(share, Share) else (True, True)
            found = self._numbers.setdefault((*share.body, *ends), len(self._numbers))
            self._contents[id(share)] = found
        return found

    def body(self, share: Model, every: int = 1) -> Counter[str]:
        """How many blocks of each kind a share has between the model's ends; each `every`-th of them."""
        key = (id(share), every)
        found = self._bodies.get(key)
        if found is None:
            found = self._bodies[key] = Counter(share.body[::every])
        return found

    def flying(
        self,
        schedule: Schedule,
        num_stages: int,
        num_micro_batches: int,
        stage: int,
        num_chunks: int,
    ) -> tuple[int, ...]:
        """As `held_at_first_backward`."""
        key = (schedule, num_stages, num_micro_batches, stage, num_chunks)
        found = self._flying.get(key)
        if found is None:
            found = self._flying[key] = held_at_first_backward(*key)
        return found

    def chunks(self, share: Share) -> tuple[Counter[str], ...]:
        """The same of each pipeline chunk."""
        found = self._chunks.get(id(share))
        if found is None:
            found = self._chunks[id(share)] = tuple(map(Counter, share.body_chunks))
        return found
