"""The serving loop on SimPy's clock: arrivals, a queue and a scheduler for each lane, pipeline stages that lanes share.

An engine with pp stages has pp lanes, so that each stage works on another lane's step (vLLM's virtual engines); a request
goes to the lane with the fewest unfinished requests, the first of them if several have. The host's time between steps
passes while the lane's devices wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import simpy

from simulator.studies.serving.batch import Batch
from simulator.studies.serving.costs import StepCosts
from simulator.studies.serving.scheduler import Limits, RequestState, Scheduler
from simulator.studies.serving.workload import Request

Progress = Callable[[int, int], None]  # requests finished, requests in all
Process = Generator[simpy.Event, Any, None]


@dataclass(slots=True, kw_only=True)
class Meter:
    """What happened between start_s and end_s. A step counts where it ends.

    busy_s: of the first stage of all engines. block_s: blocks in use × seconds. request_s: requests in the system × seconds,
    from the beginning to the end of everything.
    """

    start_s: float
    end_s: float
    num_steps: int = 0
    busy_s: float = 0.0
    prefill_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    block_s: float = 0.0
    peak_blocks: int = 0
    request_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """Every request's job, in order of arrival, and what was counted. passed: between two pools."""

    jobs: tuple[RequestState, ...]
    meter: Meter
    end_s: float
    preemptions: int
    prefilled: int
    decoded: int
    recomputed: int
    leftover_blocks: int
    passed: Passed | None = None


@dataclass(slots=True, kw_only=True)
class Passed:
    """What passed between the pools: requests, tokens of their prompts, seconds on the links and of waiting for them."""

    requests: int = 0
    tokens: int = 0
    link_s: float = 0.0
    wait_s: float = 0.0


class Engine:
    """Engines under one stream of requests. `run` plays it to its end.

    engines: how many; None: the plan's dp. prefilled: another engine has computed the prompts and made the first tokens.
    env, handed_on: the clock of several pools, and what hears of each request that this one has finished.
    users: of a closed loop. So many requests are in the system, and each that is answered makes room for the next; 0: requests
    come at their own times.
    """

    def __init__(  # noqa: PLR0913  one a noun
        self,
        costs: StepCosts,
        limits: Limits,
        requests: Sequence[Request],
        window: tuple[float, float],
        *,
        engines: int | None = None,
        prefilled: bool = False,
        env: simpy.Environment | None = None,
        handed_on: Callable[[RequestState, Lane], None] | None = None,
        users: int = 0,
    ) -> None:
        self._env = env or simpy.Environment()
        self.meter = Meter(start_s=window[0], end_s=window[1])
        self.jobs = tuple(_job(request, i, prefilled=prefilled) for i, request in enumerate(requests))
        self._finished = 0
        self._inside, self._changed_s = 0, 0.0
        self._report: Progress | None = None
        self._handed_on = handed_on
        self._request_s = 0.0 if prefilled else costs.request_s
        self._users, self._coming = users, deque[RequestState]()
        self.lanes: list[Lane] = []
        plan = costs.plan
        for _ in range(plan.dp if engines is None else engines):
            stages = [0.0] * plan.pp
            self.lanes += [Lane(self, self._env, costs, Scheduler(limits), stages) for _ in range(plan.pp)]
        for lane in self.lanes:
            self._env.process(lane.run())

    def run(self, progress: Progress | None = None) -> ServedRun:
        """Play every request. progress is called after each hundredth of them."""
        self._report = progress
        if self._users:
            self._coming.extend(self.jobs)
            self._come(self._users)
        else:
            self._env.process(arrive(self._env, self.jobs, self.take, self._request_s))
        self._env.run()
        return self.result(self.jobs)

    def _come(self, count: int) -> None:
        """The next requests of a closed loop come now."""
        jobs = [self._coming.popleft() for _ in range(min(count, len(self._coming)))]
        for job in jobs:
            job.request = replace(job.request, arrival_s=self._env.now)
        self._env.process(arrive(self._env, jobs, self.take, self._request_s))

    def result(self, jobs: tuple[RequestState, ...]) -> ServedRun:
        """What happened to these requests, in the engines' own figures."""
        queues = [lane.scheduler for lane in self.lanes]
        return ServedRun(
            jobs=jobs,
            meter=self.meter,
            end_s=max((job.end_s or 0.0 for job in jobs), default=0.0),
            preemptions=sum(queue.preemptions for queue in queues),
            prefilled=sum(queue.prefilled for queue in queues),
            decoded=sum(queue.decoded for queue in queues),
            recomputed=sum(queue.recomputed for queue in queues),
            leftover_blocks=sum(queue.used_blocks for queue in queues),
        )

    def take(self, job: RequestState) -> None:
        """A request comes: to the lane with the fewest."""
        self.give(job, min(self.lanes, key=lambda each: each.unfinished))  # the first of the least

    def give(self, job: RequestState, lane: Lane) -> None:
        """A request comes to this lane."""
        self._count(+1)
        lane.take(job)

    def leave(self, finished: Sequence[RequestState], lane: Lane) -> None:
        """Count requests that are answered."""
        self._count(-len(finished))
        before, self._finished = self._finished, self._finished + len(finished)
        if self.meter.start_s <= self._env.now <= self.meter.end_s:
            self.meter.finished += len(finished)
        total = len(self.jobs)
        if self._report is not None and before * 100 // total != self._finished * 100 // total:
            self._report(self._finished, total)
        if self._users:
            self._come(len(finished))
        if self._handed_on is not None:
            for job in finished:
                self._handed_on(job, lane)

    def _count(self, change: int) -> None:
        self.meter.request_s += self._inside * (self._env.now - self._changed_s)
        self._inside, self._changed_s = self._inside + change, self._env.now


