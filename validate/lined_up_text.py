"""A recorded step beside its capture, as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulator.base.units import counted, format_seconds
from validate.lined_up import LinedUp

_MOST = 15  # lines of a list
_NAME = 60  # characters of a kernel's name


def text_of(one: LinedUp, capture: str, trace: str) -> str:
    """The report."""
    total = one.matched + sum(one.captured_only.values())
    head = f"{one.matched:,} of {counted(total, 'captured operator')} of {capture} are in {trace}, {one.in_order:,} of them in the same order"
    return "\n".join([head, *_rows(one), *_lists(one), _collectives(one)])


def _rows(one: LinedUp) -> Iterator[str]:
    heading = "measured, on the CPU" if one.on_host else "measured"
    yield f"  {'operator':<44}{'matched':>8}{'predicted':>12}{heading:>22}"
    for name, (count, predicted_s, measured_s) in sorted(one.rows.items(), key=lambda row: -row[1][1]):
        yield f"  {name:<44}{count:>8,}{format_seconds(predicted_s):>12}{format_seconds(measured_s):>22}"


def _lists(one: LinedUp) -> Iterator[str]:
    for name, count in one.captured_only.items():
        yield f"  captured only: {name}, {counted(count, 'time')}"
    for name, (count, seconds) in list(one.recorded_only.items())[:_MOST]:
        yield f"  recorded only: {name[:_NAME]}, {counted(count, 'time')}, {format_seconds(seconds)}"
    if len(one.recorded_only) > _MOST:
        rest = list(one.recorded_only.values())[_MOST:]
        yield f"  recorded only: {len(rest)} more names, {format_seconds(sum(seconds for _, seconds in rest))}"


def _collectives(one: LinedUp) -> str:
    captured, recorded = one.collectives
    if captured == recorded:
        return f"  {counted(len(captured), 'collective')}, of equal kinds in equal order"
    return f"  collectives differ: {len(captured):,} captured, {len(recorded):,} recorded"


def as_json(one: LinedUp) -> dict[str, Any]:
    """Keys as in `LinedUp`."""
    return {
        "schema_version": 1,
        "matched": one.matched,
        "in_order": one.in_order,
        "on_cpu": one.on_host,
        "operators": {name: {"matched": n, "predicted_s": a, "measured_s": b} for name, (n, a, b) in one.rows.items()},
        "captured_only": dict(one.captured_only),
        "recorded_only": {name: {"count": n, "seconds": s} for name, (n, s) in one.recorded_only.items()},
        "collectives": {"captured": list(one.collectives[0]), "recorded": list(one.collectives[1])},
    }
