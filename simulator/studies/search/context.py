"""What all plans of a branch share."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack


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
