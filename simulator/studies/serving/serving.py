"""serve(): from (model, inference plan, cluster, requests) to latencies, throughput and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from simulator.base.errors import Fault, InputError
from simulator.base.fit import Fit
from simulator.base.remembered import remembered
from simulator.base.sums import summed
from simulator.base.units import counted, format_bytes, format_number
from simulator.predict.prediction import Source
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving.costs import StepCosts
from simulator.studies.serving.decoding import Z90, batch_of, decode_step, sigma_of
from simulator.studies.serving.deployment import Deployment, Window
from simulator.studies.serving.engine import Progress, ServedRun
from simulator.studies.serving.legal import check
from simulator.studies.serving.mixers import hybrid_notes
from simulator.studies.serving.plan import InferencePlan
from simulator.studies.serving.remedies import of_prefill, remedies
from simulator.studies.serving.report import HandedOver, Latencies, Load, Serving, Verdict, attained, latencies
from simulator.studies.serving.served import Served, rate
from simulator.studies.serving.slo import Slo
from simulator.studies.serving.workload import NO_USERS, Request, Requests, Users
from simulator.work.collectives import Links, calibrated
from simulator.work.collectives import source as links_source

_SHOWN_FAULTS = 20
_NEARLY_FULL = 0.95
_SETTLED = 10  # mean latencies that a measured time should have
_WATCHED = 10_000  # requests of a queue that grows without end: more of them only grow it further


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
    users: Users = NO_USERS,
    interval: bool = False,
    progress: Progress | None = None,
) -> Serving:
    """Play `requests`, in order of arrival, through the plan's engines.

    calibration, stack, curves: as `predict` takes them. warmup: the part of the requests, first to arrive, that no figure
    counts. users: of a closed loop, whose requests come when others are answered; without any they
    come when they say. interval: play them twice more, with all times at the ends of their 90 % interval. progress: is told
    (requests answered, requests in all plays) now and then. A plan that does not fit in memory, and requests that come
    faster than they are served, are answers.
    Raises PlanError, StackError, CalibrationError, or InputError with every fault found.
    """
    stack = stack or Stack.of(plan)
    check(plan, model, cluster)
    check_requests(model, plan, requests)
    setting = _deployed(model, plan, cluster, stack, calibration, curves)
    origins = sources(setting.costs, setting.calibration, cluster, setting.curves)
    if not setting.tightest.memory.fit.runs:
        return _does_not_fit(setting, requests, origins)
    run = _Run(requests=requests, slo=slo or Slo(), warmup=warmup, users=users, interval=interval, progress=progress)
    return _played(setting, run, origins)


# The same plan at other rates, one after the other: its steps have been priced
_deployed = remembered(1)(Deployment.of)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What is simulated, and which results are wanted."""

    requests: Sequence[Request]
    slo: Slo
    warmup: float
    users: Users
    interval: bool
    progress: Progress | None

    @property
    def num_warmup(self) -> int:
        return math.floor(self.warmup * len(self.requests))

    def watched(self, capacity_per_s: float) -> _Run:
        """The first of them, where more than that come faster than they are served."""
        grows = not self.users.count and rate(self.requests) >= capacity_per_s > 0
        return replace(self, requests=self.requests[:_WATCHED]) if grows else self

    @property
    def window(self) -> Window:
        """From the first arrival that counts to the last; to the end of everything where those are one moment."""
        if self.users.count:
            return 0.0, math.inf
        begin_s, end_s = self.requests[self.num_warmup].arrival_s, self.requests[-1].arrival_s
        return begin_s, end_s if end_s > begin_s else math.inf


