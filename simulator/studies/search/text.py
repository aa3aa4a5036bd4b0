"""A search's answer as text: the table, what was pruned and why, and the settings of the best plan's file."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from simulator.base.fit import Fit
from simulator.base.units import format_bytes, format_interval, format_seconds
from simulator.studies.search.outcome import fields_of
from simulator.studies.search.report import Row, SearchReport

WIDTH = 150
_WIDE = 110  # columns that figures and plans need beside each other


def render(report: SearchReport) -> RenderableType:
    """The report for a rich console."""
    parts: list[RenderableType] = [Text(_headline(report), style="bold"), Text()]
    if report.rows:
        parts += [_Ranked(report), Text()]
    parts.append(Text(_counts(report)))
    parts += [Text(f"{stack} has no row: {reason}") for stack, reason in report.without]
    parts += [Text(f"could not be predicted: {count:,} × {reason}") for reason, count in report.failures.items()]
    if report.rows:
        parts += [
            Text(),
            Text(_proof(report)),
            Text(_noise(report)),
            Text("* no other row is as quick and as small in memory: the Pareto front of step time and memory."),
            *_equal(report),
            Text(),
            Text(_best(report)),
            Text(_toml(report.rows[0])),
        ]
    return Group(*parts)


def _headline(report: SearchReport) -> str:
    inputs = report.study.inputs()
    nodes = "/".join(map(str, inputs["nodes"]))
    problem = f"{inputs['model']} on {nodes} × {inputs['cluster']}, {inputs['global_batch']:,} × {inputs['seq_len']:,} tokens a step"
    state = "INTERRUPTED, best so far: " if report.interrupted else ""
    return f"{state}{problem}: {'nothing that fits' if not report.rows else f'by {report.study.objective}'}"


@dataclass(frozen=True, slots=True)
class _Ranked:
    """The table; on a narrow screen the figures of all plans, then what each is."""

    report: SearchReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _WIDE
        yield _table(self.report, plans=wide)
        if not wide:
            yield _plans(self.report)


def _several(report: SearchReport) -> bool:
    """Whether plans run under more than one stack."""
    return len(report.study.space.fixed.get("stack", ())) > 1


def _plans(report: SearchReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(justify="right")
    for row in report.rows:
        table.add_row(str(row.rank), f"{row.plan.stack}: {words(row)}" if _several(report) else words(row))
    return table


def _table(report: SearchReport, *, plans: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    several = plans and _several(report)
    software = ("software",) if several else ()
    for name in ("", "step", "90 %", "tokens/s", "MFU", "memory", "GPUs", *software, *(("plan",) if plans else ())):
        table.add_column(name, justify="left" if name in ("plan", "software", "90 %") else "right")
    for row in report.rows:
        o = row.outcome
        step_s, low_s, high_s = o.interval_s
        mark = ("≈" if row.within_noise else "") + ("*" if row.on_front else "")
        table.add_row(
            f"{row.rank}{mark}",
            format_seconds(step_s),
            format_interval(low_s, high_s, between=" - "),
            f"{row.tokens_per_s:,.0f}",
            f"{o.mfu or 0:.1%}",
            format_bytes(o.used_bytes or 0) + (f" {o.status}" if o.status is Fit.TIGHT else ""),
            f"{o.num_devices:,}",
            *((row.plan.stack,) if several else ()),
            *((words(row),) if plans else ()),
        )
    return table


def words(row: Row) -> str:
    """A plan in a line: degrees, then what else it chooses."""
    plan = row.plan
    degrees = {axis: getattr(plan, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")}
    parts = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    parts.append(f"{plan.implementation} zero {plan.zero}")
    parts.append(f"mb {plan.micro_batch_size}×{plan.num_micro_batches}")
    if plan.pp > 1:
        parts.append(
            plan.pipeline_schedule + (f" v{plan.pipeline.virtual_stages}" if plan.pipeline.virtual_stages > 1 else "")
        )
    parts += ["sp"] if plan.sequence_parallel else []
    parts += [f"recompute {plan.recompute.mode}"] if plan.recompute.mode != "none" else []
    parts += [f"pool {plan.memory.policy}"] if plan.memory.policy != "caching" else []
    offload = plan.offload
    parts += [
        f"offload {name}" for name in ("optimizer", "parameters", "activations") if getattr(offload, name) != "none"
    ]
    return " · ".join(parts)


def _counts(report: SearchReport) -> str:
    c = report.counts
    refused = sum(c.refused.values())
    unchecked = f"{c.unchecked:,} too slow or too large by a bound of their kind, " if c.unchecked else ""
    rules = ", ".join(f"{name} {count:,}" for name, count in c.refused.items())
    ran = sum(c.simulated.values())
    found = ", ".join(f"{count:,} {status}" for status, count in c.simulated.items() if count)
    twice = f", of which {c.scouts:,} found the bound that prunes them, too" if c.scouts else ""
    lines = [
        f"{refused + c.unchecked + c.legal:,} candidates: {refused:,} illegal ({rules or 'none'}), {unchecked}{c.legal:,} legal.",
        f"Of the legal: {f'{c.equal:,} the same as another, ' if c.equal else ''}{c.too_large:,} pruned by memory, {c.too_slow:,} by the bound, {ran:,} simulated{f' ({found})' if found else ''}{twice}.",
    ]
    if c.open:
        lines.append(
            f"Not simulated, though they may fit: {c.open:,}."
            if report.study.layouts
            else f"{c.open:,} were not reached: the table may change."
        )
    if report.num_left_out:
        lines.append(
            f"{report.num_left_out:,} branches were not looked at: tensor parallelism across nodes, or context parallelism "
            "that leaves a rank fewer than 4,096 tokens of a sequence (--all looks at them)."
        )
    return "\n".join(lines)


def _proof(report: SearchReport) -> str:
    """How sure it is that the first row is the best."""
    if report.interrupted:
        return "Nothing is proven yet."
    certainty = " that surely fits" if report.study.layouts and report.rows[0].outcome.status is Fit.FITS else ""
    seen = " that was looked at" if report.num_left_out else ""
    if report.gain:
        return (
            f"1 is NOT PROVEN to be the best plan{certainty}{seen}. Gap {report.gain:.1%}: bounds prove that none that was not "
            "simulated is better by more than that (--all goes on until 1 is proven)."
        )
    return f"1 is the best plan{certainty}{seen}: bounds prove it for all that was not simulated."


def _equal(report: SearchReport) -> list[Text]:
    """What makes no difference."""
    return [
        Text(f"= {row.rank} runs exactly the same with {'; or '.join(row.same)}.") for row in report.rows if row.same
    ]


def _best(report: SearchReport) -> str:
    """What the plan is, above its settings."""
    if report.rows[0].outcome.status is Fit.TIGHT:
        return "Nothing surely fits. The best that is tight, as [plan] of a study file:"
    return "The best, as [plan] of a study file:"


def _noise(report: SearchReport) -> str:
    near = sum(row.within_noise for row in report.rows)
    return (
        f"≈ {near} of these cannot be told from the best at 90 %: intervals of the ratio of two steps, in which errors that "
        f"both share cancel."
    )


def _toml(row: Row) -> str:
    lines = []
    for name, value in fields_of(row.plan).items():
        if isinstance(value, dict):
            inner = ", ".join(f"{key} = {_value(each)}" for key, each in value.items())
            lines.append(f"  {name} = {{ {inner} }}")
        else:
            lines.append(f"  {name} = {_value(value)}")
    return "\n".join(lines)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
