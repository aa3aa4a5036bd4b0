"""How fast experts' products run over a batch of plain ones: `python experiments/grouped_products.py`.

`experiments/measured/grouped.csv.gz` has the grouped products that SimuMax measured with Transformer Engine on A100 and B200
(github.com/MooreThreads/SimuMax@4dcaae5, configs/system, Apache-2.0). The median over those with many rows an expert is the
prior `grouped_factor` of every stack; with few, each expert's launch is what counts.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from statistics import median, quantiles

from simulator.base.kernels import Gemm
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.software.records import GROUPED

TABLE = Path(__file__).resolve().parent / "measured" / "grouped.csv.gz"
MANY_ROWS = 512
_CLUSTERS = {"A100-PCIe-80GB": "pcie-a100-80-8", "B200-SXM": "hgx-b200-8"}


def grouped(row: dict[str, str]) -> Gemm:
    """The products of one measured call: rows of an expert × columns out × columns in."""
    notes = dict(part.split("=", 1) for part in row["notes"].replace("GROUPED ", "").split(";") if "=" in part)
    m, n, k = (int(row[name]) for name in ("m", "n", "k"))
    batch, adds = int(notes["ng"]), notes["accumulate"] == "True"
    match notes["stage"]:
        case "fwd":
            return Gemm(m=m, n=n, k=k, batch=batch, dtype="bf16")
        case "bwd_grad_act":
            return Gemm(m=m, n=n, k=k, batch=batch, dtype="bf16", layout="nn")
        case _:
            return Gemm(m=n, n=k, k=m, batch=batch, dtype="bf16", layout="nt", accumulate_fp32=adds)


def ratios(least_rows: int = MANY_ROWS) -> dict[str, list[float]]:
    """Device -> a batch of plain products over the measured time, of calls with that many rows an expert."""
    with gzip.open(TABLE, "rt", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["m"]) >= least_rows]
    found: dict[str, list[float]] = {}
    for gpu, preset in _CLUSTERS.items():
        device = Cluster.load(preset).device
        timer = Calibration.for_device(device).timer(device)
        found[gpu] = [1e6 * timer.kernel_s(grouped(r)) / float(r["time_us"]) for r in rows if r["gpu"] == gpu]
    return found


def main() -> None:
    """Print the medians."""
    found = ratios()
    everything = [ratio for of_device in found.values() for ratio in of_device]
    for gpu, these in (*found.items(), ("all", everything)):
        low, *_, high = quantiles(these, n=10)
        print(f"{gpu:15} {len(these):3} products: median {median(these):.2f}, 10 % {low:.2f}, 90 % {high:.2f}")
    print(f"prior of stacks: {GROUPED}")


if __name__ == "__main__":
    main()
