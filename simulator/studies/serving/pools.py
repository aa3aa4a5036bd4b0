"""Disaggregated serving: engines that compute prompts, engines that decode, and the links between them, on one clock.

A request's first token leaves the engine of its prompt. Its cache is handed over when the whole prompt is computed, one
prompt at a time from each engine and to each engine; until then it takes up blocks of the engine that computed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import simpy

from simulator.studies.serving.closed_loop import ClosedLoop
from simulator.studies.serving.costs import StepCosts
from simulator.studies.serving.engine import Engine, Lane, Passed, Process, Progress, ServedRun, arrive
from simulator.studies.serving.limits import Limits, RequestState
from simulator.studies.serving.workload import NO_USERS, Request, Requests, Users


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Engines of one kind: prices of their steps, and their caches."""

    costs: StepCosts
    limits: Limits


class Pools:
    """Plays one stream of requests through both. cells: as `placing` finds them. transfer_s: of a prompt of so many tokens.

    users: of a closed loop, whose requests come when others are answered; without any they come at their own times.
    """

    def __init__(
        self,
        prefill: Pool,
        decode: Pool,
        requests: Sequence[Request],
        window: tuple[float, float],
        *,
        cells: int,
        transfer_s: Callable[[int], float],
        users: Users = NO_USERS,
    ) -> None:
        self._env = env = simpy.Environment()
        self._cells, self._transfer_s = cells, transfer_s
        self._passed = Passed()
        self._handed_in_window = 0
        self._requests = requests
        prompts = Requests.of(replace(request, output_tokens=1) for request in requests)
        holding = replace(prefill.limits, hands_over=True)
        self._outside_s = prefill.costs.outside_s
        played = partial(Engine, window=window, env=env, moved=users.count > 0)
        self._prefill = played(prefill.costs, holding, prompts, handed_on=self._prompt_ends)
        self._decode = played(decode.costs, decode.limits, requests, handed_on=lambda job, _: self._tell(job))
        self._loop = ClosedLoop(self._prefill.jobs, users) if users.count else None
        self._senders = _links(env, self._prefill, prefill.costs.plan.dp)
        self._receivers = _links(env, self._decode, decode.costs.plan.dp)
        self._coming = dict.fromkeys(self._decode.lanes, 0)
        self._cell_of = _cells(self._prefill, cells) | _cells(self._decode, cells)
        self._progress: Progress | None = None
        self._done = 0

    def run(self, progress: Progress | None = None) -> ServedRun:
        """Play every request. Steps and blocks are those of the engines that decode; tokens and busy time are of all."""
        self._progress = progress
        self._come(self._loop.first() if self._loop else self._prefill.states())
        self._env.run()
        prompts, found = self._prefill.result(), self._decode.result()
        meter, other = found.meter, prompts.meter
        meter.prefill_tokens += other.prefill_tokens
        meter.output_tokens += other.output_tokens
        meter.busy_s += other.busy_s
        meter.finished += other.finished - self._handed_in_window
        return replace(
            found,
            prefilled=found.prefilled + prompts.prefilled,
            preemptions=found.preemptions + prompts.preemptions,
            passed=self._passed,
            leftover_blocks=found.leftover_blocks + prompts.leftover_blocks,
        )

    def _come(self, jobs: Iterable[RequestState]) -> None:
        self._env.process(arrive(self._env, jobs, self._prefill.take, self._outside_s))

    def _prompt_ends(self, prompt: RequestState, lane: Lane) -> None:
        """The first token is out. More of them come from another engine."""
        now = self._env.now
        request = replace(self._requests[prompt.index], arrival_s=prompt.request.arrival_s)
        job = RequestState(request=request, index=prompt.index, first_s=prompt.end_s)
        if job.request.output_tokens == 1:
            job.end_s = prompt.end_s
            self._decode.jobs.record(job)
            lane.scheduler.release(prompt)
            self._tell(job)
            return
        meter = self._prefill.meter
        self._handed_in_window += meter.start_s <= now <= meter.end_s
        self._env.process(self._hand_over(prompt, job, lane))

    def _hand_over(self, prompt: RequestState, job: RequestState, lane: Lane) -> Process:
        if prompt.end_s and prompt.end_s > self._env.now:  # until the front end has sent the first token
            yield self._env.timeout(prompt.end_s - self._env.now)
        cell = [one for one in self._decode.in_turn if self._cell_of[one] == self._cell_of[lane]]
        target = min(cell, key=lambda one: one.scheduler.unfinished + self._coming[one])
        self._coming[target] += 1
        begun_s, tokens = self._env.now, job.request.prompt_tokens
        seconds = self._transfer_s(tokens)
        with self._senders[lane].request() as sending:
            yield sending
            with self._receivers[target].request() as receiving:
                yield receiving
                self._passed.wait_s += self._env.now - begun_s
                yield self._env.timeout(seconds)
        self._passed.requests += 1
        self._passed.tokens += tokens
        self._passed.link_s += seconds
        lane.scheduler.release(prompt)
        lane.wake()
        self._coming[target] -= 1
        job.cached, job.done = tokens, 1
        target.take(job)

    def _tell(self, job: RequestState) -> None:
        """A request is answered; of a closed loop, its user sends the next."""
        self._done += 1
        following = self._loop.behind(job) if self._loop else None
        if following is not None:
            self._come([following])
        if self._loop and self._loop.thins_out:
            for meter in (self._prefill.meter, self._decode.meter):
                meter.end_s = min(meter.end_s, self._env.now)
        total = len(self._requests)
        if self._progress is not None and (self._done - 1) * 100 // total != self._done * 100 // total:
            self._progress(self._done, total)


def _links(env: simpy.Environment, engine: Engine, count: int) -> dict[Lane, simpy.Resource]:
    """The port of each engine, by its lanes."""
    ports = [simpy.Resource(env) for _ in range(count)]
    lanes = len(engine.lanes) // count
    return {lane: ports[i // lanes] for i, lane in enumerate(engine.lanes)}


def _cells(engine: Engine, cells: int) -> dict[Lane, int]:
    """The cell of each lane, in the order of the engines."""
    return {lane: i * cells // len(engine.lanes) for i, lane in enumerate(engine.lanes)}
