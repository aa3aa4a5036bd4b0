"""Whether data loading stalls a step, as text."""

from __future__ import annotations

from rich.table import Table

from simulator.base.units import counted, format_seconds
from simulator.formats.writers import layout
from simulator.predict.data_loading import DataStall


def loading(d: DataStall) -> Table:
    """The section."""
    loads = d.loads
    waits = (
        f"a batch waits ready for {format_seconds(d.ready_s)}" if d.ready_s else "no batch is ready before it is wanted"
    )
    rows = [
        ("stall", format_seconds(d.stall_s), f"{d.stall_s / d.step_s:.1%} of a step; {waits}"),
        (
            "steps",
            format_seconds(d.steps_s["p50"]),
            f"p95 {format_seconds(d.steps_s['p95'])}, p99 {format_seconds(d.steps_s['p99'])}",
        ),
        (
            "a batch every",
            format_seconds(loads.period_s),
            f"of each rank; most used: {d.slowest}, {loads.shares[d.slowest]:.0%} of that",
        ),
        (
            "decoding",
            format_seconds(loads.decode_s),
            f"by one of {counted(loads.workers, 'worker')}, {d.workers_needed} keep up",
        ),
        (
            "storage",
            format_seconds(loads.read_s),
            f"for a batch of each of a node's ranks; {loads.shares['storage']:.0%} busy",
        ),
        ("copy", format_seconds(loads.copy_s), "to the GPU"),
    ]
    return layout.table(rows, "lrl")
