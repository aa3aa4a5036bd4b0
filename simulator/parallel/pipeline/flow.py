"""What each action waits for and sends, and how many micro-batches' activations a stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.parallel.pipeline.layers import at_position, position
from simulator.parallel.pipeline.orders import Action, interleaved_warm_up
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


def peak_in_flight(
    schedule: Schedule,
    num_stages: int,
    num_micro_batches: int,
    stage: int,
    num_chunks: int = 1,
    *,
    paired: bool = False,
) -> int:
    """The most that a legal stage holds at once over all its chunks, counted in micro-batches of one chunk.

    They are held from the F to the end of the backward: to the W where there is one, else to the B.
    """
    p, m = num_stages, num_micro_batches
    match schedule:
        case "gpipe":
            return m * num_chunks
        case "1f1b":
            return min(p - stage + paired, m)
        case "interleaved":
            return min(interleaved_warm_up(p, stage, num_chunks, paired=paired) + 1, m * num_chunks)
        case "zb_h1":
            return min(p, m)
        case "dualpipe":
            return p + 1
        case "dualpipe_v":
            return 2 * p + 1


def held_at_first_backward(
    schedule: Schedule, num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 1
) -> tuple[int, ...]:
    """Micro-batches that each chunk of a stage has run forward, and holds, when the stage's first backward begins.

    Of schedules that run forwards, then both in turn: gpipe, 1f1b and interleaved.
    """
    flying = peak_in_flight(schedule, num_stages, num_micro_batches, stage, num_chunks)
    if schedule != "interleaved":
        return (flying // num_chunks,) * num_chunks
    rounds, rest = divmod(flying, num_stages * num_chunks)
    of_chunk = (min(max(rest - chunk * num_stages, 0), num_stages) for chunk in range(num_chunks))
    return tuple(rounds * num_stages + one for one in of_chunk)


def turns(schedule: Schedule, num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 1) -> int:
    """How often a forward follows a backward in a stage's order, of the same schedules."""
    total = num_micro_batches * num_chunks
    warm_up = {
        "gpipe": total,
        "1f1b": num_stages - stage - 1,
        "interleaved": interleaved_warm_up(num_stages, stage, num_chunks),
    }[schedule]
    return max(total - warm_up - 1, 0)
