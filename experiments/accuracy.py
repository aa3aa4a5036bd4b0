"""How far off are whole predictions? Regenerates docs/accuracy.md from the published table of measured runs.

    python experiments/accuracy.py                   # writes docs/accuracy.md, dated today
    python experiments/accuracy.py --date 2026-01-31 --jobs 4
    python experiments/accuracy.py --collectives     # their section alone, a minute

Nothing is fitted here. accuracy_targets.toml holds what sets of runs must reach, accuracy_notes.toml why rows miss; neither changes a number.
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import _collective_accuracy
import _cpu_accuracy
import _solo_accuracy
import _targets
import search_regret

from simulator.formats.readers.measured_table import read_measured
from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.spec.software.stack import Stack
from simulator.studies.backtest import BacktestReport, run
from simulator.studies.backtest.report import Group
from simulator.studies.backtest.text import percent

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "experiments" / "measured" / "runs-plain.csv.gz"
PAGE = ROOT / "docs" / "accuracy.md"

# The sharded data-parallel sources with targets of their own, and the targets.
JUDGED = (
    "mosaicml/llm-foundry",
    "pytorch/torchtitan",
    "NVIDIA/dgxc-benchmarking",
    "InternLM/InternEvo",
    "AI-Hypercomputer/maxtext",
)
MEDIAN, P90, BIAS, SPEARMAN = 0.04, 0.09, 0.03, 0.85

TARGETS = (
    f"Targets: median ≤ {percent(MEDIAN)}, p90 ≤ {percent(P90)}, bias within ±{percent(BIAS)}, MFU rank ≥ {SPEARMAN}. "
    "A cell in bold misses its target.\n"
)

HEAD = """# Accuracy

Predicted against measured step times of published training runs, on {date}. Regenerate with
`python experiments/accuracy.py`. The table is `experiments/measured/runs-plain.csv.gz`, which `experiments/convert_runs.py`
writes from the published one; its columns are in [the reference](reference/runs-table.md).

Kernels and links are fitted on microbenchmarks, never on these runs. {calibration}

err = predicted / measured − 1. *median* and *p90* are those of |err|, *bias* is the median of err, *MFU rank* is Spearman's
correlation of predicted with measured MFU, *in 90 %* the share of rows inside their 90 % interval. Two baselines are
fitted on a random half of each group's rows and tested on the other half, 20 times: *one MFU* (one constant per group) and
*four terms* (GEMM FLOP, attention FLOP, elementwise and loss bytes, communication bytes). The baselines have seen measured
times of the same runs; the simulator has not. Cells of baselines are median / p90.

