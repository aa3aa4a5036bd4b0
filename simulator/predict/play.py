"""Playing a lowered step: the engine's timeline, with equal micro-batches folded, and bounds that bracket it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.engine import run
from simulator.lower import Lowering
from simulator.program import Collective, Compute, Number, Program
from simulator.trace import Timeline

# From the third micro-batch on, every micro-batch but the last repeats the one before it (the pipeline of gathers is
# full): a step of n is the step of 4 plus n - 4 times what the fourth added. tests/laws holds folded = played in full.
_PLAYED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the engine says of one step. `timeline` shows `num_played` micro-batches of the plan's."""

    step_s: float
    lower_s: float
    upper_s: float
    breakdown: Mapping[str, float]
    communication: Mapping[str, tuple[float, float]]
    timeline: Timeline
    program: Program
    num_played: int


def play(lowering: Lowering, *, fold: bool = True) -> Played:
    """Run the step.

    fold: equal ranks are one class, and at most four micro-batches are played, the rest extrapolated exactly. Without,
    every rank plays every micro-batch: seconds to minutes for more than a few hundred ranks.
    """
    count = lowering.plan.num_micro_batches
    if not fold:
        return _play(lowering, count, [lowering.program(count, rank) for rank in range(lowering.plan.num_devices)])
    if count <= _PLAYED:
        return _play(lowering, count)
    shorter, longer = _play(lowering, _PLAYED - 1), _play(lowering, _PLAYED)
    more = count - _PLAYED
    return Played(
        step_s=_extend(shorter.step_s, longer.step_s, more),
        lower_s=_extend(shorter.lower_s, longer.lower_s, more),
        upper_s=_extend(shorter.upper_s, longer.upper_s, more),
        breakdown={k: _extend(shorter.breakdown.get(k, 0.0), v, more) for k, v in longer.breakdown.items()},
        communication={
            kind: tuple(_extend(a, b, more) for a, b in zip(shorter.communication[kind], both, strict=True))  # type: ignore[misc]
            for kind, both in longer.communication.items()
        },
        timeline=longer.timeline,
        program=longer.program,
        num_played=_PLAYED,
    )


def _extend(shorter: float, longer: float, more: int) -> float:
    return longer + more * (longer - shorter)


def _play(lowering: Lowering, num_micro_batches: int, programs: Sequence[Program] = ()) -> Played:
    programs = programs or [lowering.program(num_micro_batches)]
    program = programs[0]
    timeline = run(programs)
    kinds = dict.fromkeys(op.kind for op in program.ops if isinstance(op, Collective))
    lower_s, upper_s = bounds(program)
    return Played(
        step_s=float(timeline.step_s),
        lower_s=float(lower_s),
        upper_s=float(upper_s),
        breakdown={k: float(v) for k, v in timeline.breakdown(program.name).items()},
        communication={k: (float(timeline.exposed(k)), float(timeline.hidden(k))) for k in kinds},
        timeline=timeline,
        program=program,
        num_played=num_micro_batches,
    )


def bounds(program: Program) -> tuple[Number, Number]:
    """(lower, upper) of the program's duration without simulating it.

    Lower: no stream can beat its own work, no link its own bytes, the host its own launches. Upper: everything one
    after another, compute slowed throughout by the strongest collective.
    """
    streams: dict[str, Number] = {}
    links: dict[str, Number] = {}
    host: Number = 0
    serial: Number = 0
    slow: Number = max((op.interference for op in program.ops if isinstance(op, Collective)), default=0)
    for op in program.ops:
        if isinstance(op, Compute):
            alone: Number = op.duration_s
            worst: Number = op.duration_s / (1 - slow)
        else:
            alone = collective_s(op, program)
            worst = alone
            for link, size in op.bill.link_bytes.items():
                links[link] = links.get(link, 0) + size / program.links[link]
        streams[op.stream] = streams.get(op.stream, 0) + alone
        host += op.host_s
        serial += worst
    return max([*streams.values(), *links.values(), host], default=0), serial + host


def collective_s(op: Collective, program: Program) -> Number:
    """Seconds the collective takes alone on the links."""
    return op.bill.latency_s + max((size / program.links[link] for link, size in op.bill.link_bytes.items()), default=0)
