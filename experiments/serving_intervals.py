"""How unsure are the parts of a serving step? Prints the sigmas of simulator/studies/serving/decoding.py that measured servers ask.

    python experiments/serving_intervals.py [--part 4]     # every fourth row by the SHA-256 of its id; some minutes

Of each row of measured/serving.csv.gz but waits of closed loops, which depend on more than a step: log(measured / predicted) beside the
shares of a step's parts. The sigmas of reading a cache, of the host between steps, and of the stack are the most probable ones where
errors scatter as Student's t, each source and engine counting once, from priors within a factor of two; then as wide as a normal
distribution has to be to hold as many. What is said of a source comes of the others.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import t as student_t

from simulator.formats.readers.measured_table import read_measured
from simulator.studies.backtest.rows import ServingRow
from simulator.studies.backtest.serving import evaluate_row
from simulator.studies.backtest.serving_figures import deployed_once, runs_of
from simulator.studies.backtest.serving_rows import resolve
from simulator.studies.serving.decoding import BETWEEN_STEPS_SIGMA, CACHE_SIGMA, Z90, parts_of, sigmas_of

TABLE: Final = Path(__file__).resolve().parent / "measured" / "serving.csv.gz"
FREEDOM: Final = 4.0  # of Student's t
PRIOR: Final = np.array([0.3, 0.5, 0.05])  # cache, host, stack
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Judged:
    """A row's error, its parts' shares of a step, and the sigmas of those that are not fitted here."""

    error: float
    shares: Mapping[str, float]
    sigmas: Mapping[str, float]

    def sigma(self, fitted: Array) -> float:
        known = {**self.sigmas, "attention": float(fitted[0]), "host": float(fitted[1])}
        return math.sqrt(float(fitted[2]) ** 2 + sum((share * known[name]) ** 2 for name, share in self.shares.items()))


def judged(part: int) -> Iterator[tuple[str, Judged]]:
    """(source and engine, row) of every part-th row."""
    for row in read_measured(TABLE).rows:
        if not isinstance(row, ServingRow) or int(hashlib.sha256(row.id.encode()).hexdigest(), 16) % part:
            continue
        if row.metric.startswith("ttft") and row.concurrency_or_rate.isdigit():
            continue
        outcome = evaluate_row(row)
        if not outcome.scored or not outcome.measured or not outcome.predicted:
            continue
        server = resolve(row)
        deployed, (_, batch) = deployed_once(server), runs_of(server)
        parts = parts_of(deployed.costs, batch)
        shares = {name: seconds / sum(parts.values()) for name, seconds in parts.items()}
        sigmas = sigmas_of(deployed.costs, batch, deployed.calibration, deployed.curves)
        error = math.log(outcome.measured / outcome.predicted)
        yield f"{row.source[:40]} | {row.engine}", Judged(error, shares, sigmas)


def fitted(groups: Sequence[Sequence[Judged]]) -> Array:
    """The most probable sigmas."""

    def surprise(logs: Array) -> float:
        values = np.exp(logs)
        found = float((((logs - np.log(PRIOR)) / math.log(2)) ** 2).sum()) / 2
        for rows in groups:
            sigmas = [row.sigma(values) for row in rows]
            each = [
                math.log(sigma) + (FREEDOM + 1) / 2 * math.log1p((row.error / sigma) ** 2 / FREEDOM)
                for row, sigma in zip(rows, sigmas, strict=True)
            ]
            found += 10 * sum(each) / len(each)
        return found

    return np.exp(minimize(surprise, np.log(PRIOR), method="Nelder-Mead").x) * student_t.ppf(0.95, FREEDOM) / Z90


def held(rows: Sequence[Judged], sigmas: Array) -> float:
    """The share of rows inside their 90 % interval."""
    return sum(abs(row.error) <= Z90 * row.sigma(sigmas) for row in rows) / len(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the sigmas, and what those of the others and the product's hold of each source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, default=4)
    groups: dict[str, list[Judged]] = defaultdict(list)
    for name, row in judged(parser.parse_args(argv).part):
        groups[name].append(row)
    print("cache, host, stack:", np.round(fitted(list(groups.values())), 3))
    product = np.array([CACHE_SIGMA, BETWEEN_STEPS_SIGMA, PRIOR[2]])
    for name, rows in groups.items():
        others = fitted([each for other, each in groups.items() if other != name])
        print(f"{name}: {len(rows)} rows; by the others' {np.round(others, 2)} {held(rows, others):.0%} are held, "
              f"by the product's {held(rows, product):.0%}")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
