"""Fit topologies/calibrations/links.calibration.json on published nccl-tests sweeps.

    python experiments/fit_collectives.py                 fit, write the calibration, print residuals by machine
    python experiments/fit_collectives.py --carry FILE    first put FILE into experiments/measured/collectives*.csv.gz

The model is the simulator's own: NCCL's choice of algorithm and protocol and the closed forms are taken as they are,
only launch, hop, efficiency, fill and drain are free (simulator/spec/calibration/collective_curves.py). Ports are fitted on single-node
sweeps; then networks on multi-node sweeps with the ports held. Robust residuals of log time; a weak prior keeps what
no sweep shows near its physical value. Each port and network is fitted again without each of its machines in turn: the
spread of the left-out machines' large messages is what `between_machines` says.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import convert_collectives
import numpy as np
from convert_runs import zipped

from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.work.collectives.cost import call_s
from validate.fit.link_classes import Array
from validate.fit.nccl import fit_all
from validate.fit.sweeps import Sample, band, read_samples

HERE = Path(__file__).resolve().parent
TABLE = HERE / "measured" / "collectives.csv.gz"  # as it was published
PLAIN = HERE / "measured" / "collectives-plain.csv.gz"  # by convert_collectives.py
OUTPUT = HERE.parent / "topologies" / "calibrations" / "links.calibration.json"


# Two sources of the table stand without their repositories: they are called what the rows themselves say.
UNRECORDED = {
    rb"stored public GitHub text id 26285727504 (repo not named by index)": b"repository not recorded (dgx06)",
    rb"stored public GitHub text id 55623350939 (repo not named by index)": b"repository not recorded (4x H100)",
}


def carry(table: Path) -> None:
    """Write the whole table, reproducibly compressed."""
    text = table.read_bytes()
    for source, name in UNRECORDED.items():
        text = text.replace(source, name)
    TABLE.write_bytes(gzip.compress(text, mtime=0))
    PLAIN.write_bytes(zipped(convert_collectives.table()))


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
    """Carry the table if asked; fit; write; print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--carry", type=Path, help="a table to carry in experiments/measured")
    arguments = parser.parse_args()
    if arguments.carry:
        carry(arguments.carry)
    rows = list(read_samples(PLAIN))
    print(Counter(reason for _, reason in rows if reason).most_common())
    ports, networks, samples, error = fit_all([sample for sample, _ in rows if sample is not None])
    provenance = {
        "recipe": "python experiments/fit_collectives.py",
        "samples": f"experiments/measured/{TABLE.name}",
        "sha256": hashlib.sha256(TABLE.read_bytes()).hexdigest(),
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
