"""Reports as text for people: tables of errors by group, and what was left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from textwrap import shorten
from typing import Any, get_args

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.units import counted
from simulator.studies.backtest.baselines import Baseline
from simulator.studies.backtest.collectives import SIZE_CLASSES, CollectiveGroup, CollectivesReport
from simulator.studies.backtest.outcome import Judged, Report, RowOutcome, Status
from simulator.studies.backtest.report import BacktestReport, Group
from simulator.studies.backtest.scores import ErrorScore
from simulator.studies.backtest.serving import ServingGroup, ServingOutcome, ServingReport

_MAX_LISTED = 20
_SHOWN = 300  # letters of a reason
_ERROR = "|predicted / measured − 1|"


def render(report: BacktestReport) -> RenderableType:
    """Tables for a rich console."""
    parts: list[RenderableType] = [Text(headline(report))]
    if any(group.step.n for group in report.groups):
        parts.append(_step_table(report))
    if any(group.memory for group in report.groups):
        parts.append(_memory_table(report))
    software = _counted(
        "Software, and the stack that it was predicted with:",
        Counter(_software(one) for one in report.outcomes if one.stack),
    )
    options = Counter(name for outcome in report.outcomes for name in outcome.unmodelled)
    unmodelled = _counted("Stated by predicted rows, and in no prediction:", options)
    refused = _refused(report.outcomes)
    parts += [Text(line) for line in (*software, *refused, *unmodelled, *unread(report), *faulty(report.outcomes))]
    return Lines(*parts)


def headline(report: Report[Any]) -> str:
    """The number of rows, by status."""
    counts = ", ".join(f"{report.count(s)} {s}" for s in get_args(Status) if report.count(s))
    end = " (interrupted: the rows done so far)" if report.interrupted else ""
    return f"{len(report.outcomes)} rows of {report.table}: {counts or 'none'}{end}"


def _step_table(report: BacktestReport) -> Table:
    table = Table(
        "source", "GPU", "precision", title=f"Step time: {_ERROR}, beside baselines fitted on half of the rows"
    )
    _numbers(table, "n", "refused", "median", "p90", "bias", "MFU rank", "in 90 %", "one MFU", "four terms")
    for group in report.groups:
        if group.step.n:
            step, beside = group.step, _baselines(map(group.baseline, ("constant_mfu", "four_terms")))
            cells = _score_cells(group, step, step.spearman_mfu, step.coverage_90)
            table.add_row(group.source, group.gpu, group.precision, *cells, *beside)
    return table


def _score_cells(
    group: Group | ServingGroup, score: ErrorScore, rank: float | None, coverage: float | None
) -> Iterator[str]:
    yield str(score.n)
    yield str(group.rows.get("refused", 0))
    yield from _errors(score)
    yield "–" if rank is None else f"{rank:.2f}"
    yield percent(coverage)


def _memory_table(report: BacktestReport) -> Table:
    table = Table("source", "GPU", "metric", title=f"Peak memory: {_ERROR}")
    _numbers(table, "n", "exact", "median", "p90", "bias", "OOM found", "false OOM")
    for group in report.groups:
        for m in group.memory:
            counts, found = (str(m.n), str(m.exact)), f"{m.oom_found} of {m.oom_rows}"
            table.add_row(group.source, group.gpu, m.mem_metric, *counts, *_errors(m), found, str(m.predicted_oom))
    return table


def _counted(title: str, counts: Counter[str]) -> Iterator[str]:
    """Counts, the largest first."""
    if counts:
        yield title
    listed = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    for name, count in listed[:_MAX_LISTED]:
        yield f"  {count:5}  {name}"
    if len(listed) > _MAX_LISTED:
        yield f"         … and {len(listed) - _MAX_LISTED} more; --json lists all"


def _software(one: RowOutcome) -> str:
    unknown = "" if one.described else "; no stack describes it: its interval is wider"
    return f"{one.framework or 'not stated'}: {one.stack}{unknown if one.framework else ''}"


def _refused(outcomes: Sequence[RowOutcome] | Sequence[ServingOutcome]) -> Iterator[str]:
    """Counts by kind, the largest first, each with the reason of its first row."""
    rows, kinds = [one for one in outcomes if one.status == "refused"], dict[str, str]()
    for one in rows:
        reason = shorten((one.reason or "").removeprefix(f"{one.kind}: "), _SHOWN, placeholder=" …")
        kinds.setdefault(one.kind, f"{one.kind} (line {one.line}: {reason})")
    yield from _counted("Refused, by the first reason of each row:", Counter(kinds[one.kind] for one in rows))


def unread(report: BacktestReport) -> Iterator[str]:
    """Unknown columns, and unknown words of rows; both are ignored."""
    for column in report.unread:
        yield f"Column not read: {column}"
    counts = Counter(word for outcome in report.outcomes for word in outcome.unread)
    yield from _counted("Words not read, whose columns are taken as blank:", counts)


def faulty(outcomes: Sequence[Judged]) -> Iterator[str]:
    """Rows that are bad or failed, the first of them in full."""
    found = [o for o in outcomes if o.status in ("bad", "failed")]
    for outcome in found[:_MAX_LISTED]:
        place = f"line {outcome.line}"
        known = outcome.id if isinstance(outcome, RowOutcome) and outcome.id != place else ""
        reason = (outcome.reason or "").removeprefix(f"{place}: ")
        yield ": ".join(filter(None, (place, outcome.status, known, reason)))
    if len(found) > _MAX_LISTED:
        yield f"… and {len(found) - _MAX_LISTED} more; --json lists all"


def _numbers(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right")


def _errors(score: ErrorScore) -> tuple[str, str, str]:
    """Median, p90 and bias."""
    return percent(score.median_abs_error), percent(score.p90_abs_error), percent(score.bias, signed=True)


def _baselines(found: Iterable[Baseline]) -> Iterator[str]:
    for one in found:
        yield f"{percent(one.median_abs_error)} / {percent(one.p90_abs_error)}"


def percent(value: float | None, *, signed: bool = False) -> str:
    """0.0312 -> "3.1 %"; an en dash where there is nothing."""
    if value is None:
        return "–"
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def render_serving(report: ServingReport) -> RenderableType:
    """Tables for a rich console."""
    columns = (f"Column not read: {column}" for column in report.unread)
    lines = (*columns, *_refused(report.outcomes), *faulty(report.outcomes))
    return Lines(Text(headline(report)), _serving_table(report), *map(Text, lines))


def _serving_table(report: ServingReport) -> Table:
    table = Table(title=f"{_ERROR}, beside baselines fitted on half of the rows")
    for name in ("source", "engine", "GPU", "metric"):
        table.add_column(name, overflow="fold")
    _numbers(table, "n", "refused", "median", "p90", "bias", "rank", "in 90 %", "one efficiency", "two terms")
    for group in report.groups:
        cells = _score_cells(group, group.score, group.spearman, group.coverage_90)
        table.add_row(group.source, group.engine, group.gpu, group.metric, *cells, *_baselines(group.baselines))
    return table


def render_collectives(report: CollectivesReport) -> RenderableType:
    """Tables for a rich console."""
    parts: list[RenderableType] = [Text(headline(report)), _totals(report), _machines(report)]
    parts += [Text(line) for line in _left_out_of_collectives(report)]
    return Lines(*parts)


def _totals(report: CollectivesReport) -> Table:
    table = Table("size", title=f"Time of a collective: {_ERROR}, and of one repeat against the others")
    _numbers(table, "n", "median", "p90", "bias", "repeats", "of rows")
    for group in report.totals:
        if group.score.n:
            noise = (percent(group.noise_floor), str(group.noise_rows))
            table.add_row(group.size_class, str(group.score.n), *_errors(group.score), *noise)
    return table


def _machines(report: CollectivesReport) -> Table:
    table = Table(title="By machine: n: median / p90 (bias; repeats)")
    for name in ("source", "machine", "collective", *SIZE_CLASSES):
        table.add_column(name, overflow="fold")
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for group in report.groups:
        key = (group.source.split("@")[0].removeprefix("github:"), group.machine, group.collective)
        rows.setdefault(key, {})[group.size_class] = _cell(group)
    for key, cells in rows.items():
        table.add_row(*key, *(cells.get(name, "") for name in SIZE_CLASSES))
    return table


def _cell(group: CollectiveGroup) -> str:
    middle, p90, bias = _errors(group.score)
    noise = f"; {percent(group.noise_floor)}" if group.noise_rows else ""
    return f"{group.score.n}: {middle} / {p90} ({bias}{noise})"


def _left_out_of_collectives(report: CollectivesReport) -> Iterator[str]:
    for column in report.unread:
        yield f"column not read: {column}"
    flagged = Counter(outcome.degraded for outcome in report.outcomes if outcome.degraded)
    for reason, count in flagged.items():
        yield f"flagged, not scored: {counted(count, 'row')}: {reason}"
    repeated = sum(o.duplicate_of is not None for o in report.outcomes)
    if repeated:
        yield f"not scored: {counted(repeated, 'row')} that repeat an earlier line exactly"
    for kind, count in report.refused.items():
        yield f"refused: {counted(count, 'row')}: {kind}"
    logged, agree = report.logged
    if logged:
        yield f"algorithm as logged: {agree} of {logged} rows"
    yield from faulty(report.outcomes)
