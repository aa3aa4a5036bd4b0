"""What a step draws, as text: joules a token first, then by class of work, and other power caps beside."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from simulator.base.units import counted, format_number, format_seconds
from simulator.formats.writers import layout
from simulator.predict.energy import EnergyUse


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
                f"for {format_seconds(part.seconds)} of a step, {_share(e, part.joules)}",
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


def _share(e: EnergyUse, joules: float) -> str:
    return f"{joules * e.energy.pue / e.step_joules:.0%} of the energy"
