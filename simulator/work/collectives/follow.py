"""How a call follows what its fabric was measured to give: factors on the model's own waits and flows.

At a stated group the factors give the stated time back. One number for a group of large messages is shared: what it is slower
than the model is its steps' latency for the most, up to what a step of a GPU network may take, and its bytes' for the rest. Calls
below 1 MiB keep the model's steps: their protocols are others. Several sizes are followed wherever they lie: the measured time is
interpolated in log-log between them, and below and above them the model keeps its shape. A collective that nobody measured
follows the plateau of the nearest one that was. Between stated counts of nodes (inside a node: of ranks) the factors' logarithms
are interpolated over the count's; beyond the counts the nearest factor stays, so that what grows is what the model says grows,
and the interval widens with every doubling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final

from simulator.spec.calibration.collective_curves import doubling_sigma
from simulator.spec.cluster.measured import LEAST_ALONE_BYTES
from simulator.work.collectives.call import Call, Placement, Stated
from simulator.work.collectives.stated import of_stated

# One sigma of log time. A repeated sweep of the same nodes, and another job's placement on them; a number of one collective
# that stands for another's: priors. Each doubling of the nodes beyond what was stated: docs/scales.md.
REPEAT_SIGMA: Final = 0.05
OTHER_KIND_SIGMA: Final = 0.10
_NEAR: Final = 4  # sizes within such a factor of a stated one are as good as it
# What of a large message's slowness (its logarithm) is its bytes'. Steps' latencies spread over 9 to 60 µs in the networks of
# topologies/calibrations, bytes at their NICs' speed over 0.75 to 1: ln(1/0.75) of ln(60/9) + ln(1/0.75). NVLink's and PCIe's
# latencies are known.
_FLOW_PART: Final = 0.13
_RING_KINDS: Final = {"all_gather", "reduce_scatter"}  # as many steps for the same bytes; others' steps are others
LONGEST_STEP_S: Final = 60e-6
_LEAST_WAIT: Final = 1e-3  # of the model's wait: what is left where a stated time has no room for any


@dataclass(frozen=True, slots=True)
class Parts:
    """A call taken apart: seconds that its bytes take on its port and on the NICs, and at least, by the data sheet.

    wait_s: seconds before they flow, by the seconds that they flow (a pipeline fills the longer, the more there is). steps: that
    follow one another.
    """

    near_s: float
    far_s: float
    wire_s: float
    wait_s: Callable[[float], float]
    steps: int

    @property
    def flow_s(self) -> float:
        return max(self.near_s, self.far_s)

    @property
    def time_s(self) -> float:
        return self.wait_s(self.flow_s) + self.flow_s


@dataclass(frozen=True, slots=True)
class Follow:
    """Factors on the model's wait and flow, and seconds that each step waits beside.

    sigma: of the logarithm of the time that comes of them, for calls of least_bytes and more; smaller ones are the model's.
    """

    wait: float
    flow: float
    step_s: float
    sigma: float
    least_bytes: float

    def of(self, parts: Parts) -> Parts:
        """The call as it follows: no faster than the wire. Where the flow grows, it is the outer link that is slow."""
        flow_s = max(self.flow * parts.flow_s, parts.wire_s)
        grows = parts.far_s > 0 and (flow_s > parts.flow_s or parts.far_s >= parts.near_s)
        near_s = min(parts.near_s, flow_s) if parts.far_s else flow_s
        far_s = flow_s if grows else min(parts.far_s, flow_s)

        def wait_s(flow_s: float) -> float:
            return self.wait * parts.wait_s(flow_s / self.flow) + self.step_s * parts.steps

        return Parts(near_s, far_s, parts.wire_s, wait_s, parts.steps)


def follow_of(call: Call, model: Callable[[Call], Parts], *, far: bool) -> Follow | None:
    """The factors of a call by the numbers stated inside nodes or, `far`, between them; None where there are none.

    model: what calls without any statement take.
    """
    mine = [one for one in call.links.stated if (one.place.num_domains > 1) == far]
    if not mine:
        return None
    by_count = _by_count(mine, call.place, far=far)
    count = _count(call.place, far=far)
    known = sorted(by_count)
    below, above = (
        max((n for n in known if n <= count), default=known[0]),
        min((n for n in known if n >= count), default=known[-1]),
    )
    low, high = (_at(by_count[n], call, model) for n in (below, above))
    part = math.log(count / below) / math.log(above / below) if above > below and below <= count else 0.0
    distance = min(abs(math.log2(count / n)) for n in known)
    other = OTHER_KIND_SIGMA if mine[0].kind != call.kind else 0.0
    sigma = math.hypot(REPEAT_SIGMA, doubling_sigma(call.kind) * distance, other)
    least_bytes = min(one.size_bytes for n in (below, above) for one in by_count[n]) / _NEAR
    wait, flow = (_between(low[which], high[which], part) for which in (0, 1))
    step_s = ((1 - part) * low[2] + part * high[2]) * min(1.0, call.size_bytes / LEAST_ALONE_BYTES)
    return Follow(wait, flow, step_s, sigma, least_bytes)


def _count(place: Placement, *, far: bool) -> int:
    return place.num_domains if far else place.num_ranks


def _by_count(stated: Sequence[Stated], place: Placement, *, far: bool) -> dict[int, list[Stated]]:
    """The numbers of each count; over nodes, those of groups with as many ranks on each, or nearly."""

    def unlike(one: Stated) -> float:
        return abs(math.log(one.place.ranks_per_domain / place.ranks_per_domain)) if far else 0.0

    found: dict[int, list[Stated]] = {}
    for one in stated:
        found.setdefault(_count(one.place, far=far), []).append(one)
    return {n: [one for one in many if unlike(one) == min(map(unlike, many))] for n, many in found.items()}


def _between(low: float, high: float, part: float) -> float:
    return math.exp((1 - part) * math.log(low) + part * math.log(high))


def _at(stated: Sequence[Stated], call: Call, model: Callable[[Call], Parts]) -> tuple[float, float, float]:
    """(wait, flow, seconds a step) that give the times stated for one group back."""
    times, one = dict(_rising(stated)), stated[0]
    if one.kind != call.kind:  # another's small calls wait for other things
        times = dict([max(times.items())])
    if len(times) == 1:
        size, time_s = next(iter(times.items()))
        parts = model(of_stated(one, call.nccl, size))
        shared = _shared(parts, time_s, LONGEST_STEP_S if one.place.num_domains > 1 else 0.0)
        alike = one.kind == call.kind or {one.kind, call.kind} <= _RING_KINDS
        return shared if alike else (1.0, time_s / parts.time_s, 0.0)
    size = min(max(call.size_bytes, min(times)), max(times))
    parts, time_s = model(of_stated(one, call.nccl, size)), _interpolated(times, size)
    ratio = time_s / parts.time_s
    return (ratio, ratio, 0.0) if ratio > 1 else (*_quicker(parts, time_s), 0.0)


def _rising(stated: Sequence[Stated]) -> Iterable[tuple[int, float]]:
    """Size and time; a larger message is never quicker than a smaller one. Of one size, the slowest group's."""
    by_size = sorted((one.size_bytes, one.time_s) for one in stated)
    sizes = [size for size, _ in groupby(by_size, key=lambda pair: pair[0])]
    slowest = [max(time_s for _, time_s in many) for _, many in groupby(by_size, key=lambda pair: pair[0])]
    return zip(sizes, accumulate(slowest, max), strict=True)


