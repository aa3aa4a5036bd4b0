"""Backtest: tables of measured runs in, errors beside baselines out.

    report = run("runs.csv")
    report.groups[0].step.median_abs_error

docs/reference/runs-table.md describes the table, the rules that fill its blanks, and the report.
"""

from simulator.backtest.judge import run
from simulator.backtest.report import BacktestReport
from simulator.backtest.text import render

__all__ = ["BacktestReport", "render", "run"]
