"""serve(): from (model, inference plan, cluster, requests) to latencies, throughput and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulator.calibration import Calibration
from simulator.collective_curves import LinkCurves, default_curves
from simulator.errors import Fault, InputError
from simulator.inference.costs import Batch, StepCosts
from simulator.inference.engine import Engine, Played, Progress
from simulator.inference.memory import ServingMemory, serving_memory
from simulator.inference.plan import InferencePlan, check
from simulator.inference.remedies import remedies
from simulator.inference.report import DecodeStep, Load, Serving, Slo, Verdict, attained, latencies
from simulator.inference.scheduler import Job, Limits
from simulator.inference.shares import kv_bytes_per_token, part_bytes, weight_bytes
from simulator.inference.sources import ASSUMPTIONS, sources
from simulator.inference.workload import Request
from simulator.model import Model
from simulator.predict.prediction import Source
from simulator.stack import Stack
from simulator.topology import Cluster
from simulator.units import format_bytes

_SHOWN_FAULTS = 20
# Capacity is the rate at which a full queue is served. It is read between the first and the third quarter of so many
# times the sequences that run at once, so that neither filling nor emptying counts.
_ROUNDS = 16
_MOST_SATURATING = 20_000
_NEARLY_FULL = 0.95


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """What every run of one serving question shares."""

    costs: StepCosts
    memory: ServingMemory

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
        self, requests: Sequence[Request], window: tuple[float, float], progress: Progress | None = None
    ) -> Played:
        """What happens to these requests. window: the time in which figures are counted."""
        return Engine(self.costs, self.limits, requests, window).run(progress)


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
    progress: Progress | None = None,
) -> Serving:
    """Play `requests`, in order of arrival, through the plan's engines.

    calibration, stack, curves: as `predict` takes them. warmup: the part of the requests, first to arrive, that no figure
    counts. A plan that does not fit in memory, and requests that come faster than they are served, are answers.
    Raises PlanError, StackError, CalibrationError, or InputError with every fault found.
    """
    stack = stack or Stack.load(plan.stack)
    calibration = calibration or Calibration.for_device(cluster.device)
    curves = curves or calibration.links or default_curves()
    check(plan, model, cluster)
    _check_lengths(model, plan, requests)
    costs = StepCosts(model, plan, cluster, stack, calibration, curves)
    memory = serving_memory(model, plan, cluster.device, stack)
    setting = _Setting(costs=costs, memory=memory)
    said = sources(costs, calibration, cluster, curves)
    if not memory.fits:
        return _does_not_fit(setting, requests, said)
    skipped = math.floor(warmup * len(requests))
    begin_s, end_s = requests[skipped].arrival_s, requests[-1].arrival_s
    played = setting.play(requests, (begin_s, end_s if end_s > begin_s else math.inf), progress)
    capacity = _capacity(setting, requests)
    return _answer(setting, played, skipped, capacity, slo or Slo(), said)


def _check_lengths(model: Model, plan: InferencePlan, requests: Sequence[Request]) -> None:
    """Raise InputError with every request that is longer than a sequence may be, or out of order."""
    if not requests:
        raise InputError(Fault(place="requests", problem="there are none", remedy="one at least"))
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


def _capacity(setting: _Setting, requests: Sequence[Request]) -> float:
    """Requests a second that the engines serve when the queue never empties, with lengths as these have."""
    memory, plan = setting.memory, setting.costs.plan
    mean = sum(r.prompt_tokens + r.output_tokens for r in requests) / len(requests)
    room = max(1, int(memory.num_blocks * memory.block_size / mean))
    at_once = min(plan.max_sequences, room) * memory.num_schedulers * plan.dp
    count = min(max(_ROUNDS * at_once, 4), _MOST_SATURATING)
    queue = [replace(requests[i % len(requests)], arrival_s=0.0) for i in range(count)]
    ends = sorted(job.end_s or 0.0 for job in setting.play(queue, (0.0, math.inf)).jobs)
    first, last = count // 4, 3 * count // 4
    if ends[last - 1] > ends[first - 1] and count > 4 * at_once:
        return (last - first) / (ends[last - 1] - ends[first - 1])
    return count / ends[-1]


def _does_not_fit(setting: _Setting, requests: Sequence[Request], said: tuple[Source, ...]) -> Serving:
    costs, m = setting.costs, setting.memory
    found = remedies(costs.model, costs.plan, costs.cluster, costs.stack, m)
    cause = (
        f"{format_bytes(m.missing_bytes)} more than {costs.plan.gpu_memory_utilization:g} of a GPU's memory: a sequence of "
        f"max_model_len = {m.longest_tokens} tokens does not fit beside weights and activations"
    )
    told = "; ".join(f"{remedy.change} (cache of {remedy.kv_tokens:,} tokens)" for remedy in found)
    return Serving(
        **_common(setting, said),
        verdict="OOM",
        cause=cause,
        suggestion=told
        or "no single change that was tried makes it fit: more GPUs an engine (tp × pp), or a smaller model",
        num_requests=len(requests),
        num_warmup=0,
        latencies=None,
        load=None,
        attainments=(),
        slo_share=None,
        decode_steps=(),
        remedies=found,
    )


def _answer(
    setting: _Setting, played: Played, skipped: int, capacity: float, slo: Slo, said: tuple[Source, ...]
) -> Serving:
    jobs = played.jobs[skipped:]
    found, load = latencies(jobs), _load(setting, played, skipped, capacity)
    rows, share = attained(jobs, slo, found)
    verdict: Verdict = "OVERLOADED" if load.arriving_per_s >= capacity else "OK"
    return Serving(
        **_common(setting, said),
        verdict=verdict,
        cause=_cause(verdict, load),
        suggestion=_suggestion(setting, verdict, load),
        num_requests=len(played.jobs),
        num_warmup=skipped,
        latencies=found,
        load=load,
        attainments=rows,
        slo_share=share,
        decode_steps=_decode_steps(setting.costs, jobs, load),
        remedies=(),
    )


def _common(setting: _Setting, said: tuple[Source, ...]) -> dict[str, Any]:
    costs = setting.costs
    return {
        "model": costs.model.name,
        "cluster": costs.cluster.name,
        "num_devices": costs.plan.num_devices,
        "memory": setting.memory,
        "assumptions": ASSUMPTIONS,
        "sources": said,
    }


def _load(setting: _Setting, played: Played, skipped: int, capacity: float) -> Load:
    meter, plan, requests = played.meter, setting.costs.plan, played.jobs
    measured_s = min(meter.end_s, played.end_s) - meter.start_s
    spanned_s = requests[-1].request.arrival_s - requests[0].request.arrival_s
    pools = setting.memory.num_blocks * setting.memory.num_schedulers * plan.dp
    answered = len(requests) - skipped if math.isinf(meter.end_s) else meter.finished
    return Load(
        measured_s=measured_s,
        arriving_per_s=(len(requests) - 1) / spanned_s if spanned_s else 0.0,
        capacity_per_s=capacity,
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
    if verdict == "OVERLOADED":
        return (
            f"{load.arriving_per_s:.3g} requests/s arrive and at most {load.capacity_per_s:.3g} are served: the queue grows "
            "without end, and latencies only say how long it was watched"
        )
    if not load.arriving_per_s:
        return "all requests stand in the queue from the beginning: latencies are those of a batch job"
    return f"{load.arriving_per_s:.3g} of the {load.capacity_per_s:.3g} requests/s that could be served"


def _suggestion(setting: _Setting, verdict: Verdict, load: Load) -> str:
    plan = setting.costs.plan
    if verdict == "OVERLOADED":
        engines = math.ceil(plan.dp * load.arriving_per_s / (0.8 * load.capacity_per_s))
        return f"dp = {engines} keeps 20 % in reserve ({engines * plan.engine_devices} GPUs)"
    if load.preemptions:
        return "the cache runs out: kv_cache = fp8, fewer max_sequences, or more GPUs an engine"
    if load.arriving_per_s > _NEARLY_FULL * load.capacity_per_s:
        return "close to capacity, percentiles still move with the number of requests: play more of them"
    return ""


def _decode_steps(costs: StepCosts, jobs: Sequence[Job], load: Load) -> tuple[DecodeStep, ...]:
    """A step of one sequence, and one of as many as ran on average, in the middle of a mean answer."""
    mean = sum(job.request.prompt_tokens + job.request.output_tokens / 2 for job in jobs) / len(jobs)
    sizes = dict.fromkeys((1, min(max(1, round(load.sequences)), costs.plan.max_sequences)))
    return tuple(decode_step(costs, size, round(mean)) for size in sizes)


def decode_step(costs: StepCosts, sequences: int, context: int) -> DecodeStep:
    """One step of `sequences` sequences with `context` tokens each, through all stages."""
    batch = Batch(decodes=sequences, keys=tuple(sequences * min(context, w or context) for w in costs.windows))
    times = costs.stages_s(batch)
    slowest = times.index(max(times))
    share = costs.shares[slowest]
    per_layer = kv_bytes_per_token(share, costs.plan) // max(1, len(share.layers))
    cached = sum(n * keys for n, keys in zip(costs.layers_by_window[slowest], batch.keys, strict=True)) * per_layer
    read = weight_bytes(share, costs.plan) - part_bytes(share, costs.plan, "embedding") + cached
    device = costs.cluster.device
    return DecodeStep(
        sequences=sequences,
        context=context,
        step_s=costs.overhead_s + sum(times),
        exchange_s=sum(cost.exchange_s for cost in costs.costs(batch)),
        bandwidth_share=read / times[slowest] / device.memory_bytes_per_s,
    )
