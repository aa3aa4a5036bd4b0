"""serve(): from (model, inference plan, cluster, requests) to latencies, throughput and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from simulator.base.errors import Fault, InputError
from simulator.base.fit import Fit
from simulator.base.units import format_bytes, format_number
from simulator.predict.prediction import Source
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving.batch import Batch, Chunk
from simulator.studies.serving.costs import StepCosts
from simulator.studies.serving.decoding import Z90, batch_of, decode_step, sigma_of
from simulator.studies.serving.engine import Engine, Progress, ServedRun
from simulator.studies.serving.memory import ServingMemory, serving_memory
from simulator.studies.serving.plan import InferencePlan, check
from simulator.studies.serving.remedies import remedies
from simulator.studies.serving.report import Latencies, Load, Serving, Verdict, attained, latencies
from simulator.studies.serving.scheduler import Limits, RequestState
from simulator.studies.serving.slo import Slo
from simulator.studies.serving.sources import assumptions, sources
from simulator.studies.serving.workload import Request

Window = tuple[float, float]
_SHOWN_FAULTS = 20
# Capacity is the rate at which a full queue is served. It is read between the first and the third quarter of so many
# times the sequences that run at once, so that neither filling nor emptying counts.
_ROUNDS = 8
_MOST_SATURATING = 20_000
_NEARLY_FULL = 0.95
_SETTLED = 10  # mean latencies that a measured time should have


@dataclass(frozen=True, kw_only=True)
class _Deployment:
    """What every run of one serving question shares."""

    costs: StepCosts
    memory: ServingMemory
    calibration: Calibration
    curves: LinkCurves

    @property
    def limits(self) -> Limits:
        plan, model = self.costs.plan, self.costs.model
        return Limits(
            num_blocks=self.memory.num_blocks,
            block_size=plan.block_size,
            max_sequences=plan.max_sequences,
            max_tokens=plan.batched_tokens(model),
            chunked=plan.chunked_prefill,
            windows=self.costs.windows,
        )

    def play(
        self, requests: Sequence[Request], window: Window, progress: Progress | None = None, pace: float = 1.0
    ) -> ServedRun:
        """What happens to these requests. window: the time in which figures are counted. pace: a factor on all times."""
        costs = self.costs if pace == 1.0 else self.costs.at_pace(pace)
        return Engine(costs, self.limits, requests, window).run(progress)

    def probe(self) -> None:
        """Price a step of each kind, so that a missing number of the calibration is reported before the simulation."""
        self.costs.stages_s(batch_of(self.costs, 1, 1))
        keys = tuple(0 for _ in self.costs.windows)
        self.costs.stages_s(Batch(decodes=0, keys=keys, chunks=(Chunk(new=1, cached=0),)))


def serve(  # noqa: PLR0913  one a noun
    model: Model,
    plan: InferencePlan,
    cluster: Cluster,
    requests: Sequence[Request],
    calibration: Calibration | None = None,
    stack: Stack | None = None,
    *,
    curves: LinkCurves | None = None,
    slo: Slo | None = None,
    warmup: float = 0.1,
    interval: bool = False,
    progress: Progress | None = None,
) -> Serving:
    """Play `requests`, in order of arrival, through the plan's engines.

    calibration, stack, curves: as `predict` takes them. warmup: the part of the requests, first to arrive, that no figure
    counts. interval: play them twice more, with all times at the ends of their 90 % interval. progress: is told
    (requests answered, requests in all plays) now and then. A plan that does not fit in memory, and requests that come
    faster than they are served, are answers.
    Raises PlanError, StackError, CalibrationError, or InputError with every fault found.
    """
    stack = stack or Stack.of(plan)
    calibration = calibration or Calibration.for_device(cluster.device)
    curves = curves or calibration.links or default_curves()
    check(plan, model, cluster)
    _check_requests(model, plan, requests)
    costs = StepCosts(model, plan, cluster, stack, calibration, curves)
    memory = serving_memory(model, plan, cluster.device, stack)
    setting = _Deployment(costs=costs, memory=memory, calibration=calibration, curves=curves)
    setting.probe()
    said = sources(costs, calibration, cluster, curves)
    if not memory.fit.runs:
        return _does_not_fit(setting, requests, said)
    asked = _Asked(requests=requests, slo=slo or Slo(), warmup=warmup, interval=interval, progress=progress)
    return _played(setting, asked, said)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What is simulated, and which results are wanted."""

    requests: Sequence[Request]
    slo: Slo
    warmup: float
    interval: bool
    progress: Progress | None

    @property
    def num_warmup(self) -> int:
        return math.floor(self.warmup * len(self.requests))

    @property
    def window(self) -> Window:
        """From the first arrival that counts to the last; to the end of everything where those are one moment."""
        begin_s, end_s = self.requests[self.num_warmup].arrival_s, self.requests[-1].arrival_s
        return begin_s, end_s if end_s > begin_s else math.inf


