"""Backtest of a table of measured collectives: every row predicted, scored by machine, collective and size class."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final, Literal

from simulator.studies.backtest.collective_rules import degraded, resolve
from simulator.studies.backtest.outcome import Progress, Report, Status, flat, gathered, judged, relative_error
from simulator.studies.backtest.rows import BadRow, CollectiveRow, Table
from simulator.studies.backtest.scores import ErrorScore, error_score, quantile
from simulator.work.collectives import choose

SizeClass = Literal["< 64 KiB", "64 KiB – 64 MiB", "≥ 64 MiB"]
SIZE_CLASSES: Final[tuple[SizeClass, ...]] = ("< 64 KiB", "64 KiB – 64 MiB", "≥ 64 MiB")
_BORDERS = (64 * 2**10, 64 * 2**20)
_REPEATED: Final = re.compile(r"repeat \d+|dir version \S+")  # what tells a source's repeats apart, not its settings


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOutcome:
    """One row: its status, why if it is not ok, and predicted beside measured; None where unknown.

    degraded: why the run was broken in reality; duplicate_of: line of an earlier equal row. Neither kind is scored.
    noise: the measurement over the median of its other repeats, minus 1. assumed: what the row left open.
    """

    line: int
    status: Status
    reason: str | None = None
    kind: str = ""
    source: str = ""
    machine: str = ""
    collective: str = ""
    size_bytes: int | None = None
    measured_time_s: float | None = None
    predicted_time_s: float | None = None
    algorithm: str | None = None
    protocol: str | None = None
    logged_algorithm: str | None = None
    assumed: str | None = None
    degraded: str | None = None
    duplicate_of: int | None = None
    noise: float | None = None

    @property
    def scored(self) -> bool:
        return self.status == "ok" and not self.degraded and self.duplicate_of is None

    @property
    def error(self) -> float | None:
        return relative_error(self.predicted_time_s, self.measured_time_s)

    @property
    def size_class(self) -> SizeClass | None:
        if self.size_bytes is None:
            return None
        return SIZE_CLASSES[sum(self.size_bytes >= border for border in _BORDERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGroup:
    """The scored rows of one source, machine, collective and size class.

    noise_floor: median of |noise| over those that have repeats (noise_rows): what a perfect prediction would score.
    """

    source: str
    machine: str
    collective: str
    size_class: str
    score: ErrorScore
    noise_floor: float | None
    noise_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivesReport(Report[CollectiveOutcome]):
    """Every row of a table in its order; a group for each machine, collective and size class; one for each class."""

    groups: tuple[CollectiveGroup, ...]
    totals: tuple[CollectiveGroup, ...]

    @property
    def refused(self) -> dict[str, int]:
        """Kind of reason -> rows."""
        return dict(Counter(o.kind for o in self.outcomes if o.status == "refused").most_common())

    @property
    def logged(self) -> tuple[int, int]:
        """Rows whose algorithm a log names, and those of them where the prediction picks it."""
        logged = [o for o in self.outcomes if o.logged_algorithm and o.status == "ok"]
        return len(logged), sum(o.logged_algorithm == o.algorithm for o in logged)

    def as_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`; docs/reference/collectives-table.md describes every key."""
        logged, agree = self.logged
        return {
            **self.head_json(),
            "totals": [flat(group) for group in self.totals],
            "groups": [flat(group) for group in self.groups],
            "refused": self.refused,
            "logged_algorithms": {"rows": logged, "agree": agree},
            "rows": [
                {**asdict(o), "size_class": o.size_class, "error": o.error, "scored": o.scored} for o in self.outcomes
            ],
        }


def run(table: Table, *, progress: Progress | None = None) -> CollectivesReport:
    """Predict every row of a table of collectives, in its order.

    Ctrl-C ends it early: the report then holds the rows done so far and is marked `interrupted`.
    """
    rows = [row for row in table.rows if isinstance(row, CollectiveRow | BadRow)]
    outcomes, interrupted = gathered(map(evaluate_row, rows), len(rows), progress)
    return make_report(table, rows, outcomes, interrupted=interrupted)


def evaluate_row(row: CollectiveRow | BadRow) -> CollectiveOutcome:
    """The outcome of one row. Never raises: an unexpected exception is the outcome `failed`."""
    if isinstance(row, BadRow):
        return CollectiveOutcome(line=row.line, status="bad", reason="; ".join(map(str, row.faults)))
    start = CollectiveOutcome(
        line=row.line,
        status="failed",
        source=row.source,
        machine=machine_name(row, ""),
        collective=row.collective,
        size_bytes=row.size_bytes,
        measured_time_s=row.time_us * 1e-6,
        degraded=degraded(row) or None,
    )
    return judged(start, lambda: _predicted(row, start))


