"""Mesh: how a plan's ranks and groups map to a cluster."""

from simulator.parallel.mesh.groups import GroupShape, Mesh

__all__ = ["GroupShape", "Mesh"]
