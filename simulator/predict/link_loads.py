"""What a step puts on every link of a node, under a plan: the bytes of its collectives and copies, by the roads they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from simulator.calibration import Calibration
from simulator.collective_curves import default_curves
from simulator.collectives import KINDS, host_traffic
from simulator.collectives.ports import loads_of
from simulator.lower import Lowering, lower
from simulator.model import Model
from simulator.plan import Plan
from simulator.predict.play import play
from simulator.program import Collective
from simulator.stack import Stack
from simulator.topology import Cluster
from simulator.topology.wiring import Wiring


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
    """The links of a node, with nothing on them."""
    return Loads(cluster=cluster.name, num_gpus=cluster.gpus_per_node, links=tuple(_links(cluster)))


def link_loads(
    model: Model, plan: Plan, cluster: Cluster, calibration: Calibration | None = None, stack: Stack | None = None
) -> Loads:
    """The links of a node with what a step of the plan puts on them. Raises as `predict` does."""
    calibration, stack = calibration or Calibration.for_device(cluster.device), stack or Stack.load(plan.stack)
    lowering = lower(model, plan, cluster, stack, calibration, calibration.links or default_curves())
    loads = _loads(lowering)
    links = (
        NodeLink(**{f: getattr(link, f) for f in NodeLink.__slots__} | {"step_bytes": loads[link.name]})
        for link in _links(cluster)
    )
    degrees = " × ".join(f"{axis} {size}" for axis, size in lowering.mesh.axes.items() if size > 1)
    return Loads(
        cluster=cluster.name,
        num_gpus=cluster.gpus_per_node,
        links=tuple(links),
        step_s=play(lowering).step_s,
        plan=f"{model.name}, {degrees or '1 GPU'}",
    )


def _loads(lowering: Lowering) -> Counter[str]:
    """Bytes by link over a whole step."""
    fabric, cluster, found = lowering.fabric, lowering.cluster, Counter[str]()
    for op in lowering.program(lowering.plan.num_micro_batches).ops:
        if not isinstance(op, Collective):
            continue
        if op.kind in ("h2d", "d2h"):
            for gpu in range(cluster.gpus_per_node):
                found[f"{'down' if op.kind == 'h2d' else 'up'}{gpu}"] += op.size_bytes
        if op.kind not in KINDS:
            continue
        shape = fabric.shape(op.stream.removeprefix("nccl:"))
        traffic = host_traffic(op.kind, op.size_bytes, shape, cluster, lowering.curves)
        for name, load in loads_of(cluster, shape, op.kind).items():
            found[name] += load * float(traffic.port_bytes)  # type: ignore[assignment]  # bytes may be fractions
        for gpu in range(cluster.gpus_per_node):
            found[f"nic{gpu}"] += float(traffic.network_bytes)  # type: ignore[assignment]
    return found


def _links(cluster: Cluster) -> Iterator[NodeLink]:
    """Both directions of a port are alike under collectives, so ports of a switch and cards are told once."""
    wiring = Wiring.of(cluster)
    if cluster.intra.shape == "switch":
        for gpu in range(cluster.gpus_per_node):
            yield NodeLink(name=f"port{gpu}", src=f"gpu{gpu}", dst="nvswitch", bytes_per_s=cluster.intra.bytes_per_s)
    for name, rate in wiring.rates.items():
        src, dst = _ends(wiring, name)
        yield NodeLink(name=name, src=src, dst=dst, bytes_per_s=rate)
    if cluster.inter is not None:
        share, num = (
            cluster.node_bytes_per_s / cluster.gpus_per_node,
            min(cluster.inter.num_nics, cluster.gpus_per_node),
        )
        for gpu in range(cluster.gpus_per_node):
            card = f"nic{gpu * num // cluster.gpus_per_node}"
            yield NodeLink(name=f"nic{gpu}", src=f"gpu{gpu}", dst=card, bytes_per_s=share)


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
