"""The report as text for people: one table of step times, one of memory, and what was left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from simulator.studies.backtest.outcome import RowOutcome, Status
from simulator.studies.backtest.report import BacktestReport, Group

_MAX_LISTED = 20


def render(report: BacktestReport) -> RenderableType:
    """Tables for a rich console."""
    parts: list[RenderableType] = [Text(_headline(report))]
    if any(group.step.n for group in report.groups):
        parts.append(_step_table(report))
    if any(group.memory for group in report.groups):
        parts.append(_memory_table(report))
    parts += [Text(line) for line in (*_refusals(report), *_unmodelled(report), *unread(report), *_faulty(report))]
    return Lines(*parts)


def _headline(report: BacktestReport) -> str:
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


def _refusals(report: BacktestReport) -> Iterator[str]:
    kinds: dict[str, int] = {}
    for group in report.groups:
        for kind, count in group.refused.items():
            kinds[kind] = kinds.get(kind, 0) + count
    if kinds:
        yield "Refused, by the first reason of each row:"
    for kind, count in sorted(kinds.items(), key=lambda item: (-item[1], item[0])):
        yield f"  {count:5}  {kind}"


def _unmodelled(report: BacktestReport) -> Iterator[str]:
    """Options that predicted rows state and no prediction holds."""
    counts = Counter(name for outcome in report.outcomes for name in outcome.unmodelled)
    if counts:
        yield "Stated by predicted rows, and in no prediction:"
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield f"  {count:5}  {name}"


def unread(report: BacktestReport) -> Iterator[str]:
    """Columns, and words of rows, that nobody knows: they are left out, the rest of the table stands."""
    for column in report.unread:
        yield f"Column not read: {column}"
    counts = Counter(word for outcome in report.outcomes for word in outcome.unread)
    if counts:
        yield "Words not read, whose columns are taken as blank:"
    for word, count in counts.most_common():
        yield f"  {count:5}  {word}"


def _faulty(report: BacktestReport) -> Iterator[str]:
    """Rows that are bad or failed, the first of them in full."""
    faulty = [o for o in report.outcomes if o.status in ("bad", "failed")]
    for outcome in faulty[:_MAX_LISTED]:
        yield _fault_line(outcome)
    if len(faulty) > _MAX_LISTED:
        yield f"… and {len(faulty) - _MAX_LISTED} more; --json lists all"


def _fault_line(outcome: RowOutcome) -> str:
    return f"line {outcome.line}: {outcome.status}: {outcome.id or '(no id)'}: {outcome.reason}"


def percent(value: float | None, *, signed: bool = False) -> str:
    """0.0312 -> "3.1 %"; an en dash where there is nothing."""
    if value is None:
        return "–"
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"
