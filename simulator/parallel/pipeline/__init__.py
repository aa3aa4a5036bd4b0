"""Pipeline schedules as data: what each stage issues and in which order, which layers it holds, what it waits for.

A *stage* is a pipeline rank. Its layers may be split into *chunks* (virtual stages, model chunks). A micro-batch visits
chunks in the order of their *position*, 0 to the last, and its gradients go back. Letters: p stages, m micro-batches,
v chunks a stage. Told with drawings in docs/background/pipeline.md.
"""

from simulator.parallel.pipeline.flow import held_at_first_backward, neighbours, peak_in_flight, turns
from simulator.parallel.pipeline.layers import micro_batches, position, stage_layers
from simulator.parallel.pipeline.orders import Action, order
from simulator.parallel.schedule_traits import num_positions, splits_backward
from simulator.spec.plan.schedules import SCHEDULES, Schedule, Split

__all__ = [
    "SCHEDULES", "Action", "Schedule", "Split", "held_at_first_backward", "micro_batches", "neighbours",
    "num_positions", "order", "peak_in_flight", "position", "splits_backward", "stage_layers", "turns",
]  # fmt: skip
