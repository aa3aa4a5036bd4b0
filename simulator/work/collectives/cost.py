"""Costs: what one collective of a group costs each of its ranks, on two classes of link.

"intra" is a GPU's port into its node, one way; "pcie" its link to the host, where groups that its cables do not join go that way
(ports.py). "inter" is a GPU's even share of its node's NICs: if all GPUs of a node run a collective of one axis at once, each has its
share. Capacities are what the ring reaches with whole chunks; bytes of other algorithms are weighted by how far they are from that, so
that one capacity serves all and concurrent collectives share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from simulator.base.errors import ClusterError
from simulator.base.remembered import Same
from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration.collective_curves import (
    PORT_TOLERANCE,
    LearnedLinks,
    LinkCurves,
    NetworkCurves,
    PortCurves,
    default_curves,
)
from simulator.spec.cluster import Cluster
from simulator.spec.software.nccl import Nccl
from simulator.spec.software.nccl.environment import NEWEST
from simulator.work.collectives.call import (
    Call,
    Links,
    Placement,
    Stated,
    network_of,
    nic_part,
    nic_share,
    spine,
    with_peer_access,
)
from simulator.work.collectives.follow import Follow, Parts, follow_of
from simulator.work.collectives.latency import chain_fill_s, latency_s, port_weight
from simulator.work.collectives.measured_fabric import measured_fabric, ranks_heard, stated_for
from simulator.work.collectives.ports import ports_of
from simulator.work.collectives.proxy_messages import crowd, fabric_of, group_of, messages_of
from simulator.work.collectives.settings import (
    buffer_weight,
    channel_weight,
    channels_of,
    nic_channel_weight,
    send_ceiling_bytes_per_s,
)
from simulator.work.collectives.stated import of_stated
from simulator.work.collectives.tuning import Pick, pick
from simulator.work.collectives.volumes import POINT_TO_POINT, Algorithm, Volume, checked_kind, minimum, volume
from simulator.work.program import CollectiveCost, Number

_MOST_RECENT = 4096  # of calls as they are asked for, which keep their clusters
_MOST_COSTS = 65536  # a search prices many plans; a cost is quickly made again


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What NCCL picks, how long the call takes alone, and on how many channels (None where that is not calibrated)."""

    algorithm: Algorithm
    protocol: str
    time_s: Number
    channels: int | None = None


def collective_cost(
    kind: str,
    size_bytes: int,
    shape: GroupShape,
    cluster: Cluster,
    *,
    curves: LinkCurves | None = None,
    nccl: Nccl | None = None,
) -> CollectiveCost:
    """What one collective costs each rank: bytes over "intra" and "inter", and seconds before they flow.

    size_bytes: of the full tensor, nccl-tests' convention (all-gather and reduce-scatter: n times a shard; all-to-all:
    what one rank sends in total; send_recv: what one rank sends). nccl: None for a current one with nothing set.
    Raises PlanError for an unknown kind or where the settings leave nothing to run, CalibrationError where a curve is
    missing.
    """
    return _collective_cost(kind, size_bytes, shape, Same(cluster), Same(curves or default_curves()), nccl)


@lru_cache(_MOST_RECENT)
def _collective_cost(
    kind: str, size_bytes: int, shape: GroupShape, cluster: Same, curves: Same, nccl: Nccl | None
) -> CollectiveCost:
    return _cost(call_of(kind, size_bytes, shape, cluster.one, nccl), curves)


def call_of(kind: str, size_bytes: int, shape: GroupShape, cluster: Cluster, nccl: Nccl | None = None) -> Call:
    """The call in the cost model's units. Raises PlanError for an unknown kind."""
    nccl = nccl or Nccl()
    cluster = with_peer_access(cluster, nccl)
    links = Links.of(cluster, shape, checked_kind(kind), nccl)
    if cluster.fabric.measured:
        links = replace(links, stated=stated_for(cluster, checked_kind(kind), nccl, _seconds))
    return Call(checked_kind(kind), size_bytes, Placement.of(shape, links), links, nccl)


