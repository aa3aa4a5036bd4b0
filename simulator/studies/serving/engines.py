"""Engines: which stack serves what a text names, and its defaults for what a plan leaves open."""

from __future__ import annotations

from functools import cache
from typing import Final

from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.software.described import named_in
from simulator.spec.software.stack import Stack
from simulator.studies.serving.plan import InferencePlan

USUAL: Final[str] = InferencePlan.model_fields["stack"].default


@cache
def engine_of(text: str) -> Stack:
    """The stack that describes the engine which a free text names, with its version; the usual one, as unknown, if none does."""
    stacks = [stack for stack in map(Stack.load, Stack.names()) if stack.engine is not None]
    entries = [(stack, entry) for stack in stacks for entry in stack.describes]
    found = named_in(text, [entry for _, entry in entries])
    if not found:
        return Stack.load(USUAL).copy_with(known="unknown")
    return next(stack for stack, entry in entries if entry is found[0])


@cache
def usual_values(stack: str) -> dict[str, tuple[object, ...]]:
    """Of each field of a plan under this stack, what it is where nobody says it: one value, or one an architecture."""
    engine = Stack.load(stack).engine
    own = InferencePlan().model_dump(mode="json")
    ways = [own] if engine is None else [own | engine.plan | on for on in ({}, *engine.plan_on.values())]
    return {name: tuple(way[name] for way in ways) for name in own}


def with_defaults(
    plan: InferencePlan, stack: Stack, device: Device | None = None, model: Model | None = None
) -> InferencePlan:
    """The plan with the engine's own defaults, on this device and for this model where they matter, where it says nothing."""
    if stack.engine is None:
        return plan
    cache = stack.engine.kv_cache_of.get(plan.weights)
    on = {} if device is None else stack.engine.plan_on.get(device.architecture, {})
    stated = stack.engine.plan | on | ({"kv_cache": cache} if cache else {})
    if stack.engine.prompt_s and device is not None and model is not None:
        multiplied = stack.engine.prompt_s * device.peak("bf16") * plan.tp / (2 * model.num_active_parameters)
        stated |= {"max_batched_tokens": max(1, min(int(multiplied), model.max_positions))}
    left_open = {name: value for name, value in stated.items() if name not in plan.model_fields_set}
    found = plan.model_copy(update=left_open) if left_open else plan
    longest = found.max_model_len or 0
    if found.chunked_prefill or not found.max_batched_tokens or found.max_batched_tokens >= longest:
        return found
    return found.model_copy(update={"max_batched_tokens": longest})  # a whole prompt must fit a step
