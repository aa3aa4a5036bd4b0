"""What makes a serving plan fit: single changes, each judged by its memory, those that change least first; with shorter sequences if none does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from simulator.base.errors import InputError
from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.software.stack import Stack
from simulator.studies.serving.legal import check, legal_tp
from simulator.studies.serving.lora import lora_bytes
from simulator.studies.serving.memory import ServingMemory, serving_memory
from simulator.studies.serving.plan import InferencePlan
from simulator.studies.serving.shards import stage_shards

NUM_REMEDIES = 4
_MOST_UTILIZATION = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change of the plan under which one sequence of the longest kind fits, and the tokens that the cache then holds."""

    change: str
    plan: dict[str, Any]
    num_devices: int
    kv_tokens: int
    changes_numerics: bool


def remedies(
    model: Model, plan: InferencePlan, cluster: Cluster, stack: Stack, memory: ServingMemory, beside: int = 0
) -> tuple[Remedy, ...]:
    """The first few changes that make it fit. beside: devices of the other pool of engines."""
    judged = _judged(model, plan, cluster, stack, _changes(model, plan, cluster.device, memory))
    tried = [each for each in judged if each[1].num_devices + beside <= cluster.num_devices]
    found = [each for each in tried if each[2].fit.runs]
    if not found:
        shorter = (change | length for change, _, after in tried for length in _shorter(after))
        found = [each for each in _judged(model, plan, cluster, stack, shorter) if each[2].fit.runs]
    return tuple(_remedy(*each, beside) for each in found[:NUM_REMEDIES])


def _judged(
    model: Model, plan: InferencePlan, cluster: Cluster, stack: Stack, changes: Iterable[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], InferencePlan, ServingMemory]]:
    """Each change that is legal, the plan under it, and its memory."""
    for change in changes:
        other = plan.model_copy(update=change)
        try:
            check(other, model, cluster)
        except InputError:
            continue
        yield change, other, serving_memory(model, other, cluster.device, stack)


def _remedy(change: dict[str, Any], plan: InferencePlan, memory: ServingMemory, beside: int) -> Remedy:
    words = ", ".join(f"{name} = {'[]' if value == () else value}" for name, value in change.items())
    return Remedy(
        change=words,
        plan=change,
        num_devices=plan.num_devices + beside,
        kv_tokens=memory.kv_tokens,
        changes_numerics=bool({"weights", "kv_cache"} & change.keys()),
    )


def of_prefill(remedy: Remedy) -> Remedy:
    """The same of the engines that only compute prompts."""
    names = {name: f"prefill_{name}" if name in ("tp", "pp", "dp") else name for name in remedy.plan}
    plan = {names[name]: value for name, value in remedy.plan.items()}
    return replace(remedy, plan=plan, change=", ".join(f"{name} = {value}" for name, value in plan.items()))


def _shorter(memory: ServingMemory) -> Iterator[dict[str, Any]]:
    """Sequences as long as the cache has room for."""
    blocks = memory.num_blocks - memory.window_blocks - memory.state_blocks
    if blocks > 0 and memory.over_budget:
        yield {"max_model_len": blocks * memory.block_size}


def _changes(model: Model, plan: InferencePlan, device: Device, memory: ServingMemory) -> Iterator[dict[str, Any]]:
    """What to try, in order: settings, the length, more GPUs an engine, narrower numbers."""
    if plan.replicate:
        yield {"replicate": ()}
    if plan.gpu_memory_utilization != _MOST_UTILIZATION:
        yield {"gpu_memory_utilization": _MOST_UTILIZATION}
    yield from _shorter(memory)
    if plan.lora_rank and (each := lora_bytes(stage_shards(model, plan)[memory.stage], plan) // plan.lora_adapters):
        fewer = plan.lora_adapters - -(-memory.missing_bytes // each)
        yield from ({"lora_adapters": fewer},) if fewer > 0 else ()
    for tp in legal_tp(model, dealt=plan.experts == "dealt"):
        if plan.tp < tp <= 8 * plan.tp:
            yield {"tp": tp, "dp": 1}
    if plan.pp < model.num_layers:
        yield {"pp": 2 * plan.pp, "dp": 1}
    if DTYPE_BYTES[plan.kv_dtype] > 1:
        yield {"kv_cache": "fp8"}
    for weights in ("fp8", "int8", *(("mxfp4",) if model.experts else ()), "int4"):
        narrower = weights == "int4" or plan.weights in ("bf16", "fp16")
        if narrower and weights != plan.weights and (weights != "fp8" or device.peak("fp8") > 0):
            yield {"weights": weights}
