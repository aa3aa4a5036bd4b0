"""A long run's answer as JSON (docs/reference/json-output.md has every key) and as text: days first, then where they go, what interrupts, and how often to save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.sums import summed
from simulator.base.units import counted, format_bytes, format_days, format_duration, format_number, format_seconds
from simulator.formats.writers import layout
from simulator.studies.goodput import Goodput
from simulator.studies.goodput.elastic import Elastic

_SHOWN_CAUSES = 8


def render(g: Goodput, elastic: Elastic | None = None) -> Group:
    """The report, for a rich console. elastic: on spot machines, where that was asked."""
    return Group(
        _head(g),
        *([] if elastic is None else [layout.section("On the spot machines offered", _elastic(elastic))]),
        layout.section("Where the time goes", _parts(g)),
        layout.section("Interruptions", _interruptions(g)),
        layout.section("Checkpoints", _checkpoints(g)),
        layout.section("What this rests on", layout.table(((s.what, s.kind, s.detail) for s in g.sources), "lll")),
    )


def _head(g: Goodput) -> Table:
    d, share = g.days, g.goodput
    quickest = format_number(d.p5) if d.p5 >= 1 else format_days(d.p5)
    took = f"90 % of {g.replicas:,} runs take {quickest} to {format_days(d.p95)}, the step's own interval in them"
    rows = [
        (
            format_days(d.p50),
            f"{g.model} on {g.cluster}, {counted(g.num_devices, 'device')}: {counted(g.tokens, 'token')}",
        ),
        ("", took),
        ("", f"goodput {share.p50:.1%} ({share.p5:.1%} to {share.p95:.1%}): training that counts, of all the time"),
        ("", f"{counted(g.steps, 'step')} of {format_seconds(g.step_s)}"),
    ]
    if (e := g.energy) is not None:
        carbon = "" if e.co2_kg is None else f", {format_number(e.co2_kg)} kg of CO2"
        in_steps = f"{format_number(e.training_kwh)} kWh in steps that count"
        rows.append(("", f"{format_number(e.kwh)} kWh{carbon}; {in_steps}"))
    if g.dollars is not None:
        low, middle, high = (f"${format_number(each)}" for each in (g.dollars.p5, g.dollars.p50, g.dollars.p95))
        rows.insert(2, ("", f"{middle} ({low} to {high})"))
    for one in reversed(g.costs):
        price = f"{one.kind}, {one.gpu_hour:.2f} {one.currency} a GPU and hour, {one.date}: {one.source}"
        low, middle, high = (format_number(each) for each in (one.cost.p5, one.cost.p50, one.cost.p95))
        rows.insert(2, ("", f"{middle} {one.currency} ({low} to {high}) at {price}"))
    table = layout.table(rows, "ll")
    table.columns[0].style = "bold"
    return table


def _elastic(e: Elastic) -> Table:
    ended = format_days(e.days) if e.days is not None else "not finished"
    rows = [
        (
            ended,
            f"${format_number(e.dollars)}",
            f"{format_number(e.dollars_per_billion_tokens)} dollars a billion tokens; {e.tokens:,.0f} trained",
        ),
        *((name, format_duration(seconds), "") for name, seconds in e.seconds.items() if seconds),
        ("changes of size", f"{e.changes:,}", f"{e.lost_tokens:,.0f} tokens trained again"),
        *((f"with {nodes} nodes", format_days(days), "") for nodes, days in sorted(e.by_nodes.items())),
    ]
    return layout.table(rows, "lrl")


def _parts(g: Goodput) -> Table:
    return layout.table(((p.part, format_duration(p.seconds), f"{p.share:.1%}") for p in g.parts), "lrr")


def _interruptions(g: Goodput) -> RenderableType:
    if g.mtbf_s is None and not g.interruptions:
        return Text("none strike")
    rows = [(name, format_number(mean)) for name, mean in g.interruptions[:_SHOWN_CAUSES]]
    rest = summed(mean for _, mean in g.interruptions[_SHOWN_CAUSES:])
    if rest:
        rows.append((f"{len(g.interruptions) - _SHOWN_CAUSES} other causes", format_number(rest)))
    rows.append(("in all", format_number(summed(mean for _, mean in g.interruptions))))
    if g.mtbf_s is not None:
        apart = ", slow hosts apart" if "slow host" in dict(g.interruptions) else ""
        rows.append((f"one every{apart}", format_duration(g.mtbf_s)))
    rows.append(("each costs, beside the work it loses", format_duration(g.restart_s)))
    return layout.table(rows, "lr")


def _checkpoints(g: Goodput) -> Table:
    s = g.saving
    by_daly = f"Daly's formula for a write of {format_duration(s.total_s)}" if g.mtbf_s else "nothing fails"
    chosen = by_daly if g.interval_is_optimal else "as asked"
    rows = [
        ("every", format_duration(g.interval_s), chosen),
        ("one holds training up for", format_duration(s.blocking_s), f"{format_bytes(s.state_bytes)} of state"),
    ]
    rows += [
        (f"goodput at {format_duration(i.interval_s)}", f"{i.goodput:.2%}", "played with the same failures")
        for i in g.intervals
    ]
    if g.expected_days is not None:
        source = "Daly 2006; nothing announced, nothing beside training"
        rows.append(("all by the closed form", format_days(g.expected_days), source))
    return layout.table(rows, "lrl")


SCHEMA_VERSION: Final = 1


def report(answer: Goodput, inputs: Mapping[str, Any] | None = None, elastic: Elastic | None = None) -> dict[str, Any]:
    """The document as plain data. elastic: on spot machines, where that was asked."""
    fields = asdict(answer) | {"interruptions": dict(answer.interruptions)}
    fields = fields if answer.energy is not None else {name: one for name, one in fields.items() if name != "energy"}
    spot = {} if elastic is None else {"spot": elastic.report()}
    return {"schema_version": SCHEMA_VERSION, "inputs": dict(inputs or {}), **fields, **spot}
