"""Playing a lowered step: the engine's timeline, with equal micro-batches folded, and bounds that bracket it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from simulator.base.sums import summed
from simulator.parallel.legality.pipeline import MOST_PLAYED
from simulator.parallel.schedule_traits import played_of
from simulator.play.engine import run
from simulator.play.lower import Lowering
from simulator.spec.plan import Plan
from simulator.work.program import COMPUTE_STREAM, Chain, Collective, Compute, Number, Program
from simulator.work.trace import Timeline

# A step of n equal micro-batches is the step of 4 plus n - 4 times what the fourth added (of a pipeline, of those that fill
# it). Whether they are equal is looked at, not assumed: see `_folded`. tests/laws holds folded = played in full.
_MOST_PLAYED = 256  # repetitions of a step that never settles; more of them go on as the later half of these did
_SETTLED = 1e-9  # of the step: what all repetitions that are left out may miss together
_ROUNDING = 1e-12  # of the step: sums of thousands of floats that should be equal are no nearer
# The end of a step that must go alike for a pipeline to have settled; emptying takes about a third of it
_EMPTYING = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """The engine's result for one step. `timeline` shows `num_played` of the plan's micro-batches.

    kinds: where GPUs differ, the breakdown of the busiest class of each kind. launched_s: what the host takes to launch
    the ops of the program that takes longest, where it never waits for the device.
    """

    step_s: float
    lower_s: float
    upper_s: float
    breakdown: Mapping[str, float]
    communication: Mapping[str, tuple[float, float]]
    timeline: Timeline
    program: Program
    num_played: int
    kinds: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    launched_s: float = 0.0
    host_s: float = 0.0  # the same of all micro-batches
    issuing_s: float = 0.0  # the same of all micro-batches, without what the host waits for where it does


def play(lowering: Lowering, *, fold: bool = True) -> SimulatedStep:
    """Run the step.

    fold: equal ranks are one class, and only as many micro-batches are played as tell what one more adds. Without,
    every rank plays every micro-batch: seconds to minutes for more than a few hundred ranks.
    Where replicas take steps alone, it is the mean of those and of the one that ends in an agreement, which is shown.
    """
    together = _step(lowering, fold=fold)
    every = lowering.plan.agrees_every
    return (
        together if every == 1 else _further(_step(replace(lowering, agrees=False), fold=fold), together, 1 / every - 1)
    )


def step_seconds(lowering: Lowering, *, fold: bool = True) -> float:
    """`play(lowering).step_s` to the digit; where no micro-batch repeats, without finding out where the time goes."""
    plan = lowering.plan
    if not fold or plan.agrees_every > 1 or repeats_of(plan)[0]:
        return play(lowering, fold=fold).step_s
    return float(run(lowering.programs(plan.num_micro_batches), briefly=True).step_s)


def _step(lowering: Lowering, *, fold: bool) -> SimulatedStep:
    """One step, with equal micro-batches folded or all of them played."""
    if fold:
        return _folded(lowering)
    count = lowering.plan.num_micro_batches
    return _play(lowering, count, [lowering.program(count, rank) for rank in range(lowering.plan.num_devices)])


def _folded(lowering: Lowering) -> SimulatedStep:
    """One step of equal ranks, in which micro-batches that repeat are played once.

    They need not repeat: a host that launches a little slower than the device works catches up late, and collectives that
    outlast a micro-batch meet each next one elsewhere. Then all are played.
    """
    more, last, period = repeats_of(lowering.plan)
    longer = _play(lowering, last)
    if more == 0:
        return longer
    shorter = _play(lowering, last - period)
    slack_s = max(_SETTLED / more, _ROUNDING) * longer.step_s
    if longer.launched_s - shorter.launched_s <= longer.step_s - shorter.step_s + slack_s:
        if _ended_alike(shorter, longer, slack_s, pipeline=lowering.plan.pp > 1):
            return _further(shorter, longer, more)
        around = (last - 2 * period, last + period)  # the cheaper one first
        if any(_added_alike(shorter, longer, _play(lowering, other), slack_s) for other in around):
            return _further(shorter, longer, more)
    return _unsettled(lowering, last, more, period)


def num_played(plan: Plan) -> int:
    """Micro-batches that a prediction plays in all, where they repeat as expected: of the longer step and the shorter one."""
    more, last, period = repeats_of(plan)
    return last + (last - period if more else 0)


def repeats_of(plan: Plan) -> tuple[int, int, int]:
    """(repetitions that are left out, micro-batches of the step that is played, micro-batches of a repetition)."""
    return played_of(plan.pipeline_schedule, plan.pp, plan.num_micro_batches)


def _unsettled(lowering: Lowering, last: int, more: int, period: int) -> SimulatedStep:
    """The step of all micro-batches, or of as many as are played at most and the mean of their later half."""
    plan = lowering.plan
    played = min(more, _MOST_PLAYED)
    if plan.pp > 1:  # in memory, as `MOST_PLAYED` of pipelines says
        passes = plan.pp * plan.pipeline.virtual_stages
        played = min(played, max(2, (MOST_PLAYED // passes - last) // period))
    longer = _play(lowering, last + played * period)
    if played == more:
        return longer
    half = played // 2
    shorter = _play(lowering, last + (played - half) * period)
    return _further(shorter, longer, (more - played) / half)


def _ended_alike(shorter: SimulatedStep, longer: SimulatedStep, slack_s: float, *, pipeline: bool) -> bool:
    """Whether the last micro-batch took the same time in both, op by op: then one more changes nothing.

    pipeline: so did all from the repetition before the stages begin to empty.
    """
    later_s = longer.step_s - shorter.step_s
    for name in longer.timeline.programs:
        before, after = shorter.timeline.of(name), longer.timeline.of(name)
        count = round(_EMPTYING * len(before)) if pipeline else len(after) - len(before)
        if not all(
            abs(b.start_s - a.start_s - later_s) <= slack_s and abs(b.end_s - a.end_s - later_s) <= slack_s
            for a, b in zip(before[-count:], after[-count:], strict=True)
        ):
            return False
    return True


def _added_alike(shorter: SimulatedStep, longer: SimulatedStep, other: SimulatedStep, slack_s: float) -> bool:
    """Whether a third step, as much shorter or longer as the two differ, is on one line with them."""
    steps = (other, shorter, longer) if other.num_played < shorter.num_played else (shorter, longer, other)
    return all(abs(c - 2 * b + a) <= slack_s for a, b, c in zip(*_figures(*steps), strict=True))


def _figures(*steps: SimulatedStep) -> list[list[float]]:
    """Seconds of each step, by the same names in the same order."""
    parts = [
        {"step": one.step_s, **one.breakdown}
        | {(kind, i): s for kind, both in one.communication.items() for i, s in enumerate(both)}
        | {(kind, name): s for kind, found in one.kinds.items() for name, s in found.items()}
        for one in steps
    ]
    names = dict.fromkeys(name for part in parts for name in part)
    return [[part.get(name, 0.0) for name in names] for part in parts]


def _further(shorter: SimulatedStep, longer: SimulatedStep, more: float) -> SimulatedStep:
    """`longer`, and `more` times what it has beyond `shorter`."""
    none = (0.0, 0.0)
    return replace(
        longer,
        step_s=_extend(shorter.step_s, longer.step_s, more),
        lower_s=_extend(shorter.lower_s, longer.lower_s, more),
        upper_s=_extend(shorter.upper_s, longer.upper_s, more),
        host_s=_extend(shorter.host_s, longer.host_s, more),
        issuing_s=_extend(shorter.issuing_s, longer.issuing_s, more),
        breakdown=_extended(shorter.breakdown, longer.breakdown, more),
        communication={
            kind: tuple(_extend(a, b, more) for a, b in zip(shorter.communication.get(kind, none), both, strict=True))  # type: ignore[misc]
            for kind, both in longer.communication.items()
        },
        kinds={kind: _extended(shorter.kinds[kind], one, more) for kind, one in longer.kinds.items()},
    )


def _extend(shorter: float, longer: float, more: float) -> float:
    return longer + more * (longer - shorter)


def _extended(shorter: Mapping[str, float], longer: Mapping[str, float], more: float) -> dict[str, float]:
    """What the longer one has; between the two (more < 0) also what only the shorter one has."""
    names = dict.fromkeys((*longer, *(shorter if more < 0 else ())))
    return {name: _extend(shorter.get(name, 0.0), longer.get(name, 0.0), more) for name in names}


def _play(lowering: Lowering, num_micro_batches: int, programs: Sequence[Program] = ()) -> SimulatedStep:
    programs = programs or lowering.programs(num_micro_batches)
    timeline = run(programs)
    busiest = max(programs, key=lambda each: (timeline.busy(each.name, COMPUTE_STREAM), each is programs[0]))
    program = _usual(lowering, programs, busiest)
    kinds = dict.fromkeys(op.kind for op in program.ops if isinstance(op, Collective))
    limits = [bounds(each) for each in programs]
    breakdown = _with_bubble(timeline.breakdown(program.name), lowering.plan)
    communication = timeline.communication(kinds, program.name)
    if lowering.plan.pp > 1:  # waiting for other stages is no communication, and folded chunks have theirs as parts
        exposed = {k.removeprefix("exposed:"): v for k, v in breakdown.items() if k.startswith("exposed:")}
        communication = {k: (exposed.get(k, 0.0), communication.get(k, (0.0, 0.0))[1]) for k in {**exposed, **kinds}}
    step_s = float(timeline.step_s)
    upper_s = float(summed(upper for _, upper in limits)) if lowering.plan.pp > 1 else float(limits[0][1])
    if lowering.rank_classes is not None:
        upper_s = float(summed(_serial_s(each) for each in _by_stage(lowering, programs)))
    return SimulatedStep(
        step_s=step_s,
        lower_s=_but_for_rounding(float(max(lower for lower, _ in limits)), step_s),
        upper_s=_but_for_rounding(upper_s, step_s),
        breakdown=breakdown,
        communication=communication,
        timeline=timeline,
        program=program,
        num_played=num_micro_batches,
        kinds=_of_kinds(lowering, programs, timeline),
        launched_s=(host_s := max(map(launched_s, programs))),
        host_s=host_s,
        issuing_s=max(map(issuing_s, programs)),
    )


def _usual(lowering: Lowering, programs: Sequence[Program], busiest: Program) -> Program:
    """The program to report: the busiest, or where GPUs differ that of the most ranks in its stage, which shows who waits."""
    if lowering.rank_classes is None:
        return busiest
    mine = next(each for each in _by_stage(lowering, programs) if busiest in each)
    return max(mine, key=lambda each: each.num_ranks)


def _ranks(lowering: Lowering, programs: Sequence[Program]) -> Sequence[int]:
    """A rank that plays each program, where GPUs differ."""
    assert lowering.rank_classes is not None
    folded = [rank_class.rank for rank_class in lowering.rank_classes.classes]
    return (
        folded
        if [rank_class.name for rank_class in lowering.rank_classes.classes] == [p.name for p in programs]
        else range(len(programs))
    )


def _by_stage(lowering: Lowering, programs: Sequence[Program]) -> list[list[Program]]:
    found: dict[int, list[Program]] = {}
    for rank, program in zip(_ranks(lowering, programs), programs, strict=True):
        found.setdefault(lowering.mesh.coordinates(rank)["pp"], []).append(program)
    return list(found.values())


def _serial_s(programs: Sequence[Program]) -> Number:
    """Everything that the classes of a stage do, op by op at the pace of the slowest of them."""
    slow: Number = max((op.interference for p in programs for op in p.ops if isinstance(op, Collective)), default=0)
    total: Number = 0
    for ops in zip(*(program.ops for program in programs), strict=True):
        total += max(
            op.host_s + (op.duration_s / (1 - slow) if isinstance(op, Compute) else collective_s(op, program))
            for op, program in zip(ops, programs, strict=True)
        )
    return total


def launched_s(program: Program) -> float:
    """The host's time to launch a program; 0 where it waits for the device on the way, which keeps it in step."""
    return 0.0 if any(op.blocking for op in program.runs) else issuing_s(program) - program.hosted_s


