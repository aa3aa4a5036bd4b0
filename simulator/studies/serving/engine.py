"""The serving loop on SimPy's clock: arrivals, a queue and a scheduler for each lane, pipeline stages that lanes share.

An engine with pp stages has pp lanes, so that each stage works on another lane's step (vLLM's virtual engines); a request
goes to the lane with the fewest unfinished requests, of several to one of each engine in turn. The host's time between steps
passes while the lane's devices wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from simulator.studies.serving.batch import Batch
from simulator.studies.serving.closed_loop import ClosedLoop
from simulator.studies.serving.costs import StepCosts
from simulator.studies.serving.limits import Limits, RequestState
from simulator.studies.serving.scheduler import Scheduler
from simulator.studies.serving.served import ServedRequests
from simulator.studies.serving.shared import Shared
from simulator.studies.serving.transfer import fetched_s
from simulator.studies.serving.workload import NO_USERS, Request, Users

Progress = Callable[[int, int], None]  # requests finished, requests in all
Process = Generator[simpy.Event, Any, None]
_ROUNDING = 1e-9  # of a step
_LOOKED_AHEAD = 1_000  # steps


@dataclass(slots=True, kw_only=True)
class Meter:
    """What happened between start_s and end_s. A step counts where it ends.

    busy_s: of the first stage of all engines. block_s: blocks in use × seconds.
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

    def counts(self, at_s: float) -> bool:
        """Steps that end then count."""
        return self.start_s <= at_s <= self.end_s

    def is_one_way(self, first_s: float, last_s: float) -> bool:
        """All steps that end between these times count, or none does."""
        return self.counts(first_s) == self.counts(last_s) and not first_s < self.start_s <= self.end_s < last_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """What became of every request, in order of arrival, and what was counted. passed: between two pools.

    leftover_blocks: of caches that nobody gave back, on devices and hosts.
    """

    jobs: ServedRequests
    meter: Meter
    end_s: float
    preemptions: int
    prefilled: int
    decoded: int
    recomputed: int
    leftover_blocks: int
    passed: Passed | None = None

    @property
    def lasted_s(self) -> float:
        """From the first arrival to the last answer."""
        return self.end_s - self.jobs[0].request.arrival_s


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
    users: of a closed loop. So many requests come at their own times, and each that is answered brings the next; without any
    all come at their own times. moved: others than these engines say when requests come.
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
        users: Users = NO_USERS,
        moved: bool = False,
    ) -> None:
        self._env, self._own_clock = env or simpy.Environment(), env is None
        self.meter = Meter(start_s=window[0], end_s=window[1])
        self.jobs = ServedRequests(requests, moved=moved or users.count > 0)
        self._prefilled = prefilled
        self._finished = self._underway = 0
        self._costs = costs
        self._report: Progress | None = None
        self._handed_on = handed_on
        self._outside_s = (lambda _: 0.0) if prefilled else costs.outside_s
        self._loop = ClosedLoop(self.jobs, users) if users.count else None
        self._comes_s: float | None = None  # when the next request of a stream comes; None where answers bring them
        self._arriving = 0  # groups of requests that answers brought and that have not all come
        self.lanes: list[Lane] = []
        plan = costs.plan
        for _ in range(plan.dp if engines is None else engines):
            shared = Shared([0.0] * plan.pp, *costs.front_s)
            self.lanes += [Lane(self, self._env, costs, Scheduler(limits), shared) for _ in range(plan.pp)]
        self.in_turn = [lane for first in range(plan.pp) for lane in self.lanes[first :: plan.pp]]  # engine by engine
        for lane in self.lanes:
            self._env.process(lane.run())

    def run(self, progress: Progress | None = None) -> ServedRun:
        """Play every request. progress is called after each hundredth of them."""
        self._report = progress
        if self._loop:
            self._come(self._loop.first())
        else:
            self._comes_s = 0.0
            self._env.process(arrive(self._env, self.states(), self.take, self._outside_s, self._next_comes))
        self._env.run()
        return self.result()

    def states(self) -> Iterator[RequestState]:
        """Each request as it comes."""
        for job in self.jobs.states():
            if self._prefilled:
                job.cached, job.done, job.first_s = job.request.prompt_tokens, 1, job.request.arrival_s
            yield job

    def _next_comes(self, at_s: float) -> None:
        self._comes_s = at_s

    def nothing_before_s(self, lane: Lane) -> float:
        """Until then a lane hears of nothing: the next request of a stream; where answers bring requests, another lane's next answer."""
        if self._comes_s is not None and not self._underway:
            return self._comes_s
        if self._underway or self._arriving or not self._own_clock:
            return self._env.peek()
        return min((other.quiet_until_s for other in self.lanes if other is not lane), default=math.inf)

    def _come(self, jobs: Iterable[RequestState]) -> None:
        """Requests of a closed loop, in order of arrival."""
        self._arriving += 1
        self._env.process(arrive(self._env, jobs, self.take, self._outside_s, self._have_come))

    def _have_come(self, at_s: float) -> None:
        self._arriving -= at_s == math.inf

    def result(self) -> ServedRun:
        """What happened to the requests, in the engines' own figures."""
        queues = [lane.scheduler for lane in self.lanes]
        return ServedRun(
            jobs=self.jobs,
            meter=self.meter,
            end_s=max(self.jobs.ends_s, default=0.0),
            preemptions=sum(queue.preemptions for queue in queues),
            prefilled=sum(queue.prefilled for queue in queues),
            decoded=sum(queue.decoded for queue in queues),
            recomputed=sum(queue.recomputed for queue in queues),
            leftover_blocks=sum(queue.used_blocks + queue.hosted_blocks for queue in queues),
        )

    def take(self, job: RequestState) -> None:
        """A request comes: to the lane with the fewest, once it is let in and the beginning that it finds in a store is there."""
        lane = min(self.in_turn, key=lambda each: each.unfinished)  # the first of the least
        now = self._env.now
        ready_s = now if self._prefilled else lane.shared.ready_s(now, fetched_s(self._costs, job.request))
        if ready_s > now:
            self._underway += 1
            lane.underway += 1
            self._env.process(self._let_in(job, lane, ready_s - now))
        else:
            lane.take(job)

    def _let_in(self, job: RequestState, lane: Lane, seconds: float) -> Process:
        """The lane's steps go on meanwhile."""
        yield self._env.timeout(seconds)
        self._underway -= 1
        lane.underway -= 1
        lane.take(job)

    def leave(self, finished: Sequence[RequestState], lane: Lane) -> None:
        """Count requests that are answered."""
        for job in finished:
            self.jobs.record(job)
        before, self._finished = self._finished, self._finished + len(finished)
        if self.meter.counts(self._env.now):
            self.meter.finished += len(finished)
        total = len(self.jobs)
        if self._report is not None and before * 100 // total != self._finished * 100 // total:
            self._report(self._finished, total)
        if self._loop:
            following = map(self._loop.behind, finished)
            self._come(sorted((job for job in following if job), key=lambda job: job.request.arrival_s))
            if self._loop.thins_out:
                self.meter.end_s = min(self.meter.end_s, self._env.now)
        if self._handed_on is not None:
            for job in finished:
                self._handed_on(job, lane)


