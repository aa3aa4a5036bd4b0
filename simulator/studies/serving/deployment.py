"""Deployment: the prices, caches and links of a plan, and what its engines make of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from simulator.base.sums import summed
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.engine import Engine as SpecEngine
from simulator.spec.software.stack import Stack
from simulator.studies.serving.batch import Batch, Chunk
from simulator.studies.serving.costs import StepCosts
from simulator.studies.serving.decoding import batch_of
from simulator.studies.serving.engine import Engine, Progress, ServedRun
from simulator.studies.serving.limits import Limits
from simulator.studies.serving.memory import ServingMemory, serving_memory
from simulator.studies.serving.plan import InferencePlan
from simulator.studies.serving.pools import Pool, Pools
from simulator.studies.serving.transfer import Placing, Transfers, placing
from simulator.studies.serving.workload import NO_USERS, Request, Requests, Users

Window = tuple[float, float]
ALWAYS: Window = (0.0, math.inf)
# Capacity is the rate at which a full queue is served. It is read between the first and the third quarter of so many
# times the sequences that run at once, so that neither filling nor emptying counts.
_ROUNDS = 8
_MOST_SATURATING = 20_000


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What every run of one serving question shares. prefill, transfers: of a plan whose prompts have engines of their own."""

    costs: StepCosts
    memory: ServingMemory
    calibration: Calibration
    curves: LinkCurves
    prefill: Deployment | None = None
    place: Placing | None = None
    transfers: Transfers | None = None
    _capacity: dict[tuple[Request, ...], float] = field(
        default_factory=dict, compare=False, repr=False
    )  # of the last queue

    @classmethod
    def of(
        cls,
        model: Model,
        plan: InferencePlan,
        cluster: Cluster,
        stack: Stack,
        calibration: Calibration | None = None,
        curves: LinkCurves | None = None,
    ) -> Deployment:
        """Of a plan that has been checked. None: the device's. Raises StackError or CalibrationError where a price is missing."""
        calibration = calibration or Calibration.for_device(cluster.device)
        curves = curves or calibration.links or default_curves()
        made = partial(cls.of, model, cluster=cluster, stack=stack, calibration=calibration, curves=curves)
        pool = plan.prefill_pool
        if pool is not None:
            place = placing(plan, cluster)
            transfers = Transfers(model, plan, cluster, stack, curves, near=place.near)
            return replace(made(plan.decode_pool), prefill=made(pool), place=place, transfers=transfers)
        costs = StepCosts(model, plan, cluster, stack, calibration, curves)
        memory = serving_memory(model, plan, cluster.device, stack)
        found = cls(costs=costs, memory=memory, calibration=calibration, curves=curves)
        found.probe()
        return found

    @property
    def plan(self) -> InferencePlan:
        """Of the engines that decode."""
        return self.costs.plan

    @property
    def num_engines(self) -> int:
        return self.plan.dp + (self.prefill.plan.dp if self.prefill else 0)

    @property
    def num_devices(self) -> int:
        return self.plan.num_devices + (self.prefill.plan.num_devices if self.prefill else 0)

    @property
    def tightest(self) -> Deployment:
        """The pool that misses the most memory; the one that decodes where none misses any."""
        return max((self, self.prefill or self), key=lambda one: one.memory.missing_bytes)

    @property
    def limits(self) -> Limits:
        plan, model = self.costs.plan, self.costs.model
        ranks = self.costs.ranks  # whose sequences are scheduled as one
        engine = self.costs.stack.engine or SpecEngine()
        return Limits(
            num_blocks=ranks * self.memory.num_blocks,
            block_size=plan.block_size,
            max_sequences=ranks * min(plan.max_sequences, self.memory.most_states or plan.max_sequences),
            max_tokens=ranks * plan.batched_tokens(model),
            chunked=plan.chunked_prefill,
            mixed=plan.mixed,
            reuses=plan.prefix_caching and model.mamba is None,
            reserved=engine.reserved,
            alternates=engine.alternates,
            waiting_ratio=engine.waiting_ratio,
            waiting_steps=engine.waiting_steps,
            apart=engine.prompts_apart,
            windows=self.costs.windows,
            window_tokens=self.memory.window_tokens,
            window_share=self.memory.window_share,
            window_part=plan.window_part,
            state_blocks=self.memory.state_blocks,
            host_blocks=ranks * (plan.host_cache // self.memory.block_bytes // self.memory.num_schedulers),
        )

    def play(
        self,
        requests: Sequence[Request],
        window: Window,
        progress: Progress | None = None,
        pace: float = 1.0,
        users: Users = NO_USERS,
        *,
        streamed: bool = True,
    ) -> ServedRun:
        """What happens to these requests. window: the time in which figures are counted. pace: a factor on all times.

        users: of a closed loop; without any, requests come when they say. streamed: tokens are sent one by one.
        """
        costs = self.costs.changed(pace=pace, streamed=streamed)
        if self.prefill is None:
            return Engine(costs, self.limits, requests, window, users=users).run(progress)
        assert self.place is not None
        assert self.transfers is not None
        seconds = self.transfers.seconds
        return Pools(
            Pool(costs=self.prefill.costs.changed(pace=pace, streamed=streamed), limits=self.prefill.limits),
            Pool(costs=costs, limits=self.limits),
            requests,
            window,
            cells=self.place.cells,
            transfer_s=lambda tokens: pace * seconds(tokens),
            users=users,
        ).run(progress)

    def alone(
        self, requests: Sequence[Request], window: Window, *, prefilled: bool = False, pace: float = 1.0
    ) -> ServedRun:
        """The same of one engine of this pool. prefilled: its prompts are computed elsewhere."""
        costs = self.costs.changed(pace=pace)
        return Engine(costs, self.limits, requests, window, engines=1, prefilled=prefilled).run()

    def probe(self) -> None:
        """Price a step of each kind, so that a missing number of the calibration is reported before the simulation."""
        self.costs.stages_s(batch_of(self.costs, 1, 1))
        keys = tuple(0 for _ in self.costs.windows)
        self.costs.stages_s(Batch(decodes=0, keys=keys, chunks=(Chunk(new=1, cached=0),)))

    def full_queue(self, requests: Sequence[Request], engines: int) -> list[Request]:
        """Requests of the same lengths, all present from the beginning: several times as many as run at once."""
        memory, plan = self.memory, self.plan
        mean = Requests.of(requests).tokens / len(requests)
        room = max(1, int(memory.num_blocks * memory.block_size / mean))
        at_once = self.costs.ranks * min(plan.max_sequences, room) * memory.num_schedulers * engines
        count = min(max(_ROUNDS * at_once, 4), _MOST_SATURATING)
        found = [replace(request, arrival_s=0.0) for request in requests[:count]]
        return [found[i % len(found)] for i in range(count)]

    def _one_pool_capacity(self, requests: Sequence[Request]) -> float:
        """Of all engines; of one, and of one of its GPUs, times their number, where a queue for all would be too long."""
        queue = self.full_queue(requests, self.plan.dp)
        if len(queue) < _MOST_SATURATING:
            key = tuple(queue)  # of any rate
            if key not in self._capacity:
                self._capacity.clear()
                self._capacity[key] = capacity(queue, self.play(queue, ALWAYS))
            return self._capacity[key]
        one = replace(self, costs=self.costs.changed(ranks=1))
        queue = one.full_queue(requests, 1)
        return self.plan.dp * self.plan.ranks * capacity(queue, one.alone(queue, ALWAYS))

    def capacity_per_s(self, requests: Sequence[Request]) -> float:
        """Requests a second that pools serve when no queue empties: of the pool that has the least, or of the links."""
        if self.prefill is None:
            return min(self._one_pool_capacity(requests), self.plan.dp * front_capacity(self.costs, requests))
        assert self.transfers is not None
        links = link_capacity(self.transfers, requests)
        pools = ((self.prefill, prompts_of(requests), False), (self, answers_of(requests), True))
        found = [
            deployed.plan.dp * min(links, one_engine_capacity(deployed, part, prefilled=prefilled) * share)
            for deployed, (part, share), prefilled in pools
        ]
        return min(found)


Part = tuple[Sequence[Request], float]


def prompts_of(requests: Sequence[Request]) -> Part:
    """What engines that only compute prompts see: the same prompts, answers of one token."""
    return Requests.of(replace(request, output_tokens=1) for request in requests), 1.0


def answers_of(requests: Sequence[Request]) -> Part:
    """What engines that only decode see: requests of two tokens or more, and requests of any kind for each of them."""
    found = [request for request in requests if request.output_tokens > 1]
    return found, len(requests) / len(found) if found else math.inf


def one_engine_capacity(deployed: Deployment, requests: Sequence[Request], *, prefilled: bool) -> float:
    """Requests a second that one engine of a pool serves when its queue never empties."""
    if not requests:
        return math.inf
    queue = deployed.full_queue(requests, 1)
    front = front_capacity(deployed.costs, requests, prefilled=prefilled)
    return min(front, capacity(queue, deployed.alone(queue, ALWAYS, prefilled=prefilled)))


def front_capacity(costs: StepCosts, requests: Sequence[Request], *, prefilled: bool = False) -> float:
    """Requests a second that one engine's front end lets in and whose tokens it sends."""
    accept_s, send_s = costs.front_s
    if not accept_s + send_s:
        return math.inf
    sent = sum(request.output_tokens for request in requests) / len(requests)
    return 1 / (send_s * sent + (0.0 if prefilled else accept_s))


def link_capacity(transfers: Transfers, requests: Sequence[Request]) -> float:
    """Requests a second whose caches one engine's links take."""
    busy_s = summed(transfers.seconds(request.prompt_tokens) for request in requests if request.output_tokens > 1)
    return len(requests) / busy_s if busy_s else math.inf


def capacity(queue: Sequence[Request], played: ServedRun) -> float:
    """Requests a second that were served of a queue that never emptied."""
    ends = sorted(played.jobs.ends_s)
    first, last = len(queue) // 4, 3 * len(queue) // 4
    between_s = ends[last - 1] - ends[first - 1]
    return (last - first) / between_s if between_s > 0 else len(queue) / ends[-1]
