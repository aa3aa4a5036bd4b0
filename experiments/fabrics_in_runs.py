"""What a job's own fabric numbers are worth: a table of runs predicted with its fabric columns and without them.

    python experiments/fabrics_in_runs.py runs.csv [--framework nanotron] [--jobs 2] > report.md

Only rows that state a fabric (`inter_allreduce_gbps`, `intra_allgather_gbps`, … docs/reference/runs-table.md) and a time. By
source and count of nodes: n, median and 90th percentile of |predicted / measured − 1|, bias, and how often the 90 % interval
holds, each without and with the numbers; then the same for one and for several stages.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.studies.backtest.evaluate import evaluate_row
from simulator.studies.backtest.outcome import RowOutcome
from simulator.studies.backtest.resolve import resolve
from simulator.studies.backtest.scores import quantile
from simulator.studies.backtest.text import percent


@dataclass(frozen=True)
class Pair:
    """A row's outcomes without and with its fabric numbers, and what it is grouped by."""

    source: str
    num_nodes: int
    stages: int
    without: RowOutcome
    with_numbers: RowOutcome


def pair_of(row: RunRow) -> Pair | None:
    """The row predicted twice; None where one of the two has no time to compare."""
    plain = replace(row, settings=tuple(one for one in row.settings if not one[0].startswith("fabric.")))
    outcomes = evaluate_row(plain), evaluate_row(row)
    if any(one.step_error is None for one in outcomes):
        print(f"{row.id}: {outcomes[1].status}: {outcomes[1].reason or 'no time'}", file=sys.stderr)
        return None
    return Pair(row.source, resolve(row).cluster.num_nodes, row.pp or 1, *outcomes)


def cells(outcomes: Sequence[RowOutcome]) -> str:
    """Median / p90 (bias), held."""
    errors = [one.step_error for one in outcomes if one.step_error is not None]
    held = [
        one.low_step_s <= one.measured_step_s <= one.high_step_s
        for one in outcomes
        if one.low_step_s is not None and one.high_step_s is not None and one.measured_step_s is not None
    ]
    sizes = [abs(error) for error in errors]
    spread = f"{percent(median(sizes))} / {percent(quantile(sizes, 0.9))}"
    return f"{spread} ({percent(median(errors), signed=True)}) | {percent(sum(held) / len(held))}"


def tables(pairs: Sequence[Pair]) -> Iterator[str]:
    """Markdown."""
    head = "median / p90 (bias) | holds"
    groups: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for one in pairs:
        groups[one.source, f"{one.num_nodes:3d} nodes"].append(one)
        groups[one.source, "~one stage" if one.stages == 1 else "~several stages"].append(one)
        groups[one.source, "~~all"].append(one)
    yield f"| source | rows | n | without: {head} | with its numbers: {head} |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for (source, name), mine in sorted(groups.items()):
        without, with_numbers = cells([one.without for one in mine]), cells([one.with_numbers for one in mine])
        yield f"| {source} | {name.strip('~ ')} | {len(mine)} | {without} | {with_numbers} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--framework", default="", help="only rows whose framework contains this")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args(argv)
    rows = [
        row
        for row in read_runs(args.table)
        if isinstance(row, RunRow) and row.of("fabric") and args.framework.lower() in row.framework.lower()
    ]
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        pairs = [one for one in pool.map(pair_of, rows, chunksize=8) if one is not None]
    print("\n".join(tables(pairs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
