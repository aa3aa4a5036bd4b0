"""What choosing by prediction would have cost: published grids of one model on one machine under different plans.

A grid is the rows of runs-plain.csv.gz that share source, framework, model, GPUs, global batch, sequence length and precision,
and differ in the plan. Where the prediction would choose among them, regret is the measured step of its choice over the
measured best, less 1. Beside it: whether the measured best is among the first three predicted, and how often the
measured ratio of two plans of a grid lies inside the 90 % interval of the predicted one.

    python experiments/search_regret.py [--least 4] > regret.md
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

from simulator.base.errors import InputError
from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.predict import predict
from simulator.predict.difference import Timed, difference, timed
from simulator.studies.backtest.measured import NoStepTimeError
from simulator.studies.backtest.outcome import RefusedError, RowOutcome
from simulator.studies.backtest.resolve import resolve
from simulator.studies.backtest.work import measured_step_s

RUNS = Path(__file__).parent / "measured" / "runs-plain.csv.gz"
_GRID = (
    "source",
    "framework",
    "model_name",
    "n_layers",
    "d_model",
    "gpu",
    "n_gpus",
    "global_batch",
    "seq_len",
    "precision",
)
_PLAN = ("tp", "pp", "cp", "ep", "dp", "vpp", "zero_or_fsdp", "micro_batch", "act_ckpt", "seq_parallel")
_TOP = 3
_NEAR = 0.05
HEAD = """# Choosing by prediction

A published grid is at least {least} runs of one source that differ only in the plan. *Regret* is the measured step of the
plan predicted to be fastest over the measured best, minus 1; targets: the best among the first three, and regret ≤ 5 %.
[More](../search-regret.md): how often the interval of the ratio of two plans holds the measured ratio.
"""

Key = tuple[object, ...]


@dataclass(frozen=True)
class Point:
    """A row: measured and predicted, scaled alike."""

    id: str
    measured_s: float
    predicted: Timed


@dataclass(frozen=True)
class Regret:
    """A grid and what the prediction would have chosen in it."""

    key: Key
    points: Sequence[Point]

    @property
    def ranked(self) -> list[Point]:
        return sorted(self.points, key=lambda point: (point.predicted.step_s, point.id))

    @property
    def best(self) -> Point:
        return min(self.points, key=lambda point: (point.measured_s, point.id))

    @property
    def regret(self) -> float:
        return self.ranked[0].measured_s / self.best.measured_s - 1

    @property
    def place(self) -> int:
        """Where the measured best stands in the predicted order, from 1."""
        return self.ranked.index(self.best) + 1

    def covered(self) -> tuple[int, int]:
        """(pairs whose measured ratio lies in the predicted interval, all pairs)."""
        found = [
            difference(a.predicted, b.predicted).low
            <= a.measured_s / b.measured_s
            <= difference(a.predicted, b.predicted).high
            for a, b in combinations(self.points, 2)
        ]
        return sum(found), len(found)


def grids(rows: Iterable[RunRow], least: int) -> dict[Key, list[RunRow]]:
    """Rows that differ in nothing but the plan, the first of each plan."""
    found: dict[Key, dict[Key, RunRow]] = defaultdict(dict)
    for row in rows:
        key = tuple(getattr(row, name) for name in _GRID)
        found[key].setdefault(tuple(getattr(row, name) for name in _PLAN), row)
    return {key: list(plans.values()) for key, plans in found.items() if len(plans) >= least}


def point(row: RunRow) -> Point | None:
    """None where the row cannot be expressed, has no step time, or calibrated its stack."""
    try:
        run = resolve(row)
        measured_s = measured_step_s(run)
        if measured_s is None or row.id in run.stack.fitted.calibration_runs:
            return None
        prediction = predict(run.model, run.plan, run.cluster, stack=run.stack)
    except (RefusedError, NoStepTimeError, InputError):
        return None
    step_s = float(prediction.step_s) * run.time_factor
    return Point(row.id, measured_s, timed(step_s, prediction.spread, prediction.stack_sigma, run.plan))


def main() -> None:
    """Print the tables as markdown."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--least", type=int, default=4, help="plans a grid has at least")
    arguments.add_argument("--jobs", type=int, default=2)
    options = arguments.parse_args()
    found = grids((row for row in read_runs(RUNS) if isinstance(row, RunRow)), options.least)
    rows = [row for plans in found.values() for row in plans]
    points: dict[str, Point] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for done, one in enumerate(pool.map(point, rows, chunksize=8), start=1):
            if one is not None:
                points[one.id] = one
            if done % 100 == 0:
                print(f"{done} of {len(rows)}", file=sys.stderr)
    regrets = []
    for key, plans in found.items():
        known = [points[row.id] for row in plans if row.id in points]
        if len(known) >= options.least:
            regrets.append(Regret(key, known))
    report(regrets, len(rows) - len(points))


