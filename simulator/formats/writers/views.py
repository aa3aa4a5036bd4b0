"""What a prediction looks like elsewhere: plain data, JSON, HTML for notebooks, pictures. `Prediction` has a method for each."""

from __future__ import annotations

from functools import partial
from html import escape

from simulator.base.picture import Picture
from simulator.base.registry import VIEWS
from simulator.base.units import format_bytes, format_interval, format_seconds
from simulator.formats.writers.json_report import report, to_json
from simulator.formats.writers.step_plots import write_outline_plot, write_timeline_plot
from simulator.predict import Prediction


def to_html(p: Prediction) -> str:
    """A heading with the verdict and a small table."""
    interval = format_interval(p.low_s, p.high_s, prefix="90 % interval ")
    memory = f"{format_bytes(p.memory.used_bytes)} of {format_bytes(p.memory.capacity_bytes)}"
    rows = [
        ("step", format_seconds(p.step_s), interval),
        ("throughput", f"{p.tokens_per_s:,.0f} tokens/s", f"MFU {p.mfu:.1%}"),
        ("memory", memory, p.cause),
    ]
    longest = sorted(p.breakdown.items(), key=lambda part: (-part[1], part[0]))[:5]
    rows += [(name, format_seconds(seconds), f"{seconds / p.step_s:.1%} of the step") for name, seconds in longest]
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    head = f"<b>{escape(p.verdict.upper())}</b> {escape(p.model)} on {escape(p.cluster)}: {escape(p.needs)}"
    return f"<p>{head}</p><table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def memory_picture(prediction: Prediction) -> Picture:
    """Live and reserved bytes over the step, and where the device ends."""
    return Picture(partial(write_outline_plot, prediction=prediction))


def timeline_picture(prediction: Prediction) -> Picture:
    """What each stream does, in time."""
    return Picture(partial(write_timeline_plot, prediction=prediction))


for _name, _view in {
    "dict": report,
    "json": to_json,
    "html": to_html,
    "memory": memory_picture,
    "timeline": timeline_picture,
}.items():
    VIEWS.register(_name, _view)
