"""Which layers each chunk of each stage holds."""

from __future__ import annotations

from dataclasses import replace

from simulator.base.errors import PlanError
from simulator.parallel.legality.pipeline import layer_faults
from simulator.parallel.legality.rule import Pipeline
from simulator.parallel.schedule_traits import num_positions
from simulator.spec.model import Model
from simulator.spec.plan import Plan
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


def dealt(model: Model, plan: Plan) -> Split:
    """How a model's layers are dealt to the plan's stages: as the plan says, else by cost where its implementation does so."""
    if plan.split != EQUAL or plan.pp == 1 or not plan.traits.balances_stages or plan.pipeline.virtual_stages > 1:
        return plan.split
    attention = 4 * model.num_heads * model.head_dim * model.d_model
    layer = attention + 3 * model.d_ff * model.d_model
    return replace(EQUAL, explicit=by_cost(model.num_layers, layer, model.vocab_size * model.d_model, plan.pp))


def by_cost(num_layers: int, layer: int, head: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage: a stage takes layers until it and those before it have their share of the cost or more.

    The layer that passes it stays (nanotron, src/nanotron/models/base.py, build_model; what exactly fills it ends it too, by the
    pace of the stack's calibration runs). Where the layers pass all shares
    but the head's own the stages behind hold none.
    """
    counts, total, passed, stage = [0] * num_stages, num_layers * layer + head, 0, 0
    for _ in range(num_layers):
        counts[stage] += 1
        passed += layer
        if passed * num_stages >= total * (stage + 1):
            stage += 1
    return tuple(counts)
