"""Single tensors: the GPU of a node that holds each one over time, and moves between tiers when memory is short."""

from simulator.studies.tensors.assign import Assignment, Node, Transfer, assign_shards, schedule_transfers
from simulator.work.offload.tiered import POLICIES, Tensor, Tiered, tiered

__all__ = [
    "POLICIES", "Assignment", "Node", "Tensor", "Tiered", "Transfer", "assign_shards", "schedule_transfers", "tiered",
]  # fmt: skip
