"""A node as a picture: GPUs, what joins them, and how busy each link is under a plan. Equal inputs make equal bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from simulator.base.units import format_bytes, format_rate, format_seconds
from simulator.formats.drawing import Colours, colours, drawn
from simulator.predict.link_loads import Loads, NodeLink

if TYPE_CHECKING:
    from simulator.formats.drawing import Axes

_ROWS: Final = {"nvswitch": 3.0, "gpu": 2.0, "switch": 1.0, "cpu": 0.0, "memory": -0.8, "nic": 3.8}
_FILLS: Final = {
    "nvswitch": "#dbe9f6",
    "gpu": "#e3f4dc",
    "switch": "#f3f3f3",
    "cpu": "#f9e7cf",
    "memory": "#f3f3f3",
    "nic": "#efe0f2",
}
_MOST_LABELS = 40
_MOST_GPUS: Final = 32  # that one can tell apart; a picture of more would be metres wide


def write_link_plot(path: Path, loads: Loads, flag: str) -> None:
    """Draw into `path`, as `flag` asks: of a large node the first GPUs, and says so. Raises InputError where that cannot be."""
    loads = _first(loads)
    with drawn(path, flag, (max(8.0, 1.4 * loads.num_gpus), 7)) as figure:
        _draw(figure.add_subplot(), loads, colours("YlOrRd"))


def _first(loads: Loads) -> Loads:
    """The first GPUs of a node, and what they are joined to."""
    if loads.num_gpus <= _MOST_GPUS:
        return loads
    left = {f"gpu{gpu}" for gpu in range(_MOST_GPUS, loads.num_gpus)}
    links = tuple(link for link in loads.links if not {link.src, link.dst} & left)
    title = f"{loads.cluster}: the first {_MOST_GPUS} of its {loads.num_gpus:,} GPUs"
    return replace(loads, cluster=title, num_gpus=_MOST_GPUS, links=links)


def _draw(axes: Axes, loads: Loads, shades: Colours) -> None:
    at = _places(loads)
    label = len(loads.links) <= _MOST_LABELS
    for link in loads.links:
        _draw_link(axes, loads, link, at, shades, label=label)
    for name, (x, y) in at.items():
        box = {"boxstyle": "round", "facecolor": _FILLS[_kind(name)], "edgecolor": "#555555"}
        axes.text(x, y, name, ha="center", va="center", fontsize=9, bbox=box, zorder=3)
    under = (
        f"; {loads.plan}, step {format_seconds(loads.step_s)}: colour is the busy share of the step"
        if loads.step_s
        else ""
    )
    axes.set_title(f"one node of {loads.cluster}{under}", fontsize=10)
    axes.set(xlim=(-0.8, max(x for x, _ in at.values()) + 0.8), ylim=(-1.3, 4.4))
    axes.axis("off")


def _draw_link(
    axes: Axes, loads: Loads, link: NodeLink, at: Mapping[str, tuple[float, float]], shades: Colours, *, label: bool
) -> None:
    (x0, y0), (x1, y1) = at[link.src], at[link.dst]
    busy = loads.busy(link)
    beside = 0.05 if link.src < link.dst else -0.05  # the two directions of a cable side by side
    level = beside if y0 == y1 else 0.0
    bend = 0.35 if _kind(link.src) == _kind(link.dst) == "gpu" else 0.0
    axes.annotate(
        "",
        xy=(x1 + beside, y1 + level),
        xytext=(x0 + beside, y0 + level),
        arrowprops={
            "arrowstyle": "-|>" if loads.step_s else "-",
            "color": shades(0.15 + 0.85 * min(1.0, busy)) if busy else "#bbbbbb",
            "linewidth": 1 + 2.5 * min(1.0, busy),
            "connectionstyle": f"arc3,rad={bend}",
            "shrinkA": 12,
            "shrinkB": 12,
        },
        zorder=1,
    )
    if label and (busy or not loads.step_s):
        text = f"{format_bytes(round(link.step_bytes))}\n{busy:.0%}" if busy else format_rate(link.bytes_per_s)
        part = 0.35  # nearer to its start, so that the two directions do not overlap
        axes.text(
            x0 + part * (x1 - x0) + beside,
            y0 + part * (y1 - y0) + bend * abs(x1 - x0) * 0.4 * (-1 if x1 > x0 else 1),
            text,
            fontsize=6,
            ha="center",
            va="center",
            zorder=2,
        )


def _kind(name: str) -> str:
    return name.rstrip("0123456789")


def _places(loads: Loads) -> dict[str, tuple[float, float]]:
    """GPUs in a row in their order; everything else above or below the middle of what it is joined to."""
    names = {end for link in loads.links for end in (link.src, link.dst)} | {f"gpu{g}" for g in range(loads.num_gpus)}
    at = {f"gpu{gpu}": (float(gpu), _ROWS["gpu"]) for gpu in range(loads.num_gpus)}
    for kind in ("nvswitch", "switch", "cpu", "memory", "nic"):
        for name in sorted(name for name in names if _kind(name) == kind):
            below = [at[end] for end in _neighbours(loads, name) if end in at and _kind(end) != kind]
            middle = sum(x for x, _ in below) / len(below) if below else 0.0
            at[name] = (middle + (0.25 if kind == "nic" else 0.0), _ROWS[kind])
    return at


def _neighbours(loads: Loads, name: str) -> list[str]:
    ends = {link.dst if link.src == name else link.src for link in loads.links if name in (link.src, link.dst)}
    return sorted(ends)
