"""Collectives by ASTRA-sim's analytical back end beside ours, where both can express them. Run: python experiments/astra_sim.py

ASTRA-sim's numbers follow its public code, not a run of it: collectives are rings of `2 (n - 1)` or `n - 1` sends of an n-th of the
tensor (astra-sim/system/collective/Ring.cc), a send takes hops × latency + bytes ÷ bandwidth, cut to whole nanoseconds, and a GB is
2**30 bytes (astra-network-analytical: congestion_unaware/basic-topology/BasicTopology.cpp, common/NetworkFunction.cpp).
Neighbours on its Ring are one hop apart, on its Switch two; both back ends are given the same link, the cluster's own by data sheet.
"""

from __future__ import annotations

from typing import Final

from simulator.base.units import format_bytes, format_seconds
from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.cluster import Cluster
from simulator.work.collectives import LinkCurves, choose

GIB: Final = 2**30
SENDS: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # rounds of n - 1 sends of an n-th of the tensor
HOPS: Final = {"Ring": 1, "Switch": 2}
LATENCY_NS: Final = 500  # of a link, as ASTRA-sim's own examples have it (inputs/network/analytical)
SIZES: Final = (2**10, 2**15, 2**20, 2**25, 2**30)


def astra_s(kind: str, size_bytes: int, num_ranks: int, gb_per_s: float, latency_ns: float, hops: int = 1) -> float:
    """Seconds of a collective of the full tensor's bytes. gb_per_s: as in its network file, of 2**30 bytes."""
    bytes_per_ns = gb_per_s * GIB / 1e9
    send_ns = int(hops * latency_ns + (size_bytes // num_ranks) / bytes_per_ns)
    return SENDS[kind] * (num_ranks - 1) * send_ns * 1e-9


def rows(cluster: Cluster, num_ranks: int) -> list[tuple[str, int, float, float, float]]:
    """(kind, bytes, ASTRA-sim's seconds, ours with ideal links, ours calibrated)."""
    shape = GroupShape(
        num_ranks=num_ranks, num_nodes=1, ranks_per_node=num_ranks, num_groups_per_node=1, spans_domain=False
    )
    rate = float(cluster.intra.bytes_per_s)
    found = []
    for kind in SENDS:
        for size in SIZES:
            theirs = astra_s(kind, size, num_ranks, rate / 1e9, LATENCY_NS, HOPS["Switch"])
            ideal, calibrated = (
                float(choose(kind, size, shape, cluster, curves).time_s)
                for curves in (LinkCurves.ideal(), default_curves())
            )
            found.append((kind, size, theirs, ideal, calibrated))
    return found


def main() -> None:
    """Print the table of docs/background/astra-sim.md."""
    cluster = Cluster.load("hgx-h100-8")
    print("| collective | size | ASTRA-sim | ours, ideal links | ours, calibrated | ASTRA-sim / ours |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind, size, theirs, ideal, ours in rows(cluster, 8):
        cells = (
            kind,
            format_bytes(size),
            *(format_seconds(one) for one in (theirs, ideal, ours)),
            f"{theirs / ours:.2f}",
        )
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
