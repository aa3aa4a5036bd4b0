"""Plays: what one of several equal engines makes of its share of the requests. Equal engines are played once.

Folding assumes that requests are dealt to the engines of a pool at random: a share of a Poisson stream is one, at its
share of the rate. It also takes the prompts that reach engines which only decode as a Poisson stream of their own, and a
cache's links as free when it comes. A router that knows which engine is least busy does better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Final, Self

from pydantic import Field

from simulator.base.remembered import made_once
from simulator.studies.serving import InferencePlan, Request
from simulator.studies.serving.deployment import Deployment, answers_of, link_capacity, one_engine_capacity, prompts_of
from simulator.studies.serving.engine import ServedRun
from simulator.studies.serving.groups import pipeline_shape, tensor_shape
from simulator.studies.serving.memory import serving_memory
from simulator.studies.serving.report import latency_s
from simulator.studies.serving.slo import Figure
from simulator.studies.serving.transfer import Transfers
from simulator.studies.serving_search.space import Role, key_of
from simulator.studies.serving_search.study import ServingSearch

UNLIMITED: Final = 1e12  # requests a second, where there is nothing to do
Values = Mapping[Figure, Sequence[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One engine of `engines` equal ones. first_s, rest_s: of each request that counts, to its first token, and from there.

    sequences: of a mean step. kv_peak: of the cache, in use at most. capacity_per_s: of the one engine.
    """

    role: Role
    layout: str
    engines: Annotated[int, Field(ge=1)]
    pace: float
    first_s: tuple[float, ...]
    rest_s: tuple[float, ...]
    sequences: float
    kv_peak: float
    preemptions: int
    capacity_per_s: float

    @classmethod
    def from_data(cls, data: dict[str, object]) -> Self:
        """As a journal keeps it."""
        return cls(**(data | {name: tuple(data[name]) for name in ("first_s", "rest_s")}))  # type: ignore[arg-type]


