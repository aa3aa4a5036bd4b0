"""How far off are whole predictions? Regenerates docs/accuracy.md and the appendices in docs/accuracy from the published runs.

    python experiments/accuracy.py                   # some minutes; dated today
    python experiments/accuracy.py --date 2026-01-31 --jobs 4
    python experiments/accuracy.py --collectives     # their appendix alone, a minute
    python experiments/accuracy.py --rows 12         # of each source at most so many runs, drawn by their ids; the pages say so

Nothing is fitted here. accuracy_targets.toml holds what sets of runs must reach, accuracy_notes.toml why rows miss; neither changes a number.
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import _buyer
import _collective_accuracy
import _cpu_accuracy
import _solo_accuracy
import _targets
import accuracy_record
import search_regret
from unnamed_software import chosen

from simulator.formats.readers.measured_table import read_measured
from simulator.formats.readers.runs_table import RunRow
from simulator.studies.backtest import BacktestReport, run
from simulator.studies.backtest.outcome import RowOutcome
from simulator.studies.backtest.report import Group, make_report
from simulator.studies.backtest.rows import Table
from simulator.studies.backtest.text import percent

ROOT = Path(__file__).resolve().parents[1]
TABLES = tuple(ROOT / "experiments" / "measured" / f"{name}-plain.csv.gz" for name in ("runs", "runs-2"))
PAGE, APPENDICES = ROOT / "docs" / "accuracy.md", ROOT / "docs" / "accuracy"

OF_A_SOURCE = """# {source}

An appendix of [accuracy](../accuracy.md), on {date}. The runs are rows of `experiments/measured`; their columns are in
[the reference](../reference/runs-table.md).

*median*, *p90*: of the size of predicted / measured − 1; *bias*: its median; *MFU rank*: Spearman's correlation of predicted with measured
MFU; *in 90 %*: share of runs inside their 90 % interval. Two baselines are fitted on a random half of each group's runs and tested on the
other half, 20 times: *one MFU* (one constant) and *four terms* (GEMM FLOP, attention FLOP, elementwise and loss bytes, communication
bytes). They have seen measured times of the same runs; the simulator has not. Their cells are median / p90.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the backtests and write the pages; 130 if interrupted, and then nothing is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--table", type=Path, action="append", help="tables of runs; default: those that the project carries"
    )
    parser.add_argument(
        "--out", type=Path, default=PAGE, help="the page; appendices lie in a folder of its name beside it"
    )
    parser.add_argument("--date", default=dt.datetime.now(tz=dt.UTC).date().isoformat())
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rows", type=int, help="of each source at most so many runs; default: all")
    parser.add_argument("--collectives", action="store_true", help="their appendix alone")
    args = parser.parse_args(argv)
    folder = args.out.with_suffix("")
    folder.mkdir(exist_ok=True)
    if args.collectives:
        _write(folder / "collectives.md", _appendix(_collective_accuracy.section()))
        return 0
    tables = [_sampled(read_measured(table), args.rows) for table in args.table or TABLES]
    reports = [run(table, progress=_show, jobs=args.jobs) for table in tables]
    if any(report.interrupted for report in reports):
        print("interrupted: the pages are left as they were", file=sys.stderr)
        return 130
    outcomes = [one for report in reports for one in report.outcomes if isinstance(one, RowOutcome)]
    rows = [row for table in tables for row in table.rows if isinstance(row, RunRow)]
    date = (
        f"{args.date}, of each source at most {args.rows} runs drawn by the SHA-256 of their ids"
        if args.rows
        else args.date
    )
    for file, text in pages(outcomes, rows, date, args.out, folder):
        _write(file, text)
    if args.out == PAGE:
        accuracy_record.write()
    return 0


def _sampled(table: Table, most: int | None) -> Table:
    """The table with at most so many runs of each source, in its order."""
    if most is None:
        return table
    ids = {row.id for row in chosen((row for row in table.rows if isinstance(row, RunRow)), most)}
    return replace(table, rows=tuple(row for row in table.rows if isinstance(row, RunRow) and row.id in ids))