def rank_wait_s(cluster: Cluster, nccl: Nccl | None = None) -> float:
    """Seconds that the host waits for a rank of another node before it issues a collective (see measured_fabric.py)."""
    fabric = cluster.fabric
    return measured_fabric(cluster, nccl or Nccl(), _seconds).rank_s if fabric.measured else fabric.call_rank_s or 0.0


def _seconds(one: Stated, nccl: Nccl) -> float:
    """By the shipped curves: what is taken apart are factors, and no calibration moves a number across."""
    return _model(of_stated(one, nccl), default_curves()).time_s


def choose(
    kind: str,
    size_bytes: int,
    shape: GroupShape,
    cluster: Cluster,
    curves: LinkCurves | None = None,
    *,
    nccl: Nccl | None = None,
) -> Choice:
    """The algorithm and protocol that NCCL picks, and the time of the call alone (see `collective_cost` for arguments)."""
    curves = curves or default_curves()
    call = call_of(kind, size_bytes, shape, cluster, nccl)
    chosen = choice_of(call, curves)
    return Choice(
        algorithm=chosen.algorithm,
        protocol=chosen.protocol,
        time_s=max(
            call_s(call, curves), rank_wait_s(cluster, nccl) * ranks_heard(shape.num_ranks, shape.ranks_per_node)
        ),
        channels=channels_of(call, chosen, curves),
    )


def collective_s(
    kind: str,
    size_bytes: int,
    shape: GroupShape,
    cluster: Cluster,
    curves: LinkCurves | None = None,
    *,
    nccl: Nccl | None = None,
) -> Number:
    """Seconds of one collective alone on its links."""
    return choose(kind, size_bytes, shape, cluster, curves, nccl=nccl).time_s


def link_capacities(cluster: Cluster, curves: LinkCurves | None = None, *, suffix: str = "") -> dict[str, Number]:
    """Achievable bytes/s of the links that costs of this cluster name (see above).

    suffix: appended to the names where every rank or node has links of its own (see `renamed`).
    """
    by, links = Same(curves or default_curves()), Links.of(cluster)
    capacities: dict[str, Number] = {}
    for port in ports_of(cluster):
        seen = replace(links, port_kind=port.kind, port_bytes_per_s=port.bytes_per_s, port_link=port.link)
        capacities |= _capacities(seen, by)
    return {f"{name}{suffix}": value for name, value in capacities.items()}


def renamed(cost: CollectiveCost, suffix: str) -> CollectiveCost:
    """The same cost on links named with `suffix`."""
    names = {f"{name}{suffix}": value for name, value in cost.link_bytes.items()}
    return replace(cost, link_bytes=names) if suffix else cost


def call_s(call: Call, curves: LinkCurves) -> Number:
    """Seconds of one call alone on its links."""
    by = Same(curves)
    cost, capacities = _cost(call, by), _capacities(call.links, by)
    return cost.latency_s + max((b / capacities[k] for k, b in cost.link_bytes.items()), default=0)


@lru_cache(_MOST_COSTS)
def _capacities(links: Links, by: Same) -> Mapping[str, Number]:
    """What rings with whole chunks reach: the measure that other modes' bytes are weighted by.

    by: the curves, by which object they are: hashing them would cost more than the call.
    """
    curves: LinkCurves = by.one
    share = nic_share(links)
    if curves.ideal_links:
        return _drop_zero({links.port_link: Fraction(links.port_bytes_per_s), "inter": share})
    port = curves.port(links.port_kind, links.port_bytes_per_s, architecture=links.architecture)
    capacities: dict[str, Number] = {links.port_link: links.port_bytes_per_s * port.mode("ring", "simple").efficiency}
    if share:
        network = curves.network(network_of(links), frozenset(), NEWEST)
        ring = network.mode("ring", "simple")
        capacities["inter"] = (
            float(share) * ring.efficiency * network.of_the_wire(ring, "simple", links.nic_bytes_per_s)
        )
    return capacities


