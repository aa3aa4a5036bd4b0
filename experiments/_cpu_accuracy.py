"""The CPU loop's table: fitted from a folder's samples, predicted for the plans of its runs, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simulator import predict
from simulator.studies.backtest.text import percent
from validate.compare.borders import borders
from validate.compare.run import Run
from validate.fit.machine import Fit, fit_machine
from validate.records import read_records
from validate.samples import read_samples

FOLDERS = Path(__file__).resolve().parent / "measured"
COMMITTED = "cpu-loop-*"
# 18M under FSDP2: 195,386,348 bytes as layer 3 is gathered, and 6,294,528 of layer 5's gradients once more
LATE_COPY = (
    "The worst peak is caused by gloo: it frees its copy of what it scatters in a thread of its own, and this run was recorded\n"
    "before tracked steps waited for that. The copy was still live at the next gather; it is the whole difference, to the byte."
)
TARGET_STEP, TARGET_PEAK = 0.10, 0.01
TITLE = "\n## Two ranks on a CPU\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan's step and peak, predicted and measured.

    spread_s: from the tenth to the ninetieth percentile of the steps. pace: the reference product's time before the
    steps over that of the calibration; None where nobody took it.
    """

    what: str
    predicted_s: float
    measured_s: float
    spread_s: float
    pace: float | None
    peak_error: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def error_at_pace(self) -> float | None:
        return None if self.pace is None else self.predicted_s * self.pace / self.measured_s - 1

    @property
    def over_spread(self) -> float:
        return abs(self.predicted_s - self.measured_s) / self.spread_s


def rows(folder: Path) -> tuple[Fit, list[Row]]:
    """The fit, and every complete run of the folder."""
    fit = fit_machine(read_samples(sorted(folder.glob("samples-*.jsonl*"))), "here")
    records, _ = read_records(folder / "runs.jsonl")
    return fit, [_row(fit, Run.of(record)) for record in records if record["verdict"] == "ok"]


def _row(fit: Fit, run: Run) -> Row:
    assert fit.cluster is not None
    prediction = predict(run.model, run.plan, fit.cluster, fit.calibration, fit.stack)
    time, memory = run.record["time"], run.record["memory"]
    peak = borders(run.model, run.plan, run.stack, granularity_bytes=1, library="gloo").peak_bytes
    reference = fit.calibration.provenance.reference_s
    low, high = np.quantile(time["times_s"], (0.1, 0.9))
    return Row(
        what=run.what.removesuffix(", fp32"),
        predicted_s=prediction.step_s,
        measured_s=time["median_s"],
        spread_s=max(1e-9, float(high - low)),
        pace=time["reference_s"] / reference if reference and "reference_s" in time else None,
        peak_error=peak / memory["peak_bytes"] - 1,
    )


def table(folder: Path) -> Iterator[str]:
    """Lines of Markdown."""
    fit, found = rows(folder)
    provenance = fit.calibration.provenance
    yield f"{provenance.machine}, torch {provenance.torch}, {provenance.date[:10]}: `{folder.name}`."
    yield ""
    yield "| plan | predicted | measured | spread | error | error / spread | pace | error at this pace | peak bytes |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for row in found:
        cells = (
            row.what,
            f"{1e3 * row.predicted_s:.0f} ms",
            f"{1e3 * row.measured_s:.0f} ms",
            f"{1e3 * row.spread_s:.0f} ms",
            percent(row.error, signed=True),
            f"{row.over_spread:.2f}",
            "–" if row.pace is None else f"{row.pace:.2f}",
            percent(row.error_at_pace, signed=True),
            f"{100 * row.peak_error:+.2f} %",
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield _summary("Step time", [row.error for row in found])
    at_pace = [row.error_at_pace for row in found if row.error_at_pace is not None]
    if at_pace:
        yield _summary("At the pace of each run", at_pace)
    worst = max(abs(row.peak_error) for row in found)
    ratio = float(np.median([row.over_spread for row in found]))
    yield f"Median |error| over the measured spread: {ratio:.2f}. Peak bytes: worst {100 * worst:.2f} %."
    if worst > TARGET_PEAK:
        yield ""
        yield LATE_COPY


def _summary(name: str, errors: Sequence[float]) -> str:
    absolute = np.abs(errors)
    middle, p90, bias = float(np.median(absolute)), float(np.quantile(absolute, 0.9)), float(np.median(errors))
    return (
        f"{name}: {len(errors)} plans, median {percent(middle)}, p90 {percent(p90)}, bias {percent(bias, signed=True)}."
    )


def section() -> Iterator[str]:
    """The page's section: the newest committed folder."""
    folders = sorted(FOLDERS.glob(COMMITTED))
    if not folders:
        return
    yield TITLE
    yield f"""Plans on which nothing was fitted, run with gloo on two cores by `experiments/cpu_loop.py` after `calibrate run` on the
same machine. Targets: median {percent(TARGET_STEP)} of the step, {percent(TARGET_PEAK)} of peak bytes. *spread* is from
the tenth to the ninetieth percentile of ten steps. *pace* is the time of one fixed matrix product before each step (the
slower rank's) over its time during calibration: a virtual machine's cores change speed with their neighbours.
"""
    yield from table(folders[-1])
    notes = folders[-1] / "NOTES.md"
    if notes.exists():
        yield "\n" + notes.read_text(encoding="utf-8").strip()


def write_page(page: Path) -> None:
    """The section as a page of its own: the other appendices need the whole backtest."""
    page.write_text("\n".join(section()).strip("\n").replace("## ", "# ", 1) + "\n", encoding="utf-8")
