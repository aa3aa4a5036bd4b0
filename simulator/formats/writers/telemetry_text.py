"""How busy a step keeps each part of the machine, as text: a row a part, of the class of ranks that uses it most."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from simulator.base.units import format_bytes, format_flop_per_s, format_number, format_seconds
from simulator.formats.writers import layout
from simulator.predict.telemetry import Telemetry, Use

_MEANINGS = {
    "sm": "a kernel runs on the compute stream",
    "tensor": "FLOP, of the peak in the plan's precision",
    "hbm": "read and written by kernels and collectives",
    "nvlink": "sent by one GPU",
    "pcie up": "from one GPU to its host, or past it to a NIC",
    "pcie down": "from the host, or a NIC, to one GPU",
    "nic": "sent by one GPU, of its part of the node's NICs",
    "host": "the process launches kernels",
    "host memory": "of a node",
    "cpu adam": "parameters stepped, of a node",
    "nvme read": "of a node's drives",
    "nvme write": "of a node's drives",
}


def utilisation(t: Telemetry) -> Group:
    """The section."""
    rows = [("", "mean", "p50", "p95", "peak", "a step", "")]
    for name, (use, program) in t.busiest.items():
        where = f" ({program})" if len(t.programs) > 1 else ""
        rows.append((name, *_shares(use), _amount(use), f"{_MEANINGS[name]}{where}"))
    table: Table = layout.table(rows, "lrrrrrl")
    lines = [f"{format_number(t.samples_per_s)} samples/s, {t.tokens_per_s:,.0f} tokens/s"]
    if t.steps_s:
        times = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in t.steps_s.items())
        lines.append(f"steps of a run: {times}, where ranks vary by {t.jitter:.1%} (one sigma)")
    deepest = max((depth for program in t.programs for _, depth in program.queue), default=0.0)
    if deepest:
        lines.append(f"requests of 1 MiB to a node's drives at once: {deepest:,.0f} at most")
    return Group(table, *(Text(line) for line in lines))


def _shares(use: Use) -> tuple[str, str, str, str]:
    if not use.rates:
        return f"{use.mean:.1%}", "", "", ""
    return f"{use.mean:.1%}", f"{use.percentile(0.5):.1%}", f"{use.percentile(0.95):.1%}", f"{use.peak:.1%}"


def _amount(use: Use) -> str:
    if use.unit == "numel":
        return f"{use.amount:.3g}"
    if use.unit == "flop":
        return format_flop_per_s(use.amount).removesuffix("/s")
    return (format_bytes if use.unit == "bytes" else format_seconds)(use.amount)