def issuing_s(program: Program) -> float:
    """The host's own time of a program: its step takes at least as long, whether the host waits on the way or not."""
    rows = (one.kernels.hosts_s if isinstance(one, Chain) else (one.host_s,) for one in program.runs)
    return float(summed(seconds for row in rows for seconds in row)) + program.hosted_s


def _work_s(program: Program) -> float:
    """The time of its kernels alone, so that classes differ independently of the number of micro-batches."""
    return float(f"{float(summed(op.duration_s for op in program.ops if isinstance(op, Compute))):.9g}")


def _of_kinds(lowering: Lowering, programs: Sequence[Program], timeline: Timeline) -> dict[int, dict[str, float]]:
    """The step's breakdown on the busiest class of each kind of GPU."""
    if lowering.rank_classes is None:
        return {}
    found: dict[int, tuple[float, str]] = {}
    for rank, program in zip(_ranks(lowering, programs), programs, strict=True):
        kind, work_s = lowering.rank_classes.kinds.number(rank), _work_s(program)
        if kind not in found or work_s > found[kind][0]:
            found[kind] = work_s, program.name
    return {kind: _with_bubble(timeline.breakdown(name), lowering.plan) for kind, (_, name) in sorted(found.items())}


def _with_bubble(breakdown: Mapping[str, Number], plan: Plan) -> dict[str, float]:
    """Of a pipeline, waiting for other stages is the bubble."""
    found = {name: float(seconds) for name, seconds in breakdown.items()}
    if plan.pp > 1:
        waits = ("wait:send_recv", "wait:all_reduce", "idle")
        bubble = summed(found.pop(name, 0.0) for name in waits)
        found |= {"bubble": bubble} if bubble else {}
    return found


