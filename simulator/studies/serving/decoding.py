"""One decoding step in detail: where its time goes, its share of memory bandwidth, and its uncertainty."""

from __future__ import annotations

import math
from typing import Final

from simulator.base.kernels import DTYPE_BYTES
from simulator.base.sums import summed
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.calibration.intervals import unknown_engine
from simulator.studies.serving.batch import Batch, busiest_rank
from simulator.studies.serving.costs import StepCosts
from simulator.studies.serving.groups import context_shape, pipeline_shape, tensor_shape
from simulator.studies.serving.mixers import state_bytes
from simulator.studies.serving.report import DecodeStep
from simulator.studies.serving.shards import idle_expert_bytes, layer_kv_bytes, part_bytes, weight_bytes
from simulator.work.collectives import sigma as collective_sigma

Z90: Final = 1.6449  # two-sided 90 % of a normal distribution
# One sigma. Reading a cache, a prior: no published table of decoding attention is at hand, and kernels reach some 0.5 to 0.9 of
# bandwidth. The host's time between steps: from a prior of 0.5, what measured servers ask (experiments/serving_intervals.py: 0.24, and
# 0.23 to 0.27 without one of eight sources and engines; of the cache 0.35, of the stack 0.04).
CACHE_SIGMA: Final = 0.3
BETWEEN_STEPS_SIGMA: Final = 0.25


def batch_of(costs: StepCosts, sequences: int, context: int) -> Batch:
    """`sequences` sequences that decode behind `context` tokens each, the new one among them."""
    return Batch(decodes=sequences, keys=tuple(sequences * min(context, w or context) for w in costs.windows))


def parts_of(costs: StepCosts, batch: Batch) -> dict[str, float]:
    """Seconds of a step by category, through all stages; they sum to the step."""
    stages = costs.costs(batch)
    found = {
        "gemm": summed(cost.gemm_s for cost in stages),
        "attention": summed(cost.attention_s for cost in stages),
        "elementwise": summed(cost.stream_s for cost in stages),
        "collectives": summed(cost.exchange_s for cost in stages),
    }
    busy_s = summed(costs.stages_s(batch))
    return {**found, "host": costs.idle_s(busy_s, batch.rows, batch.decodes) + busy_s - summed(found.values())}


def sigma_of(costs: StepCosts, batch: Batch, calibration: Calibration, curves: LinkCurves) -> float:
    """One-sigma relative uncertainty of a step: each category's own by its share, and the stack's, in quadrature."""
    if calibration.kind == "ideal":
        return 0.0
    parts, sigmas = parts_of(costs, batch), sigmas_of(costs, batch, calibration, curves)
    total = summed(parts.values())
    shares = ((parts[name] / total * one) ** 2 for name, one in sigmas.items())
    unknown = unknown_engine().step if costs.stack.known == "unknown" else 0.0
    return math.sqrt(costs.stack.fitted.sigma**2 + unknown**2 + summed(shares))


def sigmas_of(costs: StepCosts, batch: Batch, calibration: Calibration, curves: LinkCurves) -> dict[str, float]:
    """The same of each category alone."""
    device = costs.cluster.device
    return {
        "gemm": calibration.sigma("gemm", device),
        "attention": max(CACHE_SIGMA, calibration.sigma("attention", device)),
        "elementwise": calibration.sigma("elementwise", device),
        "collectives": _collectives_sigma(costs, batch, curves),
        "host": BETWEEN_STEPS_SIGMA,
    }


def _collectives_sigma(costs: StepCosts, batch: Batch, curves: LinkCurves) -> float:
    """Of the all-reduces behind attention and MLP, of gathered keys, or of the messages between stages where there are none."""
    plan, cluster, nccl = costs.plan, costs.cluster, costs.stack.software()
    if plan.engine_devices == 1:
        return 0.0
    size = batch.tokens * costs.model.d_model * DTYPE_BYTES[plan.compute_dtype]
    if plan.pcp > 1:
        return collective_sigma("all_gather", size, context_shape(plan, cluster), cluster, curves, nccl=nccl)
    if plan.tp == 1:
        return collective_sigma("send_recv", size, pipeline_shape(plan, cluster, 0), cluster, curves, nccl=nccl)
    return collective_sigma("all_reduce", size, tensor_shape(plan, cluster), cluster, curves, nccl=nccl)


def decode_step(
    costs: StepCosts, sequences: int, context: int, calibration: Calibration, curves: LinkCurves
) -> DecodeStep:
    """One step of `sequences` sequences with `context` tokens each."""
    batch = batch_of(costs, sequences, context)
    times = costs.stages_s(batch)
    slowest = times.index(max(times))
    step_s = costs.idle_s(summed(times), sequences, sequences) + summed(times)
    spread = math.exp(Z90 * sigma_of(costs, batch, calibration, curves))
    read = _read_bytes(costs, slowest, batch) / costs.tokens_a_step  # what a step verifies shares one reading
    reading_s = read / costs.cluster.device.memory_bytes_per_s  # no step reads faster
    return DecodeStep(
        sequences=sequences,
        context=context,
        step_s=step_s,
        low_s=max(step_s / spread, min(step_s, reading_s)),
        high_s=step_s * spread,
        parts=parts_of(costs, batch),
        bandwidth_share=reading_s / times[slowest],
    )


def _read_bytes(costs: StepCosts, stage: int, batch: Batch) -> int:
    """Weights and cache that a GPU of a stage reads: all but a table that only looks tokens up and experts not reached."""
    shard, plan = costs.shards[stage], costs.plan
    looked_up = 0 if shard.part.tied_embeddings else part_bytes(shard, plan, "embedding")
    own = busiest_rank(batch, costs.ranks)
    seen = summed(n * keys for n, keys in zip(costs.layers_by_window[stage], own.keys, strict=True))
    cached = seen * layer_kv_bytes(shard, plan) + own.decodes * state_bytes(shard, plan)
    return weight_bytes(shard, plan) - looked_up - idle_expert_bytes(shard, plan, batch.tokens) + cached
