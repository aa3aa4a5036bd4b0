"""Pictures of a history and of a fleet: times over their first, or over the fleet's median."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from simulator.formats.drawing import drawn
from validate.check.components import Component, measured
from validate.check.findings import Finding, level
from validate.samples import SampleFile

if TYPE_CHECKING:
    from simulator.formats.drawing import Axes
    from validate.check.fleet import Node

_NAMED: Final = 8  # lines that a legend can hold
_GREY, _FLAG = "0.75", "--plot"


def levels(runs: Sequence[SampleFile]) -> tuple[list[str], dict[Component, list[float | None]]]:
    """(dates, times of each part over the first run's that has it), runs oldest first; None where a run has it not."""
    ordered = sorted(runs, key=lambda one: one.machine.text("date"))
    measured_runs = [measured(run) for run in ordered]
    found: dict[Component, list[float | None]] = {}
    for part in sorted({part for one in measured_runs for part in one}):
        first = next(one for one in measured_runs if part in one)
        logs = [level(one, first, part) for one in measured_runs]
        found[part] = [None if log is None else math.exp(log) for log in logs]
    return [run.machine.text("date")[:16] or "undated" for run in ordered], found


def draw_history(path: Path, runs: Sequence[SampleFile], findings: Sequence[Finding]) -> None:
    """One line a part over the runs; those that are worse now have a name and a colour."""
    dates, found = levels(runs)
    bad = {one.component for one in findings if one.bad}
    with drawn(path, _FLAG, (9, 5)) as figure:
        axes = figure.subplots()
        for ratios in found.values():
            axes.plot(range(len(dates)), _gaps(ratios), color=_GREY, linewidth=0.8)
        for part in [part for part in found if part in bad][:_NAMED]:
            axes.plot(range(len(dates)), _gaps(found[part]), marker="o", label=str(part))
        axes.plot(range(len(dates)), _medians(found), color="black", linewidth=1.6, label="median of all parts")
        axes.set_xticks(range(len(dates)), dates, rotation=30, ha="right")
        _finish(axes, "time over the first run's (above 1 is slower)")


def draw_fleet(path: Path, nodes: Sequence[Node]) -> None:
    """One point a part over the nodes; what is worse has a name."""
    with drawn(path, _FLAG, (max(6.0, 0.35 * len(nodes)), 5)) as figure:
        axes = figure.subplots()
        for place, node in enumerate(nodes):
            ratios = [(one, one.judged.ratio) for one in node.findings if one.judged is not None]
            axes.scatter(
                [place] * len(ratios), [r for _, r in ratios], s=12, c=["C3" if o.bad else _GREY for o, _ in ratios]
            )
        axes.set_xticks(range(len(nodes)), [node.name for node in nodes], rotation=60, ha="right")
        axes.plot([], [], "o", color="C3", label="worse than its peers")
        _finish(axes, "time over the median of the fleet")


def _finish(axes: Axes, label: str) -> None:
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_ylabel(label)
    axes.legend(fontsize="small", loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)


def _gaps(ratios: Sequence[float | None]) -> list[float]:
    return [math.nan if one is None else one for one in ratios]


def _medians(found: Mapping[Any, Sequence[float | None]]) -> list[float]:
    columns = zip(*found.values(), strict=True)
    return [statistics.median([one for one in column if one is not None] or [math.nan]) for column in columns]
