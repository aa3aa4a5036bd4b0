"""Asynchronous data parallelism: workers push gradients to servers that hold the parameters in shards, and pull them back.

Servers: M. Li et al., OSDI 2014 (sharded by key range, bounded delay). Staleness: Q. Ho et al., NIPS 2013 (stale synchronous
parallel: a worker begins clock k only when every worker's updates of clock k - 1 - s are in; s = 0 is synchronous).
Shards are equal and a push reaches all servers at once, so one server's queue is every server's: its link in, its update,
its link out, each first come, first served, between private compute and private links of the workers.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

from simulator.base.errors import Fault, PlanError
from simulator.base.kernels import DTYPE_BYTES
from simulator.base.schema import Strict
from simulator.base.sums import summed
from simulator.base.units import BytesPerS
from simulator.predict.prediction import Source
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.tiers import ADAM_BYTES_PER_NUMEL
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.plan.optimizers import OPTIMIZERS
from simulator.spec.software.stack import Stack

# Of an update's time, adding a gradient: both wait for the host's memory, which it reads twice and writes once in fp32
_ADD_SHARE: Final = 12 / ADAM_BYTES_PER_NUMEL
_NEVER: Final = 2**31 - 1
_FEWEST_CLOCKS, _MOST_UPDATES = 20, 200_000  # of many workers fewer clocks show the steady state
_WARM_UP: Final = 0.25  # of the clocks, until the queues are as long as they get


class Servers(Strict):
    """`[servers]`: parameter servers beside the plan's replicas, which are the workers."""

    count: int = Field(ge=1, le=65536, default=1, description="servers, each with an equal shard of the parameters")
    staleness: int = Field(
        ge=0, le=10**6, default=0, description="clocks that a worker may be ahead of the slowest (SSP); 0: synchronous"
    )
    bounded: bool = Field(
        default=True, description="false: workers never wait for each other, whatever `staleness` says"
    )
    overlap: bool = Field(
        default=False,
        description="a worker computes on while its own push and pull are under way, as far as `staleness` lets it (bounded "
        "delay); else it waits for its own pull",
    )
    server_bytes_per_s: BytesPerS | None = Field(
        gt=0, default=None, description="a server's link, one way; not set: a NIC"
    )
    worker_bytes_per_s: BytesPerS | None = Field(
        gt=0, default=None, description="a worker's link, one way; not set: a GPU's share of its node's NICs"
    )
    update_numel_per_s: PositiveFloat | None = Field(
        default=None,
        description="parameters a second that a server updates; not set: the host's vectorised CPU Adam",
    )
    push: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="dtype of pushed gradients")
    pull: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="dtype of pulled parameters")
    variation: NonNegativeFloat = Field(
        le=10,
        default=0.0,
        description="standard deviation of a worker's compute over its mean, from clock to clock",
    )
    clocks: int = Field(
        ge=20, le=10**6, default=200, description="simulated of each worker; fewer of more than a thousand"
    )
    seed: int = Field(ge=0, le=2**63, default=0, description="of the variation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """Seconds of one clock of one worker without contention. server_*: of one server for its shard of a worker's push or pull."""

    compute_s: float
    push_s: float
    pull_s: float
    server_in_s: float
    update_s: float
    server_out_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """Workers and servers in the steady state. wait_s: mean wait of a push in the servers' queue of updates.

    stale: updates of others that come between a worker's pull and its own update, mean and most; ahead: clocks, most.
    """

    updates_per_s: float
    wait_s: float
    stale: float
    most_stale: int
    ahead: int
    busy: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous:
    """Data parallelism by parameter servers. worker_bytes: reserved on a GPU; server_bytes: in one server's memory."""

    workers: int
    servers: int
    cycle: Cycle
    found: Queued
    tokens_per_s: float
    synchronous_tokens_per_s: float
    worker_bytes: int
    server_bytes: int
    fits: bool
    sources: tuple[Source, ...] = field(default=())

    def report(self) -> dict[str, Any]:
        """Plain data, as `--json` shows it."""
        return asdict(self)


def served(
    servers: Servers,
    tokens_per_s: float,
    model: Model,
    plan: Plan,
    cluster: Cluster,
    calibration: Calibration | None = None,
    stack: Stack | None = None,
) -> Asynchronous:
    """Workers are the plan's replicas. tokens_per_s: of the plan itself. Raises PlanError with every fault."""
    from simulator.predict import predict

    faults = list(_faults(servers, plan, cluster))
    PlanError.raise_for(faults)
    # A replica that never agrees; SGD stands for taking the pulled parameters in: it reads and writes as much
    worker = predict(model, plan.copy_with(sync_every_steps=_NEVER, optimizer="sgd"), cluster, calibration, stack)
    alone_s = worker.step_s - worker.breakdown.get("stragglers", 0.0)  # nobody waits for the slowest
    numel, workers = model.num_parameters, plan.dp_replicate
    cycle = _cycle(servers, alone_s, numel, cluster)
    clocks = min(servers.clocks, max(_FEWEST_CLOCKS, _MOST_UPDATES // workers))
    found = played(cycle, workers, servers.model_copy(update={"clocks": clocks}))
    states = summed(
        OPTIMIZERS[plan.optimizer.kind].state(-(-numel // servers.count), DTYPE_BYTES[plan.optimizer.dtype])
    )
    return Asynchronous(
        workers=workers,
        servers=servers.count,
        cycle=cycle,
        found=found,
        tokens_per_s=found.updates_per_s * plan.tokens_per_step / workers,
        synchronous_tokens_per_s=tokens_per_s,
        worker_bytes=worker.memory.used_bytes,
        server_bytes=-(-numel // servers.count) * (4 + DTYPE_BYTES[servers.push]) + states,
        fits=worker.fits,
        sources=tuple(_sources(servers, workers, found)),
    )


def _faults(servers: Servers, plan: Plan, cluster: Cluster) -> Iterator[Fault]:
    degrees = {name: getattr(plan, name) for name in ("dp_shard", "cp", "tp", "pp", "ep", "sync_every_steps")}
    for name, size in degrees.items():
        if size > 1:
            yield Fault(f"servers: {name}", f"workers hold the whole model, and {name} = {size}", "1")
    if servers.overlap and not servers.bounded:
        problem = "workers that neither wait for their own pull nor for others would never learn"
        yield Fault("servers.overlap", problem, "bounded = true with a staleness, or overlap = false")
    if plan.dp_replicate == 1:
        yield Fault("servers: dp_replicate", "there is one worker", "2 or more")
    if plan.zero or not plan.traits.whole_modules:
        problem = f"the servers hold the states, and {plan.implementation} with zero = {plan.zero} shards them"
        yield Fault("servers: zero", problem, 'zero = 0, data_parallel = "ddp"')
    if (
        plan.offload.any
        or plan.peft.any
        or plan.ddp.comm_hook.kind != "none"
        or OPTIMIZERS[plan.optimizer.kind].matrices
    ):
        problem = "offload, adapters, hooks and optimizers of whole matrices are not modelled with servers"
        yield Fault("servers: plan", problem, "leave them out")
    if cluster.inter is None and not (servers.server_bytes_per_s and servers.worker_bytes_per_s):
        problem = f"no network joins {cluster.name} to servers"
        yield Fault("servers", problem, "server_bytes_per_s and worker_bytes_per_s, or [inter]")
    if cluster.host_tier is None and servers.update_numel_per_s is None:
        yield Fault("servers.update_numel_per_s", f"{cluster.name} has no [host] to take it from")


def _cycle(servers: Servers, compute_s: float, numel: int, cluster: Cluster) -> Cycle:
    inter, tier = cluster.inter, cluster.host_tier
    card, share = (inter.nic_bytes_per_s, cluster.node_bytes_per_s / cluster.gpus_per_node) if inter else (0.0, 0.0)
    server, worker = servers.server_bytes_per_s or card, servers.worker_bytes_per_s or share
    rate = servers.update_numel_per_s or (tier.adam_numel_per_s if tier else 0.0)
    up, down, shard = numel * DTYPE_BYTES[servers.push], numel * DTYPE_BYTES[servers.pull], numel / servers.count
    return Cycle(
        compute_s=compute_s,
        push_s=up / worker,
        pull_s=down / worker,
        server_in_s=up / servers.count / server,
        update_s=shard / rate,
        server_out_s=down / servers.count / server,
    )


def played(cycle: Cycle, workers: int, servers: Servers) -> Queued:
    """Every worker takes `clocks` clocks; events in the order of their times, equal ones in that of the workers."""
    return _Clocks(cycle, workers, servers).play()


class _Clocks:
    """The workers' clocks, and by when each queue of a server and each link of a worker is free.

    begun, computed, pulled, asking, applied: the last clock of each worker that was begun, that was computed, after which
    it has pulled, has asked to, and that the servers hold.
    """

    def __init__(self, cycle: Cycle, workers: int, servers: Servers) -> None:
        self._c, self._n, self._servers = cycle, workers, servers
        self._draws = np.random.default_rng(servers.seed)
        self._events: list[tuple[float, int, int, str]] = []
        self._free: dict[str, float] = defaultdict(float)
        self._begun, self._computed, self._pulled, self._asking, self._applied = ([-1] * workers for _ in range(5))
        self._held = [0] * workers  # updates in the parameters that a worker has
        self._used: dict[tuple[int, int], int] = {}  # the same of those that a worker's clock is computed on
        self._sent: dict[tuple[int, int], int] = {}  # the same of those that are on their way to a worker
        self._together = servers.bounded and servers.staleness == 0
        self._updates = self._ahead = self._summed = 0
        self._behind, self._slowest = Counter({-1: workers}), -1  # clock -> workers whose last update it is; the least
        self._steady = 0  # updates until the first worker has taken all its clocks
        self._log: list[tuple[float, int]] = []  # of each update: when it was in, and how stale
        self._waits: list[float] = []

    def play(self) -> Queued:
        for worker in range(self._n):
            self._advance(0.0, worker)
        handle = {"computed": self._push, "pushed": self._update, "applied": self._apply, "pulled": self._have}
        while self._events:
            at, worker, clock, event = heapq.heappop(self._events)
            handle[event](at, worker, clock)
        return self._steady_state()

    def _steady_state(self) -> Queued:
        """Means over whole rounds of the workers, without the first ones."""
        n, c = self._n, self._c
        last = n * max(2, self._steady // n)  # whole rounds of the workers
        first = min(last - n, n + int(_WARM_UP * last) // n * n)
        window, span_s = self._log[first:last], self._log[last - 1][0] - self._log[first - 1][0]
        rate = len(window) / span_s
        update_s = c.update_s * (_ADD_SHARE + 1 / self._n if self._together else 1)
        of_server = {"server in": c.server_in_s, "update": update_s, "server out": c.server_out_s}
        of_worker = {"compute": c.compute_s, "worker push": c.push_s, "worker pull": c.pull_s}
        busy = {name: rate * s for name, s in of_server.items()}
        return Queued(
            updates_per_s=rate,
            wait_s=summed(self._waits[first:last]) / len(window),
            stale=summed(stale for _, stale in window) / len(window),
            most_stale=max(stale for _, stale in window),
            ahead=self._ahead,
            busy=busy | {name: rate / self._n * s for name, s in of_worker.items()},
        )

    def _advance(self, at: float, worker: int) -> None:
        """Begin the worker's next clock, if it is time for it."""
        clock, servers = self._computed[worker] + 1, self._servers
        lag = servers.staleness if servers.overlap else 0
        mine = self._begun[worker] < clock < servers.clocks and self._pulled[worker] >= clock - 1 - lag
        if not mine or (servers.bounded and self._slowest < clock - 1 - servers.staleness):
            return
        self._begun[worker], self._used[worker, clock] = clock, self._held[worker]
        self._ahead = max(self._ahead, clock - 1 - self._slowest)
        seconds, cv = self._c.compute_s, servers.variation
        if cv and seconds:
            seconds = float(self._draws.gamma(cv**-2, seconds * cv**2))
        self._at(at + seconds, worker, clock, "computed")

    def _push(self, at: float, worker: int, clock: int) -> None:
        """All bytes have left after push_s, and a server takes in one worker's after another's."""
        self._computed[worker] = clock
        done = max(self._queue("in", at, self._c.server_in_s), self._queue(f"push {worker}", at, self._c.push_s))
        self._at(done, worker, clock, "pushed")
        self._advance(at, worker)

    def _update(self, at: float, worker: int, clock: int) -> None:
        """Each push is a step of the optimizer; synchronous ones are added up, and the last of a clock steps."""
        seconds = self._c.update_s
        if self._together:
            self._summed += 1
            seconds = _ADD_SHARE * seconds + (0.0 if self._summed % self._n else seconds)
        done = self._queue("update", at, seconds)
        self._waits.append(done - at - seconds)
        self._at(done, worker, clock, "applied")

    def _apply(self, at: float, worker: int, clock: int) -> None:
        """The servers hold it. Whoever waited for it may pull, or begin a clock."""
        before = self._slowest
        self._applied[worker] = clock
        self._behind[clock - 1] -= 1
        self._behind[clock] += 1
        while not self._behind[self._slowest]:
            self._slowest += 1
        used = self._used.pop((worker, clock))
        self._log.append((at, 0 if self._together else self._updates - used))
        self._updates += 1
        if clock == self._servers.clocks - 1 and not self._steady:
            self._steady = self._updates
        for one in range(self._n) if self._slowest > before else (worker,):
            self._pull(at, one)
            self._advance(at, one)

    def _pull(self, at: float, worker: int) -> None:
        """Once its own update is in, and those that its next clock may not miss."""
        servers, clock = self._servers, self._applied[worker]
        late = servers.bounded and not servers.overlap and self._slowest < clock - servers.staleness
        if late or self._asking[worker] == clock:
            return
        self._asking[worker], self._sent[worker, clock] = clock, self._updates
        done = max(self._queue("out", at, self._c.server_out_s), self._queue(f"pull {worker}", at, self._c.pull_s))
        self._at(done, worker, clock, "pulled")

    def _have(self, at: float, worker: int, clock: int) -> None:
        self._pulled[worker], self._held[worker] = clock, self._sent.pop((worker, clock))
        self._advance(at, worker)

    def _at(self, at: float, worker: int, clock: int, event: str) -> None:
        heapq.heappush(self._events, (at, worker, clock, event))

    def _queue(self, name: str, at: float, seconds: float) -> float:
        """First come, first served: when it is done."""
        self._free[name] = max(self._free[name], at) + seconds
        return self._free[name]


def _sources(servers: Servers, workers: int, found: Queued) -> Iterator[Source]:
    bound = f"at most {servers.staleness} clocks ahead of the slowest" if servers.bounded else "without a bound"
    detail = f"{workers} workers {bound}; an update is {found.stale:.1f} updates stale on average"
    if servers.bounded and servers.staleness == 0:
        yield Source(what="staleness", kind="given", detail="0: synchronous, the losses are those of the plan")
    else:
        yield Source(
            what="staleness", kind="assumed", detail=f"{detail}; that as many tokens train as well is not said"
        )
    given = {name for name in servers.model_fields_set if getattr(servers, name) is not None}
    for name, default in (
        ("server_bytes_per_s", "one NIC of the cluster"),
        ("worker_bytes_per_s", "a GPU's share of its node's NICs"),
        ("update_numel_per_s", "the host's vectorised CPU Adam"),
    ):
        kind = "given" if name in given else "assumed"
        yield Source(
            what=f"servers.{name}", kind=kind, detail=default if kind == "assumed" else f"{getattr(servers, name):g}"
        )
