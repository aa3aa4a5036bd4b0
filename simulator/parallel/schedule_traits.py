"""What a pipeline schedule is, as far as others ask: how often it holds the model, and whether it parts backwards in two."""

from __future__ import annotations

from typing import Final

from simulator.spec.plan.schedules import Schedule

_SPLITTING: Final = ("zb_h1", "dualpipe", "dualpipe_v")


def splits_backward(schedule: Schedule) -> bool:
    """Whether some backwards of the schedule leave the weights' gradients to a W (`Action.whole` says which)."""
    return schedule in _SPLITTING


def num_positions(schedule: Schedule, num_stages: int, num_chunks: int = 1) -> int:
    """How many chunks a micro-batch passes through."""
    return num_stages if schedule == "dualpipe" else num_stages * num_chunks
