"""Serving: the answer of `serve`, and the figures that are read off a played queue."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

from simulator.base.fit import Fit
from simulator.predict.prediction import Source
from simulator.spec.prices import AtPrice
from simulator.studies.serving.memory import ServingMemory
from simulator.studies.serving.remedies import Remedy
from simulator.studies.serving.served import Served
from simulator.studies.serving.slo import Figure, Slo

Verdict = Literal["ok", "overloaded", Fit.DOES_NOT_FIT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Nearest-rank percentiles, mean and largest of a figure over the requests that count, in seconds."""

    p50_s: float
    p90_s: float
    p99_s: float
    mean_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """One limit: the share of requests within it. measured_s: the percentile that it limits; held: that is within it.

    measured_s is None where no request has the figure.
    """

    name: Figure
    limit_s: float
    share: float
    held: bool
    percentile: float
    measured_s: float | None

    @property
    def excess(self) -> float:
        """The percentile over its limit; 0 where no request has the figure."""
        return (self.measured_s or 0.0) / self.limit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """ttft: arrival to first token. tpot: from there, per further token (of answers with two or more). latency: to the end."""

    ttft: Spread
    tpot: Spread | None
    latency: Spread

    @classmethod
    def outermost(cls, pick: Callable[[Iterable[float]], float], plays: Sequence[Latencies]) -> Latencies:
        """Figure by figure of several plays, the least (`min`) or the most: with longer steps some happen to wait less."""
        tpot = [play.tpot for play in plays if play.tpot]
        ttft, latency = [play.ttft for play in plays], [play.latency for play in plays]
        return cls(
            ttft=_outermost(pick, ttft),
            tpot=_outermost(pick, tpot) if tpot else None,
            latency=_outermost(pick, latency),
        )


