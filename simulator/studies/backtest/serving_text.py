"""The report on a table of servers as text: a line for each source, engine, GPU and metric, then what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.units import counted
from simulator.studies.backtest.serving import ServingGroup, ServingReport
from simulator.studies.backtest.text import faulty, headline, percent


def render(report: ServingReport) -> RenderableType:
    """Tables for a rich console."""
    parts: list[RenderableType] = [Text(headline(report)), _table(report)]
    return Lines(*parts, *(Text(line) for line in _left_out(report)))


def _table(report: ServingReport) -> Table:
    table = Table(title="|predicted / measured − 1|, beside baselines fitted on half of the rows")
    for name in ("source", "engine", "GPU", "metric"):
        table.add_column(name, overflow="fold")
    for name in ("n", "refused", "median", "p90", "bias", "rank", "in 90 %", "one efficiency", "two terms"):
        table.add_column(name, justify="right")
    for group in report.groups:
        table.add_row(group.source, group.engine, group.gpu, group.metric, *_cells(group))
    return table


def _cells(group: ServingGroup) -> Iterator[str]:
    score = group.score
    yield str(score.n)
    yield str(group.rows.get("refused", 0))
    yield percent(score.median_abs_error)
    yield percent(score.p90_abs_error)
    yield percent(score.bias, signed=True)
    yield "–" if group.spearman is None else f"{group.spearman:.2f}"
    yield percent(group.coverage_90)
    for baseline in group.baselines:
        yield f"{percent(baseline.median_abs_error)} / {percent(baseline.p90_abs_error)}"


def _left_out(report: ServingReport) -> Iterator[str]:
    for column in report.unread:
        yield f"Column not read: {column}"
    refused = Counter(one.kind for one in report.outcomes if one.status == "refused")
    for kind, count in refused.most_common():
        yield f"Refused: {counted(count, 'row')}: {kind}"
    yield from faulty(report.outcomes)
