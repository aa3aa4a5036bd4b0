"""Traces: what the engine saw happen, and the questions a prediction asks of it. No SimPy, no models."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Final, NamedTuple

from simulator.base.sums import summed
from simulator.work.program import COMPUTE_STREAM, HOST_STREAM, Number

Interval = tuple[Number, Number]
_END: Final = attrgetter("end_s")
_ROUNDING: Final = 1e-12  # of a step: differences of clock times leave so much of nothing


class Span(NamedTuple):
    """One op's time on its stream.

    category: of a collective its kind, of compute its largest part. parts: of compute, nominal seconds by category.
    nominal_s: what it would take alone: compute without interference, a collective with its links to itself.
    joined_s: of a collective, when its last member had arrived (until then it occupies its stream and waits, as a
        profiler shows it); None for compute.
    cause: id of the op whose end it waited for last; None where that was the host's launch.
    """

    program: str
    stream: str
    id: int
    label: str
    category: str
    start_s: Number
    end_s: Number
    nominal_s: Number
    parts: tuple[tuple[str, Number], ...] = ()
    joined_s: Number | None = None
    cause: int | None = None

    @property
    def is_collective(self) -> bool:
        return self.joined_s is not None


class Gap(NamedTuple):
    """The compute stream stands still, in seconds of the step; `name` says what for."""

    name: str
    start_s: Number
    end_s: Number


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All spans of a step, by program and then in host launch order. `step_s`: when the last of them ends.

    Queries name a program; None is the first one.
    """

    spans: tuple[Span, ...]
    step_s: Number

    @cached_property
    def _by_program(self) -> Mapping[str, Mapping[int, Span]]:
        found: dict[str, dict[int, Span]] = {}
        for span in self.spans:
            found.setdefault(span.program, {})[span.id] = span
        return found

    @property
    def programs(self) -> tuple[str, ...]:
        return tuple(self._by_program)

    def of(self, program: str | None = None) -> tuple[Span, ...]:
        """The spans of one program, in host launch order."""
        if program is None:
            program = next(iter(self._by_program), "")
        return tuple(self._by_program.get(program, {}).values())

    def busy(self, program: str, stream: str) -> Number:
        """Seconds in which the stream is occupied (spans of one stream never overlap)."""
        return summed((span.end_s - span.start_s for span in self.of(program) if span.stream == stream), 0)

    def exposed(self, kind: str, program: str | None = None) -> Number:
        """Seconds in which collectives of this kind run while the compute stream does nothing.

        Two kinds may be exposed at the same moment, so the kinds need not sum to what they cost: `breakdown` does.
        """
        collectives, covered = self._cover(kind, program)
        return summed((end - start for start, end in collectives), 0) - covered

    def hidden(self, kind: str, program: str | None = None) -> Number:
        """Seconds in which collectives of this kind run under compute."""
        return self._cover(kind, program)[1]

    def communication(self, kinds: Iterable[str], program: str | None = None) -> dict[str, tuple[float, float]]:
        """Kind -> (exposed, hidden) seconds."""
        return {kind: (float(self.exposed(kind, program)), float(self.hidden(kind, program))) for kind in kinds}

    def _cover(self, kind: str, program: str | None) -> tuple[list[Interval], Number]:
        spans = self.of(program)
        collectives = _union((s.start_s, s.end_s) for s in spans if s.is_collective and s.category == kind)
        if (compute := self._computing.get(program)) is None:
            compute = _union((s.start_s, s.end_s) for s in spans if s.stream == COMPUTE_STREAM)
            self._computing[program] = compute
        return collectives, _overlap(collectives, compute)

    @cached_property
    def _computing(self) -> dict[str | None, list[Interval]]:
        """Busy intervals of the compute stream by program, cached."""
        return {}

    def breakdown(self, program: str | None = None) -> dict[str, Number]:
        """Where the step's seconds went, seen from the compute stream; the values sum to `step_s`.

        A compute category: its nominal seconds. interference: what compute lost to collectives. Gaps go to what the
        next compute op was waiting for, walked back in time to the start of the gap: exposed:<kind>, wait:<kind> (a
        collective whose other members had not arrived), exposed:<category> (compute on another stream), host. idle:
        after this program's last op, until the slowest program ends. What rounding of the clock leaves is no entry.
        """
        if program in self._known:
            return dict(self._known[program])
        out: dict[str, Number] = {}
        for one in self._in_order(program):
            if isinstance(one, Gap):
                _add(out, one.name, one.end_s - one.start_s)
                continue
            for category, nominal_s in one.parts:
                _add(out, category, nominal_s)
            _add(out, "interference", one.end_s - one.start_s - one.nominal_s)
        least = _ROUNDING * float(self.step_s)
        self._known[program] = {name: seconds for name, seconds in out.items() if abs(float(seconds)) > least}
        return dict(self._known[program])

    @cached_property
    def _known(self) -> dict[str | None, dict[str, Number]]:
        """Breakdowns by program, as several parts of a prediction ask for them."""
        return {}

    def gaps(self, program: str | None = None) -> tuple[Gap, ...]:
        """When the compute stream stood still and what for, in the words of `breakdown`; without rounding of the clock."""
        least = _ROUNDING * float(self.step_s)
        found = [one for one in self._in_order(program) if isinstance(one, Gap) and one.end_s - one.start_s > least]
        return tuple(sorted(found, key=lambda gap: gap.start_s))

    def _in_order(self, program: str | None) -> Iterator[Span | Gap]:
        """Compute spans, each after the gaps before it, latest first; what follows the last of them at the end."""
        spans = self.of(program)
        by_id = {span.id: span for span in spans}
        working = [span for span in spans if span.stream == HOST_STREAM and span.end_s > span.start_s]
        ended: Number = 0
        for span in (s for s in spans if s.stream == COMPUTE_STREAM):
            if span.start_s > ended:
                yield from _gaps(by_id, working, span.cause, ended, span.start_s)
            yield span
            ended = span.end_s
        last = max(spans, key=lambda span: span.end_s, default=None)
        if last is not None:
            yield from _gaps(by_id, working, last.id, ended, last.end_s)
            ended = last.end_s
        yield Gap("idle", ended, self.step_s)


