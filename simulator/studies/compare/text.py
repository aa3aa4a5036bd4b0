"""A comparison for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.units import format_bytes, format_days, format_interval, format_number, format_seconds
from simulator.studies.compare.ablations import Gain
from simulator.studies.compare.comparison import Compared, Comparison, busy

WIDTH = 140
_LITTLE = 0.01  # of a step


def render(comparison: Comparison) -> RenderableType:
    """The comparison for a rich console."""
    rows = comparison.rows
    names = [Text(f"{letter}  {row.subject.name}") for letter, row in zip(_letters(rows), rows, strict=True)]
    parts: list[RenderableType] = [
        *names,
        Text(),
        _figures(rows),
        Text(),
        Text("Where the step goes", style="bold"),
        _breakdown(rows),
    ]
    if any(row.counters for row in rows):
        parts += [Text(), Text("How busy each part is: mean, and highest at any moment", style="bold"), _busy(rows)]
    if any(row.costs for row in rows):
        parts += [Text(), Text("What it costs", style="bold"), _costs(comparison)]
    if any(row.gains for row in rows):
        parts += [Text(), Text("What the step would gain without a limit", style="bold"), _gains(rows)]
        parts += [Text(_limit(letter, row)) for letter, row in zip(_letters(rows), rows, strict=True)]
    others = zip(_letters(rows)[1:], rows[1:], strict=True)
    parts += [Text(), *(Text(_verdict(letter, row, rows[0])) for letter, row in others)]
    return Group(*parts)


def _letters(rows: tuple[Compared, ...]) -> list[str]:
    """What columns are called: A to Z, then numbers."""
    return [chr(ord("A") + number) if number < 26 else str(number + 1) for number in range(len(rows))]


def _limit(letter: str, row: Compared) -> str:
    """The bottleneck, named by the gain of removing it."""
    first = row.gains[0]
    if first.gain < _LITTLE:
        return f"{letter} is limited by compute: no limit's absence would gain {_LITTLE:.0%}."
    return f"{letter} gains most from {first.name}: {first.gain:.1%} of its step."


def _table(rows: tuple[Compared, ...]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column("")
    for letter in _letters(rows):
        table.add_column(letter, justify="right")
    return table


def _figures(rows: tuple[Compared, ...]) -> Table:
    table = _table(rows)
    figures: dict[str, list[str]] = {
        "cluster": [f"{row.prediction.num_devices:,} of {row.prediction.cluster}" for row in rows],
        "verdict": [row.prediction.verdict for row in rows],
        "memory": [
            f"{format_bytes(row.prediction.memory.used_bytes)} of {format_bytes(row.prediction.memory.capacity_bytes)}"
            for row in rows
        ],
        "step": [format_seconds(row.prediction.step_s) for row in rows],
        "90 % interval": [format_interval(row.prediction.low_s, row.prediction.high_s, between=" - ") for row in rows],
        "tokens a step": [f"{row.prediction.tokens_per_step:,}" for row in rows],
        "tokens/s": [f"{row.prediction.tokens_per_s:,.0f}" for row in rows],
        "device-hours a billion tokens": [f"{row.device_s_per_token * 1e9 / 3600:,.1f}" for row in rows],
        "MFU": [f"{row.prediction.mfu:.1%}" if row.prediction.model_flop_per_step else "-" for row in rows],
        "seconds a token over the first": [_ratio(row) for row in rows],
    }
    if any(row.served_tokens_per_s for row in rows):
        figures["tokens/s with servers"] = [
            "-" if row.served_tokens_per_s is None else f"{row.served_tokens_per_s:,.0f}" for row in rows
        ]
    for name, values in figures.items():
        table.add_row(name, *values)
    return table


def _ratio(row: Compared) -> str:
    against = row.against_first
    return "" if against is None else f"× {against.ratio:.3f} ({against.low:.3f} - {against.high:.3f})"


def _breakdown(rows: tuple[Compared, ...]) -> Table:
    table = _table(rows)
    names = dict.fromkeys(name for row in rows for name in row.prediction.breakdown)
    weight = {name: max(row.prediction.breakdown.get(name, 0.0) for row in rows) for name in names}
    for name in sorted(names, key=lambda name: (-weight[name], name)):
        if weight[name]:
            parts = [(row.prediction.breakdown.get(name, 0.0), row.prediction.step_s) for row in rows]
            table.add_row(name, *(f"{format_seconds(one)} {one / of:6.1%}" if one else "-" for one, of in parts))
    return table


def _busy(rows: tuple[Compared, ...]) -> Table:
    table, counted = _table(rows), [busy(row.counters) if row.counters else {} for row in rows]
    for name in dict.fromkeys(name for one in counted for name in one):
        shares = (one.get(name) for one in counted)
        table.add_row(name, *(f"{one['mean']:.1%} {one['peak']:7.1%}" if one else "-" for one in shares))
    return table


def _costs(comparison: Comparison) -> Table:
    """A block a price; * marks rows that no other beats in both seconds and money a token."""
    rows = comparison.rows
    table = _table(rows)
    for number in range(max(len(row.costs) for row in rows)):
        costs = [row.costs[number] if number < len(row.costs) else None for row in rows]
        table.add_row(
            "price", *(f"{c.kind}, {c.gpu_hour:.2f} {c.currency}/GPU h, {c.date}" if c else "-" for c in costs)
        )
        table.add_row("  a step", *(format_number(c.step) if c else "-" for c in costs))
        table.add_row("  a billion tokens", *(format_number(c.billion_tokens) if c else "-" for c in costs))
        if any(c and c.run for c in costs):
            table.add_row(
                "  the run",
                *(f"{format_number(c.run or 0)}, {format_days(c.run_days or 0)}" if c else "-" for c in costs),
            )
    table.add_row("nobody is both quicker and cheaper", *("*" if best else "" for best in comparison.on_front))
    return table


def _gains(rows: tuple[Compared, ...]) -> Table:
    table = _table(rows)
    meanings = {gain.name: gain.meaning for row in rows for gain in row.gains}
    for name, meaning in meanings.items():
        gains = [next((gain for gain in row.gains if gain.name == name), None) for row in rows]
        table.add_row(f"{name}: {meaning}", *("-" if gain is None else _gained(gain) for gain in gains))
    return table


def _gained(gain: Gain) -> str:
    return f"{gain.gain:.1%}" + (f", {format_bytes(gain.gain_bytes)}" if gain.gain_bytes else "")


def _verdict(letter: str, row: Compared, first: Compared) -> str:
    against = row.against_first
    assert against is not None
    if not against.distinguishable:
        return f"{letter} and A are not distinguishable at 90 %: the interval of their ratio includes 1."
    faster = against.ratio < 1
    change = 1 / against.ratio if faster else against.ratio
    mine, others = row.prediction.num_devices, first.prediction.num_devices
    on = "" if mine == others else f", with {mine:,} devices in {letter} and {others:,} in A"
    if change >= 2:
        return f"A token takes {change:,.3g} times as long in {'A' if faster else letter} as in {letter if faster else 'A'}{on}."
    return f"{letter} is {change - 1:.1%} {'faster' if faster else 'slower'} a token than A{on}."
