"""What is predicted for a row of a table of servers: its load played through the queue, and the figure that it measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from simulator.base.remembered import recent
from simulator.base.units import format_bytes
from simulator.spec.calibration.intervals import unknown_engine
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.serving_rows import Load, RequestedMetric, Server
from simulator.studies.serving import Batch, Deployment, InferencePlan, Request, check
from simulator.studies.serving.decoding import Z90, batch_of, sigma_of
from simulator.studies.serving.deployment import ALWAYS
from simulator.studies.serving.engine import ServedRun
from simulator.studies.serving.report import MEASURES, percentile, tpot_s
from simulator.studies.serving.served import Served
from simulator.studies.serving.shards import kv_bytes_per_token, weight_bytes
from simulator.studies.serving.workload import Users

_SEED: Final = 0
_APART: Final = 0.1  # of answers
# Part of a GPU's memory by which a launch may leave less for the cache: NVIDIA's generator of launches says 0.8 where
# SGLang and TensorRT-LLM take 0.84 to 0.9 (ai-dynamo/aiconfigurator, backend_templates); half of it where that leaves none.
_LESS_CACHE: Final = (0.04, 0.02)
# The same of engines that nobody described, predicted with 0.9: described ones take 0.8 (LMDeploy, launches of TensorRT-LLM) to 0.95.
_UNKNOWN_CACHE: Final = (0.1, 0.06, *_LESS_CACHE)
_FULL: Final = 0.97  # of the cache's blocks at their peak: it limits what runs
# Prior, one sigma, of how long users of a closed loop wait beyond what the plays span: cold kernels in a first round, the
# client's own time. Of twelve rows of servers whose time per token calibrates their engines, four waited longer or
# shorter than any play, by 8 % to a factor of 12.
WAIT_SIGMA: Final = 0.25
_MAX_CACHED: Final = 32  # servers, and their runs, that stay in memory: rows of one stand together in tables
_ANY: Final = RequestedMetric(figure="ttft", percentile=None, unit=1.0)  # what is played does not depend on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The predicted figure and the ends of its 90 % interval, in the row's unit; floors: what baselines know."""

    value: float
    low: float
    high: float
    floors: tuple[float, float]


def predicted(server: Server) -> Found:
    """The row's figure. Raises RefusedError where the plan does not fit in memory, launched in any way."""
    deployed = deployed_once(server)
    if server.other is not None and not deployed.tightest.memory.fit.runs:
        return predicted(replace(server, plan=server.other, other=None))
    runs, batch = runs_of(server)
    spread = math.exp(Z90 * sigma_of(deployed.costs, batch, deployed.calibration, deployed.curves))
    ends = [figure_of(run, server.metric) / server.metric.unit for run in runs]
    if server.waits and len(runs) > 1:
        unknown = unknown_engine().wait if server.stack.known == "unknown" else 0.0
        spread = math.exp(math.hypot(math.log(spread), Z90 * WAIT_SIGMA, Z90 * unknown))
    floors = _floors(deployed, server.load, server.metric)
    return Found(value=ends[0], low=min(ends) / spread, high=max(ends) * spread, floors=floors)


def deployed_once(server: Server) -> Deployment:
    """Its plan on its cluster, kept for the rows behind."""
    return _deployed(server.model, server.plan, server.cluster, server.stack)


@recent(_MAX_CACHED)
def _deployed(model: Model, plan: InferencePlan, cluster: Cluster, stack: Stack) -> Deployment:
    check(plan, model, cluster)
    return Deployment.of(model, plan, cluster, stack)


def runs_of(server: Server) -> tuple[tuple[ServedRun, ...], Batch]:
    """The load from its first request to its last, in one way or several, and a mean step of the first. Raises as `predicted`."""
    return _played(replace(server, metric=_ANY))


