"""A step as a picture: what each stream of a rank does, in time. Equal predictions make equal bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from simulator.formats.drawing import colours, drawn
from simulator.predict import Prediction
from simulator.work.program import COMPUTE_STREAM

if TYPE_CHECKING:
    from simulator.formats.drawing import Axes

_COLOURS: Final = 20  # of matplotlib's tab20


def write_timeline_plot(path: Path, prediction: Prediction) -> None:
    """Draw the first program of the timeline into `path`. Raises InputError where that cannot be."""
    with drawn(path, "plot_timeline", (14, 4), dpi=120) as figure:
        _draw(figure.add_subplot(), prediction)


def _draw(axes: Axes, prediction: Prediction) -> None:
    spans = prediction.timeline.of()
    streams = sorted(dict.fromkeys(span.stream for span in spans), key=lambda stream: stream != COMPUTE_STREAM)
    named = colours("tab20")
    for index, category in enumerate(sorted({span.category for span in spans})):
        colour = named(index % _COLOURS / _COLOURS)
        for row, stream in enumerate(streams):
            bars = [
                (float(span.start_s) * 1e3, float(span.end_s - span.start_s) * 1e3)
                for span in spans
                if span.category == category and span.stream == stream
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, linewidth=0)
        axes.plot([], [], color=colour, linewidth=6, label=category)
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    axes.set_xlim(0, float(prediction.timeline.step_s) * 1e3)
    axes.set_xlabel("milliseconds; micro-batches that only repeat are left out")
    axes.set_title(f"{prediction.model} on {prediction.cluster}: {prediction.timeline.programs[0]}", fontsize=9)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
