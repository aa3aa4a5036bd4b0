"""Loads of every link of a node under a plan: the bytes of its collectives and copies, by their routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from simulator.parallel.mesh import GroupShape
from simulator.play.lower import Lowering, lowered
from simulator.play.lower.messages import calls_of
from simulator.predict.play import play, repeats_of
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.nics import places_of, socket_of
from simulator.spec.cluster.wiring import Wiring
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.collectives import host_traffic
from simulator.work.collectives.call import nic_paths
from simulator.work.collectives.ports import loads_of
from simulator.work.program import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """One direction of a link of a node. src, dst: gpu0, nvswitch, switch0, cpu0, memory, nic0. step_bytes: in a step."""

    name: str
    src: str
    dst: str
    bytes_per_s: float
    step_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """The links of one node under a plan; step_s: 0 where there is no plan."""

    cluster: str
    num_gpus: int
    links: tuple[NodeLink, ...]
    step_s: float = 0.0
    plan: str = ""

    def busy(self, link: NodeLink) -> float:
        """Share of the step in which the link would be busy at its data sheet's speed."""
        return link.step_bytes / (link.bytes_per_s * self.step_s) if self.step_s else 0.0


def idle_links(cluster: Cluster) -> Loads:
    """The links of a node, with nothing on them. Raises ClusterError where nodes differ."""
    cluster.must_be_even("the picture of a node")
    return Loads(cluster=cluster.name, num_gpus=cluster.gpus_per_node, links=tuple(_links(cluster)))


def link_loads(
    model: Model, plan: Plan, cluster: Cluster, calibration: Calibration | None = None, stack: Stack | None = None
) -> Loads:
    """The links of a node with what a step of the plan puts on them. Raises as `predict` does, and where nodes differ."""
    cluster.must_be_even("the picture of a node")
    lowering = lowered(model, plan, cluster, calibration, stack)
    return loads_of_lowering(lowering, play(lowering).step_s)


def loads_of_lowering(lowering: Lowering, step_s: float) -> Loads:
    """The same of a lowered plan whose step is known."""
    cluster, loads = lowering.cluster, _loads(lowering)
    links = (
        NodeLink(**{f: getattr(link, f) for f in NodeLink.__slots__} | {"step_bytes": loads[link.name]})
        for link in _links(cluster)
    )
    degrees = " × ".join(f"{axis} {size}" for axis, size in lowering.mesh.axes.items() if size > 1)
    return Loads(
        cluster=cluster.name,
        num_gpus=cluster.gpus_per_node,
        links=tuple(links),
        step_s=step_s,
        plan=f"{lowering.model.name}, {degrees or '1 GPU'}",
    )


def _loads(lowering: Lowering) -> Counter[str]:
    """Bytes by link over a whole step, on the first node: each GPU runs the program of its pipeline stage."""
    mesh, tally = lowering.mesh, _Tally(lowering)
    ranks = map(lowering.cluster.rank_on, range(lowering.cluster.gpus_per_node))
    at = [mesh.coordinates(rank)["pp"] for rank in ranks]
    for stage in sorted(set(at)):
        members = tuple(gpu for gpu, its in enumerate(at) if its == stage)
        for (kind, role, size_bytes), times in _calls(lowering, stage).items():
            if role == "host":
                for gpu in members:
                    tally.found[f"{'down' if kind == 'h2d' else 'up'}{gpu}"] += times * size_bytes
            elif role.startswith("pp "):
                tally.message(role, stage, times * size_bytes, members)
            elif role != "pp":
                tally.add(kind, size_bytes, lowering.fabric.shape(role), members, times)
            elif stage == at[0]:  # among stages: told once
                tally.add(kind, size_bytes, mesh.group_shape("pp"), tuple(range(len(at))), times)
    return tally.found


def _calls(lowering: Lowering, stage: int) -> Counter[tuple[str, str, int]]:
    """How often a stage makes each call and each copy to or from the host; micro-batches that repeat are counted once."""

    def of(num_micro_batches: int) -> Counter[tuple[str, str, int]]:
        program, found = lowering.program(num_micro_batches, stage=stage), Counter[tuple[str, str, int]]()
        for *call, times in calls_of(program, stage):
            found[tuple(call)] += times  # type: ignore[index]  # kind, role, bytes
        copies = (op for op in program.ops if isinstance(op, Collective) and op.kind in ("h2d", "d2h"))
        found.update((op.kind, "host", op.size_bytes) for op in copies)
        return found

    more, last, period = repeats_of(lowering.plan)
    found = of(last)
    if more:
        fewer = of(last - period)
        found.update({call: more * (times - fewer[call]) for call, times in found.items()})
    return found