@recent(_MAX_CACHED)
def _played(server: Server) -> tuple[tuple[ServedRun, ...], Batch]:
    """The same.

    A closed loop is played in several ways, the likeliest first, since a table leaves open what decides how long its users
    wait. Users whose answers are equally long stay in step for ever, and wait for each other's prompts; a few per cent of
    difference part them. Launches give a step more tokens or fewer, and the cache more memory or less; of an
    engine that nobody described prompts may come first. So is a load whose lengths
    are means: all as long as that, or some much longer.
    """
    deployed, load = deployed_once(server), server.load
    memory = deployed.tightest.memory
    if not memory.fit.runs:
        raise RefusedError(("does not fit", f"{format_bytes(memory.missing_bytes)} of a GPU's memory are missing"))
    runs = [_run(deployed, load)]
    if load.users > 1 and not load.alone:
        spacings = (0.0, _APART) if load.shortest == 1.0 else (0.0,)
        runs += [_run(deployed, load, apart) for apart in spacings[1:]]
        if server.other is not None:
            other = deployed_once(replace(server, plan=server.other))
            runs += [_run(other, load, apart) for apart in spacings]
        runs += _with_less_cache(server, deployed, runs[0])
    if load.means:
        runs.append(_run(deployed, load, varied=True))
    meter = runs[0].meter
    size = min(max(1, round(meter.output_tokens / max(1, meter.num_steps))), deployed.plan.max_sequences)
    return tuple(runs), batch_of(deployed.costs, size, load.prompt + load.output // 2)


def _run(deployed: Deployment, load: Load, apart: float = 0.0, *, varied: bool = False) -> ServedRun:
    users, plan, model = Users(count=0 if load.alone else load.users), deployed.plan, deployed.costs.model
    streamed = users.count > 0 or load.rate < math.inf
    most = model.max_positions if plan.chunked_prefill else plan.batched_tokens(model)
    return deployed.play(_requests(load, apart, most if varied else 0), ALWAYS, users=users, streamed=streamed)


def _with_less_cache(server: Server, deployed: Deployment, run: ServedRun) -> list[ServedRun]:
    """The same load where a launch leaves the cache less memory, if the cache limits what runs."""
    if run.meter.peak_blocks < _FULL * deployed.memory.num_blocks:
        return []
    for less in _UNKNOWN_CACHE if server.stack.known == "unknown" else _LESS_CACHE:
        part = server.plan.gpu_memory_utilization - less
        smaller = deployed_once(replace(server, plan=server.plan.model_copy(update={"gpu_memory_utilization": part})))
        if smaller.memory.fit.runs:
            return [_run(smaller, server.load)]
    return []


def _requests(load: Load, apart: float = 0.0, room: int = 0) -> list[Request]:
    """A rate's arrivals are a Poisson process, stretched so that the mean is the rate's.

    apart: answers of one length are so much shorter at most. room: lengths vary, and a request has so many tokens at most; 0: they do not.
    """
    count, times = load.requests, [0.0] * load.requests
    if not load.users and load.rate < math.inf:
        arrivals = np.cumsum(np.random.default_rng(_SEED).exponential(size=count))
        times = [float(time) for time in arrivals * (count / load.rate / arrivals[-1])]
    drawn = np.random.default_rng(_SEED)
    if load.shortest < 1:
        prompts, answers = (_lengths(drawn, load.shortest, most, count) for most in (load.prompt, load.output))
    elif room:
        most = room / (load.prompt + load.output)
        prompts, answers = (_around(drawn, mean, most * mean, count) for mean in (load.prompt, load.output))
    else:
        prompts = [load.prompt] * count
        answers = [max(1, round(load.output * (1 - float(part)))) for part in drawn.uniform(0, apart, size=count)]
    return [
        Request(arrival_s=time, prompt_tokens=prompt, output_tokens=answer)
        for time, prompt, answer in zip(times, prompts, answers, strict=True)
    ]


def _lengths(drawn: np.random.Generator, shortest: float, longest: int, count: int) -> list[int]:
    """Whole numbers of tokens, equally likely."""
    return [int(n) for n in drawn.integers(max(1, int(shortest * longest)), longest, size=count, endpoint=True)]


def _around(drawn: np.random.Generator, mean: int, most: float, count: int) -> list[int]:
    """Tokens, exponentially distributed up to `most`: some requests are much longer than most, as in chats (arXiv 2309.06180, figure 11)."""
    times = drawn.exponential(size=count)
    return [max(1, int(min(most, one))) for one in (times * mean / times.mean()).round()]


def figure_of(run: ServedRun, metric: RequestedMetric) -> float:
    """In SI. Raises RefusedError where no request has it."""
    jobs = run.jobs
    if metric.figure == "ttft" or metric.figure == "tpot" or metric.figure == "latency":  # noqa: PLR1714  which narrows
        return _statistic([value for value in map(MEASURES[metric.figure], jobs) if value is not None], metric)
    if metric.figure == "itl":
        return _between_tokens(jobs, metric)
    prompts, answers = sum(j.request.prompt_tokens for j in jobs), sum(j.request.output_tokens for j in jobs)
    counted = {"output_rate": answers, "token_rate": answers + prompts, "request_rate": len(jobs)}[metric.figure]
    return counted / run.end_s


def _statistic(values: Sequence[float], metric: RequestedMetric) -> float:
    if not values:
        raise RefusedError(("metric", f"answers of one token have no {metric.figure}"))
    if metric.percentile is None:
        return math.fsum(values) / len(values)
    return percentile(sorted(values), metric.percentile)


def _between_tokens(jobs: Sequence[Served], metric: RequestedMetric) -> float:
    """Gaps between tokens of all answers: their mean, each answer as often as it has gaps; percentiles of answers' means."""
    if metric.percentile is not None:
        return _statistic([value for value in map(tpot_s, jobs) if value is not None], metric)
    gaps = sum(job.request.output_tokens - 1 for job in jobs)
    spent = math.fsum((tpot_s(job) or 0.0) * (job.request.output_tokens - 1) for job in jobs)
    return _statistic([spent / gaps] if gaps else [], metric)


def _floors(deployed: Deployment, load: Load, metric: RequestedMetric) -> tuple[float, float]:
    """Seconds of the figure's work (per unit of it, for rates) on a machine without losses: products, and bytes read.

    Of all sequences that the load or the cache lets run at once; nothing here depends on a calibration.
    """
    plan, model, device = deployed.plan, deployed.costs.model, deployed.costs.cluster.device
    shard = deployed.costs.shards[0]
    length = load.prompt + load.output
    room = max(1, deployed.memory.num_blocks * plan.block_size // length)
    users = -(-load.users // plan.dp) if load.users else room
    at_once = min(users, room, plan.max_sequences)
    peak = device.peak("fp8" if plan.weights == "fp8" else plan.compute_dtype) * plan.engine_devices
    token_s = 2 * model.num_active_parameters / peak
    held_s = weight_bytes(shard, plan) * plan.pp / device.memory_bytes_per_s
    cached_s = kv_bytes_per_token(shard, plan) * plan.pp / device.memory_bytes_per_s
    step = (at_once * token_s, held_s + at_once * cached_s * (load.prompt + load.output / 2))
    prompts = (load.prompt * token_s * (load.users if load.alone else 1), held_s)
    if metric.figure == "ttft":
        return prompts
    latency = (prompts[0] + load.output * step[0], prompts[1] + load.output * step[1])
    if metric.figure in ("tpot", "itl"):
        return step[0] + prompts[0] * at_once / load.output, step[1]
    if metric.figure == "latency":
        return latency
    each = {"output_rate": load.output, "token_rate": length, "request_rate": 1}[metric.figure] * at_once * plan.dp
    return (at_once * load.prompt * token_s + load.output * step[0]) / each, load.output * step[1] / each