def _played(setting: _Deployment, asked: _Asked, said: tuple[Source, ...]) -> Serving:
    """The answer of a plan that fits."""
    requests, costs = asked.requests, setting.costs
    queue = _full_queue(setting, requests)
    told = _Progress(asked.progress, (3 if asked.interval else 1) * len(requests) + len(queue))
    played = setting.play(requests, asked.window, told.part(len(requests)))
    capacity = _capacity(queue, setting.play(queue, (0.0, math.inf), told.part(len(queue))))
    jobs = played.jobs[asked.num_warmup :]
    size, context = _mean_step(costs, played, jobs)
    sigma = sigma_of(costs, batch_of(costs, size, context), setting.calibration, setting.curves)
    spread = math.exp(Z90 * sigma)
    ends = [
        latencies(setting.play(requests, asked.window, told.part(len(requests)), pace).jobs[asked.num_warmup :])
        for pace in ((1 / spread, spread) if asked.interval else ())
    ]
    found, load = latencies(jobs), _load(setting, played, asked.num_warmup, (capacity, spread))
    attainments, share = attained(jobs, asked.slo)
    verdict: Verdict = "overloaded" if load.arriving_per_s >= capacity else "ok"
    return Serving(
        **_common(setting, said),
        verdict=verdict,
        cause=_cause(verdict, load),
        suggestion=_suggestion(setting, verdict, load, found),
        num_requests=len(requests),
        num_warmup=asked.num_warmup,
        latencies=found,
        low_latencies=ends[0] if ends else None,
        high_latencies=ends[1] if ends else None,
        sigma=sigma,
        load=load,
        attainments=attainments,
        slo_share=share,
        decode_steps=tuple(
            decode_step(costs, n, context, setting.calibration, setting.curves) for n in dict.fromkeys((1, size))
        ),
        remedies=(),
    )


def _mean_step(costs: StepCosts, played: ServedRun, jobs: Sequence[RequestState]) -> tuple[int, int]:
    """(sequences of a mean step, their tokens in the middle of a mean answer)."""
    meter = played.meter
    size = round(meter.output_tokens / max(1, meter.num_steps))
    mean = sum(job.request.prompt_tokens + job.request.output_tokens / 2 for job in jobs) / len(jobs)
    return min(max(1, size), costs.plan.max_sequences), max(1, round(mean))