class Player:
    """Plays layouts of one study, and keeps what was played."""

    def __init__(self, study: ServingSearch) -> None:
        self.study = study
        self.share = cache(self._share)
        self._deployed: dict[object, Deployment] = {}
        self._capacities: dict[object, float] = {}
        self._plays: dict[object, Play] = {}
        self._transfers: dict[object, tuple[list[float], float]] = {}

    @cached_property
    def requests(self) -> Sequence[Request]:
        """All at the whole rate."""
        return self.share(1)

    @property
    def counted(self) -> Sequence[Request]:
        """Those behind the warm-up."""
        return self.requests[self._num_warmup :]

    @property
    def _num_warmup(self) -> int:
        return math.floor(self.study.workload.warmup * len(self.requests))

    def _share(self, engines: int) -> Sequence[Request]:
        """As many requests of the same lengths at an engine's share of the rate."""
        workload = self.study.workload.model_copy(update={"rate": self.study.rate / engines})
        return workload.requests(self.study.model.image_tokens)

    def missing_bytes(self, layout: InferencePlan) -> int:
        """What is short in memory; 0 where it fits."""
        return serving_memory(self.study.model, layout, self.study.cluster.device, self.study.stack).missing_bytes

    def deployed(self, layout: InferencePlan, engines: int) -> Deployment:
        """One engine among so many. Its prices depend on them only where their groups share links."""
        study = self.study
        most = math.lcm(study.cluster.gpus_per_node, study.cluster.nvlink_domain_size)  # further ones lie as these do
        plan = layout.model_copy(update={"dp": min(engines, most)})
        stages = tuple(pipeline_shape(plan, study.seen, stage) for stage in range(plan.pp - 1))
        key = key_of(layout), tensor_shape(plan, study.seen), stages
        given = study.model, plan, study.seen, study.stack
        return made_once(self._deployed, key, lambda: Deployment.of(*given, *study.numbers))

    def capacity(self, role: Role, layout: InferencePlan, engines: int) -> float:
        """Requests a second, of all kinds, that one of so many engines serves when its queue never empties."""
        deployed = self.deployed(layout, engines)
        return made_once(self._capacities, (role, id(deployed)), self._capacity, role, deployed)

    def _capacity(self, role: Role, deployed: Deployment) -> float:
        part, share = _part(role, self.requests)
        return share * one_engine_capacity(deployed, part, prefilled=role == "decode")

    def least(self, role: Role, layout: InferencePlan) -> int:
        """The fewest engines whose queues do not grow without end: each takes less than its capacity."""
        engines = 1
        while engines * self.capacity(role, layout, engines) <= self.study.rate:
            engines = max(engines + 1, math.floor(self.study.rate / self.capacity(role, layout, engines)))
        return engines

    def play(self, role: Role, layout: InferencePlan, engines: int, pace: float = 1.0) -> Play:
        """One of so many engines under its share."""
        key = role, key_of(layout), engines, pace
        return made_once(self._plays, key, self._played, role, layout, engines, pace)

    def know(self, play: Play) -> None:
        """It was played elsewhere."""
        self._plays[play.role, play.layout, play.engines, play.pace] = play

    def _played(self, role: Role, layout: InferencePlan, engines: int, pace: float) -> Play:
        deployed, requests = self.deployed(layout, engines), self.share(engines)
        part, _ = _part(role, requests)
        window = requests[self._num_warmup].arrival_s, requests[-1].arrival_s
        run = deployed.alone(
            part, window if window[1] > window[0] else (0.0, math.inf), prefilled=role == "decode", pace=pace
        )
        first, rest = _times(role, requests, run)
        meter = run.meter
        return Play(
            role=role,
            layout=key_of(layout),
            engines=engines,
            pace=pace,
            first_s=tuple(first[self._num_warmup :]),
            rest_s=tuple(rest[self._num_warmup :]),
            sequences=meter.output_tokens / meter.num_steps if meter.num_steps else 0.0,
            kv_peak=meter.peak_blocks / deployed.memory.num_blocks,
            preemptions=run.preemptions,
            capacity_per_s=min(self.capacity(role, layout, engines), UNLIMITED),
        )

    def transfers(self, prompts: InferencePlan, layout: InferencePlan, *, near: bool) -> tuple[list[float], float]:
        """(seconds of each counted request's cache on the links, requests a second that one engine's links take)."""
        key = key_of(prompts), key_of(layout), near
        return made_once(self._transfers, key, self._transferred, prompts, layout, near=near)

    def _transferred(self, prompts: InferencePlan, layout: InferencePlan, *, near: bool) -> tuple[list[float], float]:
        study, plan = self.study, pooled(prompts, layout, 1, 1)
        made = Transfers(study.model, plan, study.seen, study.stack, study.numbers[1], near=near)
        moved = [made.seconds(r.prompt_tokens) if r.output_tokens > 1 else 0.0 for r in self.counted]
        return moved, link_capacity(made, self.requests)

    def values(self, first: Play, rest: Play, moved_s: Sequence[float] | None = None) -> Values:
        """Every request's figures, from its prompt's play and its answer's; moved_s: its cache on the links between."""
        found: dict[Figure, list[float | None]] = {"ttft": list(first.first_s), "tpot": [], "latency": []}
        moved = moved_s or [0.0] * len(first.first_s)
        for request, first_s, rest_s, moved_one_s in zip(self.counted, first.first_s, rest.rest_s, moved, strict=True):
            more, behind_s = request.output_tokens - 1, rest_s + moved_one_s
            found["tpot"].append(behind_s / more if more else None)
            found["latency"].append(first_s + behind_s)
        return found


def pooled(prompts: InferencePlan, layout: InferencePlan, num_prompts: int, engines: int) -> InferencePlan:
    """The plan of two pools."""
    degrees = {f"prefill_{name}": getattr(prompts, name) for name in ("tp", "pp", "pcp")}
    return layout.model_copy(update=degrees | {"prefill_dp": num_prompts, "dp": engines})


def _part(role: Role, requests: Sequence[Request]) -> tuple[Sequence[Request], float]:
    """What engines of a role see of these requests, and requests of any kind for each that they see."""
    if role == "both":
        return requests, 1.0
    return prompts_of(requests) if role == "prefill" else answers_of(requests)


def _times(role: Role, requests: Sequence[Request], run: ServedRun) -> tuple[list[float], list[float]]:
    """To the first token, and from there; an engine that decodes has nothing to do with answers of one token."""
    if role == "decode":
        ended = iter(run.jobs)
        rest = [latency_s(next(ended)) if request.output_tokens > 1 else 0.0 for request in requests]
        return [0.0] * len(rest), rest
    first = [(job.first_s or 0.0) - job.request.arrival_s for job in run.jobs]
    return first, [latency_s(job) - one for job, one in zip(run.jobs, first, strict=True)]
