"""Which rank the others wait for, from each rank's own part of a profiled step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

SLOW: Final = 1.5  # times the others' median; one profiled step is no more certain than that


def own_s(profile: Mapping[str, Any] | None) -> float | None:
    """Seconds of a step in which a rank did not wait for others; all ranks' steps are equally long, their own parts are not."""
    if not profile:
        return None
    return float(profile["step_s"]) - sum(float(kind["exposed_s"]) for kind in profile["communication"].values())


def slow_ranks(by_rank: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ranks whose own part is longer than the others' median by more than half: rank, host, ratio; the slowest first."""
    own_times = {index: one["own_s"] for index, one in enumerate(by_rank) if one.get("own_s") is not None}
    found = []
    for rank, seconds in own_times.items():
        others = [other for who, other in own_times.items() if who != rank]
        if others and seconds > SLOW * (usual := statistics.median(others)) > 0:
            host = by_rank[rank].get("host", "")
            found.append({"rank": rank, "host": host, "own_s": seconds, "ratio": seconds / usual})
    return sorted(found, key=lambda one: -one["ratio"])
