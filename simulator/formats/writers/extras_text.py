"""Optional parts of a prediction as text: how busy each part is, data loading, energy, servers, phases."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.units import counted, format_bytes, format_flop_per_s, format_number, format_seconds
from simulator.formats.writers import layout
from simulator.predict.data_loading import DataStall
from simulator.predict.energy import EnergyUse
from simulator.predict.parameter_server import Asynchronous
from simulator.predict.phases import Phases
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


def drawn(e: EnergyUse) -> Group:
    """The section."""
    low, high = e.interval
    rows = [
        ("a token", f"{e.joules_per_token:.3g} J", f"90 % interval {low:.3g} to {high:.3g} J"),
        ("a GPU", f"{e.gpu_w:,.0f} W", "mean of the step"),
        *(
            (
                f"  {part.name}",
                f"{part.watts:,.0f} W",
                f"for {format_seconds(part.seconds)} of a step, {part.joules * e.energy.pue / e.step_joules:.0%} of the energy",
            )
            for part in e.parts
        ),
    ]
    if e.run_kwh is not None:
        size = f"{counted(e.energy.tokens or 0, 'token')}, failures not counted"
        carbon = "" if e.run_co2_kg is None else f"; {format_number(e.run_co2_kg)} kg of CO2"
        rows.append(("the run", f"{format_number(e.run_kwh)} kWh", f"{size}{carbon}"))
    parts: list[RenderableType] = [layout.table(rows, "lrl")]
    if e.caps:
        caps = [
            (
                f"at {cap:,.0f} W",
                format_seconds(one.step_s),
                f"{one.joules_per_token:.3g} J a token",
                f"{one.gpu_w:,.0f} W a GPU",
            )
            for cap, one in e.caps
        ]
        parts.append(layout.table(caps, "lrrr"))
    parts += [Text(f"{source.what}: {source.kind}, {source.detail}") for source in e.sources]
    return Group(*parts)


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
