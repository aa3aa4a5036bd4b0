"""`shardwise backtest`: predict a table of measurements and say how far off each group is."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from simulator.base.exit_codes import ExitCode
from simulator.cli.options import answer_options, print_answer
from simulator.cli.progress import CountLine
from simulator.formats.readers.measured_table import read_measured
from simulator.studies.backtest import BacktestReport, render, run

_WIDTH = 160  # a dozen columns
_HELP = """Predict every row of FILE.csv, a table of measured training runs, memory, collectives or servers, and compare.

Rows that cannot be expressed are refused with the reason, bad rows are listed with their line, and the rest goes on.
Ctrl-C prints what is done so far. The tables' formats: docs/reference/runs-table.md,
collectives-table.md and serving-table.md."""


@click.command("backtest", help=_HELP)
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.csv")
@partial(answer_options, json_help="Write JSON: `groups` and `rows`.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
def command(file: Path, *, jobs: int) -> int:
    """Predict and print; the exit code says whether all rows were predicted."""
    report = run(read_measured(file), progress=CountLine("rows"), jobs=jobs)
    kind = "backtest" if isinstance(report, BacktestReport) else "answer"
    print_answer(kind, report.as_json, lambda: render(report), width=_WIDTH)
    return ExitCode.INTERRUPTED if report.interrupted else ExitCode.OK
