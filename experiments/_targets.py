"""Of docs/accuracy/targets.md: what each set of runs must reach and does, and why rows miss. accuracy_targets.toml states the sets."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from simulator.formats.readers.runs_table import RunRow
from simulator.studies.backtest.baselines import baselines
from simulator.studies.backtest.models import preset_of
from simulator.studies.backtest.outcome import RowOutcome
from simulator.studies.backtest.scores import StepScore, step_score
from simulator.studies.backtest.text import percent

FILE, NOTES = (Path(__file__).with_name(f"accuracy_{name}.toml") for name in ("targets", "notes"))
RANK, RANKED_ABOVE = 0.85, 20  # of MFU, in sets of more rows than that
NO_CAUSE = "not explained yet"
SHOWN = 12  # ids of a cause
# Without a target for the 90th percentile a row misses from here on: twice the widest target of a median
FAR = 0.30

HEAD = """
## At a glance

Each set of runs with its target, and with the baseline of one MFU per set, which has seen half of the measured times. **Bold**
misses its target, or is worse than one MFU where one MFU is above 4 %. [Why rows miss](#why-rows-miss) is below.

| runs | n | median | p90 | target | bias | MFU rank | in 90 % | one MFU |
|---|--:|--:|--:|--:|--:|--:|--:|--:|"""

WHY = """
## Why rows miss

Scored rows that miss by more than their set's target of the 90th percentile ({far} where it has none), by cause. Explanations
change no number on this page.

| runs | cause | rows | err | ids |
|---|---|--:|--:|---|"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A set of rows by what they state, and what it must reach; None: no such condition, or no target.

    split: tensor, pipeline or context parallelism. experts: a mixture. hybrid: state-space layers.
    """

    name: str
    source: str
    gpu: str = ""
    precisions: tuple[str, ...] = ()
    experts: bool | None = None
    hybrid: bool | None = None
    split: bool | None = None
    min_gpus: int = 0
    max_gpus: int = 1 << 30
    median: float | None = None
    p90: float | None = None

    def holds(self, row: RunRow) -> bool:
        """Whether the row belongs to the set."""
        return (
            row.source.startswith(self.source)
            and row.gpu.startswith(self.gpu)
            and (not self.precisions or row.precision in self.precisions)
            and self.experts in (None, (row.n_experts or 1) > 1)
            and self.hybrid in (None, _hybrid(row))
            and self.split in (None, prod((row.tp or 1, row.pp or 1, row.cp or 1)) > 1)
            and self.min_gpus <= (row.n_gpus or 1) <= self.max_gpus
        )


def _hybrid(row: RunRow) -> bool:
    """The row's preset has layers that follow a pattern."""
    known = preset_of(row)
    return known is not None and known.pattern is not None


def targets() -> list[Target]:
    """The sets, in the order of their file."""
    entries = tomllib.loads(FILE.read_text(encoding="utf-8"))["set"]
    return [Target(**{**entry, "precisions": tuple(entry.get("precisions", ()))}) for entry in entries]


def members(target: Target, outcomes: Sequence[RowOutcome], rows: Mapping[str, RunRow]) -> list[RowOutcome]:
    """The scored rows of a set that have a step time."""
    scored = (o for o in outcomes if o.scored and o.step_error is not None)
    return [o for o in scored if o.id in rows and target.holds(rows[o.id])]


def at_a_glance(outcomes: Sequence[RowOutcome], rows: Sequence[RunRow]) -> Iterator[str]:
    """The table of sets."""
    by_id = {row.id: row for row in rows}
    yield HEAD
    for target in targets():
        found = members(target, outcomes, by_id)
        if found:
            yield f"| {' | '.join(_cells(target, found))} |"


def _cells(target: Target, found: Sequence[RowOutcome]) -> Iterator[str]:
    score = step_score(found)
    constant = next(b for b in baselines(found, seed=target.name) if b.name == "constant_mfu")
    beaten = (constant.median_abs_error or 0) > 0.04 and _above(score.median_abs_error, constant.median_abs_error)
    yield target.name
    yield str(score.n)
    yield _bold(percent(score.median_abs_error), beaten or _above(score.median_abs_error, target.median))
    yield _bold(percent(score.p90_abs_error), _above(score.p90_abs_error, target.p90))
    yield " / ".join("–" if one is None else f"{100 * one:.0f} %" for one in (target.median, target.p90))
    yield percent(score.bias, signed=True)
    yield _rank(score)
    yield percent(score.coverage_90)
    yield f"{percent(constant.median_abs_error)} / {percent(constant.p90_abs_error)}"


def _rank(score: StepScore) -> str:
    rank = score.spearman_mfu
    return "–" if rank is None else _bold(f"{rank:.2f}", score.n > RANKED_ABOVE and rank < RANK)


def _above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _bold(text: str, missed: bool) -> str:  # noqa: FBT001  the one thing it asks
    return f"**{text}**" if missed else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Why rows miss: those named, or all whose columns equal `where`."""

    why: str
    rows: tuple[str, ...] = ()
    where: Mapping[str, object] = field(default_factory=dict)

    def covers(self, row: RunRow) -> bool:
        """Whether it speaks of the row."""
        alike = bool(self.where) and all(getattr(row, column) == value for column, value in self.where.items())
        return alike or row.id in self.rows


def notes() -> list[Note]:
    """accuracy_notes.toml, in its order: the first that covers a row is its cause."""
    entries = tomllib.loads(NOTES.read_text(encoding="utf-8"))["note"]
    return [Note(**{**entry, "rows": tuple(entry.get("rows", ()))}) for entry in entries]


def why(outcomes: Sequence[RowOutcome], rows: Sequence[RunRow]) -> Iterator[str]:
    """A line for each set and cause."""
    by_id, known = {row.id: row for row in rows}, notes()
    yield WHY.format(far=percent(FAR))
    for target in targets():
        causes: dict[str, list[RowOutcome]] = {}
        for one in members(target, outcomes, by_id):
            if abs(one.step_error or 0.0) > (target.p90 or FAR):
                cause = next((note.why for note in known if note.covers(by_id[one.id])), NO_CAUSE)
                causes.setdefault(cause, []).append(one)
        for cause, missed in sorted(causes.items(), key=lambda item: (item[0] == NO_CAUSE, -len(item[1]), item[0])):
            errors = sorted(one.step_error or 0.0 for one in missed)
            span = [percent(error, signed=True) for error in (errors[0], errors[-1])]
            ids = ", ".join(f"`{one.id}`" for one in missed[:SHOWN]) + (", …" if len(missed) > SHOWN else "")
            yield f"| {target.name} | {cause} | {len(missed)} | {' to '.join(dict.fromkeys(span))} | {ids} |"
