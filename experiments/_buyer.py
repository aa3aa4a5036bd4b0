"""docs/accuracy.md: how far off predictions are, by the questions of somebody who wants to rely on one."""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import _collective_accuracy
import search_regret
from unnamed_software import chosen, undescribed

from simulator.formats.readers.measured_table import read_measured
from simulator.formats.readers.runs_table import RunRow
from simulator.spec.calibration.intervals import intervals
from simulator.spec.software.stack import Stack
from simulator.studies.backtest import CollectivesReport, run
from simulator.studies.backtest.evaluate import evaluate_row
from simulator.studies.backtest.outcome import RowOutcome
from simulator.studies.backtest.resolve import resolve
from simulator.studies.backtest.scores import MemoryScore, memory_scores, quantile, verdicts
from simulator.studies.backtest.text import percent
from simulator.work.collectives.cost import rank_wait_s

FIGURES = {
    "peak_allocated_gib": "allocated by torch, peak",
    "peak_active_gib": "active in torch's allocator, peak",
    "peak_reserved_gib": "reserved by torch, peak",
    "max_gpu_ram_gb": "memory of the GPU in use, peak",
    "nvidia_smi_used_gb": "nvidia-smi",
    "gpu_memory_gb": "GPU memory, kind not stated",
}
UNDESCRIBED_ROWS, SHEET_ROWS = 12, 60  # of a source; of all
HOLDS = (0.85, 0.95)
MORE_THAN = 20  # runs of a source from which on its intervals are judged

HEAD = """# How far off is it?

Predictions beside published measurements, on {date}. `python experiments/accuracy.py` writes this page and its appendices;
nobody edits them. {total} measured runs of {sources} sources (`experiments/measured`): {scored} scored, {calibration} used for calibration and
not scored, {refused} refused by name. Kernels and links are fitted on microbenchmarks, never on these runs.

An error is predicted / measured − 1. *median* and *p90* are those of its size, *bias* is its median. *holds* is the share of runs inside
their 90 % interval; where more than {more} runs are judged it should be {low} to {high}, and is **bold** where it is not. *half-width* is that of the
interval, in the middle of the runs: how much the prediction itself says that it may be off.

| your question | answer |
|---|---|
| Does the interval hold, and is it narrow? | [by source](#coverage-and-sharpness) |
| You describe my framework | [by stack](#my-framework-is-described) |
| Nobody describes my framework | [as if undescribed](#my-framework-is-not-described) |
| I measured my network, or I have its data sheet | [both ways](#my-fabric-is-measured-or-known-by-its-sheet) |
| Will it fit? | [memory](#memory) |
| How long is one collective? | [collectives](#collectives) |
| Which of these plans is fastest? | [choices](#choosing-a-plan) |
| What do a few runs of my own change? | [learning](learning.md) |
| How good is it for serving? | [serving](accuracy-serving.md) |
"""

BY_SOURCE = """
## Coverage and sharpness

Factors on the parts of intervals are fitted on a sample of these runs (`experiments/intervals.py`, each source once). *By the others'*:
what would hold of that sample by factors that have not seen the source, as of software that is not on this page.

| source | runs | holds | half-width | median | p90 | bias | by the others': holds | half-width |
|---|--:|--:|--:|--:|--:|--:|--:|--:|"""

BY_STACK = """
## My framework is described

By the stack that describes a run's software ({refer}).

| stack | runs | median | p90 | bias | holds | half-width |
|---|--:|--:|--:|--:|--:|--:|"""

UNDESCRIBED = """
## My framework is not described

A sample of at most {rows} runs of each source, predicted as if its stack and what its documents say did not exist: the generic stack, and
every way to fill a blank. Beside it the same runs with their stack. A few runs of your own [teach](learning.md) most of the difference.

| source | runs | median | p90 | holds | half-width | with its stack: median | half-width |
|---|--:|--:|--:|--:|--:|--:|--:|"""

FABRIC = """
## My fabric is measured, or known by its sheet

{rows} runs over several nodes whose jobs measured their own network, predicted with those numbers and with the data sheet's alone. The
same numbers show that hosts of {waited} of them waited for every rank before each call
([`call_rank_s`](reference/cluster-file.md#the-fabric-as-measured)): a setting of software, of which no sheet says anything.

| known | runs | median | p90 | bias | holds | half-width |
|---|--:|--:|--:|--:|--:|--:|"""

MEMORY = """
## Memory

By what was measured; each source's own table is in its appendix. Frameworks say "peak" of different things: what live tensors take
(allocated), what the allocator holds (reserved), what the driver shows.

| measured | runs | median | p90 | bias | to the byte |
|---|--:|--:|--:|--:|--:|"""

COLLECTIVES = """
## Collectives

All published sweeps, by message size ([by machine](accuracy/collectives.md), [beyond the counts of nodes that were fitted](scales.md)).

| size | rows | median | p90 | bias | repeats of one measurement |
|---|--:|--:|--:|--:|--:|"""

