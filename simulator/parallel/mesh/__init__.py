"""Mesh: how a plan's ranks and groups map to a cluster."""

from simulator.parallel.mesh.groups import EXPERT_AXES, GroupShape, Mesh, axis_names

__all__ = [
    "EXPERT_AXES",
    "GroupShape",
    "Mesh",
    "axis_names",
]
