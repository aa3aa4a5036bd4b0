"""What do networks give of what their data sheets say? Writes topologies/calibrations/networks.json.

    python experiments/networks_by_sheet.py             # some 15 s; prints the sample
    python experiments/networks_by_sheet.py --check     # writes nothing; 1 if the file is not what would be written

Every published sweep over nodes is held against what somebody would have predicted who knows the machine's data sheets and
nothing else: the network's kind and rate, RDMA as its cards can, NCCL of its release. Sweeps are among them that no fit takes
because something was wrong with the machine: a sheet does not say that. A class of networks that one machine alone taught is taken
away, so that nobody is judged by itself; of the others `machines` in links.calibration.json says what leaving one out changes.

A machine counts once, whatever it measured: its settings, collectives and counts of nodes share its weight. Most give what their
sheets say, the others 1.3 to 15 times less: two modes, and the upper end lies in the slow one (`slow_end`). A machine whose numbers
are public because it was slow says how slow such networks are, not how many there are. Speeds are those of collectives that use all
cards of a node: what one pair of GPUs sends, or many to many, has parts of the interval of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

from simulator.base.errors import InputError
from simulator.formats.readers.measured_table import read_collectives
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.calibration.networks import FILE, carrier_of
from simulator.spec.cluster.parts import InterKind
from simulator.spec.software.nccl import Nccl
from simulator.studies.backtest.collective_rules import degraded, resolve
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.rows import CollectiveRow
from simulator.work.collectives.cost import call_of, call_s
from validate.fit.link_classes import NETWORKS
from validate.fit.sweeps import LARGE_BYTES, MID_BYTES

MEASURED = Path(__file__).resolve().parent / "measured"
TABLES = (MEASURED / "collectives-plain.csv.gz", MEASURED / "collectives-2.csv.gz")
# Log ratio from which a network counts as slow: above what the others differ in (12 %), below what a wrong transport costs (1.3 times).
# Between 1.15 and 1.25 the ends of those with slow machines do not move; where there are none, it is the end itself
SLOW = math.log(1.2)
BEYOND = 0.05  # of the networks are above the upper end of a 90 % interval
_ALL_CARDS = ("all_reduce", "all_gather", "reduce_scatter")
# Rows whose clock, not whose network, was odd
_CLOCK = ("ranks not aligned", "timed from Python", "times of neighbouring sizes differ")


@dataclass(frozen=True, slots=True)
class Unit:
    """One collective of one machine, as it was set up, over so many nodes.

    ratio: log of measured over predicted, its median. reported: published because it was slow. tcp: by a setting that sends over TCP.
    """

    machine: str
    network: InterKind
    setting: str
    kind: str
    nodes: int
    band: str
    ratio: float
    reported: bool = False
    tcp: bool = False


def machine_of(row: CollectiveRow) -> str:
    """The source's name, the GPU and the first words of the notes, which tell machines of one source apart."""
    source = row.source.split("@")[0].removeprefix("github:").removeprefix("https://github.com/")
    words = " ".join(row.notes.replace(";", " ").replace(",", " ").split()[:3])
    return f"{source}, {row.gpu.split(' (')[0]}, {words}"


def without(curves: LinkCurves, kind: str) -> LinkCurves:
    """The curves without networks that only this kind's own machines taught."""
    mine = [one for one in curves.networks if kind in one.kinds]
    if any(len(one.machines) > 1 for one in mine) and kind not in (
        "slingshot",
        "sockets",
    ):  # two partitions of one site
        return curves
    return curves.model_copy(update={"networks": tuple(one for one in curves.networks if one not in mine)})


def ratio_of(row: CollectiveRow, curves: dict[str, LinkCurves]) -> tuple[InterKind, float, bool] | None:
    """The network, log(measured / predicted by the sheet), and whether all went over TCP; None where the row names no machine that can be built."""
    try:
        run = resolve(row)
    except (RefusedError, InputError):
        return None
    inter = run.cluster.inter
    assert inter is not None
    cards: InterKind = "slingshot" if "Slingshot" in row.notes else inter.kind  # whatever its software made of them
    sheet = run.cluster.model_copy(update={"inter": inter.model_copy(update={"kind": cards, "rdma": True})})
    call = call_of(run.kind, run.size_bytes, run.shape, sheet, Nccl(version=run.nccl.version))
    return cards, math.log(row.time_us * 1e-6 / float(call_s(call, curves[cards]))), not inter.rdma