def _played(setting: Deployment, run: _Run, origins: tuple[Source, ...]) -> Serving:
    """The answer of a plan that fits."""
    costs, capacity = setting.costs, setting.capacity_per_s(run.requests)
    run = run.watched(capacity)
    requests = run.requests
    progress = _Progress(run.progress, (3 if run.interval else 1) * len(requests))
    played = setting.play(requests, run.window, progress.part(len(requests)), users=run.users)
    jobs = played.jobs[run.num_warmup :]
    size, context = _mean_step(costs, played, jobs)
    sigma = sigma_of(costs, batch_of(costs, size, context), setting.calibration, setting.curves)
    spread = math.exp(Z90 * sigma)
    ends = [
        latencies(
            setting.play(requests, run.window, progress.part(len(requests)), pace, run.users).jobs[run.num_warmup :]
        )
        for pace in ((1 / spread, spread) if run.interval else ())
    ]
    found = latencies(jobs)
    load = _load(setting, played, (capacity, spread))
    attainments, share = attained(jobs, run.slo)
    verdict: Verdict = "overloaded" if load.arriving_per_s >= capacity and not run.users.count else "ok"
    return Serving(
        **_common(setting, origins),
        verdict=verdict,
        cause=_cause(verdict, load, run.users.count),
        suggestion=_suggestion(setting, verdict, load, found) or _of_users(run),
        num_requests=len(requests),
        num_warmup=run.num_warmup,
        latencies=found,
        low_latencies=Latencies.outermost(min, [found, *ends]) if ends else None,
        high_latencies=Latencies.outermost(max, [found, *ends]) if ends else None,
        sigma=sigma,
        load=load,
        handed_over=_handed_over(setting, played),
        attainments=attainments,
        slo_share=share,
        decode_steps=tuple(
            decode_step(costs, n, context, setting.calibration, setting.curves) for n in dict.fromkeys((1, size))
        ),
    )


def _mean_step(costs: StepCosts, played: ServedRun, jobs: Sequence[Served]) -> tuple[int, int]:
    """(sequences of a mean step, their tokens in the middle of a mean answer)."""
    meter = played.meter
    size = round(meter.output_tokens / max(1, meter.num_steps))
    mean = summed(job.request.prompt_tokens + job.request.output_tokens / 2 for job in jobs) / len(jobs)
    return min(max(1, size), costs.plan.ranks * costs.plan.max_sequences), max(1, round(mean))


