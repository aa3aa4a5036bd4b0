"""Engines: which stack serves what a text names, and its defaults for what a plan leaves open."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from simulator.base.errors import StackError
from simulator.base.schema import unknown_name
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.software.described import named_in
from simulator.spec.software.engine import Engine, SetAside
from simulator.spec.software.stack import Stack
from simulator.studies.serving.plan import DEFAULT_BATCHED_TOKENS, InferencePlan

# Engines that nobody described are taken to do what most of those do whose newest versions are described: prompts join the steps that
# decode (all but SGLang), and the host works a step ahead (vLLM since 0.14, SGLang, TensorRT-LLM; not TGI and LMDeploy)
GENERIC: Final = "vllm-2026"


@cache
def engine_of(text: str) -> Stack:
    """The stack that describes the engine which a free text names, with its version; the generic one, as unknown, if none does."""
    return _engine_named(text) or Stack.load(GENERIC).copy_with(known="unknown")


def stack_named(text: str) -> str:
    """The name of a stack, or of the one that describes the engine which the text names ("vllm 0.6.3", "sglang"); the text if none does."""
    if text in Stack.names() or text.endswith(".toml"):
        return text
    engine = _engine_named(text)
    return engine.name if engine else text


def stack_of(plan: InferencePlan) -> Stack:
    """The plan's stack. Raises StackError; where no stack has the name, with those that describe engines."""
    if plan.stack in Stack.names() or plan.stack.endswith(".toml"):
        return Stack.of(plan)
    raise StackError(unknown_name("stack", plan.stack, [stack.name for stack in _engines()], "a stack's .toml"))


def _engines() -> list[Stack]:
    return [stack for stack in map(Stack.load, Stack.names()) if stack.engine is not None]


def _engine_named(text: str) -> Stack | None:
    entries = [(stack, entry) for stack in _engines() for entry in stack.describes]
    found = named_in(text, [entry for _, entry in entries])
    return next((stack for stack, entry in entries if found and entry is found[0]), None)


@cache
def usual_values(stack: str) -> dict[str, tuple[object, ...]]:
    """Default of each field of a plan under this stack: one value, or one per architecture."""
    engine = Stack.load(stack).engine or Engine()
    own = InferencePlan().model_dump(mode="json") | engine.plan
    plans = [own, *(own | one.plan for one in engine.plan_on)]
    return {name: tuple(fields[name] for fields in plans) for name in own}


def defaults_of(
    plan: InferencePlan, stack: Stack, device: Device | None = None, model: Model | None = None
) -> dict[str, Any]:
    """What the engine sets in such a plan by itself, which may depend on the plan's other fields, on device and model."""
    engine = stack.engine
    if engine is None:
        return {}
    cache = engine.kv_cache_of.get(plan.weights)
    longest = plan.max_model_len or (model.max_positions if model else 0)
    on = {} if device is None else engine.on(device, plan.tp, longest).plan
    found: dict[str, Any] = engine.plan | on | ({"kv_cache": cache} if cache else {})
    cannot = (
        device is not None
        and not device.peak("bf16")
        and ("weights" not in plan.model_fields_set or plan.weights != "bf16")
    )
    if cannot or plan.dtype == "fp16":
        found |= {"weights": "fp16", "dtype": "fp16"}
    if engine.prompt_s and device is not None and model is not None:
        multiplied = (
            engine.prompt_s * (device.peak("bf16") or device.peak("fp16")) * plan.tp / (2 * model.num_active_parameters)
        )
        found |= {"max_batched_tokens": max(1, min(int(multiplied), model.max_positions))}
    if engine.set_aside and device is not None:
        tokens = plan.max_batched_tokens or int(found.get("max_batched_tokens", DEFAULT_BATCHED_TOKENS))
        found["gpu_memory_utilization"] = _utilization(engine, engine.set_aside, tokens, plan, device)
    return found


def with_defaults(
    plan: InferencePlan, stack: Stack, device: Device | None = None, model: Model | None = None
) -> InferencePlan:
    """The plan with unset fields at the engine's defaults."""
    engine, stated = stack.engine, defaults_of(plan, stack, device, model)
    if engine is None:
        return plan
    left_open = {name: value for name, value in stated.items() if name not in plan.model_fields_set}
    found = plan.model_copy(update=left_open) if left_open else plan
    cuts_long = any(one.longer_than for one in engine.plan_on)  # then steps of whole prompts have room for all others
    longest = found.model_len(model) if model and cuts_long else found.max_model_len or 0
    said = "max_batched_tokens" in plan.model_fields_set
    if said or found.chunked_prefill or not found.max_batched_tokens or found.max_batched_tokens >= longest:
        return found
    return found.model_copy(update={"max_batched_tokens": longest})  # a whole prompt must fit a step


def _utilization(engine: Engine, aside: SetAside, tokens: int, plan: InferencePlan, device: Device) -> float:
    """The share of memory that is left for weights and cache, in thousandths. tokens: of the largest step."""
    graph = max(engine.graphs(device, plan.tp), default=0)
    reserved = aside.fixed + aside.token * tokens + aside.graph * graph + aside.gpu * plan.engine_devices
    least = aside.least if device.memory_bytes > 6 * aside.least else 0
    return max(0.001, round(1 - max(least, reserved) / device.memory_bytes, 3))
