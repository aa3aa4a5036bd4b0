"""A serving answer as JSON (docs/reference/json-output.md has every key) and as text: the verdict first, then latencies, throughput, memory, and what it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.fit import Fit
from simulator.base.units import counted, format_bytes, format_interval, format_number, format_seconds
from simulator.formats.writers import layout
from simulator.studies.serving import Latencies, Load, Serving, Spread
from simulator.studies.serving.memory import ServingMemory
from simulator.studies.serving.report import Attainment, HandedOver

_COLORS = {"ok": "bold green", "overloaded": "bold yellow", Fit.DOES_NOT_FIT: "bold red"}


def render(s: Serving, *, brief: bool = False) -> Group:
    """The report, for a rich console. brief: what decides, on one screen of 80 columns, what to try behind the verdict."""
    advice = [layout.section("To try next", Text(s.suggestion))] if s.suggestion else []
    parts: list[RenderableType] = [_verdict(s), *(advice if brief else [])]
    if s.latencies is not None and s.load is not None:
        parts.append(layout.section("Latency", _latencies(s.latencies, s)))
        if s.attainments:
            parts.append(layout.section("Service level", _attainments(s)))
        rates = layout.table(_rates(s.load)[:2], "lrl") if brief else _load(s.load, s.handed_over)
        parts.append(layout.section("Throughput", rates))
        parts += [] if brief else [layout.section("Decoding", _decoding(s))]
        if s.costs:
            parts.append(layout.section("What it costs", _costs(s)))
    if s.prefill_memory is not None and s.prefill_memory != s.memory and not brief:
        parts.append(
            layout.section("Memory of a GPU that computes prompts", layout.table(_sizes(s.prefill_memory), "lrl"))
        )
    parts.append(layout.section("Memory of a GPU", layout.table(_sizes(s.memory)[3 if brief else 0 :], "lrl")))
    parts += [] if brief else [layout.section("What this rests on", _sources(s)), *advice]
    return Group(*parts)


def _verdict(s: Serving) -> Table:
    warmup = f", the first {s.num_warmup:,} as warm-up" if s.num_warmup else ""
    subject = (
        f"{s.model} on {s.cluster}, {counted(s.num_devices, 'device')}; {counted(s.num_requests, 'request')}{warmup}"
    )
    table = layout.table([(s.verdict.upper(), subject), ("", s.cause)], "ll")
    table.columns[0].style = _COLORS[s.verdict]
    return table


def _latencies(found: Latencies, s: Serving) -> Table:
    rows: list[tuple[str, ...]] = [("", "p50", "p90", "p99", "mean", "largest")]
    ends = [("", found), ("  at best", s.low_latencies), ("  at worst", s.high_latencies)]
    for name, field in (
        ("time to first token", "ttft"),
        ("time per output token", "tpot"),
        ("whole request", "latency"),
    ):
        for end, each in ends:
            spread: Spread | None = getattr(each, field, None)
            if spread is not None:
                times = (spread.p50_s, spread.p90_s, spread.p99_s, spread.mean_s, spread.max_s)
                rows.append((end or name, *map(format_seconds, times)))
    return layout.table(rows, "lrrrrr")


def _attainments(s: Serving) -> Table:
    rows: list[tuple[str, ...]] = [
        (a.name, f"{format_seconds(a.limit_s)}", f"{a.share:.1%} within", _percentile(a)) for a in s.attainments
    ]
    if s.slo_share is not None and len(rows) > 1:
        rows.append(("all", "", f"{s.slo_share:.1%} within", ""))
    return layout.table(rows, "lrrl")


def _percentile(a: Attainment) -> str:
    above = f" by {format_seconds(a.measured_s - a.limit_s)}" if a.measured_s is not None and not a.held else ""
    return f"p{a.percentile:g} {'holds' if a.held else f'is above{above}'}"


def _load(load: Load, passed: HandedOver | None) -> Table:
    rows = _rates(load)
    if passed is not None:
        where = "inside nodes" if passed.near else "over the network"
        waited = f"after {format_seconds(passed.mean_wait_s)} of waiting, links busy {passed.utilisation:.1%}"
        rows.append(("handed over", format_seconds(passed.mean_s), f"a prompt's cache, {where}, {waited}"))
    return layout.table(rows, "lrl")


def _rates(load: Load) -> list[tuple[str, str, str]]:
    arriving = f"{format_number(load.arriving_per_s)} arrive; " if load.arriving_per_s else ""
    arriving += "" if load.requests_per_s else "none is answered before the last comes; "
    ends = load.low_capacity_per_s, load.high_capacity_per_s
    between = format_interval(*ends, format_number, prefix="90 % interval ")
    capacity = f"{arriving}{format_number(load.capacity_per_s)} could be served, {between}"
    lost = f"{counted(load.recomputed_tokens, 'token')} computed again"
    return [
        ("requests", f"{format_number(load.requests_per_s)}/s", capacity),
        ("answers", f"{load.output_tokens_per_s:,.0f} tokens/s", f"{load.sequences:.1f} tokens a step"),
        ("prompts", f"{load.prompt_tokens_per_s:,.0f} tokens/s", ""),
        ("utilisation", f"{load.utilisation:.1%}", f"of {format_seconds(load.measured_s)} measured"),
        ("in the system", f"{load.in_system:.1f}", "requests, on average"),
        ("cache in use", f"{load.kv_mean:.1%}", f"on average, {load.kv_peak:.1%} at most"),
        ("preemptions", f"{load.preemptions:,}", lost if load.preemptions else ""),
    ]


def _decoding(s: Serving) -> Table:
    rows = []
    for step in s.decode_steps:
        size = counted(step.sequences, "sequence")
        between = format_interval(step.low_s, step.high_s, prefix="90 % interval ")
        detail = (
            f"{between}; at {counted(step.context, 'token')} each, {step.bandwidth_share:.0%} of the memory's bandwidth"
        )
        rows.append((size, format_seconds(step.step_s), detail))
        where = [f"{name} {format_seconds(seconds)}" for name, seconds in step.parts.items() if seconds]
        rows.append(("", "", ", ".join(where)))
    return layout.table(rows, "lrl")


def _costs(s: Serving) -> Table:
    rows: list[tuple[str, ...]] = [
        ("a million tokens", "output", "output, if the queue never emptied", "all", "a request")
    ]
    for c in s.costs:
        full = f"{format_number(c.million_output_tokens_at_capacity)} ({format_number(c.low_at_capacity)} to {format_number(c.high_at_capacity)})"
        name = f"{c.kind}, {c.gpu_hour:.2f} {c.currency} a GPU and hour, {c.date}"
        output, every, request = map(format_number, (c.million_output_tokens, c.million_tokens, c.request))
        rows.append((name, output, full, every, request))
    return layout.table(rows, "lrrrr")


def _sizes(m: ServingMemory) -> list[tuple[str, str, str]]:
    ends = f"embedding {format_bytes(m.embedding_bytes)}, head {format_bytes(m.head_bytes)}"
    where = (
        "it"
        if m.most_states is None
        else f"{format_bytes(m.states_bytes)} beside it, {m.most_states:,} sequences' at most"
    )
    states = f"; states of a sequence take {format_bytes(m.state_bytes)} of {where}" if m.state_bytes else ""
    longest = f"{m.longest_tokens:,} needed at least{states}"
    return [
        ("weights", format_bytes(m.weight_bytes), f"{m.model_fraction:.1%} of the model; {ends}"),
        ("activations", format_bytes(m.activation_bytes), "peak of the largest step"),
        ("outside torch", format_bytes(m.outside_torch_bytes), "context, communicators, libraries"),
        ("cache", format_bytes(m.kv_bytes), f"{counted(m.kv_tokens, 'token')} in blocks of {m.block_size}; {longest}"),
        ("used", format_bytes(m.used_bytes), f"the plan allows {format_bytes(m.budget_bytes)} and the CUDA context"),
        ("capacity", format_bytes(m.capacity_bytes), "what a process can get"),
    ]


def _sources(s: Serving) -> Table:
    """A line a source, then what is assumed."""
    return layout.sources(s.sources, (("", "assumed", text) for text in s.assumptions))


SCHEMA_VERSION: Final = 2


def report(serving: Serving, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The document as plain data. Units are suffixes of the names."""
    fields = asdict(serving)
    for name in ("memory", "prefill_memory"):
        memory: ServingMemory | None = getattr(serving, name)
        if memory is not None:
            fields[name] |= {each: getattr(memory, each) for each in ("kv_bytes", "kv_tokens", "used_bytes")}
    return {"schema_version": SCHEMA_VERSION, "inputs": dict(inputs or {}), "fits": serving.fits, **fields}
