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
    """Equal engines. plan: theirs alone. longest, tokens: of a sequence, and of a step. quantised: the checkpoint is, already."""

    name: str
    role: Role
    plan: InferencePlan
    longest: int
    tokens: int
    quantised: bool = False

    @property
    def casts(self) -> str | None:
        """What the engine makes of 16-bit weights. A checkpoint says by itself what it is in; another word there is an error."""
        return "fp8" if self.plan.weights == "fp8" and not self.quantised else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """software: as stacks name it. image: of its container. command: the words that start one engine of a pool on a port.

    files: beside it, name -> text. no_option: faults of plans that the engine has no option for. mixing: whether the engine can
    mix prompts and answers in a step as the plan says, and what it does. cache_of: what its flag for memory is a share of.
    quantises: precisions to which it casts 16-bit weights as it loads them. reads: what quantised the checkpoints that it loads. router: what stands before pools of two kinds.
    """

    software: str
    image: str
    command: Callable[[Pool, int], list[str]]
    files: Callable[[Pool], Mapping[str, str]] = lambda _: {}
    no_option: Callable[[InferencePlan], list[Fault]] = lambda _: []
    mixing: tuple[Callable[[InferencePlan], bool], str] = (lambda _: True, "")
    cache_of: str = ""
    quantises: tuple[str, ...] = ("fp8",)
    reads: str = ""
    router: str = ""

    def faults(self, plan: InferencePlan) -> list[Fault]:
        """What of a plan the engine has no option for."""
        faults, (can_mix, mixes) = self.no_option(plan), self.mixing
        if not can_mix(plan):
            problem = f"chunked_prefill = {str(plan.chunked_prefill).lower()} with mixed_steps = {str(plan.mixed).lower()}: {mixes}"
            faults.append(Fault("inference: mixed_steps", problem, "leave it to the engine's default"))
        if plan.cache_of != self.cache_of and self.cache_of:
            problem = f"{plan.cache_of}: the engine's own share of memory is one of `{self.cache_of}`"
            faults.append(Fault("inference: cache_of", problem, f'cache_of = "{self.cache_of}"'))
        for name in ("dcp", "pcp"):
            if getattr(plan, name) > 1 and self.software != "vLLM":
                faults.append(
                    Fault(f"inference: {name}", f"{self.software} is not told of it", "1, or a stack of vLLM")
                )
        if plan.speculative in ("draft", "eagle"):
            problem = "a draft model is a checkpoint of its own, which these files do not name"
            faults.append(Fault("inference: speculative", problem, "mtp, ngram, or the engine's own flags"))
        return faults

    def notes(self, pool: Pool) -> list[str]:
        """What the command leaves to others."""
        said, weights = [] if pool.role == "both" else [self.router], pool.plan.weights
        if pool.casts in self.quantises:
            told = "16-bit weights become fp8 as they are loaded. Leave that flag out where the checkpoint is quantised already."
            return [told, *said]
        if weights not in ("bf16", "fp16"):
            said = [f"The checkpoint's weights must be quantised already ({weights}){self.reads}.", *said]
        return said


def pools_of(plan: InferencePlan, model: Model, *, quantised: bool) -> tuple[Pool, ...]:
    """One pool; or those of prompts and of answers."""
    parts: list[tuple[str, Role, InferencePlan]] = [("engine", "both", plan)]
    if plan.prefill_pool is not None:
        parts = [("prefill", "prefill", plan.prefill_pool), ("decode", "decode", plan.decode_pool)]
    return tuple(
        Pool(
            name=name,
            role=role,
            plan=one,
            longest=one.model_len(model),
            tokens=one.batched_tokens(model),
            quantised=quantised,
        )
        for name, role, one in parts
    )


def flags(values: Mapping[str, object]) -> list[str]:
    """`--name value` of what has one; True: the bare flag; None and False: nothing."""
    words = []
    for name, value in values.items():
        if value is not None and value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words
