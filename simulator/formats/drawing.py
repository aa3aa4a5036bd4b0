"""The one door to matplotlib: whatever the simulator draws is drawn on a figure from here (docs/decisions/0004).

matplotlib takes a third of a second to import, so it is loaded when a picture is asked for. Equal drawings make equal bytes: no file holds a date, a random name or a font of the user's settings.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from simulator.base.errors import InputError
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
        from matplotlib.text import Text
    except Exception as exc:  # noqa: BLE001  a broken installation may raise anything
        raise InputError.at(f"{flag} {path}", f"matplotlib cannot be loaded: {exc}", _REINSTALL) from None
    sink = io.BytesIO()
    with rc_context({"svg.hashsalt": "shardwise", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        for text in figure.findobj(Text):  # names in files may be of any length, and leave no room for axes
            text.set_text("\n".join(_shortened(line) for line in text.get_text().split("\n")))
        figure.savefig(sink, format=path.suffix.removeprefix("."), dpi=dpi, metadata=_UNDATED[path.suffix])
    write_whole(path, sink.getvalue(), flag)


def _shortened(line: str) -> str:
    """The line, or its beginning."""
    return line if len(line) <= _MOST_OF_A_LINE else f"{line[: _MOST_OF_A_LINE - 1]}…"


def colours(name: str) -> Colours:
    """One of matplotlib's colour maps."""
    from matplotlib import colormaps

    return colormaps[name]
