"""Fit topologies/calibrations/links.calibration.json on published nccl-tests sweeps.

    python experiments/fit_collectives.py                 fit, write the calibration, print residuals by machine
    python experiments/fit_collectives.py --subset FILE   first cut experiments/measured/collectives.csv.gz from FILE

The model is the simulator's own: NCCL's choice of algorithm and protocol and the closed forms are taken as they are,
only launch, hop, efficiency, fill and drain are free (simulator/collective_curves.py). Ports are fitted on single-node
sweeps; then networks on multi-node sweeps with the ports held. Robust residuals of log time; a weak prior keeps what
no sweep shows near its physical value. Each port and network is fitted again without each of its machines in turn: the
spread of the left-out machines' large messages is what `between_machines` says.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import io
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from simulator.collective_curves import LinkCurves
from simulator.collectives.cost import call_s
from validate.fit.nccl import Array, fit_all
from validate.fit.sweeps import Sample, band, read_rows, to_sample, usable

HERE = Path(__file__).resolve().parent
SUBSET = HERE / "measured" / "collectives.csv.gz"
OUTPUT = HERE.parent / "topologies" / "calibrations" / "links.calibration.json"


def cut(table: Path) -> None:
    """Write the rows that the fit uses, all columns, reproducibly compressed; say what was left out and why."""
    rows = read_rows(table)
    print(Counter(usable(row) or "used" for row in rows).most_common())
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row for row in rows if not usable(row))
    SUBSET.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def table_of(samples: Sequence[Sample], error: Array) -> str:
    """Median |error| and bias of each machine, collective and group, by band of sizes."""
    cells: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample, e in zip(samples, error, strict=True):
        cells[sample.call.links.port_kind, sample.machine, sample.place][band(sample.call.size_bytes)].append(e)
    lines = []
    for (port, machine, place), bands in sorted(cells.items()):
        text = "  ".join(
            f"{name} {len(bands[name]):3d}: {np.median(np.abs(bands[name])):6.1%} ({np.median(bands[name]):+6.1%})"
            for name in ("small", "mid", "large")
            if name in bands
        )
        lines.append(f"{port:8s} {machine[:60]:60s} {place:20s} {text}")
    return "\n".join(lines)


def check(samples: Sequence[Sample], error: Array, curves: LinkCurves) -> float:
    """Largest difference between the arrays here and the simulator's own bills: rounding of the file, no more."""
    own = [math.log(float(call_s(s.call, curves)) / s.time_s) for s in samples]
    return float(np.max(np.abs(np.array(own) - error)))


def main() -> None:
    """Cut the subset if asked; fit; write; print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subset", type=Path, help="a full table to cut the carried subset from")
    arguments = parser.parse_args()
    if arguments.subset:
        cut(arguments.subset)
    rows = [row for row in read_rows(SUBSET) if not usable(row)]
    samples = [to_sample(row) for row in rows]
    ports, networks, samples, error = fit_all(samples)
    provenance = {
        "recipe": "python experiments/fit_collectives.py",
        "samples": f"experiments/measured/{SUBSET.name}",
        "sha256": hashlib.sha256(SUBSET.read_bytes()).hexdigest(),
        "nccl": "2.5 to 2.29.3, by machine in the samples; choice of algorithm by the constants of 2.30.7",
    }
    content = {"name": "links", "ports": ports, "networks": networks, "provenance": provenance}
    OUTPUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table_of(samples, error))
    for item in (*ports, *networks):
        print(item["name"], item["quality"])
    print(f"largest difference from the simulator's bills: {check(samples, error, LinkCurves.load(OUTPUT)):.2%}")


if __name__ == "__main__":
    main()
