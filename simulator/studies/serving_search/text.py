"""A search over serving plans as text: how many GPUs, the table, what it assumes, and the best plan's settings."""

from __future__ import annotations

import shlex

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.units import counted, format_bytes, format_number, format_seconds
from simulator.studies.serving import InferencePlan
from simulator.studies.serving.report import Attainment
from simulator.studies.serving.slo import Limit
from simulator.studies.serving_search.answers import Answer, Row, ServingSearchReport, degrees_of
from simulator.studies.serving_search.study import ServingSearch

WIDTH = 150
LIGHT = 0.3  # load below which more engines hardly shorten a queue
FOLDED = (
    "Equal engines are simulated once, at their share of the rate: requests are dealt to them at random, and prompts reach "
    "engines that only decode as a stream of their own."
)
_SHOWN_AS_TIMES = 10  # a limit that is missed by more


def render(report: ServingSearchReport) -> RenderableType:
    """The report for a rich console."""
    parts: list[RenderableType] = [Text(_headline(report), style="bold"), Text()]
    if report.rows:
        parts += [_table(report), Text()]
    parts.append(Text(_counts(report)))
    if not report.rows:
        parts += [Text(), *map(Text, _nearest(report))]
        return Group(*parts)
    parts += [Text(FOLDED), Text("* no other row has more tokens a second both for a user and for a GPU."), Text()]
    if report.price is not None:
        price, currency = report.price, report.currency
        parts.append(
            Text(f"at {price.kind}, {price.gpu_hour:.2f} {currency} a GPU and hour, {price.date}: {price.source}")
        )
    best = report.best
    parts += [Text(line) for line in _assurance(report, best)]
    if best is not None:
        parts += [Text(), Text(f"The best, as flags of `shardwise serve`: {flags(best.answer.plan, report.study)}")]
    return Group(*parts)


