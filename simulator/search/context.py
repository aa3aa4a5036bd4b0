"""What the plans of a branch have in common."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.calibration import Calibration
from simulator.collective_curves import LinkCurves, default_curves
from simulator.model import Model
from simulator.stack import Stack
from simulator.topology import Cluster


@dataclass(frozen=True, kw_only=True)
class SearchContext:
    """A model, a machine and its software."""

    model: Model
    cluster: Cluster
    stack: Stack
    calibration: Calibration

    @property
    def curves(self) -> LinkCurves:
        return self.calibration.links or default_curves()
