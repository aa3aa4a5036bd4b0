"""Who is alive when: the live bytes of a steady step by category, at as many moments as one cares to look."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from simulator.memory.history import (
    CUDA_GRANULARITY_BYTES,
    History,
    StepLiveBytes,
    moment_of,
    step_live_bytes,
    write_history,
)
from simulator.memory.tape import CATEGORIES, FREE, FREE_LATER
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.ops import build_blocks
from simulator.work.script import stepped_numels, units

Phase = tuple[str, int]  # (phase, micro-batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBytes:
    """Live bytes at the highest moment of each stretch of a steady step.

    at: index of each of these moments among all of the step. by_category: category -> bytes at each. phases: where each
    phase begins, (moment, phase). num_moments: of the step.
    """

    at: list[int]
    by_category: dict[str, list[int]]
    phases: list[tuple[int, Phase]]
    num_moments: int


def live_bytes(history: History, num_points: int) -> LiveBytes:
    """The step cut into at most `num_points` stretches of equally many moments; the peak of all is among theirs."""
    live = step_live_bytes(history)
    chosen = _highest(live, num_points)
    totals = _totals(history, [live.most[moment][1] for moment in chosen])
    tags = [tag for tag in range(len(CATEGORIES)) if any(row[tag] for row in totals)]
    return LiveBytes(
        at=chosen,
        by_category={CATEGORIES[tag]: [row[tag] for row in totals] for tag in tags},
        phases=_phases(history, live),
        num_moments=len(live.most),
    )


def _highest(live: StepLiveBytes, num_points: int) -> list[int]:
    """The moment with the most live bytes in each stretch."""
    count = len(live.most)
    width = -(-count // num_points)
    return [
        max(range(start, min(start + width, count)), key=lambda moment: live.most[moment][0])
        for start in range(0, count, width)
    ]


def _totals(history: History, events: list[int]) -> list[list[int]]:
    """Live bytes by category at each of the events, which are in order: after an allocation, before a free."""
    now = [0] * len(CATEGORIES)
    owners: dict[int, tuple[int, int]] = {}
    rows: list[list[int]] = []
    wanted = set(events)
    for index, (slot, num_bytes, _, tag) in enumerate(history.events):
        if num_bytes >= 0:
            size = -(-num_bytes // CUDA_GRANULARITY_BYTES) * CUDA_GRANULARITY_BYTES
            owners[slot] = size, tag
            now[tag] += size
        if index in wanted:
            rows.append(list(now))
        if num_bytes in (FREE, FREE_LATER):
            size, owner = owners.pop(slot)
            now[owner] -= size
    return rows


def _phases(history: History, live: StepLiveBytes) -> list[tuple[int, Phase]]:
    found: list[tuple[int, Phase]] = []
    for moment, (_, index) in enumerate(live.most):
        phase, micro_batch, _, _ = moment_of(history, index)
        if not found or found[-1][1] != (phase, micro_batch):
            found.append((moment, (phase, micro_batch)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBytes:
    """Bytes before a step, after its forward, after its backward, and the most in each phase and in all."""

    start: int
    after_fwd: int
    after_bwd: int
    peak_fwd: int
    peak_bwd: int
    peak_opt: int

    @property
    def peak(self) -> int:
        return max(self.peak_fwd, self.peak_bwd, self.peak_opt)

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "peak": self.peak}


def tracked_phase_bytes(model: Model, plan: Plan, stack: Stack, *, cuda: bool) -> PhaseBytes:
    """What torch's MemTracker reads of a steady step on one rank: tensors alone, no library's workspaces.

    cuda: storages count in blocks of 512 bytes; on a CPU they count as they are, and Adam's step counters, which stay
    on the host unless the optimizer is fused, count too.
    """
    history = write_history(model, plan, stack, build_blocks(model, stack, plan), (), steps=1)
    return _phase_bytes(history, CUDA_GRANULARITY_BYTES if cuda else 1, 0 if cuda else host_counter_bytes(model, plan))


def host_counter_bytes(model: Model, plan: Plan) -> int:
    """Adam's step counters in host memory: 4 bytes a parameter tensor; the fused optimizer keeps its on the device."""
    if plan.optimizer.kind not in ("adam", "adamw") or plan.optimizer.impl == "fused":
        return 0
    if plan.traits.reduces_among_all:
        return 4 * len(stepped_numels(model, plan))
    return 4 * sum(len(unit.shapes) for unit in units(model, plan))


def _phase_bytes(history: History, granularity_bytes: int, beside_bytes: int) -> PhaseBytes:
    moments = step_live_bytes(history, granularity_bytes)
    most = {"forward": 0, "backward": 0, "optimizer": 0}
    entered: dict[str, int] = {}
    before = moments.resident
    for (live, index), ended in zip(moments.most, moments.ends, strict=True):
        phase = moment_of(history, index)[0]
        most[phase] = max(most[phase], live)
        entered.setdefault(phase, before)
        before = ended
    return PhaseBytes(
        start=moments.resident + beside_bytes,
        after_fwd=entered["backward"] + beside_bytes,
        after_bwd=entered["optimizer"] + beside_bytes,
        peak_fwd=most["forward"] + beside_bytes,
        peak_bwd=most["backward"] + beside_bytes,
        peak_opt=most["optimizer"] + beside_bytes,
    )
