"""What each action waits for and sends, and how many micro-batches' activations a stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.base.errors import PlanError
from simulator.parallel.legality.pipeline import schedule_faults
from simulator.parallel.legality.rule import Pipeline
from simulator.parallel.pipeline.actions import Action
from simulator.parallel.pipeline.orders import interleaved_warm_up
from simulator.parallel.pipeline.placement import at_position, position
from simulator.parallel.schedule_traits import num_positions
from simulator.spec.plan.schedules import Schedule

Where = tuple[int, Action]  # (stage, what it does there)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """What must have ended before an action, on which stage, and what crosses between stages.

    after: all of it. receives: the one of `after` on another stage, whose result travels (activations before an F, their
    gradients before a B). sends: the action on another stage that this one's result goes to.
    """

    after: tuple[Where, ...]
    receives: Where | None = None
    sends: Where | None = None


def neighbours(schedule: Schedule, num_stages: int, stage: int, action: Action, num_chunks: int = 1) -> Neighbours:
    """F of a position needs F of the one before, B needs its own F and B of the one behind; W needs its own B."""
    if action.kind == "W":
        return Neighbours(after=((stage, Action("B", action.micro_batch, action.chunk)),))
    place = position(schedule, num_stages, stage, action.chunk)
    back = -1 if action.kind == "F" else 1

    def at(other: int) -> Where | None:
        if not 0 <= other < num_positions(schedule, num_stages, num_chunks):
            return None
        there, chunk = at_position(schedule, num_stages, other, action.chunk)
        return there, Action(action.kind, action.micro_batch, chunk)

    source, target = at(place + back), at(place - back)
    own = ((stage, Action("F", action.micro_batch, action.chunk)),) if action.kind == "B" else ()
    return Neighbours(
        after=own if source is None else (*own, source),
        receives=source if source and source[0] != stage else None,
        sends=target if target and target[0] != stage else None,
    )


def in_flight(
    schedule: Schedule,
    num_stages: int,
    num_micro_batches: int,
    stage: int,
    num_chunks: int = 1,
    *,
    group_size: int | None = None,
    paired: bool = False,
) -> tuple[int, ...]:
    """The most micro-batches whose activations each chunk of a stage holds at once.

    They are held from the F to the end of the backward: to the W where there is one, else to the B. Of chunks the most
    may fall on different moments: `peak_in_flight` is the stage's. Raises PlanError where the schedule cannot run so.
    """
    pipeline = Pipeline(schedule, num_stages, num_micro_batches, num_chunks, group_size=group_size)
    if found := schedule_faults(pipeline):
        raise PlanError(found)
    p, m, s = num_stages, num_micro_batches, stage
    match schedule:
        case "gpipe":
            return (m,) * num_chunks
        case "1f1b":
            return (min(p - s + paired, m),)
        case "interleaved":
            group = group_size or p
            warm_up = interleaved_warm_up(p, s, num_chunks, group, paired=paired)
            return tuple(_held_interleaved(m, num_chunks, group, chunk, warm_up) for chunk in range(num_chunks))
        case "zb_h1":
            return (min(p, m),)
        case "dualpipe":
            r = min(s, p - 1 - s)
            return (p - r, r + 1) if r == s else (r + 1, p - r)
        case "dualpipe_v":
            return (2 * p - s, s + 1)


def peak_in_flight(
    schedule: Schedule,
    num_stages: int,
    num_micro_batches: int,
    stage: int,
    num_chunks: int = 1,
    *,
    group_size: int | None = None,
    paired: bool = False,
) -> int:
    """The most that a stage holds at once over all its chunks, counted in micro-batches of one chunk."""
    if schedule == "interleaved":
        warm_up = interleaved_warm_up(num_stages, stage, num_chunks, group_size or num_stages, paired=paired)
        return min(warm_up + 1, num_micro_batches * num_chunks)
    in_flight_counts = in_flight(
        schedule, num_stages, num_micro_batches, stage, num_chunks, group_size=group_size, paired=paired
    )
    return sum(in_flight_counts)


def held_at_first_backward(
    schedule: Schedule,
    num_stages: int,
    num_micro_batches: int,
    stage: int,
    num_chunks: int = 1,
    *,
    paired: bool = False,
) -> tuple[int, ...]:
    """Micro-batches that each chunk of a stage has run forward, and holds, when the stage's first backward begins.

    Of schedules that run forwards, then both in turn: gpipe, 1f1b and interleaved.
    """
    p, m, v = num_stages, num_micro_batches, num_chunks
    if schedule != "interleaved":
        return in_flight(schedule, p, m, stage, v, paired=paired)
    flying = peak_in_flight(schedule, p, m, stage, v, paired=paired)
    return tuple(_of_chunk(flying, m, v, p, chunk) for chunk in range(v))


def turns(
    schedule: Schedule,
    num_stages: int,
    num_micro_batches: int,
    stage: int,
    num_chunks: int = 1,
    *,
    paired: bool = False,
) -> int:
    """How often a forward follows a backward in a stage's order, of the same schedules."""
    total = num_micro_batches * num_chunks
    warm_up = {
        "gpipe": total,
        "1f1b": num_stages - stage - 1 + paired,
        "interleaved": interleaved_warm_up(num_stages, stage, num_chunks, num_stages, paired=paired),
    }[schedule]
    return max(total - warm_up - 1, 0)


def _held_interleaved(m: int, v: int, group: int, chunk: int, warm_up: int) -> int:
    """A chunk holds most where a run of its backwards begins: between runs only forwards happen to it."""
    total = m * v
    begun = []
    for first in range(0, m, group):
        backwards = first * v + (v - 1 - chunk) * min(group, m - first)  # over all chunks, before this run
        forwards = min(warm_up + backwards + 1, total)
        begun.append(_of_chunk(forwards, m, v, group, chunk) - first)
    return max(begun)


def _of_chunk(num_forwards: int, m: int, v: int, group: int, chunk: int) -> int:
    """How many of a stage's first forwards are this chunk's. The last group may be smaller than the others."""
    groups = min(num_forwards // (group * v), m // group)
    size = group if groups < m // group else m % group
    rest = num_forwards - groups * group * v
    return groups * group + min(max(rest - chunk * size, 0), size)
