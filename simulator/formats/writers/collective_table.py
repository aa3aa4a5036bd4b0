"""A sweep of one collective over sizes: the numbers, where the choice changes, as JSON data, as text and as a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.units import counted, format_bytes, format_rate
from simulator.formats.drawing import drawn
from simulator.spec.cluster.nics import NicPaths
from simulator.work.collectives import Choice

if TYPE_CHECKING:
    from simulator.formats.drawing import Figure

SCHEMA_VERSION: Final = 1

Pick = Callable[[int], Choice]  # size in bytes -> what runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size: seconds, and bytes/s of the algorithm (size over time) and of the bus (nccl-tests' PERFORMANCE.md)."""

    size_bytes: int
    algorithm: str
    protocol: str
    time_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    channels: int | None = None
    measured_time_s: float | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        return self.time_s / self.measured_time_s - 1 if self.measured_time_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """The smallest size at which the choice is `after`; one byte less takes `before`."""

    size_bytes: int
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketed:
    """The bytes of one row in `num_calls` calls of at most `bucket_bytes`, one after the other, and all in one."""

    size_bytes: int
    bucket_bytes: int
    num_calls: int
    time_s: float
    whole_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A collective of `num_ranks` on `num_nodes` nodes of a cluster, over sizes.

    source: what calibrates its links. cards: what the group gets of its nodes' NICs by where they sit, None where each
    GPU has its even share. unmodelled: variables of NCCL that were given and are not modelled.
    """

    collective: str
    cluster: str
    num_ranks: int
    num_nodes: int
    rows: tuple[Row, ...]
    crossovers: tuple[Crossover, ...]
    buckets: tuple[Bucketed, ...] = ()
    source: str = ""
    unmodelled: tuple[str, ...] = ()
    cards: NicPaths | None = None


def bus_factor(kind: str, num_ranks: int) -> float:
    """Bus over algorithm bandwidth, by nccl-tests' doc/PERFORMANCE.md."""
    n = num_ranks
    factors = {"all_reduce": 2 * (n - 1) / n}
    return factors.get(kind, (n - 1) / n if kind in ("all_gather", "reduce_scatter", "all_to_all") else 1.0)


def sweep_rows(kind: str, num_ranks: int, sizes: Sequence[int], pick: Pick) -> tuple[Row, ...]:
    """A row a size."""
    return tuple(_row(kind, num_ranks, size, pick(size)) for size in sizes)


def _row(kind: str, num_ranks: int, size_bytes: int, choice: Choice) -> Row:
    time_s = float(choice.time_s)
    rate = size_bytes / time_s if time_s else 0.0
    return Row(
        size_bytes=size_bytes,
        algorithm=choice.algorithm,
        protocol=choice.protocol,
        time_s=time_s,
        algorithm_bytes_per_s=rate,
        bus_bytes_per_s=rate * bus_factor(kind, num_ranks),
        channels=choice.channels,
    )


def crossovers(rows: Sequence[Row], pick: Pick) -> tuple[Crossover, ...]:
    """Where neighbouring rows differ, to the byte by bisection (one change is found where there are several between)."""
    found = []
    for low, high in pairwise(rows):
        if _name(low) != _name(high):
            below, above = low.size_bytes, high.size_bytes
            while above - below > 1:
                middle = (below + above) // 2
                below, above = (middle, above) if _name(pick(middle)) == _name(low) else (below, middle)
            found.append(Crossover(size_bytes=above, before=_name(low), after=_name(pick(above))))
    return tuple(found)


def bucket_rows(rows: Sequence[Row], bucket_bytes: int, pick: Pick) -> tuple[Bucketed, ...]:
    """What cutting into buckets costs each row's size: small messages pay launch and steps once a call."""
    found = []
    for row in rows:
        full, rest = divmod(row.size_bytes, bucket_bytes)
        time_s = full * float(pick(bucket_bytes).time_s) + (float(pick(rest).time_s) if rest else 0.0)
        found.append(
            Bucketed(
                size_bytes=row.size_bytes,
                bucket_bytes=bucket_bytes,
                num_calls=full + (rest > 0),
                time_s=time_s,
                whole_s=row.time_s,
            )
        )
    return tuple(found)


def _name(choice: Choice | Row) -> str:
    return f"{choice.algorithm}/{choice.protocol}"


