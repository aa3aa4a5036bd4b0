"""Traits of a pipeline schedule: copies of the model, and whether backwards are split in two."""

from __future__ import annotations

from typing import Final

from simulator.spec.plan.schedules import Schedule

# From the third micro-batch on, every micro-batch but the last usually repeats the one before it: the pipeline of gathers is full
FILLED: Final = 4
_SPLITTING: Final = ("zb_h1", "dualpipe", "dualpipe_v")


def splits_backward(schedule: Schedule) -> bool:
    """Whether some backwards of the schedule leave the weights' gradients to a W (`Action.whole` says which)."""
    return schedule in _SPLITTING


def repetition(schedule: Schedule, num_stages: int) -> tuple[int, int]:
    """(micro-batches from which on more of them repeat what the last ones did, how many make one repetition).

    Without stages it is the fourth. A pipeline repeats once it is full and empties as it always does; interleaving and two
    directions take turns.
    """
    if num_stages == 1:
        return FILLED, 1
    period = {"interleaved": num_stages, "dualpipe": 2, "dualpipe_v": 1}.get(schedule, 1)
    return 3 * num_stages + FILLED - (3 * num_stages + FILLED) % period, period


def played_of(schedule: Schedule, num_stages: int, count: int) -> tuple[int, int, int]:
    """Of `count` micro-batches: (repetitions that are left out, micro-batches that are played, those of a repetition)."""
    most, period = repetition(schedule, num_stages)
    more = max(0, (count - most) // period)
    return more, count - more * period, period


def num_positions(schedule: Schedule, num_stages: int, num_chunks: int = 1) -> int:
    """How many chunks a micro-batch passes through."""
    return num_stages if schedule == "dualpipe" else num_stages * num_chunks