CHOICES = """
## Choosing a plan

Published grids: at least four runs that differ only in the plan. *Regret*: the measured step of the plan predicted to be fastest over the
measured best, minus 1 ([every grid on 64 GPUs or more](accuracy/choices.md), [how often intervals of ratios hold](search-regret.md)).
"""

MORE = """
## More

[What each set of runs must reach, and why rows miss](accuracy/targets.md) · [one rank on one H200, run by us](accuracy/one-h200.md) ·
[two ranks on a CPU, run by us](accuracy/cpu.md)

## Runs used for calibration

At most six a stack, named in its file and never scored."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Errors of runs that have a time: signed, whether the interval held, and half its width (of log time)."""

    errors: tuple[float, ...]
    held: tuple[bool, ...]
    halves: tuple[float, ...]

    def cells(self, *parts: str) -> list[str]:
        """Cells by name: n, median, p90, bias, holds, half."""
        sizes = [abs(error) for error in self.errors]
        share = sum(self.held) / len(self.held)
        wrong = len(self.held) > MORE_THAN and not HOLDS[0] <= share <= HOLDS[1]
        known = {
            "n": str(len(sizes)),
            "median": percent(median(sizes)),
            "p90": percent(quantile(sizes, 0.9)),
            "bias": percent(median(self.errors), signed=True),
            "holds": f"**{percent(share)}**" if wrong else percent(share),
            "half": f"± {100 * math.expm1(median(self.halves)):.0f} %",
        }
        return [known[part] for part in parts]


def timed(outcomes: Iterable[RowOutcome]) -> Timed | None:
    """Of outcomes with a predicted and a measured time; None where there is none."""
    found = [(o.step_error, o.low_step_s, o.high_step_s, o.measured_step_s) for o in outcomes]
    known = [(e, low, high, m) for e, low, high, m in found if e is not None and low and high and m]
    if not known:
        return None
    return Timed(
        errors=tuple(e for e, *_ in known),
        held=tuple(low <= m <= high for _, low, high, m in known),
        halves=tuple(math.log(high / low) / 2 for _, low, high, _ in known),
    )


def slug(source: str) -> str:
    """The name of a source's appendix."""
    return re.sub(r"[^a-z0-9]+", "-", source.partition(" (via")[0].lower()).strip("-")


def page(outcomes: Sequence[RowOutcome], rows: Mapping[str, RunRow], date: str) -> str:
    """The whole page as Markdown."""
    scored = [o for o in outcomes if o.scored]
    sections = (
        _head(outcomes, date),
        *_by_source(scored),
        *_by_stack(scored, rows),
        *_undescribed(scored, rows),
        *_fabric(scored, rows),
        *_memory(outcomes),
        *_collectives(),
        CHOICES,
        *search_regret.section_by_source(outcomes, rows.values()),
        MORE,
        *_calibration(),
    )
    return "\n".join(sections) + "\n"


def _head(outcomes: Sequence[RowOutcome], date: str) -> str:
    count = {
        status: sum(o.status == status for o in outcomes) for status in ("calibration", "refused", "failed", "bad")
    }
    return HEAD.format(
        date=date,
        total=f"{len(outcomes):,}",
        sources=len({o.source for o in outcomes}),
        scored=f"{sum(o.scored for o in outcomes):,}",
        calibration=count["calibration"],
        refused=count["refused"],
        more=MORE_THAN,
        low=f"{HOLDS[0]:.0%}",
        high=f"{HOLDS[1]:.0%}",
    )


def _by_source(scored: Sequence[RowOutcome]) -> Iterator[str]:
    yield BY_SOURCE
    for source, found in _grouped(scored, lambda o: o.source):
        cells = [*found.cells("n", "holds", "half", "median", "p90", "bias"), *_by_the_others(source)]
        yield f"| [{source}](accuracy/{slug(source)}.md) | {' | '.join(cells)} |"
    every = timed(scored)
    if every is not None:
        yield f"| all | {' | '.join(every.cells('n', 'holds', 'half', 'median', 'p90', 'bias'))} |  |  |"


def _by_the_others(source: str) -> tuple[str, str]:
    """What factors fitted without the source make of it: (share that holds, half-width)."""
    sample = intervals().sample.get(source)
    if sample is None:
        return "–", "–"
    return percent(sample["holds"]), f"± {100 * math.expm1(sample['half']):.0f} %"