def _add(out: dict[str, Number], category: str, seconds: Number) -> None:
    if seconds:
        out[category] = out.get(category, 0) + seconds


def _gaps(
    by_id: Mapping[int, Span], working: list[Span], cause: int | None, begin: Number, end: Number
) -> Iterator[Gap]:
    """Share the gap [begin, end] of the compute stream among the chain of ops that filled it, latest first.

    working: what the host computed meanwhile, in order of time.
    """
    while end > begin and cause is not None:
        span = by_id[cause]
        start = max(span.start_s, begin)
        joined = start if span.joined_s is None else max(span.joined_s, begin)
        yield Gap(f"exposed:{span.category}", joined, end)
        if span.joined_s is not None:
            yield Gap(f"wait:{span.category}", start, joined)
        end, cause = start, span.cause
    if end > begin:
        yield from _of_host(begin, end, working)


def _of_host(begin: Number, end: Number, working: list[Span]) -> Iterator[Gap]:
    """A gap that waits for the host: what the host computes in it, and the rest."""
    for span in working[bisect_right(working, begin, key=_END) :]:
        if span.start_s >= end:
            break
        if span.start_s > begin:
            yield Gap("host", begin, span.start_s)
        start, begin = max(span.start_s, begin), min(span.end_s, end)
        yield Gap(f"exposed:{span.category}", start, begin)
    if end > begin:
        yield Gap("host", begin, end)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order, covering the same moments."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _overlap(left: list[Interval], right: list[Interval]) -> Number:
    """Seconds that two unions have in common."""
    total: Number = 0
    i = j = 0
    while i < len(left) and j < len(right):
        total += max(min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]), 0)
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


class MemorySample(NamedTuple):
    """What is held after one memory event. `label` names the moment."""

    label: str
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrace:
    """Memory over a step, in order and without a clock.

    peak_index: the first sample with the most allocated bytes. by_category: category -> bytes alive at that moment.
    """

    samples: tuple[MemorySample, ...]
    peak_index: int
    by_category: Mapping[str, int]

    @property
    def peak(self) -> MemorySample:
        return self.samples[self.peak_index]
