"""Launcher: how one engine is started; and the pools of a plan, each with a plan of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from simulator.base.errors import Fault
from simulator.spec.model import Model
from simulator.studies.serving import InferencePlan

Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal engines. plan: theirs alone. longest, tokens: of a sequence, and of a step."""

    name: str
    role: Role
    plan: InferencePlan
    longest: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """software: as stacks name it. image: of its container. command: the words that start one engine of a pool on a port.

    files: beside it, name -> text. faults: what of a plan the engine has no option for. notes: what the command leaves to others.
    """

    software: str
    image: str
    command: Callable[[Pool, int], list[str]]
    faults: Callable[[InferencePlan], list[Fault]]
    files: Callable[[Pool], Mapping[str, str]] = lambda _: {}
    notes: Callable[[Pool], list[str]] = lambda _: []


def pools_of(plan: InferencePlan, model: Model) -> tuple[Pool, ...]:
    """One pool; or those of prompts and of answers."""
    parts: list[tuple[str, Role, InferencePlan]] = [("engine", "both", plan)]
    if plan.prefill_pool is not None:
        parts = [("prefill", "prefill", plan.prefill_pool), ("decode", "decode", plan.decode_pool)]
    return tuple(
        Pool(name=name, role=role, plan=one, longest=one.model_len(model), tokens=one.batched_tokens(model))
        for name, role, one in parts
    )


def flags(values: Mapping[str, object]) -> list[str]:
    """`--name value` of what has one; True: the bare flag; None and False: nothing."""
    words = []
    for name, value in values.items():
        if value is not None and value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def scheduling_fault(plan: InferencePlan, *, holds: bool, what: str) -> list[Fault]:
    """Unless it holds."""
    if holds:
        return []
    problem = (
        f"chunked_prefill = {str(plan.chunked_prefill).lower()} with mixed_steps = {str(plan.mixed).lower()}: {what}"
    )
    return [Fault(place="inference: mixed_steps", problem=problem, remedy="leave it to the engine's default")]


def cache_fault(plan: InferencePlan, wanted: str) -> list[Fault]:
    """Where the engine's share of memory is another."""
    if plan.cache_of == wanted:
        return []
    problem = f"{plan.cache_of}: the engine's own share of memory is one of `{wanted}`"
    return [Fault(place="inference: cache_of", problem=problem, remedy=f'cache_of = "{wanted}"')]


def checkpoint_note(plan: InferencePlan, *, on_the_fly: tuple[str, ...]) -> list[str]:
    """What the checkpoint must be."""
    if plan.weights in ("bf16", "fp16", *on_the_fly):
        return []
    return [f"The checkpoint's weights must be quantised already ({plan.weights})."]


def draft_fault(plan: InferencePlan) -> list[Fault]:
    """A second checkpoint has no place in these files."""
    if plan.speculative not in ("draft", "eagle"):
        return []
    problem = "a draft model is a checkpoint of its own, which these files do not name"
    return [Fault(place="inference: speculative", problem=problem, remedy="mtp, ngram, or the engine's own flags")]
