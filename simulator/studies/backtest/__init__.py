"""Backtest: tables of measured runs, memory or collectives in, errors beside baselines or noise out.

    report = run("runs.csv")
    report.groups[0].step.median_abs_error

docs/reference/runs-table.md describes the table of runs, the rules that fill its blanks, and the report;
docs/reference/collectives-table.md does so for collectives.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType

from simulator.formats.readers.collectives_table import is_collectives_table
from simulator.studies.backtest import collectives, collectives_text, evaluate, text
from simulator.studies.backtest.collectives import CollectivesReport
from simulator.studies.backtest.evaluate import Progress
from simulator.studies.backtest.report import BacktestReport

__all__ = ["BacktestReport", "CollectivesReport", "render", "run"]


def run(path: str | Path, *, progress: Progress | None = None, jobs: int = 1) -> BacktestReport | CollectivesReport:
    """Predict every row of the table at `path`, in its order; the header says of what it is (see `judge.run`)."""
    if is_collectives_table(path):
        return collectives.run(path, progress=progress)
    return evaluate.run(path, progress=progress, jobs=jobs)


def render(report: BacktestReport | CollectivesReport) -> RenderableType:
    """The report for a rich console."""
    return collectives_text.render(report) if isinstance(report, CollectivesReport) else text.render(report)
