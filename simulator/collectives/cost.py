"""Bills: what one collective of a group costs each of its ranks, on two classes of link.

"intra" is a GPU's port into its node, one way; "pcie" its link to the host, where groups that its cables do not join go
that way (ports.py). "inter" is a GPU's even share of its node's NICs: if every GPU of a node
runs a collective of the same axis at once, each has exactly its share, and the groups contend as they do in reality.
Capacities are what the ring reaches with whole chunks; bytes of other algorithms are weighted by how far they are from
that, so that one capacity serves all and concurrent collectives share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from simulator.collective_curves import (
    PORT_TOLERANCE,
    LinkCurves,
    Mode,
    NetworkCurves,
    PortCurves,
    default_curves,
    family_of,
    pipeline_fill_s,
)
from simulator.collectives.ports import port_of, ports_of
from simulator.collectives.tuning import Fabric, Group, pick
from simulator.collectives.volumes import KINDS, POINT_TO_POINT, Algorithm, Kind, Volume, volume
from simulator.errors import ClusterError, Fault, PlanError
from simulator.program import Bill, Number

if TYPE_CHECKING:
    from simulator.mesh import GroupShape
    from simulator.topology import Cluster

_MOST_BILLS = 65536  # a search prices many plans; a bill is quickly made again
_NVLS_SINCE = (2, 17)  # first NCCL release with NVLink SHARP


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What NCCL picks, and how long the call takes alone."""

    algorithm: Algorithm
    protocol: str
    time_s: Number


