"""Backtest: a table of measured runs, memory or collectives in, errors beside baselines or noise out.

    report = run(read_measured("runs.csv"))
    report.groups[0].step.median_abs_error

docs/reference/runs-table.md describes the table of runs, the rules that fill its blanks, and the report;
docs/reference/collectives-table.md does so for collectives, serving-table.md for servers. Readers of tables hand over `rows.Table`.
"""

from __future__ import annotations

from rich.console import RenderableType

from simulator.studies.backtest import collectives, evaluate, serving, text
from simulator.studies.backtest.collectives import CollectivesReport
from simulator.studies.backtest.outcome import Progress
from simulator.studies.backtest.report import BacktestReport
from simulator.studies.backtest.rows import Table
from simulator.studies.backtest.serving import ServingReport

__all__ = ["AnyReport", "BacktestReport", "CollectivesReport", "ServingReport", "render", "run"]

AnyReport = BacktestReport | CollectivesReport | ServingReport


def run(table: Table, *, progress: Progress | None = None, jobs: int = 1) -> AnyReport:
    """Predict every row of a table, in its order."""
    if table.kind == "collectives":
        return collectives.run(table, progress=progress)
    if table.kind == "serving":
        return serving.run(table, progress=progress, jobs=jobs)
    return evaluate.run(table, progress=progress, jobs=jobs)


def render(report: AnyReport) -> RenderableType:
    """The report for a rich console."""
    if isinstance(report, ServingReport):
        return text.render_serving(report)
    return text.render_collectives(report) if isinstance(report, CollectivesReport) else text.render(report)
