"""Records and comparisons as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.base.units import format_bytes, format_seconds

_TABLES = {
    "time": "time",
    "parts": "step by part",
    "communication": "communication, profiled step",
    "memory": "memory",
    "collectives": "collectives",
    "categories": "memory at the peak",
}


def run_text(record: Mapping[str, Any]) -> str:
    """One run: how it ended, its times, its bytes."""
    lines = [f"{record['mode']}: {record['verdict']}{' (partial)' if record['partial'] else ''}"]
    trouble = record["trouble"]
    if trouble:
        where = f" on {trouble['host']}" if trouble.get("host") else ""
        who = f"rank {trouble['rank']}{where}, " if trouble["rank"] is not None else ""
        lines.append(f"  {who}phase {trouble['phase'] or '?'}: {trouble['detail']}")
        lines += [f"  | {line}" for line in trouble["stderr"]]
    if record["time"]:
        lines.append(_step(record["time"]))
        lines += [
            f"  {name:<12}{format_seconds(phase['median_s'])}" for name, phase in record["time"]["phases"].items()
        ]
    lines += _memory(record["memory"] or {})
    lines += [f"{name} in {file}" for name, file in record["files"].items()]
    lines += [f"note: {note}" for note in record.get("notes", ())]
    return "\n".join(lines)


def _step(time: Mapping[str, Any]) -> str:
    spread = f"{format_seconds(time['p10_s'])} to {format_seconds(time['p90_s'])} in {len(time['times_s'])} steps"
    return f"step          {format_seconds(time['median_s'])}  ({spread})"


def _memory(memory: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, name in (
        ("start_bytes", "before the step"),
        ("after_forward_bytes", "after forward"),
        ("after_backward_bytes", "after backward"),
        ("peak_bytes", "peak"),
        ("end_bytes", "after the step"),
        ("peak_allocated_bytes", "peak allocated"),
        ("peak_reserved_bytes", "peak reserved"),
        ("device_used_bytes", "device used"),
    ):
        if key in memory:
            where = f"  in {memory['peak_phase']}" if key == "peak_bytes" and "peak_phase" in memory else ""
            lines.append(f"{name:<16}{format_bytes(memory[key]):>12}{where}")
    by_category = memory.get("tracked", memory).get("by_category", {}).get("peak", {})
    owners = sorted(by_category.items(), key=lambda item: -item[1])
    return [*lines, *[f"  {name:<22}{format_bytes(size):>12}" for name, size in owners]]


def comparison_text(found: Mapping[str, Any]) -> str:
    """One comparison as a table, its notes and its explanation."""
    lines = [f"{found['what']} [{found['mode']}]"]
    for key, title in _TABLES.items():
        if found.get(key):
            lines.append(
                f"  {title:<28}{'predicted':>12}{'measured':>12}{'off by':>12}{'relative':>11}{'one sigma':>12}"
            )
            lines += [_row(row) for row in found[key]]
    for topic in ("time", "memory"):
        why = found["explains"].get(topic)
        if why:
            part = _name(why["part"])
            lines.append(f"  most of the error in {topic}: {part} ({100 * why['share']:.0f} % of the parts' errors)")
    return "\n".join([*lines, *[f"  note: {note}" for note in found["notes"]]])


def _row(row: Mapping[str, Any]) -> str:
    show = format_bytes if row["name"].endswith("_bytes") else format_seconds
    name = _name(row["name"])
    values = [show(row["predicted"]), show(row["measured"])]
    sign = "-" if row["error"] < 0 else "+"
    relative = f"{100 * row['relative_error']:+,.1f} %" if row["relative_error"] is not None else "-"
    if len(relative) > 10:  # perhaps another run's
        relative = f"× {row['predicted'] / row['measured']:,.0f}"
    noise = "  lost in the noise" if row["in_the_noise"] and row["u_val"] else ""
    error = f"{sign}{show(abs(row['error']))}" if row["error"] else "0"
    return f"    {name:<26}{values[0]:>12}{values[1]:>12}{error:>12}{relative:>11}{show(row['u_val']):>12}{noise}"


def _name(key: str) -> str:
    return key.removesuffix("_bytes").removesuffix("_s").replace("_", " ")
