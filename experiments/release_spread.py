"""How far apart do releases of one software put the same plan? `experts_sigma` of Megatron-Core's stacks comes from here.

    python experiments/release_spread.py

Groups rows of experiments/measured/runs-plain.csv.gz, a source at a time, that the rules make the same model, plan, cluster and
stack of, so that nothing stated tells them apart; prints the spread of the logarithm of their steps around each group's mean.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from simulator.base.errors import InputError
from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.resolve import Run, resolve
from simulator.studies.backtest.work import measured_step_s

RUNS = Path(__file__).resolve().parent / "measured" / "runs-plain.csv.gz"
SOURCE = "NVIDIA-NeMo/Megatron-Bridge"


def repeated(rows: Iterable[RunRow], *, experts: bool) -> list[list[float]]:
    """Logarithms of the steps (in seconds) of each plan that several rows have."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        run = _resolved(row)
        if run is None or (run.model.experts is not None) != experts:
            continue
        step_s = measured_step_s(run)
        if step_s is not None:
            groups[repr((run.model, run.plan, run.cluster, run.stack))].append(math.log(step_s))
    return [steps for steps in groups.values() if len(steps) > 1]


def _resolved(row: RunRow) -> Run | None:
    try:
        return resolve(row)
    except (RefusedError, InputError):
        return None


def spread(groups: Sequence[Sequence[float]]) -> float:
    """One sigma around the groups' means; a group of n rows tells n − 1 times."""
    squares = sum(sum((step - fmean(steps)) ** 2 for step in steps) for steps in groups)
    return math.sqrt(squares / sum(len(steps) - 1 for steps in groups))


def main() -> None:
    """Print the spread of dense models and of mixtures."""
    rows = [row for row in read_runs(RUNS) if isinstance(row, RunRow) and row.source == SOURCE]
    for name, experts in (("dense", False), ("experts", True)):
        groups = repeated(rows, experts=experts)
        print(f"{name}: {len(groups)} plans, {sum(map(len, groups))} rows, one sigma {spread(groups):.3f}")


if __name__ == "__main__":
    main()