class _Progress:
    """Progress over several plays as one."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._before = progress, total, 0

    def part(self, count: int) -> Progress | None:
        """For the next play, of so many requests."""
        before, self._before = self._before, self._before + count
        progress, total = self._progress, self._total
        return None if progress is None else lambda done, _: progress(before + done, total)


def check_requests(model: Model, plan: InferencePlan, requests: Sequence[Request]) -> None:
    """Raises InputError where there are none, where they are out of order, or longer than a sequence may be."""
    if not requests:
        raise InputError.at("requests", "there are none", "one at least")
    room = plan.batched_tokens(model)
    if not plan.chunked_prefill and (prompt := Requests.of(requests).longest_prompt) > room:
        problem = f"a prompt has {prompt} tokens, and a step computes whole ones, of {room} tokens at most"
        raise InputError.at("requests", problem, f"max_batched_tokens = {prompt} or more, or chunked_prefill = true")
    if isinstance(requests, Requests) and requests.keep_to(plan.model_len(model)):
        return
    times = [request.arrival_s for request in requests]
    if not all(math.isfinite(time) for time in times) or times[0] < 0 or any(b < a for a, b in pairwise(times)):
        raise InputError.at("requests", "arrivals are not finite times from 0 on, in order", "sort them by arrival_s")
    if any(min(request.prompt_tokens, request.output_tokens) < 1 for request in requests):
        raise InputError.at("requests", "a request has no token", "prompt and answer of 1 at least")
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


def _does_not_fit(setting: Deployment, requests: Sequence[Request], origins: tuple[Source, ...]) -> Serving:
    tightest = setting.tightest
    costs, m = tightest.costs, tightest.memory
    beside = setting.num_devices - costs.plan.num_devices
    found = remedies(costs.model, costs.plan, costs.cluster, costs.stack, m, beside)
    if tightest is setting.prefill:
        found = tuple(of_prefill(remedy) for remedy in found)
    cause = (
        f"{format_bytes(m.missing_bytes)} more than {costs.plan.gpu_memory_utilization:g} of a GPU's memory: a sequence of "
        f"max_model_len = {m.longest_tokens} tokens does not fit beside weights and activations"
        if m.over_budget
        else f"{format_bytes(m.missing_bytes)} more than a GPU has: gpu_memory_utilization = "
        f"{costs.plan.gpu_memory_utilization:g} leaves too little for the CUDA context"
    )
    cause = f"of a GPU that computes prompts: {cause}" if tightest is setting.prefill else cause
    changes = "; ".join(f"{remedy.change} (cache of {remedy.kv_tokens:,} tokens)" for remedy in found)
    return Serving(
        **_common(setting, origins),
        verdict=Fit.DOES_NOT_FIT,
        cause=cause,
        suggestion=changes or "nothing that was tried makes it fit: more GPUs an engine (tp × pp), or a smaller model",
        num_requests=len(requests),
        num_warmup=0,
        remedies=found,
    )


def _common(setting: Deployment, origins: tuple[Source, ...]) -> dict[str, Any]:
    costs = setting.costs
    return {
        "model": costs.model.name,
        "cluster": costs.cluster.name,
        "num_devices": setting.num_devices,
        "memory": setting.tightest.memory,
        "prefill_memory": setting.prefill.memory if setting.prefill else None,
        "assumptions": assumptions(costs, handed_over=setting.prefill is not None),
        "sources": origins,
    }


def _load(setting: Deployment, played: ServedRun, capacity: tuple[float, float]) -> Load:
    """capacity: requests a second, and the factor to the ends of its interval."""
    meter, plan, requests = played.meter, setting.costs.plan, played.jobs
    measured_s = min(meter.end_s, played.end_s) - meter.start_s
    pools = setting.memory.num_blocks * setting.memory.num_schedulers * plan.dp * plan.ranks
    return Load(
        measured_s=measured_s,
        arriving_per_s=requests.arriving_per_s(meter.end_s),
        capacity_per_s=capacity[0],
        low_capacity_per_s=capacity[0] / capacity[1],
        high_capacity_per_s=capacity[0] * capacity[1],
        requests_per_s=meter.finished / measured_s,
        output_tokens_per_s=meter.output_tokens / measured_s,
        prompt_tokens_per_s=meter.prefill_tokens / measured_s,
        utilisation=meter.busy_s / (measured_s * setting.num_engines),
        num_steps=meter.num_steps,
        sequences=meter.output_tokens / meter.num_steps if meter.num_steps else 0.0,
        kv_mean=meter.block_s / (measured_s * pools),
        kv_peak=meter.peak_blocks / (setting.memory.num_blocks * plan.ranks),
        in_system=summed((one.end_s or 0.0) - one.request.arrival_s for one in requests) / played.lasted_s,
        preemptions=played.preemptions,
        recomputed_tokens=played.recomputed,
    )


def _handed_over(setting: Deployment, played: ServedRun) -> HandedOver | None:
    """What passed between the pools."""
    passed, place, transfers = played.passed, setting.place, setting.transfers
    if passed is None or place is None or transfers is None or setting.prefill is None:
        return None
    ports = min(setting.plan.dp, setting.prefill.plan.dp)
    return HandedOver(
        near=place.near,
        requests=passed.requests,
        num_bytes=passed.tokens * transfers.bytes_per_token,
        mean_s=passed.link_s / max(1, passed.requests),
        mean_wait_s=passed.wait_s / max(1, passed.requests),
        utilisation=passed.link_s / (ports * played.lasted_s),
    )


def _cause(verdict: Verdict, load: Load, users: int) -> str:
    arriving, capacity = format_number(load.arriving_per_s), format_number(load.capacity_per_s)
    if verdict == "overloaded":
        return (
            f"{arriving} requests/s arrive and at most {capacity} are served: the queue grows without end, and latencies only "
            "say how long it was watched"
        )
    if users:
        served = f"{format_number(load.requests_per_s)} requests/s are answered"
        return f"{counted(users, 'user')}, each with one request at a time: {served}, {capacity} where the queue never empties"
    if not load.arriving_per_s:
        return "all requests stand in the queue from the beginning: latencies are those of a batch job"
    return f"{arriving} of the {capacity} requests/s that could be served"


def _suggestion(setting: Deployment, verdict: Verdict, load: Load, found: Latencies) -> str:
    plan = setting.costs.plan
    if verdict == "overloaded" and setting.prefill:
        return "more engines in both pools: `shardwise serve --search` finds how many"
    if verdict == "overloaded":
        engines = math.ceil(plan.dp * load.arriving_per_s / (0.8 * load.capacity_per_s))
        gpus, cluster = engines * plan.engine_devices, setting.costs.cluster
        nodes = f": nodes = {math.ceil(gpus / cluster.gpus_per_node)}" if gpus > cluster.num_devices else ""
        return f"dp = {engines} keeps 20 % in reserve ({gpus} GPUs{nodes})"
    if load.preemptions:
        return "the cache runs out: kv_cache = fp8, fewer max_sequences, or more GPUs an engine"
    if load.arriving_per_s and load.measured_s < _SETTLED * found.latency.mean_s:
        spans = load.measured_s / found.latency.mean_s
        return f"only {spans:.1f} mean latencies were watched, too few to settle: play more requests"
    if load.arriving_per_s > _NEARLY_FULL * load.capacity_per_s:
        return "close to capacity, percentiles still move with the number of requests: play more of them"
    return ""


def _of_users(run: _Run) -> str:
    """What the likeness of a closed loop's answers does to waits."""
    if run.users.count < 2 or run.users.gaps_s or len({request.output_tokens for request in run.requests}) > 1:
        return ""
    return "users whose answers are equally long stay in step and wait for each other's prompts; lengths that vary part them"


