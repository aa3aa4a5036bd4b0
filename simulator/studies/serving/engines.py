"""Engines: which stack serves what a text names, and its defaults for what a plan leaves open."""

from __future__ import annotations

from functools import cache
from typing import Final

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


def with_defaults(plan: InferencePlan, stack: Stack) -> InferencePlan:
    """The plan with the engine's own defaults where it says nothing."""
    if stack.engine is None:
        return plan
    stated = stack.engine.plan
    left_open = {name: value for name, value in stated.items() if name not in plan.model_fields_set}
    return plan.model_copy(update=left_open) if left_open else plan
