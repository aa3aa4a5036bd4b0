"""Collectives: what each costs on each class of link, which algorithm NCCL runs, and what compute loses meanwhile."""

from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.work.collectives.call import Links
from simulator.work.collectives.copies import copies
from simulator.work.collectives.cost import (
    Choice,
    calibrated,
    choose,
    collective_cost,
    collective_s,
    link_capacities,
    rank_wait_s,
    renamed,
)
from simulator.work.collectives.effects import interference, sigma, source
from simulator.work.collectives.host_traffic import host_traffic
from simulator.work.collectives.measured_fabric import ranks_heard
from simulator.work.collectives.volumes import KINDS, minimum, volume

__all__ = [
    "KINDS", "Choice", "LinkCurves", "Links", "calibrated", "choose", "collective_cost", "collective_s", "copies",
    "default_curves", "host_traffic", "interference", "link_capacities", "minimum", "rank_wait_s", "ranks_heard", "renamed",
    "sigma", "source", "volume",
]  # fmt: skip
