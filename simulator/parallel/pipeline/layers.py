"""Which layers each chunk of each stage holds."""

from __future__ import annotations

from simulator.base.errors import PlanError
from simulator.parallel.legality.pipeline import layer_faults
from simulator.parallel.legality.rule import Pipeline
from simulator.parallel.pipeline.placement import position
from simulator.parallel.schedule_traits import num_positions
from simulator.spec.plan.schedules import EQUAL, Schedule, Split


def stage_layers(
    num_layers: int, num_stages: int, num_chunks: int = 1, *, split: Split = EQUAL, schedule: Schedule = "1f1b"
) -> tuple[tuple[range, ...], ...]:
    """The layers of each chunk of each stage: `[stage][chunk]` is a range of layer numbers.

    Raises PlanError where the layers cannot be dealt so.
    """
    pipeline = Pipeline(schedule, num_stages, 1, num_chunks, num_layers, split=split)
    if found := layer_faults(pipeline):
        raise PlanError(found)
    ranges: list[range] = []
    for count in _counts(schedule, num_layers, num_stages, num_chunks, split):
        begin = ranges[-1].stop if ranges else 0
        ranges.append(range(begin, begin + count))
    return tuple(
        tuple(ranges[position(schedule, num_stages, stage, chunk)] for chunk in range(num_chunks))
        for stage in range(num_stages)
    )


def _counts(schedule: Schedule, num_layers: int, num_stages: int, num_chunks: int, split: Split) -> tuple[int, ...]:
    """Layers of each position. The split is legal."""
    if split.explicit is not None:
        return split.explicit
    positions = num_positions(schedule, num_stages, num_chunks)
    if split.first is not None or split.last is not None:
        chunks = positions // num_stages  # chunks of a stage that one micro-batch passes
        chunk_counts = [count // chunks for count in _stage_counts(num_layers, num_stages, split)]
        if schedule == "dualpipe_v":
            return (*chunk_counts, *reversed(chunk_counts))
        return tuple(chunk_counts) * chunks
    share, rest = divmod(num_layers + split.ends_as_layers, positions)
    counts = [share + (place < rest) for place in range(positions)]
    counts[0] -= split.embedding_as_layer
    counts[-1] -= split.head_as_layer
    return tuple(counts)


def _stage_counts(num_layers: int, num_stages: int, split: Split) -> list[int]:
    """Layers of each stage where the ends are given; what does not divide is left over (a fault)."""
    given = [count for count in (split.first, split.last) if count is not None]
    middle = num_stages - len(given)
    share = (num_layers - sum(given)) // middle if middle else 0
    counts = [share] * num_stages
    if split.first is not None:
        counts[0] = split.first
    if split.last is not None:
        counts[-1] = split.last
    return counts
