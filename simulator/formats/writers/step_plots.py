"""The memory of a step as a picture: live bytes by category, what the allocator holds, and where the device ends.

Memory has no clock: the axis is the order of operations in which the host issues them. The trace for Perfetto shows the
same counters in time. Equal predictions make equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from simulator.base.units import format_bytes
from simulator.formats.drawing import colours, drawn
from simulator.memory import History
from simulator.memory.live_bytes import LiveBytes, live_bytes
from simulator.predict import Prediction
from simulator.work.program import COMPUTE_STREAM

if TYPE_CHECKING:
    from simulator.formats.drawing import Axes

GIB = 2**30
_POINTS = 1500  # stretches of the step: more than a picture has columns
_IN_ORDER: Final = "operations in the order in which the host issues them"
_OWNERS = 5  # named at the peak
# What stays is blue, what the step needs warm, communication green; distinguished without colour by their order
_COLORS: Final = {
    "parameters": "#1f4e79",
    "gradients": "#2e75b6",
    "optimizer_state": "#5b9bd5",
    "buckets": "#9dc3e6",
    "buffers": "#bdd7ee",
    "inputs": "#deebf7",
    "workspaces": "#c9c9c9",
    "activations": "#ed7d31",
    "unsharded_parameters": "#548235",
    "all_gather": "#70ad47",
    "reduce_scatter": "#a9d18e",
    "loss": "#ffc000",
    "temporaries": "#f4b183",
}


def write_memory_plot(path: Path, prediction: Prediction, history: History) -> None:
    """Draw into `path`. Raises InputError where that cannot be."""
    with drawn(path, "--memory", (12, 6), dpi=120) as figure:
        _draw(figure.add_subplot(), prediction, live_bytes(history, _POINTS))


def write_outline_plot(path: Path, prediction: Prediction) -> None:
    """Draw what a prediction alone knows: live bytes of each moment without their categories. Raises InputError."""
    samples, outside = prediction.memory_trace.samples, prediction.memory.outside_torch_bytes
    with drawn(path, "plot_memory", (12, 6), dpi=120) as figure:
        axes, at = figure.add_subplot(), range(len(samples))
        live = [_gib([outside] * len(at)), _gib([sample.allocated_bytes for sample in samples])]
        axes.stackplot(at, live, labels=["outside torch", "allocated"], colors=["#7f7f7f", "#5b9bd5"], step="mid")
        _outline(axes, prediction, at)
        axes.set_xlabel(_IN_ORDER)


def _draw(axes: Axes, prediction: Prediction, shown: LiveBytes) -> None:
    memory = prediction.memory
    outside = memory.outside_torch_bytes
    names = list(shown.by_category)
    layers = [[outside] * len(shown.at), *shown.by_category.values()]
    axes.stackplot(
        shown.at,
        [_gib(layer) for layer in layers],
        labels=["outside torch", *(name.replace("_", " ") for name in names)],
        colors=["#7f7f7f", *(_COLORS[name] for name in names)],
        step="mid",
    )
    _outline(axes, prediction, shown.at)
    _mark_phases(axes, shown)


def _outline(axes: Axes, prediction: Prediction, at: Sequence[int]) -> None:
    """What is reserved at these moments, where the device ends, the peak of live bytes, and the verdict."""
    memory = prediction.memory
    reserved = [prediction.memory_trace.samples[moment].reserved_bytes + memory.outside_torch_bytes for moment in at]
    axes.plot(at, _gib(reserved), color="black", linewidth=1, drawstyle="steps-mid", label="reserved")
    capacity = memory.capacity_bytes / GIB
    axes.axhline(capacity, color="crimson", linestyle="--", linewidth=1.2)
    text = f"capacity {format_bytes(memory.capacity_bytes)}"
    axes.annotate(text, (at[-1], capacity), textcoords="offset points", xytext=(-4, 4), ha="right", color="crimson")
    _mark_peak(axes, prediction)
    axes.set_xlim(0, max(at[-1], 1))
    axes.set_ylim(0, 1.12 * max(capacity, memory.used_bytes / GIB))
    axes.set_ylabel("GiB on the fullest rank")
    title = f"{prediction.verdict.upper()}: {prediction.model} on {prediction.cluster}, {prediction.needs}"
    axes.set_title(f"{title}\n{prediction.cause}", fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def _gib(sizes: Sequence[int]) -> list[float]:
    return [size / GIB for size in sizes]


def peak_words(prediction: Prediction) -> str:
    """The peak of live bytes, its moment and its owners."""
    memory = prediction.memory
    owners = sorted(memory.by_category.items(), key=lambda item: (-item[1], item[0]))[:_OWNERS]
    lines = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in owners]
    return "\n".join([f"peak {format_bytes(memory.peak_allocated_bytes)} at {memory.peak_moment}", *lines])


def _mark_peak(axes: Axes, prediction: Prediction) -> None:
    at = prediction.memory_trace.peak_index
    height = (prediction.memory.peak_allocated_bytes + prediction.memory.outside_torch_bytes) / GIB
    right = at > len(prediction.memory_trace.samples) / 2
    axes.plot([at], [height], marker="o", color="black", markersize=5)
    axes.annotate(
        peak_words(prediction),
        (at, height),
        textcoords="offset points",
        xytext=(-14 if right else 14, -14),
        ha="right" if right else "left",
        va="top",
        fontsize=8,
        bbox={"boxstyle": "round", "facecolor": "white", "alpha": 0.85, "edgecolor": "gray"},
        arrowprops={"arrowstyle": "-", "color": "gray"},
    )


def _mark_phases(axes: Axes, shown: LiveBytes) -> None:
    """Where each micro-batch's forward and backward and the optimizer begin."""
    several = any(micro_batch for _, (_, micro_batch) in shown.phases)
    for moment, (phase, micro_batch) in shown.phases:
        word = f"{phase} mb{micro_batch}" if several and phase != "optimizer" else phase
        axes.axvline(moment, color="gray", linewidth=0.6, linestyle=":")
        late = moment > 0.9 * shown.num_moments
        axes.annotate(
            word,
            (moment, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            xytext=(-2 if late else 2, -12),
            ha="right" if late else "left",
            fontsize=8,
        )
    axes.set_xticks([])
    axes.set_xlabel(_IN_ORDER, labelpad=16)


# A step as a picture: what each stream of a rank does, in time. Equal predictions make equal bytes.
_COLOURS: Final = 20  # of matplotlib's tab20


def write_timeline_plot(path: Path, prediction: Prediction) -> None:
    """Draw the first program of the timeline into `path`. Raises InputError where that cannot be."""
    with drawn(path, "plot_timeline", (14, 4), dpi=120) as figure:
        _draw_timeline(figure.add_subplot(), prediction)


def _draw_timeline(axes: Axes, prediction: Prediction) -> None:
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
