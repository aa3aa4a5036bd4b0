"""Predicted bytes at the borders of a step's phases: the same moments that a tracked step reports."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.memory import Library, moment_of, write_history
from simulator.memory.live_bytes import host_counter_bytes
from simulator.memory.tape import CATEGORIES, DONE
from simulator.parallel.model_shard import shard_of
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import ModelBlocks, build_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent:
    """One allocation or free. `storage` names the pair; `moment` is (phase, micro-batch, unit, op)."""

    kind: str
    storage: int
    num_bytes: int
    tag: str
    stream: int
    moment: tuple[str, int, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """Live bytes before the step, after the last forward and backward, and at the peak, with whose they are there."""

    start_bytes: int
    after_forward_bytes: int
    after_backward_bytes: int
    peak_bytes: int
    peak_phase: str
    peak_by_phase_bytes: dict[str, int]
    by_category: dict[str, int]


def step_events(
    model: Model, plan: Plan, stack: Stack, blocks: ModelBlocks, *, library: Library = "nccl", stage: int = 0
) -> tuple[MemoryEvent, ...]:
    """Persistent state, then one steady step of a stage, in host order; bytes as asked for, before any rounding."""
    history = write_history(model, plan, stack, blocks, (), steps=1, library=library, stage=stage)
    made: dict[int, tuple[int, str, int]] = {}
    events: list[MemoryEvent] = []
    for index, (slot, num_bytes, stream, tag) in enumerate(history.events):
        if num_bytes >= 0:
            made[slot] = (num_bytes, CATEGORIES[tag], stream)
        elif num_bytes == DONE:
            continue
        size, name, owner = made[slot]
        kind = "alloc" if num_bytes >= 0 else "free"
        moment = moment_of(history, index)
        events.append(MemoryEvent(kind=kind, storage=slot, num_bytes=size, tag=name, stream=owner, moment=moment))
    return tuple(events)


def borders(
    model: Model, plan: Plan, stack: Stack, *, granularity_bytes: int, library: Library = "nccl", stage: int = 0
) -> Borders:
    """Walk the predicted step of a pipeline stage; each storage is rounded up to `granularity_bytes` (1: a CPU, 512: CUDA).

    library: gloo keeps a copy of what it scatters; NCCL, and a process group that only pretends, do not.

    On a CPU a tracker sees Adam's step counters too, which the host holds.
    """
    live = highest = 0 if granularity_bytes > 1 else host_counter_bytes(shard_of(model, plan, stage), plan)
    by_tag = {"optimizer_state": live}
    peak_tags: dict[str, int] = {}
    peak_phase = "start"
    after: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for event in step_events(model, plan, stack, build_blocks(model, stack, plan), library=library, stage=stage):
        phase = event.moment[0]
        size = -(-event.num_bytes // granularity_bytes) * granularity_bytes
        signed = size if event.kind == "alloc" else -size
        peaks.setdefault(phase, live)
        live += signed
        by_tag[event.tag] = by_tag.get(event.tag, 0) + signed
        after[phase] = live
        peaks[phase] = max(peaks[phase], live)
        if live > highest:
            highest, peak_phase, peak_tags = live, phase, dict(by_tag)
    peaks.setdefault("optimizer", after["backward"])  # it may allocate nothing
    return Borders(
        start_bytes=after["start"],
        after_forward_bytes=after["forward"],
        after_backward_bytes=after["backward"],
        peak_bytes=highest,
        peak_phase=peak_phase,
        peak_by_phase_bytes={name: size for name, size in peaks.items() if name != "start"},
        by_category={name: size for name, size in peak_tags.items() if size},
    )
