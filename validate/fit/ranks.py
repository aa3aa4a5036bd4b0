"""Ranks and hosts that are slower than the others: named, and left out of the fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from validate.samples import Sample, by_key

MIN_RANKS = 3  # of two that differ nobody can say which is wrong
MIN_SLOW = 0.10  # relative
SPREADS = 4.0
SHARED = frozenset(
    {"collective", "collective_burst", "collective_issue", "overlap", "fsdp2_group"}
)  # everybody waits for the slowest: no rank's own speed


def slow_ranks(samples: Sequence[Sample]) -> dict[tuple[str, int], float]:
    """(host, rank) -> median time over its peers', for those far off: more than 10 % and four spreads of the others."""
    logs: dict[tuple[str, int], list[float]] = {}
    for same in by_key(s for s in samples if s.kind not in SHARED).values():
        if len({(s.host, s.rank) for s in same}) < MIN_RANKS:
            continue
        middle = float(np.median([np.log(s.time_s) for s in same]))
        for s in same:
            logs.setdefault((s.host, s.rank), []).append(float(np.log(s.time_s)) - middle)
    if len(logs) < MIN_RANKS:
        return {}
    medians = {who: float(np.median(found)) for who, found in logs.items()}
    values = np.array(list(medians.values()))
    center = float(np.median(values))
    width = max(1.4826 * float(np.median(np.abs(values - center))), 0.005)
    return {
        who: float(np.exp(value - center))
        for who, value in sorted(medians.items())
        if value - center > max(SPREADS * width, np.log(1 + MIN_SLOW))
    }
