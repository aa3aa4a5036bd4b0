"""HDR or NDR: what 400 in place of 200 Gb/s a network card is worth, over the size of the job.

On every size both networks get their own quickest plan; what NDR may cost more an hour is the ratio of the two steps.

    python experiments/hdr_or_ndr.py [--model llama3-70b] [--nodes 2,4,8,16,32] [-o FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _purchase import SPACE, bars, picture, quickest

from simulator.predict.difference import Difference
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.studies.compare import Subject, compare
from simulator.studies.search import Row
from simulator.studies.search.text import words

NDR, HDR = 50e9, 25e9  # bytes/s of one card, one way


def main() -> None:
    """A line a size, and the picture."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="llama3-70b")
    arguments.add_argument("--cluster", default="hgx-h100-8")
    arguments.add_argument("--nodes", default="2,4,8,16,32")
    arguments.add_argument("--sequences-a-node", type=int, default=32)
    arguments.add_argument("--seq-len", type=int, default=8192)
    arguments.add_argument("--jobs", type=int)
    arguments.add_argument("-o", "--folder", type=Path, default=Path("hdr-or-ndr"))
    options = arguments.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = Model.load(options.model)
    sizes, found = [], []
    for nodes in map(int, options.nodes.split(",")):
        batch = nodes * options.sequences_a_node
        ndr, hdr = (_with_cards(Cluster.load(options.cluster, nodes), rate) for rate in (NDR, HDR))
        rows = [quickest(model, each, batch, options.seq_len, SPACE, options.jobs) for each in (ndr, hdr)]
        if rows[0] is None or rows[1] is None:
            print(f"{nodes:4d} nodes: no plan")
            continue
        ratio = _ratio(model, (ndr, hdr), (rows[0], rows[1]))
        sizes.append(nodes)
        found.append(ratio)
        note = "" if ratio.distinguishable else ", not distinguishable at 90 %"
        print(
            f"{nodes:4d} nodes: NDR may cost {ratio.ratio - 1:6.1%} more ({ratio.low - 1:.1%} to {ratio.high - 1:.1%}){note}"
        )
        print(f"            NDR: {words(rows[0])}\n            HDR: {words(rows[1])}")
    if found:
        picture(options.folder / "premium.svg", lambda axes: _draw(axes, sizes, found, options.model))


def _with_cards(cluster: Cluster, bytes_per_s: float) -> Cluster:
    assert cluster.inter is not None
    return cluster.model_copy(update={"inter": cluster.inter.model_copy(update={"nic_bytes_per_s": bytes_per_s})})


def _ratio(model: Model, clusters: tuple[Cluster, Cluster], rows: tuple[Row, Row]) -> Difference:
    """The step with HDR over that with NDR."""
    subjects = [
        Subject(name="", model=model, plan=row.plan, cluster=cluster)
        for row, cluster in zip(rows, clusters, strict=True)
    ]
    against = compare(subjects, ablate=False).rows[1].against_first
    assert against is not None
    return against


def _draw(axes: Any, sizes: Sequence[int], found: Sequence[Difference], model: str) -> None:  # noqa: ANN401
    percent = [[(value - 1) * 100 for value in (one.low, one.ratio, one.high)] for one in found]
    low, middle, high = zip(*percent, strict=True)
    axes.errorbar(sizes, middle, yerr=bars(low, middle, high), fmt="o-", capsize=3, color="#1f4e79")
    axes.axhline(0, color="#a6a6a6", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel(f"nodes, {model}")
    axes.set_ylabel("what NDR may cost more an hour, %")


if __name__ == "__main__":
    main()
