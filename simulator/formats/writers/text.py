"""A prediction as text for people: the verdict and what to change first, then time, memory, and what it rests on.

What decides stands in the first 24 lines of 80 columns.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.errors import without_commands
from simulator.base.fit import Fit
from simulator.base.sums import summed
from simulator.base.units import counted, format_bytes, format_flop_per_s, format_interval, format_seconds
from simulator.formats.writers import layout
from simulator.memory.pools import PoolUse
from simulator.predict import Z90, Prediction
from simulator.predict.confidence import upward
from simulator.predict.lengths import Padding
from simulator.work.checkpoint import Saving

if TYPE_CHECKING:
    from simulator.studies.rollout import Iteration

_COLORS = {Fit.FITS: "bold green", Fit.TIGHT: "bold yellow", Fit.DOES_NOT_FIT: "bold red"}
PLAIN_WIDTH = 120
_LARGEST = 3

_Rows = list[tuple[str, ...]]


def to_text(answer: RenderableType, *, color: bool = False, width: int = PLAIN_WIDTH) -> str:
    """What a rich console would show, ending in a newline. Without `color` it is the same bytes on every terminal."""
    sink = io.StringIO()
    console = Console(
        file=sink,
        width=width,
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
    console.print(answer)
    return "\n".join(without_commands(line.rstrip(), color=color) for line in sink.getvalue().splitlines()) + "\n"


def render(
    p: Prediction,
    padding: Padding | None = None,
    iteration: Iteration | None = None,
    further: Sequence[tuple[str, RenderableType]] = (),
) -> Group:
    """The report, for a rich console. padding, iteration: of data whose lengths, of a rollout that was asked for.

    further: sections that were asked for, by title.
    """
    parts: list[RenderableType] = [
        *_head(p, p.suggestion, _speed_rows(p), _memory_rows(p)),
        layout.section("Where the step goes", _breakdown(p)),
    ]
    if p.kinds:
        title = "Kinds of ranks" if p.kinds[0].kind.startswith("rank ") else "Kinds of GPUs"
        parts.append(layout.section(title, _kinds(p)))
    parts += _beside(padding, iteration)
    if p.checkpoint is not None:
        parts.append(layout.section("One checkpoint", _checkpoint(p.checkpoint)))
    if p.communication:
        parts.append(layout.section("Communication", layout.communication(p.communication)))
    parts += [layout.section(title, content) for title, content in further]
    parts.append(layout.section("What this rests on", _sources(p)))
    return Group(*parts)


def render_brief(p: Prediction, padding: Padding | None = None, iteration: Iteration | None = None) -> Group:
    """What decides, on one screen of 80 columns: verdict, the first change to try, step and memory."""
    m = p.memory
    used = "MFU" if p.model_flop_per_step else "HFU"
    speed = [row for row in _speed_rows(p) if row[0] in ("step", "throughput", used)]
    memory = [
        ("allocated", format_bytes(m.peak_allocated_bytes), f"peak at {m.peak_moment}"),
        ("reserved", format_bytes(m.reserved_bytes), _reserved_interval(p)),
        *_memory_rows(p)[-2 - len([1 for _, size, _ in m.below if size]) :],
    ]
    return Group(*_head(p, p.suggestion.partition("\n")[0], speed, memory), *_beside(padding, iteration))


def _head(p: Prediction, suggestion: str, speed: _Rows, memory: _Rows) -> list[RenderableType]:
    """What both reports begin with."""
    return [
        _verdict(p),
        *([layout.section("To try next", Text(suggestion))] if suggestion else []),
        layout.section("Speed", layout.table(speed, "lrl")),
        layout.section("Memory of the fullest rank", layout.table(memory, "lrl")),
    ]


def _beside(padding: Padding | None, iteration: Iteration | None) -> list[RenderableType]:
    """What was asked for besides the step."""
    parts: list[RenderableType] = []
    if padding is not None:
        parts.append(layout.section("With sequences of your lengths", _padding(padding)))
    if iteration is not None:
        parts.append(layout.section("One iteration of reinforcement learning", _iteration(iteration)))
    return parts


def _verdict(p: Prediction) -> Table:
    subject = f"{p.model} on {p.cluster}, {counted(p.num_devices, 'device')}: {p.needs}"
    table = layout.table([(p.verdict.upper(), subject), ("", p.cause), ("", _largest(p))], "ll")
    table.columns[0].style = _COLORS[p.verdict]
    return table


def _largest(p: Prediction) -> str:
    """What limits the step: the largest parts of its time, and of the memory at its peak."""
    times = sorted(p.breakdown.items(), key=lambda item: (-item[1], item[0]))
    sizes = sorted(p.memory.by_category.items(), key=lambda item: (-item[1], item[0]))
    time = ", ".join(f"{name} {seconds / p.step_s:.0%}" for name, seconds in times[:_LARGEST] if seconds)
    memory = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes[:_LARGEST] if size)
    most = (("most of the time: ", time), ("most of the memory: ", memory))
    return "; ".join(label + text for label, text in most if text)


def _speed_rows(p: Prediction) -> _Rows:
    overlap = f"{format_seconds(p.lower_s)} at best, {format_seconds(p.upper_s)} without any, at the same kernel and link times"
    peak = f"of {format_flop_per_s(p.peak_flop_per_s)} a device"
    rows: _Rows = [
        ("step", format_seconds(p.step_s), format_interval(p.low_s, p.high_s, prefix="90 % interval ")),
        *([("", "", f"made of {_width(p)}")] if p.uncertainty else []),
        ("overlap", "", overlap),
    ]
    if p.network is not None:
        hangs_s, more_s = p.network.hangs_s, p.network.tenth_less_s
        share = f"{hangs_s / p.step_s:.1%} hangs on bandwidth between nodes; 10 % less costs "
        rows.append(("network", format_seconds(hangs_s), f"{share}{format_seconds(more_s)} ({more_s / p.step_s:.1%})"))
    if p.tokens_per_step:
        each = f"{p.tokens_per_s / p.num_devices:,.0f} tokens/s a device; {counted(p.tokens_per_step, 'token')} a step"
        rows.append(("throughput", f"{p.tokens_per_s:,.0f} tokens/s", each))
    if p.model_flop_per_step:
        rows += [("MFU", f"{p.mfu:.1%}", peak), ("HFU", f"{p.hfu:.1%}", "the same, recomputation counted too")]
    else:
        rows.append(("HFU", f"{p.hfu:.1%}", f"{peak}, of all products that the program runs"))
    return rows


def _width(p: Prediction) -> str:
    """The three widest parts of the interval, + those of its upper end alone; they add in quadrature."""
    widest = sorted(p.uncertainty.items(), key=lambda item: (-item[1], item[0]))[:3]
    return ", ".join(f"{name} {'+' if upward(name) else '±'} {math.expm1(Z90 * one):.0%}" for name, one in widest)


def _reserved_interval(p: Prediction) -> str:
    return f"90 % interval {format_bytes(p.memory.low_reserved_bytes)} to {format_bytes(p.memory.high_reserved_bytes)}"


def _memory_rows(p: Prediction) -> _Rows:
    m = p.memory
    unlimited = f" after retries; {format_bytes(m.peak_reserved_bytes)} without a limit" if m.retries else ""
    who = "by the caching allocator" if m.pool is None else f"by the pool: {m.pool.policy}"
    resident = f"{format_bytes(m.resident_bytes)} stay from step to step"
    alive = sorted(m.by_category.items(), key=lambda item: (-item[1], item[0]))
    rows: _Rows = [
        ("allocated", format_bytes(m.peak_allocated_bytes), f"peak at {m.peak_moment}; {resident}"),
        *((f"  {category}", format_bytes(size), "alive at that moment") for category, size in alive if size),
        ("reserved", format_bytes(m.reserved_bytes), f"{who}{unlimited}; {_reserved_interval(p)}"),
        *_pool(m.pool),
        ("outside torch", format_bytes(m.outside_torch_bytes), "context, communicators, libraries"),
        ("capacity", format_bytes(m.capacity_bytes), "what a process can get"),
    ]
    for name, size, there in m.below:
        if size:
            rows.append((name, format_bytes(size), f"of a node's {format_bytes(there)}, by all its ranks"))
    return rows


def _pool(pool: PoolUse | None) -> list[tuple[str, str, str]]:
    """What the pool that a plan asks for does in a step."""
    if pool is None:
        return []
    calls = ", ".join(f"{count:,} {name}" for name, count in pool.calls.items()) or "none"
    own = f", {format_seconds(pool.host_s)} of the host" if pool.host_s else ""
    rows = [("  requests", f"{pool.allocations:,}", f"allocations a step{own}; calls of the driver: {calls}")]
    if pool.compressed_bytes:
        size = format_bytes(pool.compressed_bytes)
        rows.append(
            ("  compressed", size, f"a step, before compression; {format_seconds(pool.compress_s)} to do and undo it")
        )
    return rows


def _padding(found: Padding) -> Table:
    rows = [
        (
            "padded",
            found.step_s,
            found.tokens_per_s,
            f"batches of {found.padded_len:,.0f} tokens a sequence, {found.padding:.0%} padding",
        ),
        (
            "packed",
            found.packed_step_s,
            found.packed_tokens_per_s,
            f"whole sequences, documents of {found.document_len:,} tokens in them",
        ),
    ]
    steps = [(name, format_seconds(step_s), f"{speed:,.0f} tokens/s", detail) for name, step_s, speed, detail in rows]
    data = f"{found.count:,} of them, mean {found.mean_len:,.0f}, longest {found.longest:,} tokens"
    return layout.table([*steps, ("lengths", "", "", data)], "lrrl")


def _iteration(found: Iteration) -> Table:
    parts = (
        ("answers", found.generate_s, f"{found.sequences:,} of them, {found.output_tokens:,} tokens"),
        ("log-probabilities", found.log_probs_s, "of the policy before the first step, and of a critic"),
        ("reference", found.reference_s, ""),
        ("rewards", found.reward_s, ""),
        ("training", found.train_s, counted(found.steps, "step")),
        ("new weights", found.sync_s, "to the engine"),
    )
    rows = [(name, format_seconds(seconds), detail) for name, seconds, detail in parts if seconds]
    beside = "answers made beside the rest" if found.overlaps else "one after another"
    holds = (("answering", found.generating_bytes), ("training", found.training_bytes))
    memory = ", ".join(f"{format_bytes(size)} {word}" for word, size in holds)
    fits = "fits" if found.fits else "does not fit"
    row = ("memory", "", f"{memory}, of {format_bytes(found.capacity_bytes)}: {fits}")
    return layout.table([*rows, ("iteration", format_seconds(found.iteration_s), beside), row], "lrl")


def _checkpoint(saved: Saving) -> Table:
    parts = (("gather", saved.gather_s), ("copy", saved.copy_s), ("write", saved.write_s))
    shares = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts if seconds)
    return layout.table(
        [
            ("state", format_bytes(saved.state_bytes), f"saved {saved.mode}"),
            ("time", format_seconds(saved.total_s), f"{shares}; training waits {format_seconds(saved.blocking_s)}"),
            (
                "memory",
                format_bytes(saved.extra_hbm_bytes),
                f"more on a GPU, {format_bytes(saved.host_bytes)} on a host",
            ),
        ],
        "lrl",
    )


def _breakdown(p: Prediction) -> Table:
    parts = sorted(p.breakdown.items(), key=lambda item: (-item[1], item[0]))
    rows = [(name, format_seconds(seconds), f"{seconds / p.step_s:.1%}") for name, seconds in parts if seconds]
    total = summed(p.breakdown.values())
    return layout.table([*rows, ("sum", format_seconds(total), f"{total / p.step_s:.1%}")], "lrr")


def _kinds(p: Prediction) -> Table:
    rows = [
        (
            f"{kind.num_devices:,}",
            kind.kind,
            f"computes {format_seconds(kind.compute_s)}",
            f"waits {format_seconds(kind.waiting_s)}",
            f"{kind.verdict}: {format_bytes(kind.memory.used_bytes)} of {format_bytes(kind.memory.capacity_bytes)}",
        )
        for kind in p.kinds
    ]
    return layout.table(rows, "rllll")


def _sources(p: Prediction) -> Table:
    curves = dict.fromkeys(reason.partition(":")[0] for reason in p.extrapolated)
    beyond = [("beyond what was measured", "extrapolated", ", ".join(curves))] if curves else []
    return layout.sources(p.sources, beyond)