class _Progress:
    """Progress over several plays as one."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._before = progress, total, 0

    def part(self, count: int) -> Progress | None:
        """For the next play, of so many requests."""
        before, self._before = self._before, self._before + count
        progress, total = self._progress, self._total
        return None if progress is None else lambda done, _: progress(before + done, total)


def _check_requests(model: Model, plan: InferencePlan, requests: Sequence[Request]) -> None:
    """Raise InputError where there are none, where they are out of order, or longer than a sequence may be."""
    if not requests:
        raise InputError(Fault(place="requests", problem="there are none", remedy="one at least"))
    times = [request.arrival_s for request in requests]
    if not all(math.isfinite(time) for time in times) or times[0] < 0 or any(b < a for a, b in pairwise(times)):
        problem = "arrivals are not finite times from 0 on, in order"
        raise InputError(Fault(place="requests", problem=problem, remedy="sort them by arrival_s"))
    if any(min(request.prompt_tokens, request.output_tokens) < 1 for request in requests):
        raise InputError(
            Fault(place="requests", problem="a request has no token", remedy="prompt and answer of 1 at least")
        )
    longest = plan.model_len(model)
    seen: dict[tuple[int, int, int], int] = {}
    for request in requests:
        if request.prompt_tokens + request.output_tokens > longest:
            key = (request.line, request.prompt_tokens, request.output_tokens)
            seen[key] = seen.get(key, 0) + 1
    faults = [_too_long(model, plan, key, count) for key, count in seen.items()]
    if faults:
        more = len(faults) - _SHOWN_FAULTS
        rest = [Fault(place="requests", problem=f"{more} more lengths are too long")] if more > 0 else []
        raise InputError([*faults[:_SHOWN_FAULTS], *rest])


def _too_long(model: Model, plan: InferencePlan, key: tuple[int, int, int], count: int) -> Fault:
    line, prompt, output = key
    times = f" ({count:,} requests)" if count > 1 else ""
    return Fault(
        place=f"trace: line {line}" if line else "requests",
        problem=f"{prompt} tokens of prompt and {output} of answer are {prompt + output}, beyond {plan.model_len(model)}{times}",
        remedy=_shorter(model, plan, prompt + output),
    )


def _shorter(model: Model, plan: InferencePlan, total: int) -> str:
    if plan.model_len(model) < model.max_positions and total <= model.max_positions:
        return f"max_model_len = {total} or more"
    return f"shorter requests, or a model with more than {model.max_positions} positions"


def _full_queue(setting: _Deployment, requests: Sequence[Request]) -> list[Request]:
    """Requests of the same lengths, all present from the beginning: several times as many as run at once."""
    memory, plan = setting.memory, setting.costs.plan
    mean = sum(r.prompt_tokens + r.output_tokens for r in requests) / len(requests)
    room = max(1, int(memory.num_blocks * memory.block_size / mean))
    at_once = min(plan.max_sequences, room) * memory.num_schedulers * plan.dp
    count = min(max(_ROUNDS * at_once, 4), _MOST_SATURATING)
    return [replace(requests[i % len(requests)], arrival_s=0.0) for i in range(count)]


def _capacity(queue: Sequence[Request], played: ServedRun) -> float:
    """Requests a second that the engines serve when the queue never empties."""
    ends = sorted(job.end_s or 0.0 for job in played.jobs)
    first, last = len(queue) // 4, 3 * len(queue) // 4
    between_s = ends[last - 1] - ends[first - 1]
    return (last - first) / between_s if between_s > 0 else len(queue) / ends[-1]


def _does_not_fit(setting: _Deployment, requests: Sequence[Request], said: tuple[Source, ...]) -> Serving:
    costs, m = setting.costs, setting.memory
    found = remedies(costs.model, costs.plan, costs.cluster, costs.stack, m)
    cause = (
        f"{format_bytes(m.missing_bytes)} more than {costs.plan.gpu_memory_utilization:g} of a GPU's memory: a sequence of "
        f"max_model_len = {m.longest_tokens} tokens does not fit beside weights and activations"
        if m.over_budget
        else f"{format_bytes(m.missing_bytes)} more than a GPU has: gpu_memory_utilization = "
        f"{costs.plan.gpu_memory_utilization:g} leaves too little for the CUDA context"
    )
    told = "; ".join(f"{remedy.change} (cache of {remedy.kv_tokens:,} tokens)" for remedy in found)
    return Serving(
        **_common(setting, said),
        verdict=Fit.DOES_NOT_FIT,
        cause=cause,
        suggestion=told
        or "no single change that was tried makes it fit: more GPUs an engine (tp × pp), or a smaller model",
        num_requests=len(requests),
        num_warmup=0,
        latencies=None,
        low_latencies=None,
        high_latencies=None,
        sigma=None,
        load=None,
        attainments=(),
        slo_share=None,
        decode_steps=(),
        remedies=found,
    )


def _common(setting: _Deployment, said: tuple[Source, ...]) -> dict[str, Any]:
    costs = setting.costs
    return {
        "model": costs.model.name,
        "cluster": costs.cluster.name,
        "num_devices": costs.plan.num_devices,
        "memory": setting.memory,
        "assumptions": assumptions(costs.model),
        "sources": said,
    }


def _load(setting: _Deployment, played: ServedRun, skipped: int, capacity: tuple[float, float]) -> Load:
    """capacity: requests a second, and the factor to the ends of its interval."""
    meter, plan, requests = played.meter, setting.costs.plan, played.jobs
    measured_s = min(meter.end_s, played.end_s) - meter.start_s
    spanned_s = requests[-1].request.arrival_s - requests[0].request.arrival_s
    pools = setting.memory.num_blocks * setting.memory.num_schedulers * plan.dp
    answered = len(requests) - skipped if math.isinf(meter.end_s) else meter.finished
    return Load(
        measured_s=measured_s,
        arriving_per_s=(len(requests) - 1) / spanned_s if spanned_s else 0.0,
        capacity_per_s=capacity[0],
        low_capacity_per_s=capacity[0] / capacity[1],
        high_capacity_per_s=capacity[0] * capacity[1],
        requests_per_s=answered / measured_s,
        output_tokens_per_s=meter.output_tokens / measured_s,
        prompt_tokens_per_s=meter.prefill_tokens / measured_s,
        utilisation=meter.busy_s / (measured_s * plan.dp),
        num_steps=meter.num_steps,
        sequences=meter.output_tokens / meter.num_steps if meter.num_steps else 0.0,
        kv_mean=meter.block_s / (measured_s * pools),
        kv_peak=meter.peak_blocks / setting.memory.num_blocks,
        in_system=meter.request_s / played.end_s,
        preemptions=played.preemptions,
        recomputed_tokens=played.recomputed,
    )


def _cause(verdict: Verdict, load: Load) -> str:
    arriving, capacity = format_number(load.arriving_per_s), format_number(load.capacity_per_s)
    if verdict == "overloaded":
        return (
            f"{arriving} requests/s arrive and at most {capacity} are served: the queue grows without end, and latencies only "
            "say how long it was watched"
        )
    if not load.arriving_per_s:
        return "all requests stand in the queue from the beginning: latencies are those of a batch job"
    return f"{arriving} of the {capacity} requests/s that could be served"


def _suggestion(setting: _Deployment, verdict: Verdict, load: Load, found: Latencies) -> str:
    plan = setting.costs.plan
    if verdict == "overloaded":
        engines = math.ceil(plan.dp * load.arriving_per_s / (0.8 * load.capacity_per_s))
        return f"dp = {engines} keeps 20 % in reserve ({engines * plan.engine_devices} GPUs)"
    if load.preemptions:
        return "the cache runs out: kv_cache = fp8, fewer max_sequences, or more GPUs an engine"
    if load.arriving_per_s and load.measured_s < _SETTLED * found.latency.mean_s:
        spans = load.measured_s / found.latency.mean_s
        return f"only {spans:.1f} mean latencies were watched, too few to settle: play more requests"
    if load.arriving_per_s > _NEARLY_FULL * load.capacity_per_s:
        return "close to capacity, percentiles still move with the number of requests: play more of them"
    return ""