def _predicted(row: CollectiveRow, start: CollectiveOutcome) -> CollectiveOutcome:
    call = resolve(row)
    choice = choose(call.kind, call.size_bytes, call.shape, call.cluster, nccl=call.nccl)
    return replace(
        start,
        status="ok",
        machine=machine_name(row, call.network),
        predicted_time_s=float(choice.time_s),
        algorithm=choice.algorithm,
        protocol=choice.protocol,
        logged_algorithm=call.logged or None,
        assumed=call.assumed or None,
    )


def machine_name(row: CollectiveRow, network: str) -> str:
    """`H100-SXM5-80GB, 2 × 8, infiniband`."""
    nodes = row.n_nodes or "?"
    local = row.n_gpus // row.n_nodes if row.n_gpus and row.n_nodes else "?"
    return ", ".join(part for part in (row.gpu, f"{nodes} × {local}", network) if part)


def make_report(
    table: Table, rows: Sequence[CollectiveRow | BadRow], outcomes: Sequence[CollectiveOutcome], *, interrupted: bool
) -> CollectivesReport:
    """Mark repeats, group and score. Groups are sorted by (source, machine, collective, size)."""
    marked = tuple(_with_noise(rows, _without_repeats(rows, outcomes)))
    grouped: dict[tuple[str, str, str, int], list[CollectiveOutcome]] = defaultdict(list)
    by_class: dict[SizeClass, list[CollectiveOutcome]] = {name: [] for name in SIZE_CLASSES}
    for outcome in marked:
        if outcome.scored and outcome.size_class is not None:
            index = SIZE_CLASSES.index(outcome.size_class)
            grouped[outcome.source, outcome.machine, outcome.collective, index].append(outcome)
            by_class[outcome.size_class].append(outcome)
    groups = (_group((s, m, c, SIZE_CLASSES[i]), members) for (s, m, c, i), members in sorted(grouped.items()))
    totals = (_group(("", "", "", name), members) for name, members in by_class.items())
    return CollectivesReport(
        table=table.name,
        interrupted=interrupted,
        groups=tuple(groups),
        totals=tuple(totals),
        outcomes=marked,
        unread=table.unread,
    )


def _group(key: tuple[str, str, str, str], members: Sequence[CollectiveOutcome]) -> CollectiveGroup:
    source, machine, collective, size_class = key
    noise = [abs(o.noise) for o in members if o.noise is not None]
    return CollectiveGroup(
        source=source,
        machine=machine,
        collective=collective,
        size_class=size_class,
        score=error_score([o.error for o in members if o.error is not None]),
        noise_floor=quantile(noise, 0.5),
        noise_rows=len(noise),
    )


def _without_repeats(
    rows: Sequence[CollectiveRow | BadRow], outcomes: Sequence[CollectiveOutcome]
) -> Iterator[CollectiveOutcome]:
    """A row equal to an earlier one in every column is the same measurement: it is not scored."""
    seen: dict[CollectiveRow, int] = {}
    for row, outcome in zip(rows, outcomes, strict=False):
        if isinstance(row, CollectiveRow):
            first = seen.setdefault(replace(row, line=0), row.line)
            yield outcome if first == row.line else replace(outcome, duplicate_of=first)
        else:
            yield outcome


def _with_noise(
    rows: Sequence[CollectiveRow | BadRow], outcomes: Iterator[CollectiveOutcome]
) -> Iterator[CollectiveOutcome]:
    """Repeats: scored rows of the same machine, collective, size, in-place setting and stated software."""
    marked = list(outcomes)
    repeats: dict[tuple[object, ...], list[float]] = defaultdict(list)
    keys = [_repeat_key(row, o) for row, o in zip(rows, marked, strict=False)]
    for key, outcome in zip(keys, marked, strict=True):
        if key is not None and outcome.measured_time_s is not None:
            repeats[key].append(outcome.measured_time_s)
    for key, outcome in zip(keys, marked, strict=True):
        times = repeats.get(key, []) if key is not None else []
        if len(times) < 2 or outcome.measured_time_s is None:
            yield outcome
            continue
        others = list(times)
        others.remove(outcome.measured_time_s)
        yield replace(outcome, noise=outcome.measured_time_s / median(others) - 1)


def _repeat_key(row: CollectiveRow | BadRow, outcome: CollectiveOutcome) -> tuple[object, ...] | None:
    if isinstance(row, BadRow) or not outcome.scored:
        return None
    settings = _REPEATED.sub("", row.notes)
    software = (row.nccl_version, row.algo_env, row.proto_env, settings, row.in_place)
    rate = row.inter_link_gbps_per_node
    return (outcome.source, outcome.machine, row.intra_link, rate, outcome.collective, row.size_bytes, *software)
