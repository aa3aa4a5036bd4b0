"""A recorded step that was played, as text for people and as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.units import counted, format_bytes, format_seconds
from simulator.formats.writers import layout
from simulator.predict.recorded import ReplayedStep

_WIDTH = 76
_MOST = 12  # kernels named as priced without their shapes


def render(one: ReplayedStep) -> Group:
    """The report, for a rich console."""
    parts: list[RenderableType] = [_head(one), layout.section("Step", _step(one))]
    parts.append(layout.section("Where the step goes", _breakdown(one)))
    if one.communication:
        parts.append(layout.section("Communication", layout.communication(one.communication)))
    if one.repriced:
        parts.append(layout.section("Priced anew", _repriced(one)))
    return Group(*parts, layout.section("What this rests on", layout.sources(one.sources)))


def as_json(one: ReplayedStep) -> dict[str, Any]:
    """The same as plain data; docs/reference/json-output.md says what each key is."""
    return {
        "schema_version": 1,
        "recording": {"name": one.name, "ranks": one.num_ranks, "world_size": one.world_size, "step": one.step},
        "changes": list(one.changes),
        "recorded_s": one.recorded_s,
        "replayed_s": one.replayed_s,
        "step_s": one.step_s,
        "breakdown_s": dict(one.breakdown),
        "breakdown_before_s": dict(one.before),
        "communication": {k: {"exposed_s": a, "hidden_s": b} for k, (a, b) in one.communication.items()},
        "priced_anew": {method: {"ops": n, "before_s": a, "after_s": b} for method, (n, a, b) in one.repriced.items()},
        "without_shapes": dict(one.unshaped),
        "memory": None
        if one.peaks is None
        else dict(zip(("allocated_bytes", "reserved_bytes"), one.peaks, strict=True)),
        "sources": [{"what": each.what, "kind": each.kind, "detail": each.detail} for each in one.sources],
    }


def _head(one: ReplayedStep) -> Text:
    steps = counted(one.num_steps, "recorded step")
    which = "all that was recorded" if one.step is None else f"ProfilerStep#{one.step}, of {steps}"
    changes = "; ".join(one.changes) or "as it was recorded"
    return Text(f"{one.name}, {which}: {changes}", style="bold")


def _step(one: ReplayedStep) -> Table:
    rows = [
        ("recorded", format_seconds(one.recorded_s), "by the profiler, until the next step begins"),
        ("played again", format_seconds(one.replayed_s), f"{one.replayed_s / one.recorded_s - 1:+.2%}"),
    ]
    if one.changes:
        rows.append(("changed", format_seconds(one.step_s), f"{one.step_s / one.replayed_s - 1:+.1%}"))
    if one.peaks is not None:
        detail = f"allocated, {format_bytes(one.peaks[1])} reserved, as recorded"
        rows.append(("memory", format_bytes(one.peaks[0]), detail))
    return layout.table(rows, "lrl")


def _breakdown(one: ReplayedStep) -> Table:
    names = sorted({*one.breakdown, *one.before}, key=lambda name: (-one.before.get(name, 0.0), name))
    rows = [_row(name, one.before.get(name, 0.0), one.breakdown.get(name, 0.0), one) for name in names]
    total = _row("sum", sum(one.before.values()), sum(one.breakdown.values()), one)
    return layout.table([*rows, total], "lrrrr" if one.changes else "lrr")


def _row(name: str, before_s: float, after_s: float, one: ReplayedStep) -> tuple[str, ...]:
    row = (name, format_seconds(before_s), f"{before_s / one.replayed_s:.1%}")
    return (*row, format_seconds(after_s), f"{after_s / one.step_s if one.step_s else 0:.1%}") if one.changes else row


def _repriced(one: ReplayedStep) -> Table:
    rows = [
        (method, counted(n, "op"), format_seconds(a), f"{format_seconds(b)}", f"{b / a if a else 1:.2f} times")
        for method, (n, a, b) in one.repriced.items()
    ]
    return layout.table([*rows, *_unshaped(one.unshaped)], "lrrrr")


def _unshaped(names: Mapping[str, int]) -> list[tuple[str, ...]]:
    most = sorted(names.items(), key=lambda item: (-item[1], item[0]))
    rows: list[tuple[str, ...]] = [
        (f"  no shapes: {name[: _WIDTH - 30]}", counted(n, "op"), "", "", "") for name, n in most[:_MOST]
    ]
    return [*rows, (f"  and {len(most) - _MOST} more kernels", "", "", "", "")] if len(most) > _MOST else rows