def units() -> Iterator[Unit]:
    """Every unit of the published sweeps."""
    kinds = {kind for one in NETWORKS.values() for kind in one.kinds}
    curves = {kind: without(default_curves(), kind) for kind in sorted(kinds)}
    found: dict[tuple[str, InterKind, str, str, int, str], list[float]] = defaultdict(list)
    reported, over_tcp = set[str](), set[str]()
    for table in TABLES:
        for row in read_collectives(table):
            if not isinstance(row, CollectiveRow) or (row.n_nodes or 1) < 2 or not row.time_us:
                continue
            band = "bytes" if row.size_bytes >= LARGE_BYTES else "waits" if row.size_bytes < MID_BYTES else ""
            odd = any(word in (row.left_out or "") for word in _CLOCK)
            judged = None if odd or not band or row.collective not in _ALL_CARDS else ratio_of(row, curves)
            if judged is not None:
                network, ratio, tcp = judged
                setting = f"{row.notes} {row.nccl_version}"
                over_tcp |= {setting} if tcp else set()
                found[machine_of(row), network, setting, row.collective, row.n_nodes or 1, band].append(ratio)
                reported |= {machine_of(row)} if degraded(row) else set()
    for key, ratios in sorted(found.items()):
        yield Unit(*key, median(ratios), key[0] in reported, key[2] in over_tcp)


def slow_end(sample: Sequence[Unit]) -> float:
    """The ratio that one network more, like these, exceeds once in twenty: two modes, of which the slow one is lognormal.

    Its share is the mean of what so few machines leave open (Jeffreys' prior).
    """
    count = Counter(one.machine for one in sample)
    counted = {one.machine for one in sample if not one.reported}
    slow = [(one.ratio, 1 / count[one.machine], one.machine) for one in sample if one.ratio > SLOW]
    weight = sum(share for _, share, _ in slow)
    share = (sum(share for _, share, machine in slow if machine in counted) + 0.5) / (len(counted) + 1)
    if share <= BEYOND or not slow:
        return SLOW
    middle = sum(ratio * one for ratio, one, _ in slow) / weight
    sigma = math.sqrt(sum(one * (ratio - middle) ** 2 for ratio, one, _ in slow) / weight)
    return middle + sigma * NormalDist().inv_cdf(1 - BEYOND / share)


def tcp_end(sample: Iterable[Unit]) -> float:
    """How far a machine's settings lie apart over TCP, of which a sheet says nothing: too few machines for a share of slow ones."""
    by_call: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for one in sample:
        if one.tcp:
            by_call[one.machine, one.kind, one.nodes].append(one.ratio)
    return median(max(found) - min(found) for found in by_call.values() if len(found) > 1)


def held(groups: Iterable[Sequence[Unit]]) -> float:
    """The share of machines below the slow end by the other sources of their group; a machine's units share its weight."""
    below = machines = 0.0
    for sample in groups:
        count = Counter(one.machine for one in sample)
        machines += len(count)
        for source in {source_of(one) for one in sample}:
            end = slow_end([one for one in sample if source_of(one) != source])
            below += sum(1 / count[one.machine] for one in sample if source_of(one) == source and one.ratio <= end)
    return below / machines


def source_of(one: Unit) -> str:
    """Who published it."""
    return one.machine.partition(",")[0]


def per_doubling(sample: Sequence[Unit]) -> float:
    """What each doubling of the nodes adds to a ratio: root mean square over settings with several counts, none of them slow."""
    by_setting: dict[tuple[str, str, str], list[Unit]] = defaultdict(list)
    for one in sample:
        by_setting[one.machine, one.setting, one.kind].append(one)
    ordered = [sorted(many, key=lambda one: one.nodes) for many in by_setting.values()]
    pairs = [pair for many in ordered for pair in pairwise(many) if max(one.ratio for one in pair) <= SLOW]
    slopes = [(more.ratio - few.ratio) / math.log2(more.nodes / few.nodes) for few, more in pairs]
    return math.sqrt(sum(one**2 for one in slopes) / len(slopes))


def document() -> dict[str, Any]:
    """What the file holds: the numbers, and the sample that they are of."""
    sample = list(units())
    by_band: dict[str, dict[str, list[Unit]]] = {"bytes": defaultdict(list), "waits": defaultdict(list)}
    for one in sample:
        by_band[one.band][carrier_of(one.network)].append(one)
    ends = {
        band: {carrier: round(math.exp(slow_end(mine)), 3) for carrier, mine in sorted(of.items())}
        for band, of in by_band.items()
    }
    for band, of in by_band.items():
        ends[band]["tcp"] = round(math.exp(tcp_end(of["plugin"])), 3)
    by_machine: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in sample:
        by_machine[one.machine][one.band].append(math.exp(one.ratio))
    return {
        "source": "python experiments/networks_by_sheet.py: published sweeps over nodes, measured over predicted by the data sheet",
        "slow_bytes": ends["bytes"],
        "slow_waits": ends["waits"],
        "per_doubling": round(per_doubling([one for one in sample if one.band == "bytes"]), 3),
        "nodes": min(one.nodes for one in sample),
        "held": round(held(by_band["bytes"].values()), 3),
        "sample": {
            machine: {band: [round(min(found), 3), round(max(found), 3)] for band, found in sorted(bands.items())}
            for machine, bands in sorted(by_machine.items())
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(argv).check
    text = json.dumps(document(), indent=1, ensure_ascii=False) + "\n"
    if check:
        return int(not FILE.is_file() or FILE.read_text(encoding="utf-8") != text)
    FILE.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
