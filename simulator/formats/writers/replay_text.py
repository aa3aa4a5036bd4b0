"""Replays for people: an exact one, and the table of policies."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.units import counted, format_bytes, format_seconds
from simulator.memory.policies import POLICIES
from simulator.studies.replay import Demand, ReplayReport, Score, Sequence, Tally

_COMPARED = (
    ("allocations", "addresses handed out"),
    ("taken", "segments and pages taken from the driver"),
    ("returned", "segments and pages given back"),
    ("segments", "segments at the end"),
    ("blocks", "blocks at the end"),
)


def exact_text(report: ReplayReport) -> Group:
    """What was compared, what differed first, what the reader of the file had to say."""
    head = Text(f"{'EXACT' if report.is_exact else 'DIFFERS'}  {report.name}: {counted(report.num_events, 'event')}")
    head.stylize("bold green" if report.is_exact else "bold red", 0, 7)
    table = _table("lrl")
    for name, words in _COMPARED:
        table.add_row(words, *_tally(getattr(report, name)))
    for name, (recorded, replayed) in report.counters.items():
        words = f"{name.removesuffix('_bytes')} bytes at the end"
        table.add_row(words, f"{recorded:,}", "the same" if recorded == replayed else f"ours {replayed:,}")
    for name, value in report.peaks.items():
        table.add_row(f"peak of {name.removesuffix('_bytes')} bytes", f"{value:,}", "ours: a snapshot has none")
    parts: list[RenderableType] = [head, Text(), table]
    if report.first_mismatch is not None:
        first = report.first_mismatch
        parts += [Text(), Text(f"first difference, event {first.index} ({first.event})", style="bold")]
        parts += [Text(f"  recorded: {first.recorded}"), Text(f"  ours:     {first.replayed}")]
    return Group(*parts, *_notes(report.notes))


def _tally(tally: Tally) -> tuple[str, str]:
    if tally.is_exact:
        return f"{tally.total:,}", "all the same"
    extra = f", {tally.extra:,} of ours were not recorded" if tally.extra else ""
    return f"{tally.total:,}", f"{tally.matched:,} the same{extra}"


def policies_text(sequence: Sequence, demand: Demand, scores: Rows[Score], source: str) -> Group:
    """One line a policy."""
    small = (
        f"{demand.share_below_256_mb:.1%} of them below 256 MB, {demand.share_of_bytes_below_256_mb:.1%} of the bytes"
    )
    head = [
        Text(f"{sequence.name}: at most {format_bytes(demand.peak_live_bytes)} alive"),
        Text(f"  a step: {demand.num_allocations:,} allocations, {demand.num_frees:,} frees; {small}"),
        Text(),
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in (
        "policy",
        "allocated",
        "reserved",
        "fragmented",
        "free",
        "largest",
        "index",
        "calls",
        "cost",
        "first",
    ):
        table.add_column(title, justify="left" if title == "policy" else "right", no_wrap=True)
    for score in scores:
        table.add_row(*_line(score))
    words = [
        Text(),
        Text(
            "allocated, reserved: peaks of the step. At the moment of most live bytes: fragmented = reserved - allocated,"
        ),
        Text(
            "largest block of what is free, index = 1 - largest / free. calls, cost: the driver's in the step; first: the"
        ),
        Text(f"cost of those before it. Costs: {source}; mapping is priced like cudaMalloc."),
        *(Text(f"{score.policy}: {POLICIES[score.policy][1]}") for score in scores),
    ]
    return Group(*head, table, *words, *_notes(sequence.notes))


def _line(score: Score) -> tuple[str, ...]:
    if not score.fit.runs:
        return (score.policy, score.fit, *[""] * 8)
    return (
        score.policy,
        format_bytes(score.peak_allocated_bytes),
        format_bytes(score.peak_reserved_bytes),
        format_bytes(score.fragmentation_bytes),
        format_bytes(score.free_bytes),
        format_bytes(score.largest_free_bytes),
        f"{score.external_fragmentation:.2f}" if score.free_bytes else "",
        f"{sum(score.calls.values()) - score.calls.get('move', 0):,}",
        format_seconds(score.calls_s),
        format_seconds(score.all_calls_s - score.calls_s),
    )


def _notes(notes: Rows[str]) -> list[RenderableType]:
    return [Text(f"note: {note}") for note in notes]


def _table(justify: str) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2), pad_edge=True)
    for letter in justify:
        table.add_column(justify="right" if letter == "r" else "left", no_wrap=True)
    return table