def to_data(sweep: Sweep) -> dict[str, Any]:
    """Plain data for `json.dumps`; docs/reference/topology-sources.md describes every key."""
    data = asdict(sweep)
    for one, row in zip(data["rows"], sweep.rows, strict=True):
        one["error"] = row.error
    if sweep.cards is not None:
        data["cards"] = {key: value for key, value in data["cards"].items() if key != "loads"}
    return {"schema_version": SCHEMA_VERSION, **data}


def render(sweep: Sweep) -> RenderableType:
    """An nccl-tests-like table for a rich console; a row that begins with > is the first of a new choice."""
    head = f"{sweep.collective}: {counted(sweep.num_ranks, 'rank')} on {counted(sweep.num_nodes, 'node')} of {sweep.cluster}"
    table = Table(box=None, padding=(0, 2, 0, 0))
    measured = any(row.measured_time_s for row in sweep.rows)
    names = ["", "size (B)", "algorithm", "protocol", "time (us)", "algbw (GB/s)", "busbw (GB/s)"]
    for name in [*names, "measured (us)", "error"] if measured else names:
        table.add_column(name, justify="left" if name in ("", "algorithm", "protocol") else "right")
    before = ""
    for row in sweep.rows:
        mark = ">" if before and _name(row) != before else ""
        rates = (f"{row.algorithm_bytes_per_s / 1e9:.2f}", f"{row.bus_bytes_per_s / 1e9:.2f}")
        beside = (f"{row.measured_time_s * 1e6:.2f}", f"{row.error:+.1%}") if row.measured_time_s else ()
        table.add_row(
            mark, str(row.size_bytes), row.algorithm, row.protocol, f"{row.time_s * 1e6:.2f}", *rates, *beside
        )
        before = _name(row)
    lines = (
        f"> {c.after} from {format_bytes(c.size_bytes)} ({c.size_bytes} B), {c.before} below" for c in sweep.crossovers
    )
    parts: list[RenderableType] = [Text(head), table, *(Text(line) for line in lines)]
    if measured:
        errors = sorted(abs(row.error) for row in sweep.rows if row.error is not None)
        parts.append(Text(f"against the log: median error {median(errors):.1%}, largest {errors[-1]:.1%}"))
    if sweep.cards is not None:
        parts.append(Text(_nics_line(sweep.cards)))
    if sweep.buckets:
        parts += [Text(f"in buckets of {format_bytes(sweep.buckets[0].bucket_bytes)}"), _bucket_table(sweep.buckets)]
    return Group(*parts)


def _nics_line(cards: NicPaths) -> str:
    """What a group gets of its nodes' NICs, and by what path."""
    staged = f", {cards.in_memory:.0%} of it through host memory" if cards.in_memory else ""
    away = f", {cards.off_rail:.0%} of what leaves on another rail" if cards.off_rail else ""
    return f"cards: {format_rate(cards.bytes_per_s)} a node and group, {cards.word} at the farthest{staged}{away}"


def _bucket_table(buckets: Sequence[Bucketed]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("size (B)", "calls", "time (us)", "in one call (us)", "times as long"):
        table.add_column(name, justify="right")
    for one in buckets:
        ratio = f"{one.time_s / one.whole_s:.2f}" if one.whole_s else ""
        times = (f"{one.time_s * 1e6:.2f}", f"{one.whole_s * 1e6:.2f}", ratio)
        table.add_row(str(one.size_bytes), str(one.num_calls), *times)
    return table


def plot(sweep: Sweep, path: Path) -> None:
    """Time and bus bandwidth over size. Raises InputError where that cannot be drawn."""
    with drawn(path, "--plot", (9, 4), dpi=100) as figure:
        _draw(figure, sweep)


def _draw(figure: Figure, sweep: Sweep) -> None:
    sizes = [row.size_bytes for row in sweep.rows]
    left, right = figure.subplots(1, 2)
    left.plot(sizes, [row.time_s * 1e6 for row in sweep.rows], marker=".")
    right.plot(sizes, [row.bus_bytes_per_s / 1e9 for row in sweep.rows], marker=".")
    left.set(xscale="log", yscale="log", xlabel="size (B)", ylabel="time (us)")
    right.set(xscale="log", xlabel="size (B)", ylabel="bus bandwidth (GB/s)")
    for one in sweep.crossovers:
        left.axvline(one.size_bytes, linestyle=":", color="grey")
        right.axvline(one.size_bytes, linestyle=":", color="grey")
        right.text(one.size_bytes, 0, f" {one.after}", rotation=90, fontsize="small", color="grey")
    figure.suptitle(
        f"{sweep.collective}, {counted(sweep.num_ranks, 'rank')} on {counted(sweep.num_nodes, 'node')} of {sweep.cluster}"
    )
