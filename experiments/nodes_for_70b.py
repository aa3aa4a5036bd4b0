"""How many nodes for 70B in 30 days: the smallest number with which 95 % of the runs are done in time.

Every size gets its quickest plan; its run is then played with failures, checkpoints and restarts, and the step's own
uncertainty is in the days. With a price file of your own also what each size costs.

    python experiments/nodes_for_70b.py [--model llama3-70b] [--tokens 2T] [--days 30] [--prices PRICES.toml] [-o FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _purchase import SPACE, bars, picture, quickest

from simulator.base.units import counted, parse_count
from simulator.predict import predict
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.prices import Prices
from simulator.studies.goodput import Goodput, LongRun, goodput
from simulator.studies.search.text import words
from simulator.work.checkpoint import Checkpoint, loading_s, saving


def main() -> None:
    """A line a size, the answer, and the picture."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="llama3-70b")
    arguments.add_argument("--cluster", default="hgx-h100-8")
    arguments.add_argument("--nodes", default="32,64,96,128,192")
    arguments.add_argument("--global-batch", type=int, default=1536)
    arguments.add_argument("--seq-len", type=int, default=8192)
    arguments.add_argument("--tokens", default="2T")
    arguments.add_argument("--days", type=float, default=30.0)
    arguments.add_argument("--prices", type=Path)
    arguments.add_argument("--replicas", type=int, default=400)
    arguments.add_argument("--jobs", type=int)
    arguments.add_argument("-o", "--folder", type=Path, default=Path("nodes-for-70b"))
    options = arguments.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model, prices = Model.load(options.model), Prices.load(options.prices) if options.prices else None
    run = LongRun(tokens=parse_count(options.tokens), replicas=options.replicas)
    sizes: list[int] = []
    found: list[Goodput] = []
    for nodes in map(int, options.nodes.split(",")):
        cluster = Cluster.load(options.cluster, nodes)
        row = quickest(model, cluster, options.global_batch, options.seq_len, SPACE, options.jobs)
        if row is None:
            print(f"{nodes:4d} nodes: no plan")
            continue
        prediction = predict(model, row.plan, cluster)
        nouns = (model, row.plan, cluster, Checkpoint())
        played = goodput(prediction, run, saving(*nouns), loading_s(*nouns), cluster=cluster, prices=prices)
        sizes.append(nodes)
        found.append(played)
        print(f"{nodes:4d} nodes: {_line(played)}   {words(row)}")
    enough = [nodes for nodes, one in zip(sizes, found, strict=True) if one.days.p95 <= options.days]
    print(f"\n{_verdict(enough)}")
    if found:
        picture(options.folder / "days.svg", lambda axes: _draw(axes, sizes, found, options.days))


def _verdict(enough: Sequence[int]) -> str:
    """The smallest size that is done in time."""
    if not enough:
        return "No size that was asked for is enough."
    least = min(enough)
    return f"{counted(least, 'node')} {'is' if least == 1 else 'are'} enough."


def _line(one: Goodput) -> str:
    money = "".join(f", {c.cost.p50 / 1e6:,.2f} million {c.currency} ({c.kind})" for c in one.costs)
    days = one.days
    return f"{days.p50:6.1f} days ({days.p5:.1f} to {days.p95:.1f}), goodput {one.goodput.p50:.1%}{money}"


def _draw(axes: Any, sizes: Sequence[int], found: Sequence[Goodput], days: float) -> None:  # noqa: ANN401
    low, middle, high = ([getattr(one.days, level) for one in found] for level in ("p5", "p50", "p95"))
    axes.errorbar(sizes, middle, yerr=bars(low, middle, high), fmt="o-", capsize=3, color="#1f4e79")
    axes.axhline(days, color="#c00000", linewidth=1)
    axes.set_xlabel(f"nodes of {found[0].cluster}")
    axes.set_ylabel(f"days of {found[0].model}, {found[0].tokens:,} tokens")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)


if __name__ == "__main__":
    main()