def _but_for_rounding(bound_s: float, step_s: float) -> float:
    """Where nothing overlaps, step and bound are one sum, added in different orders."""
    return step_s if math.isclose(bound_s, step_s, rel_tol=1e-9) else bound_s


def bounds(program: Program) -> tuple[Number, Number]:
    """(lower, upper) of the program's duration without simulating it.

    Lower: no stream can beat its own work, no link its own bytes, the host its own launches. Upper: everything one
    after another, compute slowed throughout by the strongest collective.
    """
    streams: dict[str, Number] = {}
    links: dict[str, Number] = {}
    host: Number = 0
    serial: Number = 0
    slow: Number = max((op.interference for op in program.runs if isinstance(op, Collective)), default=0)
    for op in program.runs:
        if isinstance(op, Collective):
            alone: Number = collective_s(op, program)
            for link, size in op.cost.link_bytes.items():
                links[link] = links.get(link, 0) + size / program.links[link]
            streams[op.stream] = streams.get(op.stream, 0) + alone
            host, serial = host + op.host_s, serial + alone
            continue
        durations = op.kernels.durations_s if isinstance(op, Chain) else (op.duration_s,)
        hosts = op.kernels.hosts_s if isinstance(op, Chain) else (op.host_s,)
        for duration_s, host_s in zip(durations, hosts, strict=True):
            streams[op.stream] = streams.get(op.stream, 0) + duration_s
            host, serial = host + host_s, serial + duration_s / (1 - slow)
    return max([*streams.values(), *links.values(), host], default=0), serial + host


def collective_s(op: Collective, program: Program) -> Number:
    """Seconds the collective takes alone on the links."""
    return op.cost.latency_s + max((size / program.links[link] for link, size in op.cost.link_bytes.items()), default=0)
