"""Ablations: one limit taken away, the step simulated again. The limit that costs most by its absence is the bottleneck.

Each changes what the engine plays, nothing else: memory, kernels and the schedule stay. Gains do not add up: what one
limit hides another shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from typing_extensions import override

from simulator.play.lower import Lowering, lower
from simulator.play.lower.builder import Builder
from simulator.predict import Prediction
from simulator.predict.play import SimulatedStep, play
from simulator.predict.program import lowered_programs, played_programs
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.tiers import (
    BOTH,
    CPU_ADAM,
    D2H,
    FAULTS,
    H2D,
    HOST_MEMORY,
    NVME_READ,
    NVME_WRITE,
    STAGING,
    SWITCH_DOWN,
    SWITCH_UP,
)
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.captured.capture import Capture
from simulator.work.program import Collective, Compute, Program

_BEYOND: Final = 1e30  # times the bandwidth: no bytes take any time
_BELOW: Final = frozenset(  # links to and of what lies below HBM
    (H2D, D2H, BOTH, STAGING, FAULTS, HOST_MEMORY, CPU_ADAM, NVME_READ, NVME_WRITE, SWITCH_UP, SWITCH_DOWN)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The step without a limit. gain: the share of the step that is saved; gain_bytes: saved memory."""

    name: str
    meaning: str
    step_s: float
    gain: float
    gain_bytes: int = 0


def _infinite_links(program: Program) -> Program:
    """Bytes take no time, latencies stay; folded waits for collectives inside blocks go with them."""
    return _faster(_without(program, "exposed:", "interference"), lambda name: name not in _BELOW)


def _instant_offload(program: Program) -> Program:
    """Offload takes no time: copies, drives, the CPU's optimizer."""
    return _faster(program, lambda name: name in _BELOW)


def _faster(program: Program, which: Callable[[str], bool]) -> Program:
    links = {name: capacity * (_BEYOND if which(name) else 1) for name, capacity in program.links.items()}
    return replace(program, links=links)


def _zero_latency(program: Program) -> Program:
    """Collectives begin to move bytes at once, launches cost the host nothing."""
    ops = tuple(
        replace(op, host_s=0, cost=replace(op.cost, latency_s=0))
        if isinstance(op, Collective)
        else replace(op, host_s=0)
        for op in program.ops
    )
    return replace(program, ops=ops)


def _perfect_overlap(program: Program) -> Program:
    """Compute never waits for data-parallel or block collectives, nor is it slowed; messages of a pipeline stay."""
    free = {op.id for op in program.ops if isinstance(op, Collective) and op.kind != "send_recv"}
    ops = tuple(
        replace(op, after=tuple(other for other in op.after if other not in free))
        if isinstance(op, Compute)
        else replace(op, interference=0)
        for op in program.ops
    )
    return _without(replace(program, ops=ops), "exposed:", "interference")


def _without(program: Program, *prefixes: str) -> Program:
    """Removes the waits inside folded compute."""
    ops = tuple(_shorter(op, prefixes) if isinstance(op, Compute) else op for op in program.ops)
    return replace(program, ops=ops)


def _shorter(op: Compute, prefixes: tuple[str, ...]) -> Compute:
    parts = tuple(part for part in op.parts if not part[0].startswith(prefixes))
    if len(parts) == len(op.parts):
        return op
    return replace(op, parts=parts, duration_s=sum(seconds for _, seconds in parts))


_PROGRAMS: Final[Mapping[str, tuple[str, Callable[[Program], Program]]]] = MappingProxyType(
    {
        "infinite links": ("bytes between GPUs take no time", _infinite_links),
        "zero latency": ("collectives and launches begin at once", _zero_latency),
        "perfect overlap": ("compute never waits for collectives", _perfect_overlap),
    }
)
_OFFLOAD: Final = "instant offload"
ABLATIONS: Final = (*_PROGRAMS, "no bubble", "no fragmentation")


@dataclass(frozen=True, kw_only=True)
class _Ablated(Lowering):
    """A lowering whose programs do not have one of the limits."""

    change: Callable[[Program], Program]

    @override
    def _played(self, build: Builder, num_micro_batches: int, stage: int, rank: int | None) -> Program:
        return self.change(super()._played(build, num_micro_batches, stage, rank))


def ablated(
    model: Model, plan: Plan, cluster: Cluster, calibration: Calibration, stack: Stack, prediction: Prediction
) -> tuple[Gain, ...]:
    """What each limit costs, the most expensive first.

    No bubble: the time that the pipeline's stages stand idle, which the prediction's own breakdown has. No
    fragmentation: the retries of the allocator, where the prediction has any, and what it reserves beyond what is live.
    """
    lowering = lower(model, plan, cluster, stack, calibration, calibration.links or default_curves())
    tried = dict(_PROGRAMS)
    if plan.offload.any:
        tried[_OFFLOAD] = ("copies, drives and the CPU's optimizer take no time", _instant_offload)
    fields = {key: getattr(lowering, key) for key in lowering.__dataclass_fields__}
    return _gains(prediction, tried, lambda change: play(_Ablated(**fields, change=change)))


def ablated_program(
    capture: Capture, cluster: Cluster, calibration: Calibration, stack: Stack, prediction: Prediction
) -> tuple[Gain, ...]:
    """The same of a captured program."""
    curves = calibration.links or default_curves()
    programs = lowered_programs(capture, cluster, stack, calibration, curves)
    return _gains(
        prediction, _PROGRAMS, lambda change: played_programs(capture.target, [change(one) for one in programs])
    )


def _gains(
    prediction: Prediction,
    tried: Mapping[str, tuple[str, Callable[[Program], Program]]],
    played: Callable[[Callable[[Program], Program]], SimulatedStep],
) -> tuple[Gain, ...]:
    full_s = float(prediction.step_s)
    stalls = float(prediction.breakdown.get("cuda_malloc", 0.0))
    found = []
    for name, (meaning, change) in tried.items():
        step_s = min(float(played(change).step_s) + stalls, full_s)
        found.append(Gain(name=name, meaning=meaning, step_s=step_s, gain=1 - step_s / full_s))
    fragmented = prediction.memory.peak_reserved_bytes - prediction.memory.peak_allocated_bytes
    for name, meaning, lost_s, num_bytes in (
        ("no bubble", "stages of the pipeline never stand idle", float(prediction.breakdown.get("bubble", 0.0)), 0),
        ("no fragmentation", "the allocator reserves what is allocated, and gives nothing back", stalls, fragmented),
    ):
        gain = Gain(name=name, meaning=meaning, step_s=full_s - lost_s, gain=lost_s / full_s, gain_bytes=num_bytes)
        found.append(gain)
    return tuple(sorted(found, key=lambda gain: (-gain.gain, gain.name)))
