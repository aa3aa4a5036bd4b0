"""Which releases of torch play which plans: seen by `python -m tests.versions`. torch is not loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from simulator.base.errors import Fault
from simulator.spec.plan import Plan

Release = tuple[int, int]
# What a plan has more than one of -> the oldest release that played it, in fake and gloo modes, as 2.13 does.
# 2.6's DDP, FSDP2 and fake process group have other arguments; up to 2.9 DTensor cuts fake tables wrongly, gloo has no
# scaled sums and pipelines abort under the profiler.
OLDEST: Final[Release] = (2, 8)
EXACT: Final[Release] = (2, 9)  # 2.8's RMSNorm keeps other activations in 16 bits
OLDEST_OF: Final[dict[str, Release]] = {"cp": (2, 9), "tp": (2, 11), "ep": (2, 11), "pp": (2, 11)}
DUALPIPE_V: Final[Release] = (2, 13)  # 2.11's sends to its own rank, which gloo does not
STAGES_VOTE: Final[Release] = (2, 13)  # whether shapes are known, by messages; older ones ask nobody
EXACT_STAGES: Final[Release] = (2, 13)  # 2.11's hold other bytes: `release_notes` says which
SCALED_BY_ROW: Final[Release] = (2, 13)  # on a CPU, whose older scaled product takes one scale a tensor
BUFFERS_ON_DEMAND: Final[Release] = (2, 15)  # of what comes from other stages; 2.13 makes them all at once


def installed() -> str:
    """The installed torch's version; empty where there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def release(text: str) -> Release:
    """(2, 13) of 2.13.0+cpu."""
    major, minor = (int(part) for part in re.findall(r"\d+", text)[:2])
    return major, minor


def release_faults(plan: Plan, torch: str, mode: str = "") -> Iterator[Fault]:
    """Why this torch does not play the plan, in this mode."""
    if not torch:
        return
    place = f"torch {torch}"
    if release(torch) < OLDEST:
        problem = f"is older than {_text(OLDEST)}, the oldest release that plays plans"
        yield Fault(place=place, problem=problem, remedy=f"pip install 'torch>={_text(OLDEST)}'")
        return
    if plan.pp > 1 and plan.pipeline_schedule == "dualpipe_v" and release(torch) < DUALPIPE_V:
        remedy = f"pip install 'torch>={_text(DUALPIPE_V)}', or another schedule"
        yield Fault(place=place, problem="does not play dualpipe_v: a rank would send to itself", remedy=remedy)
    if mode == "cpu" and plan.precision.fp8_recipe == "rowwise" and release(torch) < SCALED_BY_ROW:
        remedy = f"pip install 'torch>={_text(SCALED_BY_ROW)}', or fp8_recipe = \"tensorwise\""
        yield Fault(place=place, problem="scales fp8 products on a CPU by tensor, not by row", remedy=remedy)
    for name, oldest in OLDEST_OF.items():
        if getattr(plan, name) > 1 and release(torch) < oldest:
            problem = f"does not play {name} = {getattr(plan, name)} as {_text(oldest)} and newer do"
            yield Fault(place=place, problem=problem, remedy=f"pip install 'torch>={_text(oldest)}', or {name} = 1")


def release_notes(plan: Plan, torch: str) -> Iterator[str]:
    """What this torch does otherwise than is predicted."""
    if torch and release(torch) < EXACT:
        yield f"torch {torch}: RMSNorm in 16 bits keeps other activations than the releases that bytes are predicted of"
    if torch and plan.pp > 1 and release(torch) < EXACT_STAGES:
        yield f"pp: torch {torch}'s stages keep 16 bytes more between steps than is predicted, up to 0.5 % of a peak in split backwards"
    if torch and plan.pp > 1 and release(torch) >= BUFFERS_ON_DEMAND:
        yield (
            f"pp: torch {torch} makes buffers of messages when they are needed; the prediction is of 2.13, which makes all "
            "of them at the first step, so it may count a stage's messages in flight too often"
        )


def _text(one: Release) -> str:
    return f"{one[0]}.{one[1]}"
