"""The report on a table of collectives as text: by size class, then by machine and collective, then what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.units import counted
from simulator.studies.backtest.collectives import SIZE_CLASSES, CollectiveGroup, CollectivesReport
from simulator.studies.backtest.text import faulty, headline, percent


def render(report: CollectivesReport) -> RenderableType:
    """Tables for a rich console."""
    parts: list[RenderableType] = [Text(headline(report)), _totals(report), _machines(report)]
    parts += [Text(line) for line in _left_out(report)]
    return Lines(*parts)


def _totals(report: CollectivesReport) -> Table:
    table = Table(title="Time of a collective: |predicted / measured − 1|, and of one repeat against the others")
    table.add_column("size")
    for name in ("n", "median", "p90", "bias", "repeats", "of rows"):
        table.add_column(name, justify="right")
    for group in report.totals:
        if group.score.n:
            noise = (percent(group.noise_floor), str(group.noise_rows))
            table.add_row(group.size_class, str(group.score.n), *_scores(group), *noise)
    return table


def _scores(group: CollectiveGroup) -> tuple[str, str, str]:
    score = group.score
    return percent(score.median_abs_error), percent(score.p90_abs_error), percent(score.bias, signed=True)


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
    middle, p90, bias = _scores(group)
    noise = f"; {percent(group.noise_floor)}" if group.noise_rows else ""
    return f"{group.score.n}: {middle} / {p90} ({bias}{noise})"


def _left_out(report: CollectivesReport) -> Iterator[str]:
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
