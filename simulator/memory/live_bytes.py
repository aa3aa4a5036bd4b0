"""Who is alive when: the live bytes of a steady step by category, at as many moments as one cares to look."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.memory.history import CUDA_GRANULARITY_BYTES, History, StepLiveBytes, moment_of, step_live_bytes
from simulator.memory.tape import CATEGORIES, FREE, FREE_LATER

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
