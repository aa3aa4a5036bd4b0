"""Mesh: how a plan's ranks and groups map to a cluster, and which plans the model and cluster allow."""

from simulator.parallel.mesh.groups import EXPERT_AXES, GroupShape, Mesh, axis_names
from simulator.parallel.mesh.legal import check, degree_faults, model_faults, nearest_divisor, shares_kv_heads

__all__ = [
    "EXPERT_AXES",
    "GroupShape",
    "Mesh",
    "axis_names",
    "check",
    "degree_faults",
    "model_faults",
    "nearest_divisor",
    "shares_kv_heads",
]
