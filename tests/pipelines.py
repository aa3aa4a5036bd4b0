"""Two players of pipeline orders, in exact arithmetic: a small one of their own, and the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from hypothesis import strategies as st

from simulator.base.errors import Fault
from simulator.parallel.legality.pipeline import broken_by
from simulator.parallel.legality.rule import Pipeline
from simulator.parallel.pipeline import SCHEDULES, Action, Schedule, neighbours, order
from simulator.work.program import Collective, CollectiveCost, Compute, Program, ProgramOp

Group = tuple[Action, ...]  # actions that run as one


def pipeline_faults(line: Pipeline, place: str = "plan") -> list[Fault]:
    """Everything that keeps a pipeline from running: its schedule's demands, and how the layers are dealt."""
    return [rule.fault(line, place) for rule in broken_by(line)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A pipeline and what its work takes. b: gradients of the inputs, w: of the weights, pair: DualPipe's F&B."""

    schedule: Schedule
    p: int
    m: int
    v: int = 1
    f: Fraction = Fraction(1)
    b: Fraction = Fraction(1)
    w: Fraction = Fraction(1)
    pair: Fraction | None = None

    def order(self, stage: int) -> tuple[Action, ...]:
        return order(self.schedule, self.p, self.m, stage, self.v)

    def groups(self, stage: int) -> list[Group]:
        groups: list[Group] = []
        for action in self.order(stage):
            if action.beside:
                groups[-1] = (*groups[-1], action)
            else:
                groups.append((action,))
        return groups

    def seconds(self, group: Group) -> Fraction:
        if len(group) > 1 and self.pair is not None:
            return self.pair
        times = {"F": self.f, "B": self.b, "W": self.w}
        return sum((times[a.kind] + (self.w if a.kind == "B" and a.whole else 0) for a in group), Fraction(0))

    def work_s(self, stage: int) -> Fraction:
        return sum(map(self.seconds, self.groups(stage)), Fraction(0))


@st.composite
def shapes(draw: st.DrawFn, schedules: tuple[Schedule, ...] = SCHEDULES) -> Shape:
    """A legal pipeline of at most 5 (DualPipe: 6) stages."""
    schedule = draw(st.sampled_from(schedules))
    p, m, v = draw(st.integers(1, 5)), draw(st.integers(1, 12)), 1
    if schedule == "gpipe":
        v = draw(st.integers(1, 3))
    elif schedule == "interleaved":
        p, v = max(p, 2), draw(st.integers(2, 4))
        m = draw(st.integers(1, 4)) * p
    elif schedule == "dualpipe":
        p, v = 2 * draw(st.integers(1, 3)), 2
        m = 2 * (p + draw(st.integers(0, 3)))
    elif schedule == "dualpipe_v":
        v, m = 2, 2 * p + draw(st.integers(0, 3))
    times = st.integers(1, 6).map(Fraction)
    return Shape(schedule=schedule, p=p, m=m, v=v, f=draw(times), b=draw(times), w=draw(times))


def play(shape: Shape) -> Fraction:
    """When the last action of any stage ends, with links that take no time. Fails if the orders wait for each other."""
    left = [shape.groups(stage) for stage in range(shape.p)]
    free = [Fraction(0)] * shape.p
    ended: dict[tuple[int, Action], Fraction] = {}
    moved = True
    while moved:
        moved = False
        for stage in range(shape.p):
            while left[stage] and all(need in ended for need in _needs(shape, stage, left[stage][0])):
                group = left[stage].pop(0)
                starts = [free[stage], *(ended[need] for need in _needs(shape, stage, group))]
                free[stage] = max(starts) + shape.seconds(group)
                ended.update({(stage, action): free[stage] for action in group})
                moved = True
    assert not any(left), f"deadlock before {[groups[0] for groups in left if groups]}"
    return max(free)


def _needs(shape: Shape, stage: int, group: Group) -> Iterator[tuple[int, Action]]:
    for action in group:
        yield from neighbours(shape.schedule, shape.p, stage, action, shape.v).after


def programs(shape: Shape) -> list[Program]:
    """A program a stage: kernels in order, and a meeting of two for each message, on a stream of its own."""
    return [Program(name=f"stage {stage}", num_ranks=1, ops=tuple(_ops(shape, stage))) for stage in range(shape.p)]


def _ops(shape: Shape, stage: int) -> Iterator[ProgramOp]:
    number = 0
    for group in shape.groups(stage):
        near = [(action, neighbours(shape.schedule, shape.p, stage, action, shape.v)) for action in group]
        received = []
        for action, around in near:
            if around.receives is not None:
                yield _meeting(number, _message(around.receives, (stage, action)))
                received.append(number)
                number += 1
        kernel = number
        seconds = shape.seconds(group)
        yield Compute(
            id=kernel, stream="compute", after=tuple(received), label=" ".join(map(str, group)), duration_s=seconds
        )
        number += 1
        for action, around in near:
            if around.sends is not None:
                yield _meeting(number, _message((stage, action), around.sends), kernel)
                number += 1


def _message(source: tuple[int, Action], target: tuple[int, Action]) -> str:
    return f"{source[1]} on {source[0]} to {target[1]} on {target[0]}"


def _meeting(number: int, key: str, *after: int) -> Collective:
    cost = CollectiveCost(latency_s=0, link_bytes={})
    return Collective(
        id=number, stream=key, after=after, label=key, kind="p2p", key=key, members=2, cost=cost, size_bytes=0
    )