def _grouped(outcomes: Iterable[RowOutcome], key: object) -> Iterator[tuple[str, Timed]]:
    """By a key, those with times, sorted."""
    groups: dict[str, list[RowOutcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[key(outcome)].append(outcome)  # type: ignore[operator]
    for name, mine in sorted(groups.items()):
        found = timed(mine)
        if found is not None:
            yield name, found


def _by_stack(scored: Sequence[RowOutcome], rows: Mapping[str, RunRow]) -> Iterator[str]:
    yield BY_STACK.format(refer="`topologies/stacks`")
    mine = [o for o in scored if o.id in rows and rows[o.id].stack]
    for stack, found in _grouped(mine, lambda o: rows[o.id].stack):
        yield f"| `{stack}` | {' | '.join(found.cells('n', 'median', 'p90', 'bias', 'holds', 'half'))} |"


def _undescribed(scored: Sequence[RowOutcome], rows: Mapping[str, RunRow]) -> Iterator[str]:
    yield UNDESCRIBED.format(rows=UNDESCRIBED_ROWS)
    known = {o.id: o for o in scored if o.step_error is not None}
    sample = chosen((row for row in rows.values() if row.id in known), UNDESCRIBED_ROWS)
    without = {row.id: evaluate_row(undescribed(row)) for row in sample}
    with_time = {name: one for name, one in without.items() if one.step_error is not None}
    every: list[tuple[str, Timed, Timed | None]] = [
        (source, found, timed(known[o.id] for o in with_time.values() if o.source == source))
        for source, found in _grouped(with_time.values(), lambda o: o.source)
    ]
    everything = timed(with_time.values())
    if everything is not None:
        every.append(("all", everything, timed(known[name] for name in with_time)))
    for source, found, described in every:
        beside = described.cells("median", "half") if described else ["–", "–"]
        yield f"| {source} | {' | '.join([*found.cells('n', 'median', 'p90', 'holds', 'half'), *beside])} |"


def _fabric(scored: Sequence[RowOutcome], rows: Mapping[str, RunRow]) -> Iterator[str]:
    """The same runs with the numbers of their own network and without."""
    stated = [o for o in scored if o.step_error is not None and o.id in rows and _measured_over_nodes(rows[o.id])]
    stated.sort(key=lambda o: hashlib.sha256(o.id.encode()).hexdigest())
    stated = stated[:SHEET_ROWS]
    if not stated:
        return
    rank_s = {o.id: _rank_wait_s(rows[o.id]) for o in stated}
    alone = {o.id: evaluate_row(_by_sheet(rows[o.id])) for o in stated}
    yield FABRIC.format(rows=len(stated), waited=sum(map(bool, rank_s.values())))
    lines: dict[str, Iterable[RowOutcome]] = {
        "as the job measured it": stated,
        "the data sheet, and whether hosts waited": [
            evaluate_row(_by_sheet(rows[name], rank_s[name])) for name in alone
        ],
        "the data sheet alone": alone.values(),
    }
    for words, outcomes in lines.items():
        found = timed(outcomes)
        if found is not None:
            yield f"| {words} | {' | '.join(found.cells('n', 'median', 'p90', 'bias', 'holds', 'half'))} |"


def _measured_over_nodes(row: RunRow) -> bool:
    """The job stated what its network gave, and has one."""
    return bool(row.of("fabric").get("inter")) and resolve(row).cluster.num_nodes > 1


def _rank_wait_s(row: RunRow) -> float:
    """What the numbers of its network show that hosts waited for each rank."""
    run = resolve(row)
    return rank_wait_s(run.cluster, run.stack.software())


def _by_sheet(row: RunRow, rank_s: float | None = None) -> RunRow:
    """The row without its network's numbers; rank_s: but with what they show of its hosts."""
    left = tuple(one for one in row.settings if not one[0].startswith("fabric."))
    return replace(row, settings=left if rank_s is None else (*left, ("fabric.call_rank_s", rank_s)))


def _memory(outcomes: Sequence[RowOutcome]) -> Iterator[str]:
    """By figure, and the verdicts."""
    yield MEMORY
    scored = [replace(o, mem_metric=o.mem_metric.partition("(")[0]) for o in outcomes if o.scored and o.mem_metric]
    scores = [score for score in memory_scores(scored) if score.n]
    yield from (_memory_line(score) for score in sorted(scores, key=lambda score: -score.n))
    of_all = verdicts(outcomes)
    oom = [o for o in outcomes if o.scored and o.measured_oom and o.fits is not None]
    yield ""
    yield (
        f"{of_all.ran:,} runs ran: {of_all.said_oom} were predicted not to fit, and for {of_all.open} that hangs on what the row does not state. "
        f"{len(oom)} runs ended for lack of memory: {sum(not o.fits for o in oom)} were predicted not to fit."
    )


def _memory_line(score: MemoryScore) -> str:
    errors = (percent(score.median_abs_error), percent(score.p90_abs_error), percent(score.bias, signed=True))
    return f"| {FIGURES.get(score.mem_metric, score.mem_metric)} | {score.n} | {' | '.join(errors)} | {score.exact} |"


def _collectives() -> Iterator[str]:
    report = run(read_measured(_collective_accuracy.TABLE))
    assert isinstance(report, CollectivesReport)
    yield COLLECTIVES
    for group in report.totals:
        s = group.score
        cells = (str(s.n), percent(s.median_abs_error), percent(s.p90_abs_error), percent(s.bias, signed=True))
        yield f"| {group.size_class} | {' | '.join(cells)} | {percent(group.noise_floor)} |"


def _calibration() -> Iterator[str]:
    """Which stacks were fitted on which named runs."""
    yield ""
    fitted = {name: runs for name in Stack.names() if (runs := Stack.load(name).fitted.calibration_runs)}
    yield "| stack | runs |"
    yield "|---|---|"
    for name, runs in fitted.items():
        yield f"| `{name}` | {', '.join(f'`{one}`' for one in runs)} |"