def _outermost(pick: Callable[[Iterable[float]], float], spreads: Sequence[Spread]) -> Spread:
    return Spread(**{key: pick(getattr(one, key) for one in spreads) for key in asdict(spreads[0])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the engines did in the measured time.

    arriving_per_s: requests; 0: all at once. capacity_per_s: requests that a queue that never empties is served at, and
    its 90 % interval. utilisation: of the measured time, the part in which the first stage of an engine computes. sequences: mean in a step.
    kv_mean, kv_peak: of an engine's blocks, in use (peak: of one scheduler). in_system: requests between arrival and answer, mean
    over everything.
    recomputed_tokens: that preemptions threw away.
    """

    measured_s: float
    arriving_per_s: float
    capacity_per_s: float
    low_capacity_per_s: float
    high_capacity_per_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    utilisation: float
    num_steps: int
    sequences: float
    kv_mean: float
    kv_peak: float
    in_system: float
    preemptions: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """Caches that passed from the engines of prompts to those that decode.

    near: inside nodes; otherwise over the network. mean_s: on the links, of a request; mean_wait_s: for them.
    utilisation: of the links of the smaller pool.
    """

    near: bool
    requests: int
    num_bytes: int
    mean_s: float
    mean_wait_s: float
    utilisation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost(AtPrice):
    """Money at one price. million_*: of so many tokens at the load that was played; at_capacity: if the queue never emptied.

    low_, high_at_capacity: 90 % interval. An output token bears its prompt; `million_tokens` shares among both.
    """

    request: float
    million_output_tokens: float
    million_tokens: float
    million_output_tokens_at_capacity: float
    low_at_capacity: float
    high_at_capacity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """One step that decodes `sequences` sequences of `context` tokens each, through all stages.

    low_s, high_s: its 90 % interval. parts: where it goes: gemm, attention, elementwise, collectives, host (between steps,
    and what launching takes beyond the devices' work); they sum to step_s. bandwidth_share: bytes of weights and cache that
    a GPU of the slowest stage reads, over what its memory delivers at its data sheet's speed in that time.
    """

    sequences: int
    context: int
    step_s: float
    low_s: float
    high_s: float
    parts: dict[str, float]
    bandwidth_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a plan serves a stream of requests. latencies, load: None where the plan does not fit.

    low_latencies, high_latencies: of plays with every time at the lower and the upper end of its 90 % interval, where that was asked.
    sigma: one-sigma relative uncertainty of a mean step's time. num_requests: played; num_warmup of them are in no figure. slo_share: requests within every limit; None: none is set.
    costs: where prices were given. prefill_memory, handed_over: where prompts have engines of their own; memory is then of
    the engines that decode, or of those that do not fit.
    """

    model: str
    cluster: str
    num_devices: int
    verdict: Verdict
    cause: str
    suggestion: str
    num_requests: int
    num_warmup: int
    latencies: Latencies | None = None
    low_latencies: Latencies | None = None
    high_latencies: Latencies | None = None
    sigma: float | None = None
    load: Load | None = None
    attainments: tuple[Attainment, ...] = ()
    slo_share: float | None = None
    decode_steps: tuple[DecodeStep, ...] = ()
    memory: ServingMemory
    remedies: tuple[Remedy, ...] = ()
    assumptions: tuple[str, ...]
    sources: tuple[Source, ...]
    costs: tuple[TokenCost, ...] = ()
    prefill_memory: ServingMemory | None = None
    handed_over: HandedOver | None = None

    @property
    def fits(self) -> bool:
        return self.memory.fit.runs


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest rank, of at least one value."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def spread(values: Iterable[float]) -> Spread:
    """Of at least one value."""
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
    return Spread(p50_s=p50, p90_s=p90, p99_s=p99, mean_s=math.fsum(ordered) / len(ordered), max_s=ordered[-1])


def ttft_s(job: Served) -> float:
    """Arrival to the end of the step that makes the first token."""
    assert job.first_s is not None
    return job.first_s - job.request.arrival_s


def tpot_s(job: Served) -> float | None:
    """Mean time of the tokens behind the first; None where there are none."""
    assert job.first_s is not None
    assert job.end_s is not None
    more = job.request.output_tokens - 1
    return (job.end_s - job.first_s) / more if more else None


def latency_s(job: Served) -> float:
    """Arrival to the last token."""
    assert job.end_s is not None
    return job.end_s - job.request.arrival_s


def latencies(jobs: Sequence[Served]) -> Latencies:
    """Of the requests that count."""
    paces = [pace for pace in map(tpot_s, jobs) if pace is not None]
    return Latencies(
        ttft=spread(map(ttft_s, jobs)), tpot=spread(paces) if paces else None, latency=spread(map(latency_s, jobs))
    )


MEASURES: Final[Mapping[Figure, Callable[[Served], float | None]]] = {
    "ttft": ttft_s,
    "tpot": tpot_s,
    "latency": latency_s,
}


def attained(jobs: Sequence[Served], slo: Slo) -> tuple[tuple[Attainment, ...], float | None]:
    """Each limit with the share of requests within it, and the share within all."""
    if not slo.any:
        return (), None
    values = {name: [measure(job) for job in jobs] for name, measure in MEASURES.items()}
    return judged(values, slo)


def judged(values: Mapping[Figure, Sequence[float | None]], slo: Slo) -> tuple[tuple[Attainment, ...], float | None]:
    """The same from every request's figures. A request without a figure is within its limits."""
    rows: list[Attainment] = []
    within = [True] * len(values["ttft"])
    for limit in slo.limits:
        each = values[limit.name]
        good = [value is None or value <= limit.limit_s for value in each]
        within = [a and b for a, b in zip(within, good, strict=True)]
        known = sorted(value for value in each if value is not None)
        measured_s = percentile(known, limit.percentile) if known else None
        rows.append(
            Attainment(
                name=limit.name,
                limit_s=limit.limit_s,
                share=sum(good) / len(good),
                held=measured_s is None or measured_s <= limit.limit_s,
                percentile=limit.percentile,
                measured_s=measured_s,
            )
        )
    return tuple(rows), (sum(within) / len(within) if rows else None)
