"""500 synthetic trials of a line's fit: errors and coverage. Run: PYTHONPATH=. python tests/bench/bench_fit.py

Truth: latency 5 µs to 1 ms, bandwidth 1 to 316 GB/s; eight runs over 11 sizes; 3 % noise, 20 % outliers of 1.5 to 4 times.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "validate"))

from test_fit import trial

TRIALS = 500


def main() -> None:
    found = np.array([trial(seed) for seed in range(TRIALS)], float)
    worst, p95 = np.abs(found[:, :2]).max(axis=0), np.quantile(np.abs(found[:, :2]), 0.95, axis=0)
    sys.stdout.write(
        f"bandwidth: worst {worst[0]:.1%}, 95th percentile {p95[0]:.1%}, inside its interval {found[:, 2].mean():.1%}\n"
    )
    sys.stdout.write(
        f"latency:   worst {worst[1]:.1%}, 95th percentile {p95[1]:.1%}, inside its interval {found[:, 3].mean():.1%}\n"
    )


if __name__ == "__main__":
    main()
