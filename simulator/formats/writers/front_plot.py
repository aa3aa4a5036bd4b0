"""Time against cost as a picture. Equal inputs make equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.base.errors import Fault, InputError
from simulator.base.schema import check_writable
from simulator.formats.drawing import FORMATS, new_figure, picture_bytes

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


def check_picture(path: Path) -> None:
    """Raises InputError for an ending that is no picture's, or a file that cannot be written."""
    if path.suffix not in FORMATS:
        remedy = f"ending in {' or '.join(FORMATS)}"
        raise InputError(Fault(place=f"--plot {path}", problem="no picture format", remedy=remedy))
    check_writable(path, "--plot")


def write_front_plot(path: Path, points: Sequence[Point], time: str, money: str) -> None:
    """Draw to .png or .svg. Raises InputError for another ending, an unwritable file, or without matplotlib."""
    check_picture(path)
    try:
        path.write_bytes(_picture(points, time, money, path.suffix.removeprefix(".")))
    except OSError as exc:
        raise InputError(Fault(place=f"--plot {path}", problem=f"cannot be written: {exc.strerror}")) from None


def _picture(points: Sequence[Point], time: str, money: str, file_format: str) -> bytes:
    with new_figure("--plot", (7, 5)) as figure:
        _draw(figure.add_subplot(), points, time, money)
        return picture_bytes(figure, file_format, 110)


def _draw(axes: Axes, points: Sequence[Point], time: str, money: str) -> None:
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
