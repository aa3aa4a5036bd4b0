"""What all plans of a branch share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from simulator.play.lower.priced_stages import PricedBlocks
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

# Fields that decide what stands around a plan's blocks, and nothing in them
AROUND: Final = ("bucket_bytes", "memory_fraction")
_USUAL: Final = {name: Plan.flat_fields()[name].default for name in AROUND}
_MOST_PLANS: Final = 32  # plans whose blocks are kept


@dataclass(frozen=True, kw_only=True)
class SearchContext:
    """A model, a machine and its software."""

    model: Model
    cluster: Cluster
    stack: Stack
    calibration: Calibration
    _blocks: dict[Plan, PricedBlocks] = field(default_factory=dict, compare=False, repr=False)

    @property
    def curves(self) -> LinkCurves:
        return self.calibration.links or default_curves()

    def blocks_like(self, plan: Plan) -> PricedBlocks | None:
        """Those of a plan before, if one had the same blocks."""
        return self._blocks.get(plan.copy_with(**_USUAL))

    def keep(self, plan: Plan, blocks: PricedBlocks) -> None:
        """Keep a plan's blocks for the next that has the same."""
        if len(self._blocks) >= _MOST_PLANS:
            del self._blocks[next(iter(self._blocks))]
        self._blocks[plan.copy_with(**_USUAL)] = blocks
