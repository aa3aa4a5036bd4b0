"""The one door to matplotlib: whatever the simulator draws is drawn on a figure from here (docs/decisions/0004).

matplotlib is an extra and takes a third of a second to import, so it is loaded when a picture is asked for. Equal
drawings make equal bytes: no file holds a date, a random name or a font of the user's settings.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from simulator.base.errors import Fault, InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes  # noqa: PLC0414  writers take the types from here too
    from matplotlib.figure import Figure as Figure  # noqa: PLC0414

Colours = Callable[[float], tuple[float, float, float, float]]  # 0 to 1 -> red, green, blue, opacity

FORMATS: Final = (".png", ".svg")
_UNDATED: Final = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


@contextmanager
def new_figure(asked_by: str, size: tuple[float, float]) -> Iterator[Figure]:
    """A figure of `size` inches, to be drawn and saved inside the context.

    asked_by: the option that asks for a picture. Raises InputError without matplotlib.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        fault = Fault(place=asked_by, problem="needs matplotlib", remedy='pip install "shardwise[plots]"')
        raise InputError(fault) from None
    with rc_context({"svg.hashsalt": "shardwise", "font.family": "DejaVu Sans"}):
        yield Figure(figsize=size, layout="constrained")


def colours(name: str) -> Colours:
    """One of matplotlib's colour maps."""
    from matplotlib import colormaps

    return colormaps[name]


def picture_bytes(figure: Figure, file_format: str, dpi: int) -> bytes:
    """A figure as the bytes of a PNG or SVG file."""
    sink = io.BytesIO()
    nothing = {"Date": None} if file_format == "svg" else {"Software": None}
    figure.savefig(sink, format=file_format, dpi=dpi, metadata=nothing)
    return sink.getvalue()


def save_as_ending(figure: Figure, path: Path) -> None:
    """A figure in whatever format the file's ending names. Raises OSError or ValueError."""
    figure.savefig(path, metadata=_UNDATED.get(path.suffix))