@dataclass(frozen=True, slots=True)
class Links:
    """Numbers of a cluster that bills use, hashable: part of the memo's key.

    port_link, port_kind, port_bytes_per_s, detour: the port that a group sees (ports.Port). islands: GPUs that share one
    NVLink domain.
    """

    architecture: str
    port_kind: str
    port_bytes_per_s: float
    port_link: str
    detour: Fraction
    network_kind: str
    nic_bytes_per_s: float
    num_nics: int
    oversubscription: float
    nodes_per_leaf: int
    gpus_per_node: int
    islands: int

    @classmethod
    def of(cls, cluster: Cluster, shape: GroupShape | None = None, kind: str = "all_reduce") -> Links:
        """The links of `cluster` as `kind` in a group sees them; without a group, as one GPU does."""
        port, network, fabric = port_of(cluster, shape, kind), cluster.inter, cluster.fabric
        return cls(
            cluster.device.architecture,
            port.kind,
            port.bytes_per_s,
            port.link,
            port.detour,
            network.kind if network else "",
            network.nic_bytes_per_s if network else 0.0,
            network.num_nics if network else 0,
            fabric.oversubscription,
            fabric.nodes_per_leaf,
            cluster.gpus_per_node,
            max(cluster.nvlink_domain_size, cluster.gpus_per_node),
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """A group in units that matter: ranks, the NVLink domains they lie in, and how many GPUs of each are busy."""

    num_ranks: int
    num_domains: int
    busy_per_domain: int

    @classmethod
    def of(cls, shape: GroupShape, links: Links) -> Placement:
        """`shape` on `links`; a rack-wide NVLink domain is one place whatever its trays are called."""
        trays = max(1, links.islands // links.gpus_per_node)
        if shape.num_nodes == 1 or (trays > 1 and not shape.spans_domain):
            domains = 1
        else:
            domains = max(2, -(-shape.num_nodes // trays))
        ranks = -(-shape.num_ranks // domains)
        return cls(shape.num_ranks, domains, min(links.islands, ranks * max(1, shape.num_groups_per_node)))

    @property
    def ranks_per_domain(self) -> int:
        return -(-self.num_ranks // self.num_domains)


def bill(
    kind: str,
    size_bytes: int,
    shape: GroupShape,
    cluster: Cluster,
    *,
    curves: LinkCurves | None = None,
    nccl: str = "",
    allowed: tuple[str, ...] = (),
) -> Bill:
    """What one collective costs each rank: bytes over "intra" and "inter", and seconds before they flow.

    size_bytes: of the full tensor, nccl-tests' convention (all-gather and reduce-scatter: n times a shard; all-to-all:
    what one rank sends in total; send_recv: what one rank sends). nccl: version, empty for a current one.
    allowed: algorithms or protocols to choose from, as NCCL_ALGO and NCCL_PROTO restrict; empty for all.
    Raises PlanError for an unknown kind, CalibrationError where a curve is missing.
    """
    links = Links.of(cluster, shape, checked_kind(kind))
    call = Call(checked_kind(kind), size_bytes, Placement.of(shape, links), links, nccl, allowed)
    return _memo(curves or default_curves()).bill(call)


def choose(
    kind: str,
    size_bytes: int,
    shape: GroupShape,
    cluster: Cluster,
    curves: LinkCurves | None = None,
    *,
    nccl: str = "",
    allowed: tuple[str, ...] = (),
) -> Choice:
    """The algorithm and protocol that NCCL picks, and the time of the call alone (see `bill` for arguments)."""
    links, curves = Links.of(cluster, shape, checked_kind(kind)), curves or default_curves()
    call = Call(checked_kind(kind), size_bytes, Placement.of(shape, links), links, nccl, allowed)
    algorithm, protocol = algorithm_of(call, curves)
    return Choice(algorithm=algorithm, protocol=protocol, time_s=call_s(call, curves))


def collective_s(
    kind: str,
    size_bytes: int,
    shape: GroupShape,
    cluster: Cluster,
    curves: LinkCurves | None = None,
    *,
    nccl: str = "",
) -> Number:
    """Seconds of one collective alone on its links."""
    return choose(kind, size_bytes, shape, cluster, curves, nccl=nccl).time_s


def link_capacities(cluster: Cluster, curves: LinkCurves | None = None, *, suffix: str = "") -> dict[str, Number]:
    """Achievable bytes/s of the links that bills of this cluster name.

    "intra": one GPU's port; "pcie": its link to the host, where groups may be bound by it; "inter": its share of the
    node's NICs.
    suffix: appended to the names where every rank or node has links of its own (see `renamed`).
    """
    memo, links = _memo(curves or default_curves()), Links.of(cluster)
    capacities: dict[str, Number] = {}
    for port in ports_of(cluster):
        seen = replace(links, port_kind=port.kind, port_bytes_per_s=port.bytes_per_s, port_link=port.link)
        capacities |= memo.capacity(seen)
    return {f"{name}{suffix}": value for name, value in capacities.items()}


def renamed(bill: Bill, suffix: str) -> Bill:
    """The same bill on links named with `suffix`."""
    names = {f"{name}{suffix}": value for name, value in bill.link_bytes.items()}
    return replace(bill, link_bytes=names)


@dataclass(frozen=True, slots=True)
class Call:
    """Everything a bill depends on but the curves: the memo's key."""

    kind: Kind
    size_bytes: int
    place: Placement
    links: Links
    nccl: str
    allowed: tuple[str, ...]


def call_s(call: Call, curves: LinkCurves) -> Number:
    """Seconds of one call alone on its links."""
    return _memo(curves).time_s(call)


class _Memo:
    """Bills and capacities of one set of curves, kept with it: hashing the curves would cost more than a bill."""

    def __init__(self, curves: LinkCurves) -> None:
        self.curves = curves
        self.bills: dict[Call, Bill] = {}
        self.capacities: dict[Links, dict[str, Number]] = {}

    def bill(self, call: Call) -> Bill:
        found = self.bills.get(call)
        if found is None:
            if len(self.bills) >= _MOST_BILLS:
                self.bills.clear()
            found = self.bills[call] = _bill(call, self.curves)
        return found

    def capacity(self, links: Links) -> Mapping[str, Number]:
        found = self.capacities.get(links)
        if found is None:
            found = self.capacities[links] = _capacities(links, self.curves)
        return found

    def time_s(self, call: Call) -> Number:
        found, capacities = self.bill(call), self.capacity(call.links)
        return found.latency_s + max((b / capacities[k] for k, b in found.link_bytes.items()), default=0)


_memos: dict[int, _Memo] = {}


def _memo(curves: LinkCurves) -> _Memo:
    found = _memos.get(id(curves))
    if found is None:
        found = _memos[id(curves)] = _Memo(curves)  # the memo holds the curves, so the id stays theirs
    return found


def _capacities(links: Links, curves: LinkCurves) -> dict[str, Number]:
    share = nic_share(links)
    if curves.ideal_links:
        return _drop_zero({links.port_link: Fraction(links.port_bytes_per_s), "inter": share})
    port = curves.port(links.port_kind, links.port_bytes_per_s)
    capacities: dict[str, Number] = {links.port_link: links.port_bytes_per_s * port.mode("ring", "simple").efficiency}
    if share:
        network = curves.network(links.network_kind)
        capacities["inter"] = float(share) * network.mode("ring", "simple").efficiency
    return capacities


def nic_share(links: Links) -> Fraction:
    """One GPU's even share of its node's NICs, data sheet."""
    return Fraction(links.nic_bytes_per_s) * links.num_nics / links.gpus_per_node


def algorithm_of(call: Call, curves: LinkCurves) -> tuple[Algorithm, str]:
    """Ideal links run rings (the closed forms); real ones what NCCL picks."""
    if curves.ideal_links:
        return POINT_TO_POINT.get(call.kind, "ring"), "simple"
    if curves.library == "gloo":
        return POINT_TO_POINT.get(call.kind, "ring"), call.kind
    links = call.links
    node_gb_per_s = float(nic_share(links)) * links.islands / 1e9
    # NVSwitch reduces for Hopper and later; an older NCCL cannot ask it to
    architecture = "ampere" if _without_nvls(call.nccl) else links.architecture
    port_gb_per_s = float(links.port_bytes_per_s / links.detour) / 1e9
    fabric = Fabric(family_of(links.port_kind), architecture, port_gb_per_s, node_gb_per_s)
    return pick(call.kind, call.size_bytes, Group(call.place.num_ranks, call.place.num_domains), fabric, call.allowed)


def _bill(call: Call, curves: LinkCurves) -> Bill:
    """Volume × size over each link, weighted by the mode's distance from the ring, and the delay before it."""
    if call.place.num_domains > 1 and not call.links.num_nics:
        problem = f"a {call.kind} spans {call.place.num_domains} nodes that no network joins"
        raise ClusterError(Fault(place="cluster: inter", problem=problem, remedy="give `inter`, or one node"))
    algorithm, protocol = algorithm_of(call, curves)
    form = volume(call.kind, algorithm, call.place.num_ranks, call.place.num_domains)
    port_bytes = form.port * call.size_bytes * call.links.detour
    nic_bytes = form.nic * call.size_bytes * nic_part(call) * _spine(algorithm, call)
    if curves.ideal_links:
        return Bill(
            latency_s=Fraction(0), link_bytes=_drop_zero({call.links.port_link: port_bytes, "inter": nic_bytes})
        )
    port = curves.port(call.links.port_kind, call.links.port_bytes_per_s)
    network = curves.network(call.links.network_kind) if call.place.num_domains > 1 else None
    weighted: dict[str, Number] = {
        call.links.port_link: float(port_bytes) * port_weight(port, algorithm, protocol, form)
    }
    if network is not None:
        mode = network.mode(algorithm, protocol)
        weighted["inter"] = float(nic_bytes) * network.mode("ring", "simple").efficiency / mode.efficiency
    capacities = _memo(curves).capacity(call.links)
    transfer_s = max((float(b / capacities[k]) for k, b in weighted.items() if b), default=0.0)
    return Bill(
        latency_s=latency_s(port, network, algorithm, protocol, form, transfer_s), link_bytes=_drop_zero(weighted)
    )


def port_weight(port: PortCurves, algorithm: Algorithm, protocol: str, form: Volume) -> float:
    """Ring-equivalent bytes per byte on a port: the mode's efficiency, and what a loop costs beyond its steps."""
    mode = port.mode(algorithm, protocol)
    return (
        port.mode("ring", "simple").efficiency
        / mode.efficiency
        * (1 + mode.drain / form.loop_steps if form.loop_steps else 1)
    )


def latency_s(
    port: PortCurves,
    network: NetworkCurves | None,
    algorithm: Algorithm,
    protocol: str,
    form: Volume,
    transfer_s: float,
) -> float:
    """Launch, steps and pipeline fill. Across nodes the network's fill decides: its chunks are the slower ones."""
    local = port.mode(algorithm, protocol)
    if network is None:
        return local.base_s + form.local_steps * local.hop_s + pipeline_fill_s(local, transfer_s)
    far: Mode = network.mode(algorithm, protocol)
    steps = form.local_steps * local.hop_s + form.network_steps * far.hop_s
    return local.base_s + far.base_s + steps + pipeline_fill_s(far, transfer_s)


def nic_part(call: Call) -> Fraction:
    """One rank's part of its domain's NIC traffic, weighted to bytes over a GPU's even share of the NICs.

    A node with idle GPUs leaves their share to the busy ones, but a GPU cannot use more than the NICs on its side
    (one at least): with one busy GPU of eight and eight NICs it has its own share only.
    """
    links, place = call.links, call.place
    if not links.num_nics:
        return Fraction(0)
    even = Fraction(links.num_nics, links.gpus_per_node)
    usable = min(even * links.islands / place.busy_per_domain, max(Fraction(1), even))
    return even / max(usable, even) / place.ranks_per_domain


def _spine(algorithm: Algorithm, call: Call) -> Fraction:
    """Slowdown by uplinks that are slower than the cards below them.

    A ring (or a tree over consecutive nodes) leaves a leaf of L nodes once, with one node's traffic: it feels an
    oversubscription above L only. Of an all-to-all's traffic (N−L)/(N−1) leaves the leaf of its sender.
    """
    leaf, nodes = call.links.nodes_per_leaf, call.place.num_domains
    if nodes <= leaf:
        return Fraction(1)
    over = Fraction(call.links.oversubscription)
    crossing = Fraction(nodes - leaf, nodes - 1) if algorithm == "p2p" else Fraction(1, leaf)
    return max(Fraction(1), over * crossing)


def _drop_zero(link_bytes: dict[str, Number]) -> dict[str, Number]:
    return {name: value for name, value in link_bytes.items() if value}


def _without_nvls(nccl: str) -> bool:
    parts = tuple(int(p) for p in nccl.split(".")[:2] if p.isdigit())
    return bool(parts) and parts < _NVLS_SINCE


def checked_kind(kind: str) -> Kind:
    """`kind` if it is one. Raises PlanError with the legal ones."""
    found = next((k for k in KINDS if k == kind), None)
    if found is None:
        raise PlanError(Fault(place="collective", problem=f"no kind {kind!r}", remedy=f"one of {', '.join(KINDS)}"))
    return found


def calibrated(links: Links, curves: LinkCurves) -> bool:
    """True where the port itself was measured, not a relative scaled by data-sheet speed."""
    port = curves.port(links.port_kind, links.port_bytes_per_s)
    ratio = links.port_bytes_per_s / port.bytes_per_s
    return port.name == links.port_kind and 1 / PORT_TOLERANCE <= ratio <= PORT_TOLERANCE
