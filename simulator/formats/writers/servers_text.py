"""Data parallelism beside gradients that are summed in every step, as text: parameter servers, and phases of one-bit optimizers."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from simulator.base.units import counted, format_bytes, format_number, format_seconds
from simulator.formats.writers import layout
from simulator.predict.parameter_server import Asynchronous
from simulator.predict.phases import Phases


def phases(p: Phases) -> Table:
    """The section of a run whose optimizer compresses."""
    words = {"full": "sum gradients", "one_bit": "sum signs", "local": "sum nothing"}
    rows = [(words[name], format_seconds(s), counted(p.counts[name], "step")) for name, s in p.seconds.items()]
    mean = (
        "mean of the run",
        format_seconds(p.mean_s),
        f"{p.speedup:.2f} times as fast as sums of gradients in every step",
    )
    return layout.table([*rows, mean], "lrl")


def servers(a: Asynchronous) -> Group:
    """The section."""
    found, fits = a.found, "" if a.fits else ", which does not fit"
    rows = [
        ("throughput", f"{a.tokens_per_s:,.0f} tokens/s", f"{a.synchronous_tokens_per_s:,.0f} of the plan by itself"),
        (
            "updates",
            f"{format_number(found.updates_per_s)}/s",
            f"{counted(a.workers, 'worker')}, {counted(a.servers, 'server')}; one waits {format_seconds(found.wait_s)}",
        ),
        (
            "staleness",
            f"{found.stale:.1f} updates",
            f"mean; most {found.most_stale:,}; {counted(found.ahead, 'clock')} ahead at most",
        ),
        ("memory", format_bytes(a.worker_bytes), f"a worker{fits}; {format_bytes(a.server_bytes)} a server"),
        *((name, f"{share:.0%}", "busy") for name, share in sorted(found.busy.items(), key=lambda one: -one[1])),
    ]
    sources = (Text(f"{source.what}: {source.kind}, {source.detail}") for source in a.sources)
    return Group(layout.table(rows, "lrl"), *sources)