def choice_of(call: Call, curves: LinkCurves) -> Pick:
    """Ideal links run rings (the closed forms); gloo has one way for each kind; real GPUs run what NCCL picks."""
    if curves.ideal_links:
        return Pick(POINT_TO_POINT.get(call.kind, "ring"), "simple")
    if curves.library == "gloo":
        return Pick(POINT_TO_POINT.get(call.kind, "ring"), "tcp")
    return pick(call.kind, call.size_bytes, group_of(call), fabric_of(call), call.nccl)


def algorithm_of(call: Call, curves: LinkCurves) -> tuple[Algorithm, str]:
    """The algorithm, and the protocol or (gloo) the kind that its calibrated mode is named after."""
    chosen = choice_of(call, curves)
    return chosen.algorithm, call.kind if curves.library == "gloo" else chosen.protocol


def form_of(call: Call, algorithm: Algorithm) -> Volume:
    """The closed form."""
    return volume(call.kind, algorithm, call.place.num_ranks, call.place.num_domains)


@lru_cache(_MOST_COSTS)
def _cost(call: Call, by: Same) -> CollectiveCost:
    """Volume × size over each link, weighted by the mode's distance from the ring, and the delay before it. by: the curves."""
    curves: LinkCurves = by.one
    if call.place.num_domains > 1 and not call.links.num_nics:
        problem = f"a {call.kind} spans {call.place.num_domains} nodes that no network joins"
        raise ClusterError.at("cluster: inter", problem, "give `inter`, or one node")
    near = call.links.port_link
    if curves.ideal_links:
        algorithm = algorithm_of(call, curves)[0]
        form = form_of(call, algorithm)
        port_bytes = form.port * call.size_bytes * call.links.detour
        nic_bytes = form.nic * call.size_bytes * nic_part(call) * spine(algorithm, call)
        return CollectiveCost(latency_s=Fraction(0), link_bytes=_drop_zero({near: port_bytes, "inter": nic_bytes}))
    parts, capacities = parts_of(call, curves), _capacities(call.links, by)
    weighted: dict[str, Number] = {near: parts.near_s * float(capacities[near])}
    if call.place.num_domains > 1:
        weighted["inter"] = parts.far_s * float(capacities["inter"])
    transfer_s = max((float(b / capacities[k]) for k, b in weighted.items() if b), default=0.0)
    return CollectiveCost(latency_s=parts.wait_s(transfer_s), link_bytes=_drop_zero(weighted))


def parts_of(call: Call, curves: LinkCurves) -> Parts:
    """What the call takes: by the model, or as its fabric was measured."""
    parts = _model(call, curves)
    if call.links.stated:
        parts, _ = _followed(parts, call, curves)
    if curves.learned is not None:
        parts = _learned(parts, call, curves.learned)
    return _what_if(parts, call)


def _what_if(parts: Parts, call: Call) -> Parts:
    """The call on a network that is quicker or slower than it is."""
    speed, wait = call.links.network_speed, call.links.network_wait
    if (speed, wait) == (1, 1) or call.place.num_domains == 1:
        return parts
    return replace(parts, far_s=parts.far_s / speed, wait_s=lambda flow_s: wait * parts.wait_s(flow_s))


def _learned(parts: Parts, call: Call, learned: LearnedLinks) -> Parts:
    """The call as a user's own steps say that it takes."""
    far_s, wait_s = parts.far_s, parts.wait_s
    if call.place.num_domains > 1:
        far_s *= learned.between(call.place.num_domains)
    return replace(
        parts, near_s=parts.near_s * learned.node, far_s=far_s, wait_s=lambda flow_s: learned.latency * wait_s(flow_s)
    )


def follows(call: Call, curves: LinkCurves) -> Follow | None:
    """What the call follows where its own class of links was measured; None where it is the model's alone."""
    return _followed(_model(call, curves), call, curves)[1] if call.links.stated and not curves.ideal_links else None