{total} rows: {counts}.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the backtest and write the page; 130 if interrupted, and then nothing is written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--date", default=dt.datetime.now(tz=dt.UTC).date().isoformat())
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--collectives", action="store_true", help="that section alone, in the page as it is")
    args = parser.parse_args(argv)
    if args.collectives:
        args.out.write_text(_with_collectives(args.out.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    report = run(read_measured(args.table), progress=_show, jobs=args.jobs)
    if report.interrupted:
        print("interrupted: the page is left as it was", file=sys.stderr)
        return 130
    args.out.write_text(page(report, args.date, _rows(args.table)), encoding="utf-8")
    return 0


def _with_collectives(text: str) -> str:
    """The page with its section on collectives written anew."""
    start, end = text.index("\n## Collectives\n"), text.index("\n## Rows not predicted\n")
    return text[:start] + "\n".join(_collective_accuracy.section()) + "\n" + text[end:]


def _rows(table: Path) -> list[RunRow]:
    return [row for row in read_runs(table) if isinstance(row, RunRow)]


def page(report: BacktestReport, date: str, rows: Sequence[RunRow]) -> str:
    """The whole page as Markdown."""
    judged = [g for g in report.groups if g.step.n and g.source in JUDGED and g.precision == "bf16"]
    others = [g for g in report.groups if g.step.n and g not in judged]
    sections = (
        _head(report, date),
        *_targets.at_a_glance(report.outcomes, rows),
        "\n## Sharded data parallelism in bf16\n",
        TARGETS,
        *_step_table(judged, targets=True),
        "\n## Other groups\n",
        *_step_table(others, targets=False),
        "\n## Peak memory\n",
        *_memory_table(report),
        *_verdicts(report),
        *_targets.why(report.outcomes, rows),
        *search_regret.section(report.outcomes, rows),
        *_solo_accuracy.section(),
        *_cpu_accuracy.section(),
        *_collective_accuracy.section(),
        "\n## Rows not predicted\n",
        *_refusals(report),
    )
    return "\n".join(sections) + "\n"


def _head(report: BacktestReport, date: str) -> str:
    statuses = ("ok", "calibration", "refused", "bad", "failed")
    counts = ", ".join(f"{report.count(s)} {s}" for s in statuses)
    return HEAD.format(date=date, calibration=_calibration(), total=len(report.outcomes), counts=counts)


def _calibration() -> str:
    """Which stacks were fitted on which named runs."""
    fitted = {name: runs for name in Stack.names() if (runs := Stack.load(name).fitted.calibration_runs)}
    if not fitted:
        return "No stack is fitted on any of them either."
    named = "; ".join(f"`{name}` on {', '.join(f'`{r}`' for r in runs)}" for name, runs in fitted.items())
    lent = [name for name in Stack.names() if name not in fitted and Stack.load(name).fitted.elementwise_factor != 1]
    more = (
        f" {', '.join(f'`{name}`' for name in lent)} take their coefficients from one of these, as each file says."
        if lent
        else ""
    )
    return f"Stacks with coefficients fitted on named runs, which are not scored: {named}.{more}"


def _step_table(groups: Sequence[Group], *, targets: bool) -> Iterator[str]:
    yield "| source | GPU | precision | n | median | p90 | bias | MFU rank | in 90 % | one MFU | four terms |"
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for group in groups:
        yield f"| {' | '.join(_step_cells(group, targets=targets))} |"


def _step_cells(group: Group, *, targets: bool) -> Iterator[str]:
    step = group.step

    def cell(text: str, *, missed: bool) -> str:
        return f"**{text}**" if targets and missed else text

    yield from (group.source, group.gpu, group.precision, str(step.n))
    yield cell(percent(step.median_abs_error), missed=(step.median_abs_error or 0) > MEDIAN)
    yield cell(percent(step.p90_abs_error), missed=(step.p90_abs_error or 0) > P90)
    yield cell(percent(step.bias, signed=True), missed=abs(step.bias or 0) > BIAS)
    rank = step.spearman_mfu
    yield "–" if rank is None else cell(f"{rank:.2f}", missed=rank < SPEARMAN)
    yield percent(step.coverage_90)
    for name in ("constant_mfu", "four_terms"):
        baseline = group.baseline(name)
        yield f"{percent(baseline.median_abs_error)} / {percent(baseline.p90_abs_error)}"


def _memory_table(report: BacktestReport) -> Iterator[str]:
    yield "| source | GPU | precision | metric | n | median | p90 | bias | predicted OOM, ran |"
    yield "|---|---|---|---|--:|--:|--:|--:|--:|"
    for group in report.groups:
        for m in group.memory:
            errors = (percent(m.median_abs_error), percent(m.p90_abs_error), percent(m.bias, signed=True))
            cells = (group.source, group.gpu, group.precision, m.mem_metric, str(m.n), *errors, str(m.predicted_oom))
            yield f"| {' | '.join(cells)} |"


def _verdicts(report: BacktestReport) -> Iterator[str]:
    """Rows that ran and were said not to fit, and those whose verdict hangs on what they do not state."""
    ran, said, left = (sum(getattr(g.verdicts, name) for g in report.groups) for name in ("ran", "said_oom", "open"))
    yield ""
    yield (
        f"{ran} rows ran. {said} of them were predicted not to fit; for {left} it depends on something that the row does not state."
    )
    rows = [o for o in report.outcomes if o.status in ("ok", "calibration") and not o.measured_oom]
    rows = [o for o in rows if not o.fits and (o.open or o.fits is False)]
    if rows:
        yield ""
        yield "| row that ran | GPU | predicted |"
        yield "|---|---|---|"
    for o in rows:
        yield f"| `{o.id}` | {o.gpu} | {o.open or 'does not fit'} |"


def _refusals(report: BacktestReport) -> Iterator[str]:
    yield "By the first reason of each row."
    yield ""
    yield "| source | rows | reasons |"
    yield "|---|--:|---|"
    by_source: dict[str, dict[str, int]] = {}
    for group in report.groups:
        kinds = by_source.setdefault(group.source, {})
        for kind, count in group.refused.items():
            kinds[kind] = kinds.get(kind, 0) + count
    for source, kinds in by_source.items():
        if kinds:
            reasons = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
            yield f"| {source} | {sum(kinds.values())} | {reasons} |"


def _show(done: int, total: int) -> None:
    if done % 100 == 0 or done == total:
        print(f"\r{done} of {total} rows", end="\n" if done == total else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
