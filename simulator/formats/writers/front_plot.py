"""Time against cost as a picture. Equal inputs make equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.formats.drawing import drawn

if TYPE_CHECKING:
    from simulator.formats.drawing import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One alternative. low, high: the 90 % interval of its time, and with it of its money; best: on the front."""

    label: str
    time: float
    low: float
    high: float
    money: float
    best: bool


def write_front_plot(path: Path, points: Sequence[Point], time: str, money: str) -> None:
    """Draw into `path`. Raises InputError where that cannot be."""
    with drawn(path, "--plot", (7, 5)) as figure:
        _draw_front(figure.add_subplot(), points, time, money)


def _draw_front(axes: Axes, points: Sequence[Point], time: str, money: str) -> None:
    front = sorted((point for point in points if point.best), key=lambda point: point.time)
    axes.plot([p.time for p in front], [p.money for p in front], color="#1f4e79", linewidth=1, zorder=1)
    for point in points:
        colour = "#1f4e79" if point.best else "#a6a6a6"
        ends = (point.low, point.high)  # a longer step costs more: both err together
        axes.plot(ends, [point.money * end / point.time for end in ends], color=colour, alpha=0.4, linewidth=3)
        axes.plot([point.time], [point.money], "o", color=colour, zorder=2)
        axes.annotate(point.label, (point.time, point.money), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set_xlabel(time)
    axes.set_ylabel(money)
    axes.grid(visible=True, alpha=0.3)
    axes.margins(0.15)