def _interpolated(times: dict[int, float], size: int) -> float:
    """The time of a size between the smallest and the largest, in log-log."""
    below = max(s for s in times if s <= size)
    above = min(s for s in times if s >= size)
    part = math.log(size / below) / math.log(above / below) if above > below else 0.0
    return _between(times[below], times[above], part)


def _quicker(parts: Parts, time_s: float) -> tuple[float, float]:
    """Factors on wait and flow for a call faster than the model: equal, until its bytes move at wire speed."""
    flow_s, wait_s = parts.flow_s, parts.wait_s(parts.flow_s)
    ratio = time_s / (wait_s + flow_s)
    quick_s = max(ratio * flow_s, parts.wire_s)
    if not wait_s or not flow_s:
        return ratio, ratio
    return max(time_s - quick_s, _LEAST_WAIT * wait_s) / wait_s, quick_s / flow_s


def _shared(parts: Parts, time_s: float, longest_s: float) -> tuple[float, float, float]:
    """The factors on wait and flow, and the seconds a step beside, at which the call takes `time_s`.

    One number does not say which of them is slower. Networks spread more in what a step waits than in what their NICs carry, so
    steps take most of what a call is slower than the model, until each waits longest_s; then its bytes do.
    """
    flow_s, wait_s = parts.flow_s, parts.wait_s(parts.flow_s)
    if not flow_s:
        return 1.0, 1.0, 0.0
    ratio = time_s / (wait_s + flow_s)
    if ratio <= 1:
        return *_quicker(parts, time_s), 0.0
    longer_s = max(min(time_s - ratio**_FLOW_PART * flow_s, longest_s * parts.steps) - wait_s, 0.0)
    return 1.0, (time_s - wait_s - longer_s) / flow_s, longer_s / max(parts.steps, 1)
