"""The one door to matplotlib: whatever the simulator draws is drawn on a figure from here (docs/decisions/0004).

matplotlib takes a third of a second to import, so it is loaded when a picture is asked for. Equal drawings make equal bytes: no file holds a date, a random name or a font of the user's settings.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from simulator.base.errors import InputError, printable
from simulator.base.files import write_whole
from simulator.base.schema import check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes  # noqa: PLC0414  writers take the types from here too
    from matplotlib.figure import Figure as Figure  # noqa: PLC0414

Colours = Callable[[float], tuple[float, float, float, float]]  # 0 to 1 -> red, green, blue, opacity

_UNDATED: Final = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
FORMATS: Final = tuple(_UNDATED)
_REINSTALL: Final = "pip install --force-reinstall matplotlib"
_MOST_OF_A_LINE: Final = 120  # characters
_MOST_OF_A_TICK: Final = 40


def check_picture(path: Path, flag: str) -> None:
    """Raises InputError for an ending that is no picture's, or a file that cannot be written."""
    if path.suffix not in FORMATS:
        remedy = f"ending in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise InputError.at(f"{flag} {path}", "is not a picture format", remedy)
    check_writable(path, flag)


@contextmanager
def drawn(path: Path, flag: str, size: tuple[float, float], dpi: int = 110) -> Iterator[Figure]:
    """A figure of `size` inches to draw on; the file holds it after the context.

    flag: the option that asks for the picture. Raises InputError where it cannot be drawn or written.
    """
    check_picture(path, flag)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except Exception as exc:  # noqa: BLE001  a broken installation may raise anything
        raise InputError.at(f"{flag} {path}", f"matplotlib cannot be loaded: {exc}", _REINSTALL) from None
    sink = io.BytesIO()
    with rc_context({"svg.hashsalt": "shardwise", "font.family": "DejaVu Sans", "text.parse_math": False}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        _make_legible(figure)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of letters that the font lacks, and of crowded axes
            date = os.environ.pop("SOURCE_DATE_EPOCH", None)  # no file holds one, and matplotlib ends where it is none
            try:
                figure.savefig(sink, format=path.suffix.removeprefix("."), dpi=dpi, metadata=_UNDATED[path.suffix])
            finally:
                os.environ |= {} if date is None else {"SOURCE_DATE_EPOCH": date}
    write_whole(path, sink.getvalue(), flag)


def _make_legible(figure: Figure) -> None:
    """Names in files may hold anything: no line is longer than there is room for, or sets controls or formulas."""
    from matplotlib.text import Text
    from matplotlib.ticker import FixedLocator, LogFormatter

    for text in figure.findobj(Text):
        text.set_text(_legible(text.get_text()))
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_locator(), FixedLocator):  # what ticks say is set anew when they are drawn
            axis.set_ticklabels([_legible(tick.get_text(), _MOST_OF_A_TICK) for tick in axis.get_ticklabels()])
        elif axis.get_scale() == "log":  # by default of formulas
            axis.set_major_formatter(LogFormatter())
            axis.set_minor_formatter(LogFormatter())


def _legible(text: str, most: int = _MOST_OF_A_LINE) -> str:
    """Without what no font has a sign for, each line shortened."""
    lines = printable(text).expandtabs().split("\n")
    return "\n".join(line if len(line) <= most else f"{line[: most - 1]}…" for line in lines)


def colours(name: str) -> Colours:
    """One of matplotlib's colour maps."""
    from matplotlib import colormaps

    return colormaps[name]
