"""The position of a chunk in the order in which a micro-batch passes the chunks.

Chunk c of stage s has position c p + s (Megatron-LM). DualPipeV folds the way into a V: chunk 0 of stage s has position
s, chunk 1 position 2p - 1 - s. DualPipe holds the model twice: a micro-batch goes either through all chunks 0, from
stage 0 up, or through all chunks 1, from stage p - 1 down; the position is that in its own direction.
"""

from __future__ import annotations

from simulator.spec.plan.schedules import Schedule


def position(schedule: Schedule, num_stages: int, stage: int, chunk: int = 0) -> int:
    """The position of a chunk in its micro-batches' order: 0 holds the embedding, the last the head."""
    if schedule == "dualpipe":
        return stage if chunk == 0 else num_stages - 1 - stage
    if schedule == "dualpipe_v":
        return stage if chunk == 0 else 2 * num_stages - 1 - stage
    return chunk * num_stages + stage


def at_position(schedule: Schedule, num_stages: int, place: int, direction: int = 0) -> tuple[int, int]:
    """(stage, chunk) of a position: the inverse of `position`. `direction` matters to DualPipe: the chunk of the way."""
    if schedule == "dualpipe":
        return (place if direction == 0 else num_stages - 1 - place), direction
    if schedule == "dualpipe_v":
        return (place, 0) if place < num_stages else (2 * num_stages - 1 - place, 1)
    chunk, stage = divmod(place, num_stages)
    return stage, chunk


def micro_batches(schedule: Schedule, num_micro_batches: int, chunk: int = 0) -> range:
    """The micro-batches that pass through a chunk: all, or DualPipe's half of that direction."""
    if schedule == "dualpipe":
        half = num_micro_batches // 2
        return range(half) if chunk == 0 else range(half, num_micro_batches)
    return range(num_micro_batches)
