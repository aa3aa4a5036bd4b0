"""The highest rate of arrivals at which every limit holds."""

from __future__ import annotations

from collections.abc import Callable

from simulator.studies.serving.report import Serving

ROUNDS = 7  # of bisection: within a hundredth of the capacity


def within(served: Serving) -> bool:
    """The queue does not grow, and every limit holds."""
    return served.verdict == "ok" and all(each.held for each in served.attainments)


def highest_rate(
    play: Callable[[float], Serving], first: Serving, progress: Callable[[float, bool], None] | None = None
) -> tuple[float, Serving | None]:
    """(requests a second, the answer there); (0, None) where not even the lowest rate that is tried holds.

    play: the same requests at another rate. first: an answer at any rate, for its capacity. told: hears of each rate
    that is tried. The rate is sought by halves between none and the capacity: percentiles of one drawn workload do not
    always grow with the rate, so where they cross a limit twice, either crossing may be found.
    """
    if first.load is None:
        return 0.0, None
    low, high, best = 0.0, first.load.capacity_per_s, None
    for _ in range(ROUNDS):
        rate = (low + high) / 2
        served = play(rate)
        holds = within(served)
        if progress is not None:
            progress(rate, holds)
        if holds:
            low, best = rate, served
        else:
            high = rate
    return low, best
