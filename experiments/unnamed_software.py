"""How wrong is a prediction of software that nobody described? `_UNKNOWN_SOFTWARE` in simulator/predict/confidence.py comes from here.

    python experiments/unnamed_software.py [ROWS_PER_SOURCE]

Predicts rows of experiments/measured/runs-plain.csv.gz, source by source, as if their stack did not exist: without its name, its file
and what its documents say of blanks. Prints per source the logarithm of predicted over measured and how many intervals hold.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.studies.backtest.evaluate import evaluate_row

RUNS = Path(__file__).resolve().parent / "measured" / "runs-plain.csv.gz"
_RUNS_ON = re.compile(r"\bJAX\b|\bXLA\b|\btorch \d[\d.]*\d")  # the compiler, and PyTorch's version


def chosen(rows: Iterable[RunRow], most: int) -> list[RunRow]:
    """At most so many rows of each source, drawn by their ids."""
    by_source: dict[str, list[RunRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: hashlib.sha256(row.id.encode()).hexdigest()):
        by_source[row.source].append(row)
    return [row for rows in by_source.values() for row in rows[:most]]


def undescribed(row: RunRow) -> RunRow:
    """The row as if nobody had described its software: it has a name that no file knows, and runs on what its own name says."""
    runs_on = " ".join(one[0] for one in _RUNS_ON.finditer(row.framework))
    settings = tuple((key, value) for key, value in row.settings if not key.startswith("stack."))
    return replace(row, framework=f"undescribed {runs_on}".strip(), stack="", settings=settings)


def main() -> None:
    """Print a line a source."""
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    found: dict[str, list[tuple[float, float, bool]]] = defaultdict(list)
    for row in chosen((row for row in read_runs(RUNS) if isinstance(row, RunRow)), most):
        outcome = evaluate_row(undescribed(row))
        step_s, measured_s = outcome.predicted_step_s, outcome.measured_step_s
        if step_s and measured_s and outcome.low_step_s and outcome.high_step_s:
            holds = outcome.low_step_s <= measured_s <= outcome.high_step_s
            found[row.source].append((math.log(step_s / measured_s), outcome.high_step_s / step_s, holds))
    for source, rows in sorted(found.items()):
        errors, widths, hold = zip(*rows, strict=True)
        size = median(map(abs, errors))
        print(f"{source[:45]:45} {len(rows):3} rows, median {size:.2f}, bias {median(errors):+.2f}, "
              f"upper end x {median(widths):.2f}, {fmean(hold):.0%} hold")  # fmt: skip


if __name__ == "__main__":
    main()