def _headline(report: ServingSearchReport) -> str:
    study = report.study
    most = (
        f"as many {study.cluster.name} as needed"
        if study.any_nodes
        else f"{study.cluster.num_nodes} × {study.cluster.name} ({counted(study.most_devices, 'GPU')})"
    )
    service = f"{study.model.name} on {most} at {format_number(study.rate)} requests/s"
    state = "INTERRUPTED, best so far: " if report.interrupted else ""
    best = report.best or (report.rows[0] if report.rows else None)
    if best is None:
        found = "no plan that meets the limits is known yet" if report.interrupted else "no layout meets the limits"
        return f"{state}{service}: {found}"
    nodes = -(-best.answer.num_devices // study.cluster.gpus_per_node)
    size = f"{counted(best.answer.num_devices, 'GPU')} ({counted(nodes, 'node')})"
    return f"{state}{service}: {size}, {words(best.answer.plan, study)}"


def _table(report: ServingSearchReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    limits = report.study.slo.limits
    money = (f"{report.currency}/M output",) if report.price is not None else ()
    names = ("", "GPUs", *(limit.words for limit in limits), "tokens/s/user", "tokens/s/GPU", "load", *money, "plan")
    for name in names:
        table.add_column(name, justify="left" if name == "plan" else "right")
    for row in report.rows:
        table.add_row(*_cells(report, row))
    return table


def _cells(report: ServingSearchReport, row: Row) -> list[str]:
    one = row.answer
    speed = one.tokens_per_s_user
    money = [f"{row.million_output_tokens:,.3g}"] if row.million_output_tokens is not None else []
    mark = "†" if row.confirmed is False else "*" if row.pareto else ""
    return [
        f"{row.rank}{mark}",
        f"{one.num_devices:,}",
        *("" if each.measured_s is None else format_seconds(each.measured_s) for each in one.attainments),
        "" if speed is None else f"{speed:.1f}",
        f"{row.tokens_per_s_gpu:,.1f}",
        f"{report.study.rate / one.capacity_per_s:.0%}",
        *money,
        words(one.plan, report.study),
    ]


def words(plan: InferencePlan, study: ServingSearch) -> str:
    """A plan in a line: how many engines of what, and what else it chooses."""
    text = f"{plan.dp} × {_engine(plan)}"
    pool = plan.prefill_pool
    if pool is not None:
        text = f"prompts {pool.dp} × {_engine(pool)} → answers {text}"
    known = {"tp", "pp", "dp", "experts", "prefill_tp", "prefill_pp", "prefill_pcp", "prefill_dp", "pcp", "stack"}
    others = {name: value for name, value in degrees_of(plan, study).items() if name not in known}
    return " · ".join([text, *(f"{name} {value}" for name, value in others.items())])


def _engine(plan: InferencePlan) -> str:
    more = [f"{name} {getattr(plan, name)}" for name in ("pp", "pcp") if getattr(plan, name) > 1]
    return f"({' '.join([f'tp {plan.tp}', *more, *(['ep'] if plan.experts == 'dealt' else [])])})"


def flags(plan: InferencePlan, study: ServingSearch) -> str:
    """The plan's settings on the command line of `shardwise serve`."""
    found = []
    for name, value in degrees_of(plan, study).items():
        text = ",".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else value
        text = f"{value}B" if name == "host_cache" else text
        found.append(f"--{name.replace('_', '-')} {shlex.quote(str(text))}")
    return " ".join(found) or "none, all are at their defaults"


def _counts(report: ServingSearchReport) -> str:
    c = report.counts
    parts = [
        (c.too_large, "do not fit in memory"),
        (c.too_slow, "are too slow by a bound"),
        (c.short, "need more GPUs for the rate"),
        (c.pruned, "need more GPUs than the table's last row"),
        (c.missed, "miss a limit with any number of engines"),
        (c.met, "meet theirs"),
    ]
    became = ", ".join(f"{count:,} {noun}" for count, noun in parts if count)
    pairs = f" {counted(c.pairs, 'pair')} of pools." if c.pairs else ""
    return f"{counted(c.layouts, 'layout')} of one engine; of these in each role: {became}.{pairs} {counted(c.plays, 'play')}."


def _assurance(report: ServingSearchReport, best: Row | None) -> list[str]:
    """How sure the first row is."""
    if report.interrupted:
        return ["Nothing is proven yet."]
    lines = [
        f"† {row.rank} misses a limit when all its engines are played together: {_missed_limits(row.whole or ())}."
        for row in report.rows
        if row.confirmed is False
    ]
    if best is None:
        return lines
    lines.append(
        f"{best.rank} played whole, each request to the engine with the fewest: {_missed_limits(best.whole or ())}."
    )
    spread = report.spread or 1.0
    if report.sure is None:
        lines.append(
            f"With all times {spread - 1:.0%} longer (upper end at 90 %), its layout misses a limit on all numbers tried."
        )
    elif report.sure == best.answer.plan:
        lines.append(f"It also holds with all times {spread - 1:.0%} longer, the upper end of the 90 % interval.")
    else:
        size = counted(report.sure.num_devices, "GPU")
        lines.append(
            f"With all times {spread - 1:.0%} longer (upper end at 90 %), it takes {size}: {words(report.sure, report.study)}."
        )
    return lines


def _missed_limits(rows: tuple[Attainment, ...]) -> str:
    known = [(Limit(name=one.name, percentile=one.percentile, limit_s=one.limit_s).words, one) for one in rows]
    return ", ".join(f"{name} {format_seconds(one.measured_s)}" for name, one in known if one.measured_s is not None)


def _nearest(report: ServingSearchReport) -> list[str]:
    """What to do where nothing meets the limits."""
    study, near = report.study, report.nearest
    lines = []
    most = study.most_devices
    if report.least_devices is None and report.missing_bytes and near is None and not report.counts.too_slow:
        lines.append(
            f"No layout fits in memory: {format_bytes(report.missing_bytes)} a GPU are missing at least. More nodes "
            "(--nodes), narrower weights (--weights fp8), or a shorter --max-model-len."
        )
    elif report.least_devices is not None and report.least_devices > most:
        lines.append(
            f"The queue grows without end: no layout takes {format_number(study.rate)} requests/s on fewer than "
            f"{report.least_devices:,} GPUs, and there are {most:,}. `--gpus-needed` finds how many meet the limits."
        )
    if near is not None:
        lines.append(f"Nearest: {words(near.plan, study)} on {counted(near.num_devices, 'GPU')}, which misses")
        lines += [f"  {_missed(each)}" for each in near.attainments if not each.held]
        lines.append(_advice(near, more_gpus=not study.any_nodes and study.rate > LIGHT * near.capacity_per_s))
    return lines


def _missed(one: Attainment) -> str:
    limit = Limit(name=one.name, percentile=one.percentile, limit_s=one.limit_s)
    over, allowed = format_seconds((one.measured_s or 0.0) - one.limit_s), format_seconds(one.limit_s)
    near = one.excess < _SHOWN_AS_TIMES
    missed = f"{over} ({one.excess - 1:.0%}) above {allowed}" if near else f"{one.excess:,.0f} times {allowed}"
    return f"{limit.words}: {format_seconds(one.measured_s or 0.0)}, {missed}; {one.share:.1%} of requests are within"


def _advice(near: Answer, *, more_gpus: bool) -> str:
    names = {one.name for one in near.attainments if not one.held}
    changes = ["narrower weights (--fix weights=fp8,int4)"]
    changes += ["smaller steps (--fix max_batched_tokens=512,2048,8192)"] if "tpot" in names else []
    changes += ["shorter prompts"] if "ttft" in names else []
    more = "more GPUs (--gpus-needed), " if more_gpus else ""
    return f"To try: {more}{', '.join(changes)}, or another --cluster."