class _Tally:
    """Bytes by link of one node, as they are added."""

    def __init__(self, lowering: Lowering) -> None:
        self.cluster, self.curves, self.nccl = lowering.cluster, lowering.curves, lowering.fabric.nccl
        self.mesh, self.found = lowering.mesh, Counter[str]()

    def add(self, kind: str, size_bytes: int, shape: GroupShape, members: tuple[int, ...], times: int) -> None:
        """So many collectives of the groups that these GPUs are in."""
        if shape.num_ranks == 1:
            return
        traffic = host_traffic(kind, size_bytes, shape, self.cluster, self.curves, nccl=self.nccl)
        for name, load in loads_of(self.cluster, shape, kind, members).items():
            self.found[name] += times * load * float(traffic.port_bytes)  # type: ignore[assignment]  # bytes may be fractions
        self.network(kind, times * float(traffic.network_bytes), shape, members)

    def network(self, kind: str, bytes_each: float, shape: GroupShape, members: tuple[int, ...]) -> None:
        """The share of its node's NICs of each of these GPUs."""
        nics = nic_paths(self.cluster, shape, kind, self.nccl) if bytes_each else None
        if nics is None:
            for gpu in members:
                self.found[f"nic{gpu}"] += bytes_each  # type: ignore[assignment]
            return
        part = len(members) / self.cluster.gpus_per_node  # the groups of all stages were laid together
        for name, load in nics.loads.items():
            self.found[name] += load * bytes_each * shape.ranks_per_node * part  # type: ignore[assignment]

    def message(self, role: str, stage: int, size_bytes: int, members: tuple[int, ...]) -> None:
        """From every GPU of a stage to its peer in another, on the links of the sender."""
        target = role.rpartition(" ")[2]
        cluster, wiring = self.cluster, Wiring.of(self.cluster)
        away = (int(target) - stage) * self.mesh.stride("pp")
        for gpu in members:
            peer = cluster.gpu_of(cluster.rank_on(gpu) + away)
            if not 0 <= peer < cluster.gpus_per_node:
                self.network("send_recv", float(size_bytes), self.mesh.pair_shape(stage, int(target)), (gpu,))
            elif cluster.intra.shape == "switch":
                self.found[f"port{gpu}"] += size_bytes
            else:
                for name in wiring.route(gpu, peer, (gpu, peer)).links:
                    self.found[name] += size_bytes


def _links(cluster: Cluster) -> Iterator[NodeLink]:
    """Collectives load both directions of a port equally, so ports of a switch and NICs are listed once."""
    wiring = Wiring.of(cluster)
    if cluster.intra.shape == "switch":
        for gpu in range(cluster.gpus_per_node):
            yield NodeLink(name=f"port{gpu}", src=f"gpu{gpu}", dst="nvswitch", bytes_per_s=cluster.intra.bytes_per_s)
    for name, rate in wiring.rates.items():
        src, dst = _ends(wiring, name)
        yield NodeLink(name=name, src=src, dst=dst, bytes_per_s=rate)
    if cluster.inter is not None and cluster.inter.cards:
        yield from _nic_links(cluster, wiring)
    elif cluster.inter is not None:
        share, num = (
            cluster.node_bytes_per_s / cluster.gpus_per_node,
            min(cluster.inter.num_nics, cluster.gpus_per_node),
        )
        for gpu in range(cluster.gpus_per_node):
            nic = f"nic{gpu * num // cluster.gpus_per_node}"
            yield NodeLink(name=f"nic{gpu}", src=f"gpu{gpu}", dst=nic, bytes_per_s=share)


def _nic_links(cluster: Cluster, wiring: Wiring) -> Iterator[NodeLink]:
    """Both ways of every NIC, where a file says what it sits beside."""
    for number, place in enumerate(places_of(cluster)):
        switch = wiring.switch(place.gpus[0]) if place.gpus else None
        beside = f"gpu{place.gpus[0]}" if len(place.gpus) == 1 else f"cpu{socket_of(wiring, place)}"
        beside, nic = beside if switch is None else f"switch{switch}", f"nic{number}"
        assert cluster.inter is not None
        for name, src, dst in ((f"{nic} out", beside, nic), (f"{nic} in", nic, beside)):
            yield NodeLink(name=name, src=src, dst=dst, bytes_per_s=cluster.inter.nic_bytes_per_s)


def _ends(wiring: Wiring, name: str) -> tuple[str, str]:
    """The two ends of a link by its name in the wiring."""
    first, arrow, second = name.partition(">")
    if arrow:
        return (first, second) if second.startswith("gpu") else (first.replace("socket", "cpu"), f"cpu{second}")
    if name == "memory":
        return "cpu0", "memory"
    if name.startswith("switch"):
        switch = int(name.removeprefix("switch").partition(" ")[0])
        above = f"cpu{wiring.socket(wiring.pcie.switches[switch][0])}" if wiring.pcie else "cpu0"
        return (f"switch{switch}", above) if name.endswith("up") else (above, f"switch{switch}")
    gpu = int(name.removeprefix("up").removeprefix("down"))
    switch_above = wiring.switch(gpu)
    above = f"cpu{wiring.socket(gpu)}" if switch_above is None else f"switch{switch_above}"
    return (f"gpu{gpu}", above) if name.startswith("up") else (above, f"gpu{gpu}")
