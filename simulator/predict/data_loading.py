"""Data loading as a stream that can stall a step: workers read, decode and copy batches ahead, into a buffer of some.

A batch is the micro-batch of one data-parallel rank. Worker n mod w makes batch n; it begins when it has made its last
one and a slot of the w · prefetch is free, which is when batch n − w · prefetch is taken. Ranks step together, so the
latest of their batches counts. Storage is the node's: its ranks' batches are read one after another. The law is that
of a queue with the two ends turned round: step time is the service, batches that wait ready are its customers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from pydantic import Field

from simulator.base.errors import PlanError
from simulator.base.schema import Strict
from simulator.base.units import Bytes, BytesPerS, Seconds
from simulator.predict.prediction import Prediction
from simulator.spec.cluster import Cluster
from simulator.spec.plan import Plan
from simulator.work.program import COMPUTE_STREAM
from simulator.work.trace import Span, Timeline

STALL: Final = "data loading"
_WARM_UP: Final = 0.5  # of the batches, until the buffer is as full as it gets
_MOST_OF_A_STEP: Final = 10_000  # batches of one step that are simulated; more go on alike
_EVEN: Final = 1e-6  # variation that nobody could measure
_MOST_DRAWS: Final = 20_000_000
_MOST_RANKS: Final = 4096  # more of them are later by next to nothing: the latest of n grows with the logarithm
_DETERMINISTIC, _MOST_DETERMINISTIC = 400, 40_000  # batches that show a steady state where nothing varies


class DataLoading(Strict):
    """`[data]`: where samples come from. A sample is a sequence of `seq_len`."""

    decode_s: Seconds = Field(
        ge=0, default=0.0, description="of one core for one sample, on the Xeon of a DGX H100; `host_factor` scales it"
    )
    decode_variation: float = Field(
        ge=0, le=10, default=0.0, description="standard deviation of `decode_s` over its mean; 1: exponential"
    )
    sample_bytes: Bytes = Field(ge=0, default=0, description="read from storage for one sample")
    storage_bytes_per_s: BytesPerS | None = Field(
        gt=0, default=None, description="what one node reads; not set: the node's drives"
    )
    device_bytes: Bytes = Field(ge=0, default=0, description="of one sample, copied to the GPU")
    workers: int = Field(ge=0, le=1024, default=4, description="processes of one rank; 0: the step loads for itself")
    prefetch: int = Field(ge=1, le=1024, default=2, description="batches that each worker keeps ready")
    cores: int | None = Field(
        ge=1, le=65536, default=None, description="of a node, for its ranks' workers; not set: one for each"
    )
    batches: int = Field(ge=100, le=10**5, default=4000, description="simulated, where decoding varies")
    seed: int = Field(ge=0, le=2**63, default=0, description="of the decoding times")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Seconds that a batch takes of each stage, where the step takes them every `period_s`.

    decode_s: of one worker, shared cores counted. read_s: of the node's storage for a batch of each of its ranks.
    """

    period_s: float
    decode_s: float
    read_s: float
    copy_s: float
    workers: int
    slots: int

    @property
    def worker_s(self) -> float:
        """A worker reads a batch, then decodes it."""
        return self.read_s + self.decode_s

    @property
    def shares(self) -> dict[str, float]:
        """Of each stage, the share of the period that a batch takes it: above 1, it decides."""
        seconds = {"workers": self.worker_s / max(self.workers, 1), "storage": self.read_s, "copy": self.copy_s}
        return {name: one / self.period_s for name, one in seconds.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataStall:
    """What loading does to a step. stall_s: mean of a step; ready_s: how long a batch waits ready, mean.

    steps_s: percentiles of a step with its stall. workers_needed: of a rank, that keep up on average.
    """

    alone_s: float
    stall_s: float
    ready_s: float
    steps_s: dict[str, float]
    loads: Loads
    workers_needed: int

    @property
    def step_s(self) -> float:
        return self.alone_s + self.stall_s

    @property
    def slowest(self) -> str:
        """The stage that is used most."""
        return max(self.loads.shares, key=lambda name: self.loads.shares[name])

    def report(self) -> dict[str, Any]:
        """Plain data, as `--json` shows it."""
        own = {name: getattr(self, name) for name in ("stall_s", "alone_s", "ready_s", "steps_s", "workers_needed")}
        return {**own, "slowest": self.slowest, "shares": self.loads.shares, **asdict(self.loads)}


def stall_of(loading: DataLoading, step_s: float, plan: Plan, cluster: Cluster) -> DataStall:
    """Loading beside a step of `step_s`. Raises PlanError where the cluster has no host."""
    loads = _loads(loading, step_s, plan, cluster)
    ranks = min(plan.num_data_parallel, _MOST_RANKS)
    each = min(plan.num_micro_batches, _MOST_OF_A_STEP)
    count = _num_batches(loading, loads, each, ranks)
    stalls, ready_s = played(loads, _times(loading, loads, plan, count, ranks))
    of_steps = stalls.reshape(-1, each).sum(axis=1)[int(_WARM_UP * count) // each :]
    steps = step_s + of_steps * (plan.num_micro_batches / each)
    return DataStall(
        alone_s=step_s,
        stall_s=max(0.0, float(steps.mean()) - step_s),  # never less by a rounding
        ready_s=ready_s,
        steps_s={f"p{share}": float(np.percentile(steps, share)) for share in (50, 90, 95, 99)},
        loads=loads,
        workers_needed=math.ceil(loads.worker_s / loads.period_s - 1e-9),
    )


def _num_batches(loading: DataLoading, loads: Loads, each: int, ranks: int) -> int:
    """Batches to simulate: whole steps of `each`; where nothing varies, as many more as make whole rounds of the workers."""
    if loading.decode_variation > _EVEN:
        count = min(loading.batches, max(100, _MOST_DRAWS // ranks))
        return count + -count % (2 * each)
    rounds = 2 * math.lcm(max(loads.workers, 1), each)
    count = rounds * -(-max(_DETERMINISTIC, 4 * loads.slots) // rounds)
    return min(count, max(2 * each, _MOST_DETERMINISTIC - _MOST_DETERMINISTIC % (2 * each)))


def _loads(loading: DataLoading, step_s: float, plan: Plan, cluster: Cluster) -> Loads:
    tier = cluster.host_tier
    if tier is None:
        problem = "has no [host], whose memory and cores would load data"
        raise PlanError.at(f"data: {cluster.name}", problem, "add [host], or leave out [data]")
    samples = plan.micro_batch_size
    here = min(plan.num_data_parallel, max(1, cluster.gpus_per_node // (plan.tp * plan.cp)))
    crowd = max(1.0, here * max(loading.workers, 1) / loading.cores) if loading.cores else 1.0
    storage = loading.storage_bytes_per_s or tier.nvme_read_bytes_per_s
    copied = samples * loading.device_bytes
    return Loads(
        period_s=step_s / plan.num_micro_batches,
        decode_s=samples * loading.decode_s * cluster.device.host_factor * crowd,
        read_s=here * samples * loading.sample_bytes / storage,
        copy_s=tier.copy_latency_s + copied / tier.h2d_bytes_per_s if copied else 0.0,
        workers=loading.workers,
        slots=loading.workers * loading.prefetch,
    )


def _times(loading: DataLoading, loads: Loads, plan: Plan, count: int, ranks: int) -> Iterator[np.ndarray[Any, Any]]:
    """Decoding times of each batch by rank: sums of independent samples, as a gamma distribution."""
    if loading.decode_variation <= _EVEN or not loads.decode_s:
        yield from (np.full(1, loads.decode_s) for _ in range(count))
        return
    shape, generator = plan.micro_batch_size / loading.decode_variation**2, np.random.default_rng(loading.seed)
    for _ in range(count):
        yield generator.gamma(shape, loads.decode_s / shape, ranks)


def played(loads: Loads, times: Iterator[np.ndarray[Any, Any]]) -> tuple[np.ndarray[Any, Any], float]:
    """(how long each batch is waited for, how long one waits ready on average), of batches taken one after another."""
    made: deque[Any] = deque(maxlen=max(loads.workers, 1))  # when the last batches were ready, by rank
    taken: deque[float] = deque(maxlen=max(loads.slots, 1))
    free_s = read_s = waited_s = 0.0
    copied: Any = 0.0  # when the last batch was on the GPU, by rank
    stalls = []
    for decode_s in times:
        if loads.workers:
            begin = np.maximum(
                made[0] if len(made) == loads.workers else 0.0, taken[0] if len(taken) == loads.slots else 0.0
            )
        else:
            begin = np.full(1, free_s)
        read_s = max(read_s, float(np.min(begin))) + loads.read_s
        ready = np.maximum(begin, read_s if loads.read_s else 0.0) + decode_s
        copied = np.maximum(copied, ready) + loads.copy_s
        last_s = float(np.max(copied))
        stalls.append(max(0.0, last_s - free_s))
        waited_s += max(0.0, free_s - last_s)
        start_s = max(free_s, last_s)
        made.append(ready)
        taken.append(start_s)
        free_s = start_s + loads.period_s
    return np.array(stalls), waited_s / len(stalls)


def with_data(prediction: Prediction, found: DataStall) -> Prediction:
    """The prediction of the step with its mean stall, before its first op."""
    stall_s = found.stall_s
    if not stall_s:
        return prediction
    longer = found.step_s / prediction.step_s
    return replace(
        prediction,
        step_s=found.step_s,
        low_s=prediction.low_s * longer,
        high_s=prediction.high_s * longer,
        upper_s=prediction.upper_s + stall_s,
        breakdown={**prediction.breakdown, f"exposed:{STALL}": stall_s},
        timeline=_after_stall(prediction.timeline, stall_s),
    )


def _after_stall(timeline: Timeline, stall_s: float) -> Timeline:
    """The same later, behind a wait for data on a stream of its own in every program."""
    spans = []
    for program in timeline.programs:
        own = timeline.of(program)
        first_s = min((span.start_s for span in own if span.stream == COMPUTE_STREAM), default=0)
        wait = Span(
            program=program,
            stream="data",
            id=-1,
            label="wait for data",
            category=STALL,
            start_s=0.0,
            end_s=stall_s,
            nominal_s=stall_s,
        )
        spans += [wait, *(_later(span, stall_s, first=span.start_s <= first_s) for span in own)]
    return Timeline(spans=tuple(spans), step_s=timeline.step_s + stall_s)


def _later(span: Span, by_s: float, *, first: bool) -> Span:
    """first: it would have waited for its launch alone, and now waits for the data."""
    joined_s = None if span.joined_s is None else span.joined_s + by_s
    cause = -1 if first and span.cause is None else span.cause
    return span._replace(start_s=span.start_s + by_s, end_s=span.end_s + by_s, joined_s=joined_s, cause=cause)
