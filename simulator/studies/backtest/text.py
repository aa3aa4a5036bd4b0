"""The report as text for people: one table of step times, one of memory, and what was left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from simulator.studies.backtest.outcome import Judged, Report, RowOutcome, Status
from simulator.studies.backtest.report import BacktestReport, Group

_MAX_LISTED = 20


def render(report: BacktestReport) -> RenderableType:
    """Tables for a rich console."""
    parts: list[RenderableType] = [Text(headline(report))]
    if any(group.step.n for group in report.groups):
        parts.append(_step_table(report))
    if any(group.memory for group in report.groups):
        parts.append(_memory_table(report))
    kinds: Counter[str] = sum((Counter(group.refused) for group in report.groups), Counter())
    refused = _counted("Refused, by the first reason of each row:", kinds)
    options = Counter(name for outcome in report.outcomes for name in outcome.unmodelled)
    unmodelled = _counted("Stated by predicted rows, and in no prediction:", options)
    parts += [Text(line) for line in (*refused, *unmodelled, *unread(report), *faulty(report.outcomes))]
    return Lines(*parts)


def headline(report: Report[Any]) -> str:
    """The number of rows, by status."""
    counts = ", ".join(f"{report.count(s)} {s}" for s in get_args(Status) if report.count(s))
    end = " (interrupted: the rows done so far)" if report.interrupted else ""
    return f"{len(report.outcomes)} rows of {report.table}: {counts or 'none'}{end}"


def _step_table(report: BacktestReport) -> Table:
    table = Table(title="Step time: |predicted / measured − 1|, beside baselines fitted on half of the rows")
    table.add_column("source")
    table.add_column("GPU")
    table.add_column("precision")
    for name in ("n", "refused", "median", "p90", "bias", "MFU rank", "in 90 %", "one MFU", "four terms"):
        table.add_column(name, justify="right")
    for group in report.groups:
        if group.step.n:
            table.add_row(group.source, group.gpu, group.precision, *_step_cells(group))
    return table


def _step_cells(group: Group) -> Iterator[str]:
    step = group.step
    yield str(step.n)
    yield str(group.rows.get("refused", 0))
    yield percent(step.median_abs_error)
    yield percent(step.p90_abs_error)
    yield percent(step.bias, signed=True)
    yield "–" if step.spearman_mfu is None else f"{step.spearman_mfu:.2f}"
    yield percent(step.coverage_90)
    for name in ("constant_mfu", "four_terms"):
        baseline = group.baseline(name)
        yield f"{percent(baseline.median_abs_error)} / {percent(baseline.p90_abs_error)}"


def _memory_table(report: BacktestReport) -> Table:
    table = Table(title="Peak memory: |predicted / measured − 1|")
    for name in ("source", "GPU", "metric"):
        table.add_column(name)
    for name in ("n", "exact", "median", "p90", "bias", "OOM found", "false OOM"):
        table.add_column(name, justify="right")
    for group in report.groups:
        for m in group.memory:
            cells = (percent(m.median_abs_error), percent(m.p90_abs_error), percent(m.bias, signed=True))
            found = f"{m.oom_found} of {m.oom_rows}"
            table.add_row(
                group.source, group.gpu, m.mem_metric, str(m.n), str(m.exact), *cells, found, str(m.predicted_oom)
            )
    return table


def _counted(title: str, counts: Counter[str]) -> Iterator[str]:
    """Counts, the largest first."""
    if counts:
        yield title
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield f"  {count:5}  {name}"


def unread(report: BacktestReport) -> Iterator[str]:
    """Unknown columns, and unknown words of rows; both are ignored."""
    for column in report.unread:
        yield f"Column not read: {column}"
    counts = Counter(word for outcome in report.outcomes for word in outcome.unread)
    if counts:
        yield "Words not read, whose columns are taken as blank:"
    for word, count in counts.most_common():
        yield f"  {count:5}  {word}"


def faulty(outcomes: Sequence[Judged]) -> Iterator[str]:
    """Rows that are bad or failed, the first of them in full."""
    found = [o for o in outcomes if o.status in ("bad", "failed")]
    for outcome in found[:_MAX_LISTED]:
        name = f"{outcome.id or '(no id)'}: " if isinstance(outcome, RowOutcome) else ""
        yield f"line {outcome.line}: {outcome.status}: {name}{outcome.reason}"
    if len(found) > _MAX_LISTED:
        yield f"… and {len(found) - _MAX_LISTED} more; --json lists all"


def percent(value: float | None, *, signed: bool = False) -> str:
    """0.0312 -> "3.1 %"; an en dash where there is nothing."""
    if value is None:
        return "–"
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"
