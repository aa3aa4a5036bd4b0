"""Programs of captured ranks, played together: their step in time, in full or its length alone."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.base.errors import EngineError, InputError
from simulator.play.engine import run, seconds
from simulator.predict.play import SimulatedStep, bounds, issuing_s, launched_s
from simulator.work.program import COMPUTE_STREAM, Collective, Program
from simulator.work.trace import Timeline


def played_programs(target: str, programs: Sequence[Program]) -> SimulatedStep:
    """The programs' step in time, seen from the one that computes longest. Raises InputError where they never end."""
    try:
        timeline = run(programs)
    except EngineError as exc:
        remedy = "calls in one order on both sides, or batch_isend_irecv for what goes both ways"
        raise InputError.at(target, f"as on GPUs, {exc}", remedy) from None
    program = max(programs, key=lambda one: timeline.busy(one.name, COMPUTE_STREAM))
    limits = [bounds(one) for one in programs]
    lower_s, upper_s = max(one for one, _ in limits), sum(one for _, one in limits)
    kinds = dict.fromkeys(op.kind for op in program.runs if isinstance(op, Collective))
    waits = {k: (float(timeline.exposed(k, program.name)), float(timeline.hidden(k, program.name))) for k in kinds}
    step_s, breakdown = float(timeline.step_s), breakdown_of(timeline, program.name)
    if "send_recv" in waits and len(programs) > 1:  # waiting for the other end is the bubble
        waits["send_recv"] = breakdown.get("exposed:send_recv", 0.0), waits["send_recv"][1]
    return SimulatedStep(
        step_s=step_s,
        lower_s=min(float(lower_s), step_s),
        upper_s=max(float(upper_s), step_s),
        breakdown=breakdown,
        communication=waits,
        timeline=timeline,
        program=program,
        num_played=1,
        host_s=max(map(launched_s, programs)),
        issuing_s=max(map(issuing_s, programs)),
    )


def played_briefly(programs: Sequence[Program]) -> SimulatedStep:
    """How long the step takes, and nothing more."""
    step_s = float(seconds(programs))
    return SimulatedStep(
        step_s=step_s,
        lower_s=step_s,
        upper_s=step_s,
        breakdown={},
        communication={},
        timeline=Timeline(spans=(), step_s=step_s),
        program=programs[0],
        num_played=1,
        host_s=max(map(launched_s, programs)),
    )


def breakdown_of(timeline: Timeline, name: str) -> dict[str, float]:
    """Where a program's step goes. Waiting for the other end of a message is the bubble of a pipeline."""
    found = {part: float(value) for part, value in timeline.breakdown(name).items()}
    if len(timeline.programs) > 1:
        bubble = sum(found.pop(part, 0.0) for part in ("wait:send_recv", "idle"))
        found |= {"bubble": bubble} if bubble else {}
    return found