def _followed(parts: Parts, call: Call, curves: LinkCurves) -> tuple[Parts, Follow | None]:
    """A call over nodes follows what was measured between them; else its part inside them what was measured there."""
    several = call.place.num_domains > 1
    far = follow_of(call, lambda one: _model(one, curves), far=True) if several else None
    if far is not None:
        return far.of(parts), far
    near = follow_of(call, lambda one: _model(one, curves), far=False)
    if near is None:
        return parts, None
    return (
        (replace(parts, near_s=near.of(replace(parts, far_s=0.0)).near_s), None) if several else (near.of(parts), near)
    )


def _model(call: Call, curves: LinkCurves) -> Parts:
    """A call apart, by the calibrated curves."""
    chosen, (algorithm, protocol) = choice_of(call, curves), algorithm_of(call, curves)
    form = form_of(call, algorithm)
    port, network = port_curves(call, curves), network_curves(call, curves) if call.place.num_domains > 1 else None
    port_bytes = form.port * call.size_bytes * call.links.detour
    near_s = float(port_bytes) / call.port.bytes_per_s * port_weight(port, algorithm, protocol, form)
    channels, mode = channels_of(call, chosen, curves), port.mode(algorithm, protocol)
    near_s *= channel_weight(call, chosen, port, curves)
    near_s *= buffer_weight(call, protocol, mode, call.port.bytes_per_s, channels)
    far_s = 0.0
    if network is not None:
        nic_bytes = form.nic * call.size_bytes * nic_part(call) * spine(algorithm, call)
        mode, share = network.mode(algorithm, protocol), float(nic_share(call.links))
        share *= network.of_the_wire(mode, protocol, call.links.nic_bytes_per_s)
        far_s = float(nic_bytes) / share / mode.efficiency * nic_channel_weight(call, chosen, port, curves, share)
        far_s *= 1 + mode.crowding * crowd(call)
        far_s = max(
            far_s, float(form.nic) * call.size_bytes / call.place.ranks_per_domain / send_ceiling_bytes_per_s(call)
        )
        far_s *= buffer_weight(call, protocol, mode, share * call.place.ranks_per_domain, channels)
    messages, chain_s = messages_of(call, network, algorithm, protocol), chain_fill_s(call, protocol)

    def wait_s(flow_s: float) -> float:
        return chain_s + latency_s(port, network, algorithm, protocol, form, flow_s, messages)

    return Parts(near_s, far_s, _wire_s(call), wait_s, form.local_steps + form.network_steps)


def _wire_s(call: Call) -> float:
    """What the data sheets' links take at least, by any algorithm."""
    least = minimum(call.kind, call.place.num_ranks, call.place.num_domains)
    near_s = float(least.port * call.size_bytes) / call.links.port_bytes_per_s
    share = float(nic_share(call.links))
    return max(near_s, float(least.nic * call.size_bytes * nic_part(call)) / share if share else 0.0)


def port_curves(call: Call, curves: LinkCurves) -> PortCurves:
    """The calibrated port that the call uses, or its nearest relative."""
    return curves.port(call.port.kind, call.port.bytes_per_s, call.port.way, call.links.architecture)


def network_curves(call: Call, curves: LinkCurves) -> NetworkCurves:
    """The calibrated network between the call's nodes."""
    return curves.network(call.network, call.traits, call.nccl.release)


def _drop_zero(link_bytes: dict[str, Number]) -> dict[str, Number]:
    return {name: value for name, value in link_bytes.items() if value}


def calibrated(links: Links, curves: LinkCurves) -> bool:
    """True where the port itself was measured, not a relative scaled by data-sheet speed."""
    port = curves.port(links.port_kind, links.port_bytes_per_s, architecture=links.architecture)
    ratio = links.port_bytes_per_s / port.bytes_per_s
    return port.stands_for(links.port_kind) and 1 / PORT_TOLERANCE <= ratio <= PORT_TOLERANCE
