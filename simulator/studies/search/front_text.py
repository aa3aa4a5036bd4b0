"""Sizes of a cluster as text: the fastest plan of each, its cost, and which of them no other beats in both."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.units import counted, format_interval, format_number, format_seconds
from simulator.studies.search.front import Front, FrontRow
from simulator.studies.search.text import words

WIDTH = 150


def enough_text(found: Front, days: float) -> str:
    """How many GPUs end the run in time."""
    size, certain = found.enough(days)
    if size is None:
        return f"No size that was searched ends the run in {days:g} days: --nodes with larger ones."
    text = (
        f"{_size(size)} end the run in {days:g} days: {size.run_days:,.1f} days, {size.high_days:,.1f} at the upper end"
    )
    if certain is size:
        return f"{text}."
    return f"{text}; {_size(certain)} surely do." if certain else f"{text}; no size that was searched surely does."


def _size(row: FrontRow) -> str:
    assert row.best is not None
    return f"{counted(row.best.outcome.num_devices, 'GPU')} ({counted(row.nodes, 'node')})"


def render_front(found: Front, days: float | None = None) -> RenderableType:
    """The answer for a rich console. days: in which the run should end."""
    inputs = found.study.inputs()
    head = f"{inputs['model']} on {inputs['cluster']}, {inputs['global_batch']:,} × {inputs['seq_len']:,} tokens a step"
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    money = f"{found.currency} a billion tokens"
    run = ("days", f"{found.currency} of the run") if found.run_tokens else ()
    for name in ("", "nodes", "GPUs", "step", "90 %", "tokens/s", money, *run, "quickest plan"):
        table.add_column(name, justify="left" if name in ("", "90 %", "quickest plan") else "right")
    for row in found.rows:
        table.add_row(*_cells(row, with_run=bool(run)))
    prices = {
        f"{p.kind}, {p.gpu_hour:.2f} {found.currency} a GPU and hour, {p.date}: {p.source}": None
        for row in found.rows
        if (p := row.price) is not None
    }
    return Group(
        Text(f"{head}: time against cost", style="bold"),
        Text(),
        table,
        Text(),
        *((Text(enough_text(found, days), style="bold"), Text()) if days is not None else ()),
        Text(
            "≈ its cost cannot be told from the cheapest at 90 %: intervals of the ratio, in which shared errors cancel."
        ),
        Text("* no other size is both quicker and cheaper. Failures and restarts are not in it: `shardwise goodput`."),
        *(Text(f"at {one}") for one in prices),
    )


def _cells(row: FrontRow, *, with_run: bool) -> list[str]:
    best = row.best
    if best is None:
        return ["", f"{row.nodes:,}", *[""] * (7 if with_run else 5), row.reason]
    o = best.outcome
    step_s, low_s, high_s = o.interval_s
    times = [format_seconds(step_s), format_interval(low_s, high_s, between=" - ")]
    money = f"{row.billion_tokens or 0:,.4g}" + (" ≈" if row.within_noise else "")
    run = [format_number(row.run_days or 0), format_number(row.run or 0)] if with_run else []
    cells = [f"{row.nodes:,}", f"{o.num_devices:,}", *times, f"{best.tokens_per_s:,.0f}", money]
    return ["*" if row.on_front else "", *cells, *run, words(best)]
