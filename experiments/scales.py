"""Collectives at node counts that no fit has seen: writes docs/scales.md.

    python experiments/scales.py            # some 40 s
    python experiments/scales.py --check    # writes nothing; exit code 1 if the page is not what would be written

Two questions. A class of networks is fitted on sweeps of at most N nodes (ports on single nodes, as always) and predicts
those of more. And a machine's own numbers at its smallest count of nodes, stated as `fabric.measured`, predict its larger ones.
Messages of 64 MiB and more: what a network's bandwidth, not its latency, decides.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simulator.spec.calibration.collective_curves import DOUBLING_SIGMA, PAIRS_DOUBLING_SIGMA, default_curves
from simulator.studies.backtest.text import percent
from simulator.work.collectives.call import Stated
from simulator.work.collectives.cost import call_s
from validate.fit.link_classes import NETWORKS, PORTS, Array, network_class, port_class
from validate.fit.nccl import errors, fit_network, fit_ports, with_trees
from validate.fit.sweeps import Sample, band, read_samples

HERE = Path(__file__).resolve().parent
TABLE, PAGE = HERE / "measured" / "collectives-plain.csv.gz", HERE.parent / "docs" / "scales.md"
_MEDIAN, _BIAS = 0.10, 0.05
HEAD = """# Node counts that no fit has seen

Written by `python experiments/scales.py` from `experiments/measured/collectives-plain.csv.gz`: published sweeps, messages of
64 MiB and more. Cells are n: median / 90th percentile of |log(predicted / measured)| (bias: the median with its sign). Aim:
median at most 10 %, bias within ± 5 %; **bold** misses one.

## Fitted on fewer nodes

Ports are fitted on single nodes, a class of networks on its sweeps of at most N nodes, and larger groups are predicted. Where
sweeps of small groups and of large ones are from different machines, the error contains what machines differ in.

| network | fitted on | predicted | all-reduce | all-gather | reduce-scatter | all-to-all | together |
|---|--:|--:|--:|--:|--:|--:|--:|"""
OWN = """
## A machine's own numbers at fewer nodes

The times of a machine on its smallest count of nodes are stated as its [fabric](reference/cluster-file.md#the-fabric-as-measured),
and its larger groups with as many GPUs on each node are predicted, beside what the shipped curves say of them (which have seen
both).

| machine | network | stated | predicted | collective | by its own numbers | by the shipped curves |
|---|---|--:|--:|---|--:|--:|"""
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Cell:
    """Errors of one collective of one machine at so many nodes. doublings: from the largest count that was fitted."""

    kind: str
    errors: Array
    doublings: float


def text(cells: Sequence[Cell]) -> str:
    """n: median / 90th percentile (bias)."""
    if not cells:
        return ""
    every = np.concatenate([cell.errors for cell in cells])
    sizes = np.abs(every)
    median, bias = float(np.median(sizes)), float(np.median(every))
    head = (
        f"{every.size}: {percent(median)} / {percent(float(np.percentile(sizes, 90)))} ({percent(bias, signed=True)})"
    )
    return f"**{head}**" if median > _MEDIAN or abs(bias) > _BIAS else head


def fewer_nodes(samples: Sequence[Sample], every: list[Cell]) -> Iterator[str]:
    """A line for each class of networks and count of nodes that it is fitted up to."""
    ports = {name: [s for s in samples if not s.network and port_class(s.call) == name] for name in PORTS}
    tables = fit_ports(ports)
    for name in NETWORKS:
        mine = [s for s in samples if s.network and network_class(s.call) == name]
        counts = sorted({s.call.place.num_domains for s in mine})
        for most in counts[:-1]:
            seen = [s for s in mine if s.call.place.num_domains <= most]
            near = with_trees(tables, seen)
            table = fit_network(seen, name, near)
            cells: dict[tuple[str, str, int], list[float]] = defaultdict(list)
            beyond = [s for s in mine if s.call.place.num_domains > most and band(s.call.size_bytes) == "large"]
            for sample, error in zip(beyond, errors(beyond, table, near), strict=True):
                cells[sample.call.kind, sample.machine, sample.call.place.num_domains].append(float(error))
            found = {
                key: Cell(key[0], np.array(value), math.log2(key[2] / most)) for key, value in sorted(cells.items())
            }
            by_kind = [text([cell for key, cell in found.items() if key[0] == kind]) for kind in _KINDS]
            predicted = ", ".join(map(str, sorted({key[2] for key in found})))
            yield f"| {name} | {most} | {predicted} | {' | '.join(by_kind)} | {text(list(found.values()))} |"
            every += found.values()


def own_numbers(samples: Sequence[Sample]) -> Iterator[str]:
    """A line for each machine and collective with several counts of nodes."""
    groups: dict[tuple[str, str, str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.network:
            call = sample.call
            groups[sample.machine, network_class(call), call.kind, call.place.ranks_per_domain].append(sample)
    for (machine, network, kind, ranks), mine in sorted(groups.items()):
        counts = sorted({s.call.place.num_domains for s in mine})
        beyond = [s for s in mine if s.call.place.num_domains > counts[0] and band(s.call.size_bytes) == "large"]
        if not beyond:
            continue
        stated = tuple(_stated([s for s in mine if s.call.place.num_domains == counts[0]]))
        calls = [replace(s.call, links=replace(s.call.links, stated=stated)) for s in beyond]
        own, shipped = (
            Cell(
                kind,
                np.array(
                    [math.log(float(call_s(c, default_curves())) / s.time_s) for c, s in zip(each, beyond, strict=True)]
                ),
                0,
            )
            for each in (calls, [s.call for s in beyond])
        )
        predicted = ", ".join(map(str, sorted({s.call.place.num_domains for s in beyond})))
        who = f"{machine.split(' ')[0]}, {ranks} GPUs a node | {network}"
        yield f"| {who} | {counts[0]} | {predicted} | {kind} | {text([own])} | {text([shipped])} |"


def _stated(samples: Sequence[Sample]) -> Iterator[Stated]:
    """Each size once, at the median of its times."""
    by_size: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_size[sample.call.size_bytes].append(sample)
    for size, same in sorted(by_size.items()):
        call = same[0].call
        yield Stated(call.kind, size, float(np.median([s.time_s for s in same])), call.place, call.links)


def per_doubling(cells: Sequence[Cell]) -> float:
    """Root mean square of the cells' biases, each for one doubling of the nodes."""
    return math.sqrt(float(np.mean([(float(np.median(cell.errors)) / cell.doublings) ** 2 for cell in cells])))


def page() -> str:
    """The whole page."""
    samples = [sample for sample, _ in read_samples(TABLE) if sample is not None]
    cells: list[Cell] = []
    lines = [HEAD, *fewer_nodes(samples, cells), OWN, *own_numbers(samples)]
    pairs, rings = ([cell for cell in cells if (cell.kind == "all_to_all") == one] for one in (True, False))
    lines.append(
        "\n## How fast an interval widens\n\n"
        "The biases of the first table's cells (a machine's collective at a count of nodes), each over the doublings from the "
        f"largest count that was fitted, have a root mean square of {percent(per_doubling(rings))} a doubling in {len(rings)} cells "
        f"of rings and trees and of {percent(per_doubling(pairs))} in {len(pairs)} of all-to-alls. Intervals of groups beyond what "
        f"a network was fitted or stated on widen by one sigma of {percent(DOUBLING_SIGMA)} and {percent(PAIRS_DOUBLING_SIGMA)} "
        "for each.\n"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    written = page()
    if parser.parse_args(argv).check:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != written)
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