ASSUMPTIONS: Final = (
    "reading the cache reaches the bandwidth of the attention kernel's calibration at any batch size, and one kernel's floor",
    "weights that are narrower than their products reach the 16-bit product's share of bandwidth",
    "an engine's own small all-reduces take what one table on H100 says; other collectives are NCCL's",
    "every answer has the length that the request states",
)
_OF_EXPERTS: Final = "routing is even: a step reads the experts that its tokens reach on average"
_OF_LATENTS: Final = "attention over latents reaches what the attention kernel's calibration says of its widest heads"
_OF_MTP: Final = "modules of multi-token prediction are not loaded"
_OF_GUESSES: Final = "every guess is accepted with the stated probability, whatever was guessed before it"
# DeepSeek's and Qwen 3's checkpoints in fp8 have a scale a block of 128 × 128 (weight_block_size in their config.json); engines refuse
# slices of other widths (vLLM, model_executor/layers/quantization/fp8.py; SGLang likewise)
_BLOCK: Final = 128
_OF_BLOCKS: Final = (
    'a GPU has {} columns of an expert, no whole blocks of 128: a checkpoint scaled by blocks takes experts = "dealt"'
)
_OF_HALF: Final = "the GPU multiplies no bf16: what is not quantised is in fp16"
_OF_POOLS: Final = "a prompt's cache is handed over when all of it is computed, at the speed of NCCL's send and receive"


def assumptions(costs: StepCosts, *, handed_over: bool = False) -> tuple[str, ...]:
    """Those that an answer rests on."""
    model, plan = costs.model, costs.plan
    half = plan.compute_dtype == "fp16" and not costs.cluster.device.peak("bf16")
    found = [*ASSUMPTIONS, *([_OF_HALF] if half else ()), *([_OF_POOLS] if handed_over else ())]
    found += [_OF_EXPERTS] if model.experts is not None else []
    found += hybrid_notes(model)
    found += [_OF_LATENTS] if model.latent is not None else []
    found += [_OF_GUESSES] if plan.speculative != "none" else []
    found += [_OF_MTP] if model.mtp_layers and plan.speculative != "mtp" else []
    columns = model.experts.d_ff // (plan.tp * plan.pcp) if model.experts and plan.experts == "split" else 0
    return tuple([*found, _OF_BLOCKS.format(columns)] if plan.weights == "fp8" and columns % _BLOCK else found)


def sources(costs: StepCosts, calibration: Calibration, cluster: Cluster, curves: LinkCurves) -> tuple[Source, ...]:
    """Provenance of every input."""
    model, stack = costs.model, costs.stack
    date = f", {calibration.provenance.date}" if calibration.provenance.date else ""
    near = "ideal" if curves.ideal_links else "calibrated" if calibrated(Links.of(cluster), curves) else "datasheet"
    return (
        Source(what="model", kind="given", detail=f"{model.name}, {model.num_parameters:,} parameters"),
        Source(what="device", kind="datasheet", detail=cluster.device.name),
        Source(
            what="kernels", kind=calibration.kind, detail=f"{calibration.name}: {calibration.provenance.machine}{date}"
        ),
        Source(what="links", kind=near, detail=links_source(cluster, curves, nccl=stack.software())),
        Source(what="stack", kind="assumed", detail=f"{stack.name}: {stack.framework}"),
    )