def report(regrets: Sequence[Regret], num_refused: int) -> None:
    """A line a source, then the grids on 64 GPUs and more."""
    by_source, large = tables(regrets, covered=True)
    print(
        *by_source, "", f"{num_refused} rows of these grids have no prediction or no step time.", "", *large, sep="\n"
    )


def section(outcomes: Iterable[RowOutcome], rows: Iterable[RunRow], least: int = 4) -> Iterator[str]:
    """Of docs/accuracy: the same of what a backtest has predicted already, without the pairs."""
    by_source, large = tables(_regrets(outcomes, rows, least), covered=False)
    yield HEAD.format(least=least)
    yield from by_source
    yield ""
    yield from large


def section_by_source(outcomes: Iterable[RowOutcome], rows: Iterable[RunRow], least: int = 4) -> Sequence[str]:
    """Of it the lines of sources alone."""
    return tables(_regrets(outcomes, rows, least), covered=False)[0]


def _regrets(outcomes: Iterable[RowOutcome], rows: Iterable[RunRow], least: int) -> list[Regret]:
    known = {o.id: o for o in outcomes if o.status == "ok" and o.predicted_step_s and o.measured_step_s}
    regrets = []
    for key, plans in grids(rows, least).items():
        points = [_scored(known[row.id]) for row in plans if row.id in known]
        if len(points) >= least:
            regrets.append(Regret(key, points))
    return regrets


def _scored(outcome: RowOutcome) -> Point:
    assert outcome.measured_step_s is not None
    assert outcome.predicted_step_s is not None
    timed_alone = Timed(step_s=outcome.predicted_step_s, spread={}, stack_sigma=0.0)
    return Point(outcome.id, outcome.measured_step_s, timed_alone)


def tables(regrets: Sequence[Regret], *, covered: bool) -> tuple[list[str], list[str]]:
    """A line a source and one for all; the grids on 64 GPUs and more. covered: how many pairs lie in their interval too."""
    columns = ["source", "grids", "plans", "best in first 3", "regret ≤ 5 %", "median", "worst"]
    columns += ["pairs in interval"] if covered else []
    sources = sorted({str(regret.key[0]) for regret in regrets})
    by_source = [*_header(columns)]
    by_source += [_line(name, [r for r in regrets if r.key[0] == name], covered=covered) for name in sources]
    by_source += [_line("all", regrets, covered=covered)] if regrets else []
    large = [*_header(["grid on 64 GPUs or more", "plans", "place of the best", "regret"])]
    for regret in sorted(regrets, key=lambda each: (str(each.key[0]), str(each.key))):
        source, _, model, _, _, gpu, num_gpus, batch, seq_len, _ = regret.key
        if isinstance(num_gpus, int) and num_gpus >= 64:
            name = f"{source}: {model}, {num_gpus} {gpu}, {batch} × {seq_len}"
            large.append(f"| {name} | {len(regret.points)} | {regret.place} | {regret.regret:.1%} |")
    return by_source, large


def _header(columns: Sequence[str]) -> tuple[str, str]:
    return f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"


def _line(name: str, regrets: Sequence[Regret], *, covered: bool) -> str:
    values = [regret.regret for regret in regrets]
    first = sum(regret.place <= _TOP for regret in regrets)
    near = sum(value <= _NEAR for value in values)
    plans, count = sum(len(regret.points) for regret in regrets), len(regrets)
    cells = [name, str(count), str(plans), f"{first / count:.0%}", f"{near / count:.0%}"]
    cells += [f"{median(values):.1%}", f"{max(values):.1%}"]
    if covered:
        inside, pairs = (sum(numbers) for numbers in zip(*(regret.covered() for regret in regrets), strict=True))
        cells.append(f"{inside / pairs:.0%} of {pairs:,}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