def _job(request: Request, index: int, *, prefilled: bool) -> RequestState:
    if not prefilled:
        return RequestState(request=request, index=index)
    return RequestState(request=request, index=index, cached=request.prompt_tokens, done=1, first_s=request.arrival_s)


def arrive(
    env: simpy.Environment, jobs: Sequence[RequestState], take: Callable[[RequestState], None], later_s: float
) -> Process:
    """Every request reaches the queue so long behind its time."""
    for job in jobs:
        delay = job.request.arrival_s + later_s - env.now
        if delay > 0:
            yield env.timeout(delay)
        take(job)


class Lane:
    """One scheduler. free_s: when each stage that its steps pass is free, of all lanes of an engine.

    A host that works ahead decides on the next step when a step begins, so what comes meanwhile waits for the one behind it.
    """

    def __init__(
        self,
        engine: Engine,
        env: simpy.Environment,
        costs: StepCosts,
        scheduler: Scheduler,
        free_s: list[float],
    ) -> None:
        self._engine, self._env, self._costs = engine, env, costs
        self.scheduler, self._free_s = scheduler, free_s
        self._idle: simpy.Event | None = None
        self._coming: deque[RequestState] = deque()  # in no step that has been decided on

    @property
    def unfinished(self) -> int:
        return len(self._coming) + self.scheduler.unfinished

    def take(self, job: RequestState) -> None:
        """A request comes."""
        (self._coming if self._costs.works_ahead and self._idle is None else self.scheduler.waiting).append(job)
        self.wake()

    def _batch(self) -> Batch | None:
        """The next step; None if there is nothing to do."""
        scheduler, coming = self.scheduler, self._coming
        batch = scheduler.next_batch()
        scheduler.waiting.extend(coming)
        if batch is None and coming:
            batch = scheduler.next_batch()
        coming.clear()
        return batch

    def wake(self) -> None:
        """Start the lane if it is idle, since there is work."""
        if self._idle is not None:
            idle, self._idle = self._idle, None
            idle.succeed()

    def run(self) -> Process:
        env, scheduler, costs = self._env, self.scheduler, self._costs
        while True:
            batch = self._batch()
            if batch is None:
                self._idle = env.event()
                yield self._idle
                continue
            begun_s = env.now
            times = costs.stages_s(batch)
            alone, idle_s = len(times) == 1, costs.idle_s(times[0], batch.rows)
            yield env.timeout(idle_s + times[0] if alone else self._passed_s(begun_s + idle_s, times) - begun_s)
            prefill = sum(chunk.new for chunk in batch.chunks)
            self._measure(begun_s, times[0], prefill, batch.rows)
            finished = scheduler.complete(env.now)
            if finished:
                self._engine.leave(finished, self)

    def _passed_s(self, at_s: float, times: Sequence[float]) -> float:
        """When a step that reaches the first stage then has passed all. Each serves one lane at a time, in order of arrival.

        No lane overtakes another, as all pass the same stages: so what is free when is known as soon as a step begins.
        """
        free = self._free_s
        for stage, seconds in enumerate(times):
            at_s = free[stage] = max(at_s, free[stage]) + seconds
        return at_s

    def _measure(self, begun_s: float, busy_s: float, prefill: int, rows: int) -> None:
        meter, used = self._engine.meter, self.scheduler.used_blocks
        if not meter.start_s <= self._env.now <= meter.end_s:
            return
        meter.num_steps += 1
        meter.busy_s += busy_s
        meter.prefill_tokens += prefill
        meter.output_tokens += rows
        meter.block_s += used * (self._env.now - begun_s)
        meter.peak_blocks = max(meter.peak_blocks, used)