def arrive(
    env: simpy.Environment,
    jobs: Iterable[RequestState],
    take: Callable[[RequestState], None],
    later_s: Callable[[Request], float],
    on_end: Callable[[float], None] = lambda _: None,
) -> Process:
    """Every request reaches the queue so long behind its time, none before another. on_end: hears when the next one does; inf: there is none."""
    for job in jobs:
        at_s = job.request.arrival_s + later_s(job.request)
        if at_s > env.now:
            on_end(at_s)
            yield env.timeout(at_s - env.now)
        take(job)
    on_end(math.inf)


class Lane:
    """One scheduler.

    A host that works ahead decides on the next step when a step begins, so what comes meanwhile waits for the one behind it.
    """

    def __init__(
        self, engine: Engine, env: simpy.Environment, costs: StepCosts, scheduler: Scheduler, shared: Shared
    ) -> None:
        self._engine, self._env, self._costs = engine, env, costs
        self.scheduler, self.shared = scheduler, shared
        self.underway = 0  # requests that are in no queue yet
        self.quiet_until_s = 0.0  # before which no request is answered here unless one comes
        self._idle: simpy.Event | None = None
        self._coming: deque[RequestState] = deque()  # in no step that has been decided on

    @property
    def unfinished(self) -> int:
        return self.underway + len(self._coming) + self.scheduler.unfinished

    def take(self, job: RequestState) -> None:
        """A request comes."""
        self.quiet_until_s = min(self.quiet_until_s, self._env.now)
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
        """The step loop. Steps are merged into one event unless a request may arrive or finish during them."""
        env, scheduler, costs = self._env, self.scheduler, self._costs
        now_s = env.now
        while True:
            batch = self._batch()
            if batch is None:
                self._idle, self.quiet_until_s = env.event(), math.inf
                yield self._idle
                now_s = env.now
                continue
            times = costs.stages_s(batch)
            begun_s = now_s
            idle_s = costs.idle_s(times[0], batch.rows, batch.decodes) + costs.moved_s(batch)
            alone = len(times) == 1
            if alone and scheduler.undisturbed and not batch.back:
                passed_s = self._pass_over(batch, begun_s, idle_s + times[0])
                if passed_s:
                    now_s = begun_s + passed_s
                    continue
            now_s = begun_s + (idle_s + times[0]) if alone else self._passed_s(begun_s + idle_s, times)
            if not alone or not scheduler.undisturbed or self._engine.nothing_before_s(self) <= now_s:
                if self.quiet_until_s <= now_s:
                    self.quiet_until_s = now_s + (self._quiet_steps(batch) * times[0] if alone else 0.0)
                yield env.timeout(now_s - env.now)
            self._measure((begun_s, now_s), times[0], batch)
            finished = scheduler.complete(self.shared.sent_s(now_s, now_s, batch.rows))
            if finished:
                self._engine.leave(finished, self)

    def _pass_over(self, batch: Batch, begun_s: float, step_s: float) -> float:
        """Steps that only decode and end before anything comes, at once: their seconds; 0.0 if there are not two of them.

        Their times are an arithmetic series, as the keys grow by one a sequence and the price is a line of the keys.
        """
        costs, meter, until_s = self._costs, self._engine.meter, self._engine.nothing_before_s(self)
        if until_s <= begun_s + 2 * step_s:
            return 0.0
        most = int(min(costs.on_a_line(batch), (until_s - begun_s) / step_s))
        count = self.scheduler.alike(most) if most > 1 else 1
        if count < 2:
            return 0.0
        last = Batch(decodes=batch.decodes, keys=(batch.keys[0] + (count - 1) * batch.decodes,))
        busy_s = [costs.stages_s(one)[0] for one in (batch, last)]
        spent_s = count * (step_s + costs.idle_s(busy_s[1], batch.rows, batch.decodes) + busy_s[1]) / 2
        hidden = (
            costs.works_ahead and min(busy_s) * costs.tokens_a_step < costs.overhead_s
        )  # then what is seen of the host is no line
        if (
            hidden
            or not self._launched_alike(batch, busy_s, count)
            or begun_s + spent_s >= until_s
            or not meter.is_one_way(begun_s + step_s, begun_s + spent_s)
        ):
            return 0.0
        used = self.scheduler.pass_over(count)
        self.shared.sent_s(begun_s + step_s, begun_s + spent_s, batch.rows, count)
        if meter.counts(begun_s + spent_s):
            meter.num_steps += count
            meter.busy_s += count * sum(busy_s) / 2
            meter.output_tokens += count * batch.rows
            meter.block_s += spent_s * used
            meter.peak_blocks = max(meter.peak_blocks, self.scheduler.used_blocks)
        return spent_s

    def _quiet_steps(self, batch: Batch) -> int:
        """Steps behind this one that end without an answer; each takes at least as long, as the keys grow."""
        if not self.scheduler.undisturbed or batch.back:
            return 0
        return self.scheduler.alike(_LOOKED_AHEAD) - 1

    def _launched_alike(self, batch: Batch, busy_s: Sequence[float], count: int) -> bool:
        """One graph each; or the slower of device and host is so from the first step on, as the second lies on their line."""
        if count == 2 or self._costs.graphed(batch):
            return True
        second = Batch(decodes=batch.decodes, keys=(batch.keys[0] + batch.decodes,))
        on_line_s = busy_s[0] + (busy_s[-1] - busy_s[0]) / (count - 1)
        return abs(self._costs.stages_s(second)[0] - on_line_s) <= _ROUNDING * on_line_s

    def _passed_s(self, at_s: float, times: Sequence[float]) -> float:
        """When a step that reaches the first stage then has passed all. Each serves one lane at a time, in order of arrival.

        No lane overtakes another, as all pass the same stages: so what is free when is known as soon as a step begins.
        """
        free = self.shared.free_s
        for stage, seconds in enumerate(times):
            at_s = free[stage] = max(at_s, free[stage]) + seconds
        return at_s

    def _measure(self, step: tuple[float, float], busy_s: float, batch: Batch) -> None:
        (begun_s, end_s), meter, used = step, self._engine.meter, self.scheduler.used_blocks
        if not meter.counts(end_s):
            return
        meter.num_steps += 1
        meter.busy_s += busy_s
        meter.prefill_tokens += sum(chunk.new for chunk in batch.chunks) if batch.chunks else 0
        meter.output_tokens += batch.rows
        meter.block_s += used * (end_s - begun_s)
        meter.peak_blocks = max(meter.peak_blocks, used)
