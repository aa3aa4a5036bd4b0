"""The serving loop on SimPy's clock: arrivals, a queue and a scheduler for each lane, pipeline stages as resources.

An engine with pp stages has pp lanes, so that each stage works on another lane's step (vLLM's virtual engines); a request
goes to the lane with the fewest unfinished requests, the first of them if several have. The host's time between steps
passes while the lane's devices wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

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
    """Every request's job, in order of arrival, and what was counted."""

    jobs: tuple[RequestState, ...]
    meter: Meter
    end_s: float
    preemptions: int
    prefilled: int
    decoded: int
    recomputed: int
    leftover_blocks: int


class Engine:
    """dp engines under one stream of requests. `run` plays it to its end."""

    def __init__(
        self, costs: StepCosts, limits: Limits, requests: Sequence[Request], window: tuple[float, float]
    ) -> None:
        self._costs, self._requests = costs, requests
        self._env = simpy.Environment()
        self.meter = Meter(start_s=window[0], end_s=window[1])
        plan = costs.plan
        self._jobs = tuple(RequestState(request=request, index=i) for i, request in enumerate(requests))
        self._finished = 0
        self._inside, self._changed_s = 0, 0.0
        self._report: Progress | None = None
        self._lanes: list[_Lane] = []
        for _ in range(plan.dp):
            stages = [simpy.Resource(self._env) for _ in range(plan.pp)]
            self._lanes += [_Lane(self, self._env, costs, Scheduler(limits), stages) for _ in range(plan.pp)]

    def run(self, progress: Progress | None = None) -> ServedRun:
        """Play every request. progress is called after each hundredth of them."""
        self._report = progress
        self._env.process(self._arrive())
        for lane in self._lanes:
            self._env.process(lane.run())
        self._env.run()
        queues = [lane.scheduler for lane in self._lanes]
        return ServedRun(
            jobs=self._jobs,
            meter=self.meter,
            end_s=max((job.end_s or 0.0 for job in self._jobs), default=0.0),
            preemptions=sum(queue.preemptions for queue in queues),
            prefilled=sum(queue.prefilled for queue in queues),
            decoded=sum(queue.decoded for queue in queues),
            recomputed=sum(queue.recomputed for queue in queues),
            leftover_blocks=sum(queue.used_blocks for queue in queues),
        )

    def _arrive(self) -> Process:
        env = self._env
        for job in self._jobs:
            delay = job.request.arrival_s - env.now
            if delay > 0:
                yield env.timeout(delay)
            self._count(+1)
            lane = min(self._lanes, key=lambda each: each.scheduler.unfinished)  # the first of the least
            lane.scheduler.waiting.append(job)
            lane.wake()

    def leave(self, finished: Sequence[RequestState]) -> None:
        """Count requests that are answered."""
        self._count(-len(finished))
        before, self._finished = self._finished, self._finished + len(finished)
        if self.meter.start_s <= self._env.now <= self.meter.end_s:
            self.meter.finished += len(finished)
        total = len(self._jobs)
        if self._report is not None and before * 100 // total != self._finished * 100 // total:
            self._report(self._finished, total)

    def _count(self, change: int) -> None:
        self.meter.request_s += self._inside * (self._env.now - self._changed_s)
        self._inside, self._changed_s = self._inside + change, self._env.now


class _Lane:
    """One scheduler, and the stages that its steps pass."""

    def __init__(
        self,
        engine: Engine,
        env: simpy.Environment,
        costs: StepCosts,
        scheduler: Scheduler,
        stages: Sequence[simpy.Resource],
    ) -> None:
        self._engine, self._env, self._costs = engine, env, costs
        self.scheduler, self._stages = scheduler, stages
        self._idle: simpy.Event | None = None

    def wake(self) -> None:
        """Start the lane if it is idle, since there is work."""
        if self._idle is not None:
            idle, self._idle = self._idle, None
            idle.succeed()

    def run(self) -> Process:
        env, scheduler, costs, overhead_s = self._env, self.scheduler, self._costs, self._costs.overhead_s
        while True:
            batch = scheduler.next_batch()
            if batch is None:
                self._idle = env.event()
                yield self._idle
                continue
            begun_s = env.now
            times = costs.stages_s(batch)
            if len(times) == 1:
                yield env.timeout(overhead_s + times[0])
            else:
                yield from self._pass(overhead_s, times)
            prefill = sum(chunk.new for chunk in batch.chunks)
            self._measure(begun_s, times[0], prefill, batch.rows)
            finished = scheduler.complete(env.now)
            if finished:
                self._engine.leave(finished)

    def _pass(self, overhead_s: float, times: Sequence[float]) -> Process:
        """Through every stage, each of which serves one lane at a time, in order of arrival."""
        yield self._env.timeout(overhead_s)
        for stage, seconds in zip(self._stages, times, strict=True):
            with stage.request() as turn:
                yield turn
                yield self._env.timeout(seconds)

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