def pages(
    outcomes: Sequence[RowOutcome], rows: Sequence[RunRow], date: str, page: Path, folder: Path
) -> Iterator[tuple[Path, str]]:
    """Every page with its text: the buyer's, and the appendices."""
    report = make_report("published runs", outcomes)
    for source in sorted({group.source for group in report.groups}):
        yield folder / f"{_buyer.slug(source)}.md", "\n".join(_of_a_source(report, source, date)) + "\n"
    yield folder / "targets.md", _targets_page(outcomes, rows)
    yield folder / "choices.md", _appendix(search_regret.section(outcomes, rows))
    yield folder / "one-h200.md", _appendix(_solo_accuracy.section())
    yield folder / "cpu.md", _appendix(_cpu_accuracy.section())
    yield folder / "collectives.md", _appendix(_collective_accuracy.section())
    yield page, _buyer.page(outcomes, {row.id: row for row in rows}, date)


def _appendix(lines: Iterator[str]) -> str:
    """A section as a page of its own: its heading becomes the title."""
    text = "\n".join(lines).strip("\n") + "\n"
    return text.replace("## ", "# ", 1) if text.startswith("## ") else text


def _targets_page(outcomes: Sequence[RowOutcome], rows: Sequence[RunRow]) -> str:
    body = "\n".join((*_targets.at_a_glance(outcomes, rows), *_targets.why(outcomes, rows)))
    return f"# Targets\n{body}\n"


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def _of_a_source(report: BacktestReport, source: str, date: str) -> Iterator[str]:
    """A source's appendix: groups, memory, verdicts, refusals."""
    groups = [group for group in report.groups if group.source == source]
    yield OF_A_SOURCE.format(source=source, date=date)
    counts: dict[str, int] = defaultdict(int)
    for group in groups:
        for status, count in group.rows.items():
            counts[status] += count
    yield f"{sum(counts.values())} runs: {', '.join(f'{count} {status}' for status, count in sorted(counts.items()))}."
    if any(group.step.n for group in groups):
        yield "\n## Step time\n"
        yield from _step_table([group for group in groups if group.step.n])
    if any(group.memory for group in groups):
        yield "\n## Peak memory\n"
        yield from _memory_table(groups)
    yield from _verdicts([one for one in report.outcomes if one.source == source])
    yield from _refusals(groups)


def _step_table(groups: Sequence[Group]) -> Iterator[str]:
    yield "| GPU | precision | n | median | p90 | bias | MFU rank | in 90 % | one MFU | four terms |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for group in groups:
        yield f"| {' | '.join(_step_cells(group))} |"


def _step_cells(group: Group) -> Iterator[str]:
    step = group.step
    yield from (group.gpu, group.precision, str(step.n))
    yield from (percent(step.median_abs_error), percent(step.p90_abs_error), percent(step.bias, signed=True))
    yield "–" if step.spearman_mfu is None else f"{step.spearman_mfu:.2f}"
    yield percent(step.coverage_90)
    for name in ("constant_mfu", "four_terms"):
        baseline = group.baseline(name)
        yield f"{percent(baseline.median_abs_error)} / {percent(baseline.p90_abs_error)}"


def _memory_table(groups: Sequence[Group]) -> Iterator[str]:
    yield "| GPU | precision | metric | n | median | p90 | bias | predicted OOM, ran | OOM, found |"
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|"
    for group in groups:
        for m in group.memory:
            errors = (percent(m.median_abs_error), percent(m.p90_abs_error), percent(m.bias, signed=True))
            found = f"{m.oom_found} of {m.oom_rows}" if m.oom_rows else "–"
            yield f"| {' | '.join((group.gpu, group.precision, m.mem_metric, str(m.n), *errors, str(m.predicted_oom), found))} |"


def _verdicts(outcomes: Sequence[RowOutcome]) -> Iterator[str]:
    """Rows that ran and were said not to fit, and those whose verdict hangs on what they do not state."""
    rows = [o for o in outcomes if o.status in ("ok", "calibration") and not o.measured_oom]
    rows = [o for o in rows if not o.fits and (o.open or o.fits is False)]
    if rows:
        yield "\n## Runs that ran and were not surely predicted to fit\n"
        yield "| row | GPU | predicted |"
        yield "|---|---|---|"
    for o in rows:
        yield f"| `{o.id}` | {o.gpu} | {o.open or 'does not fit'} |"


def _refusals(groups: Sequence[Group]) -> Iterator[str]:
    kinds: dict[str, int] = defaultdict(int)
    for group in groups:
        for kind, count in group.refused.items():
            kinds[kind] += count
    if kinds:
        yield "\n## Runs not predicted\n"
        yield (
            "By the first reason of each: "
            + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
            + "."
        )


def _show(done: int, total: int) -> None:
    if done % 100 == 0 or done == total:
        print(f"\r{done} of {total} rows", end="\n" if done == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
