"""A step's spans small enough for a page: every op where there is room, else neighbours drawn together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from simulator.work.program import COMPUTE_STREAM
from simulator.work.trace import Span, Timeline

MOST_SPANS: Final = 20_000  # some 400 kB
_FINENESS: Final = 1e-7  # of the step: what a tick of the page's clock is
_NUMBER: Final = re.compile(r"\d+")
_MICRO_BATCH: Final = re.compile(r"\bmb(\d+)\b|\b[FBWI](\d+)\.")
_PHASES: Final = ("recompute", "forward", "backward", "weights")
_MOST_PASSES: Final = 6_000

Key = tuple[str, int]


@dataclass(slots=True)
class _Drawn:
    """One bar: an op, or several too short to be drawn apart."""

    start: int
    end: int
    label: str
    category: str
    critical: bool
    longest: int
    count: int = 1


def timeline_of(timeline: Timeline) -> dict[str, Any]:
    """The spans of every program and stream, as flat lists of whole numbers that static/timeline.js decodes.

    A bar is seven numbers: ticks since the one before ended, ticks long, label, category, on the critical path, ops,
    and how many numbers of its label follow. Labels are stored without their numbers.
    """
    tick_s = 10 ** math.ceil(math.log10(max(float(timeline.step_s), 1e-9))) * _FINENESS
    path, names = critical_path(timeline), _Names()
    shares = _shares({name: len(timeline.of(name)) for name in timeline.programs})
    programs, coarsest = [], 0
    for name in timeline.programs:
        bars, together = _thinned(timeline.of(name), tick_s, path, shares[name])
        coarsest = max(coarsest, together)
        rows = [{"stream": stream, "bars": list(_coded(row, names))} for stream, row in bars.items()]
        programs.append({"name": name, "rows": rows})
    return {
        "step_s": float(timeline.step_s),
        "tick_s": tick_s,
        "together_s": coarsest * tick_s,
        "num_ops": len(timeline.spans),
        "labels": list(names.labels),
        "categories": list(names.categories),
        "programs": programs,
    }


def _shares(counts: Mapping[str, int]) -> dict[str, int]:
    """How many bars each program may have: the first as many as half of all, where there are too many."""
    if sum(counts.values()) <= MOST_SPANS:
        return dict(counts)
    first, *others = counts
    rest = MOST_SPANS // 2 // max(1, len(others))
    return {first: MOST_SPANS // 2 if others else MOST_SPANS} | dict.fromkeys(others, max(64, rest))


class _Names:
    """Labels without their numbers, and categories, each once."""

    def __init__(self) -> None:
        self.labels: dict[str, int] = {}
        self.categories: dict[str, int] = {}

    def label(self, text: str) -> tuple[int, list[int]]:
        numbers = [int(one) for one in _NUMBER.findall(text) if len(one) < 10]
        shape = _NUMBER.sub(lambda match: "#" if len(match[0]) < 10 else match[0], text.replace("#", " "))
        return self.labels.setdefault(shape, len(self.labels)), numbers

    def category(self, text: str) -> int:
        return self.categories.setdefault(text, len(self.categories))


def _coded(row: Sequence[_Drawn], names: _Names) -> Iterator[int]:
    end = 0
    for bar in row:
        label, numbers = names.label(bar.label)
        yield from (bar.start - end, bar.end - bar.start, label, names.category(bar.category), int(bar.critical))
        yield from (bar.count, len(numbers), *numbers)
        end = bar.end


def _thinned(
    spans: Sequence[Span], tick_s: float, path: frozenset[Key], most: int
) -> tuple[dict[str, list[_Drawn]], int]:
    """Bars by stream, compute first, and the ticks below which neighbours are drawn together."""
    streams = sorted(dict.fromkeys(span.stream for span in spans), key=lambda name: name != COMPUTE_STREAM)
    singles: dict[str, list[_Drawn]] = {name: [] for name in streams}
    for span in spans:
        start, end = round(float(span.start_s) / tick_s), round(float(span.end_s) / tick_s)
        bar = _Drawn(start, end, span.label, span.category, (span.program, span.id) in path, end - start)
        singles[span.stream].append(bar)
    for row in singles.values():
        row.sort(key=lambda bar: (bar.start, bar.end))
    limit, rows = 0, singles
    while sum(map(len, rows.values())) > most:
        limit = max(1, 3 * limit // 2, limit + 1)
        rows = {name: _together(row, limit) for name, row in singles.items()}
    return rows, limit


def _together(row: Sequence[_Drawn], limit: int) -> list[_Drawn]:
    """Neighbours within `limit` ticks as one bar of the longest one's label."""
    out: list[_Drawn] = []
    for bar in row:
        last = out[-1] if out else None
        if last is not None and bar.end - last.start <= limit:
            if bar.longest > last.longest:
                last.label, last.category, last.longest = bar.label, bar.category, bar.longest
            last.end, last.count, last.critical = max(last.end, bar.end), last.count + 1, last.critical or bar.critical
        else:
            out.append(_Drawn(bar.start, bar.end, bar.label, bar.category, bar.critical, bar.longest))
    return out


def critical_path(timeline: Timeline) -> frozenset[Key]:
    """(program, id) of the ops that the step's end waited for, one after another back to its start.

    From a collective that waited for others, the path goes on at the one that came last.
    """
    by_key = {(span.program, span.id): span for span in timeline.spans}
    last_to_come: dict[tuple[str, object, object], Span] = {
        (span.category, span.joined_s, span.end_s): span for span in timeline.spans if span.joined_s == span.start_s
    }
    span = max(timeline.spans, key=lambda one: one.end_s, default=None)
    found: set[Key] = set()
    while span is not None and (span.program, span.id) not in found:
        found.add((span.program, span.id))
        late = last_to_come.get((span.category, span.joined_s, span.end_s))
        if span.joined_s is not None and late is not None and (late.program, late.id) not in found:
            span = late
        else:
            span = None if span.cause is None else by_key.get((span.program, span.cause))
    return frozenset(found)


def pipeline_of(timeline: Timeline) -> list[dict[str, Any]] | None:
    """Of each stage, the passes of its micro-batches: flat lists of start, end (seconds), phase, micro-batch.

    None where there is one stage, or more passes than a page can show.
    """
    stages = [{"name": name, "passes": list(_passes(timeline.of(name)))} for name in timeline.programs]
    count = sum(len(stage["passes"]) for stage in stages)
    return stages if len(stages) > 1 and 0 < count <= _MOST_PASSES else None


def _passes(spans: Sequence[Span]) -> Iterator[tuple[float, float, int, int]]:
    at: tuple[int, int] | None = None
    start = end = 0.0
    for span in spans:
        key = _pass_of(span)
        if key is None:
            continue
        if key != at:
            if at is not None:
                yield start, end, *at
            at, start = key, float(span.start_s)
        end = float(span.end_s)
    if at is not None:
        yield start, end, *at


def _pass_of(span: Span) -> tuple[int, int] | None:
    """(phase, micro-batch) of an op of the compute stream; recomputation is part of the backward."""
    match = _MICRO_BATCH.search(span.label) if span.stream == COMPUTE_STREAM else None
    phase = next((one for one in _PHASES if one in span.label), None)
    if match is None or phase is None:
        return None
    return max(0, _PHASES.index("backward" if phase == "recompute" else phase) - 1), int(match[1] or match[2])
