"""Turns a host that was read from a file into a cluster for predictions.

The source says who is joined to whom; data sheets say how fast: of the GPU, and of the usual machine of that GPU for what no
source shows (the host link's generation, the kind of network, speeds of NICs that a matrix lists without them).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from simulator.base.errors import ClusterError
from simulator.spec.cluster import Cluster
from simulator.spec.cluster import Host as TopologyHost
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.host import (
    Host,
    Island,
    Nic,
    PcieLink,
    domains,
    findings,
    islands,
    nearest_nics,
    pcie_groups,
)
from simulator.spec.cluster.hosts import pcie_bytes_per_s, pcie_kind, usual_host

# One link, one way: data sheets (github:stas00/ml-engineering network/README.md; 14 GB/s on GA102 boards); of xGMI, by the
# GPU's generation, what carries data (topologies/mi*.toml)
ONE_LINK: Final = {"nvlink2": 25e9, "nvlink3": 25e9, "nvlink4": 25e9, "nvlink5": 50e9} | {
    "cdna2": 36e9,
    "cdna3": 48e9,
    "cdna4": 57.375e9,
}
GA102_LINK: Final = 14.0625e9
_KIND: Final = {
    "volta": "nvlink2",
    "ampere": "nvlink3",
    "hopper": "nvlink4",
    "blackwell": "nvlink5",
    "cdna2": "xgmi",
    "cdna3": "xgmi",
    "cdna4": "xgmi",
}
_WITHOUT_PEERS: Final = ("rtx-4090",)  # GeForce: NVIDIA's driver offers no peer access over PCIe
_NUMBER: Final = re.compile(r"[0-9]{1,9}")


def cluster_of(host: Host, device_name: str, num_nodes: int = 1) -> Cluster:
    """`num_nodes` hosts like this one. Raises ClusterError: an unknown device, links that no cluster file can say."""
    device = Device.load(Device.resolve(device_name))
    usual = Cluster.load(usual_host(device.name))
    data: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "-", host.source.rpartition("/")[2].rpartition(".")[0] or host.source),
        "device": device,
        "num_nodes": num_nodes,
        "gpus_per_node": len(host.gpus),
        "fabric": usual.fabric.model_copy(update={"confirmed": False}),  # nobody measured the network of this host
        "sources": {"host": f"assumed: as in {usual.name}"},
    }
    data["host"] = _pcie_link(host, usual.host_link, data["sources"])
    data |= _intra(host, device, usual, data["sources"])
    data |= {"pcie": _tree(host, device, data["sources"]), "inter": _inter(host, usual, data["sources"])}
    beyond = [place["socket"] for place in (data["inter"] or {}).get("cards", ()) if "socket" in place]
    data["pcie"]["sockets"] += [[]] * (max(beyond, default=0) + 1 - len(data["pcie"]["sockets"]))
    if data["intra"]["shape"] == "pcie":
        data["host"] = None
    return Cluster.parse(data, host.source, ClusterError)


def _intra(host: Host, device: Device, usual: Cluster, sources: dict[str, str]) -> dict[str, Any]:
    """[intra] and the NVLink domain."""
    found, gpus = islands(host), len(host.gpus)
    latency, size = usual.intra.latency_s, gpus
    if not host.links_listed and gpus == usual.gpus_per_node:
        sources["intra"] = f"assumed: as in {usual.name}; the source lists no NVLinks whether there are any or not"
        return {"intra": usual.intra.model_dump(), "nvlink_domain_size": usual.nvlink_domain_size}
    if all(len(island.gpus) == 1 for island in found):
        link = _pcie_link(host, usual.host_link, {})
        if link is None:
            raise ClusterError.at(host.source, f"no link joins its GPUs, and {usual.name} has no host")
        of_source = link != usual.host_link
        sources["intra"] = (
            f"no direct links in the source; PCIe {'links of the source' if of_source else f'as in {usual.name}'}"
        )
        intra = {"kind": link.kind, "shape": "pcie", "bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}
        return {"intra": intra, "nvlink_domain_size": size}
    kind = _KIND.get(device.architecture)
    if kind is None:
        problem = f"shows direct links between its GPUs; {device.name} has none"
        raise ClusterError.at(host.source, problem, "--device with the board that is in it")
    bridged = usual.intra.kind == kind == "nvlink3" and usual.intra.bytes_per_s % ONE_LINK[kind]
    one = GA102_LINK if bridged else ONE_LINK.get(kind) or ONE_LINK[device.architecture]
    intra = {"kind": kind, "latency_s": latency, **_shape(host, found, one)}
    sources["intra"] = f"links as the source counts them, {one / 1e9:g} GB/s each one way (data sheet)"
    if intra["shape"] == "switch" and usual.nvlink_domain_size > gpus == usual.gpus_per_node:
        size = usual.nvlink_domain_size
        sources["nvlink_domain_size"] = f"assumed: as in {usual.name}; a tray does not show its rack"
    return {"intra": intra, "nvlink_domain_size": size}


def _shape(host: Host, found: tuple[Island, ...], one: float) -> dict[str, Any]:
    """shape, rate and edges. Raises ClusterError where only some GPUs meet in a switch."""
    switched = [island for island in found if island.shape == "switch"]
    most = one * max(links for island in found for links in island.links)
    if switched and len(found) > 1:
        outside = ", ".join(host.gpus[g].name for island in found if island is not switched[0] for g in island.gpus)
        problem = f"an NVSwitch joins {len(switched[0].gpus)} of {len(host.gpus)} GPUs, and not {outside}"
        raise ClusterError.at(host.source, problem, "NVLink up on every GPU, then read again")
    if switched:
        return {"shape": "switch", "bytes_per_s": most}
    pairs = {pair: path for island in found for pair, path in island.pairs.items()}
    edges = [{"src": a, "dst": b, "bytes_per_s": one * path.count} for (a, b), path in pairs.items()]
    shapes = {island.shape for island in found if len(island.gpus) > 1}
    even = len({path.count for path in pairs.values()}) == 1
    if shapes == {"mesh"} and len(found) == 1 and even:
        return {"shape": "mesh", "bytes_per_s": most}
    shape = "cube_mesh" if shapes == {"cube_mesh"} else "pairs" if shapes == {"pair"} else "mesh"
    return {"shape": shape, "bytes_per_s": most, "edges": edges}


def _tree(host: Host, device: Device, sources: dict[str, str]) -> dict[str, Any]:
    """[pcie]: NUMA nodes as sockets, PCIe switches."""
    sockets, gpus = _sockets(host), len(host.gpus)
    at = {gpu: index for index, socket in enumerate(sockets) for gpu in socket}
    groups = [list(group) for group in pcie_groups(host, "PXB") if len(group) > 1]
    switches = [group for group in groups if len({at[gpu] for gpu in group}) == 1 and len(group) < gpus]
    made: dict[str, Any] = {"cpu": host.cpu or "unknown", "sockets": sockets, "switches": switches}
    uplinks = _rates(host.gpus[gpu].uplink for group in switches for gpu in group)
    if uplinks:
        made["switch_bytes_per_s"] = min(uplinks)
    if device.name in _WITHOUT_PEERS:
        made["p2p"] = "none"
    sources["pcie"] = "NUMA nodes and PCIe switches as the source shows them"
    return made


def _inter(host: Host, usual: Cluster, sources: dict[str, str]) -> dict[str, Any] | None:
    """[inter]: the NICs that some GPU is nearest to, where they sit, and how fast they are at their PCIe links."""
    if usual.inter is None:
        return None
    inter = usual.inter.model_dump(exclude={"cards"})
    used = {name for one in nearest_nics(host) for name in one.nics}
    nics = [nic for nic in host.nics if nic.name in used]
    if not nics:
        share = len(host.gpus) / usual.gpus_per_node
        sources["inter"] = f"assumed: as in {usual.name}; the source shows no network cards"
        return {**inter, "num_nics": max(1, round(inter["num_nics"] * share))}
    rates = [nic.bytes_per_s for nic in nics if nic.bytes_per_s]
    rate, speed = min(rates, default=inter["nic_bytes_per_s"]), "speeds from the source"
    if not rates:
        speed = f"their speed assumed: as in {usual.name}"
    narrow = min(_rates(nic.pcie for nic in nics), default=rate)
    if narrow < rate:
        rate, speed = narrow, f"{speed}, held to their PCIe links"
    sources["inter"] = f"{len(nics)} cards nearest to some GPU, {speed}; kind and latency as in {usual.name}"
    inter |= {"num_nics": len(nics), "nic_bytes_per_s": rate}
    if "hidden" in {finding.kind for finding in findings(host)}:
        sources["cards"] = "assumed: beside the GPUs in even parts; a virtual machine hides where they sit"
        return inter
    sources["cards"] = "where the source shows them: beside GPUs within PXB, else on a CPU"
    return inter | {"cards": [_place(host, nic) for nic in nics]}


def _rates(links: Iterable[PcieLink | None]) -> list[float]:
    """Data-sheet rates of the devices that the source names."""
    rates = (pcie_bytes_per_s(link.gt_per_s, link.lanes) for link in links if link is not None)
    return [rate for rate in rates if rate is not None]


def _pcie_link(host: Host, usual: TopologyHost | None, sources: dict[str, str]) -> TopologyHost | None:
    """[host]: the GPUs' PCIe links as the source states them, the slowest of them; else as in the usual machine."""
    rates = _rates(gpu.pcie for gpu in host.gpus)
    if usual is None or usual.kind == "c2c" or len(rates) < len(host.gpus):
        return usual
    slowest = min((gpu.pcie for gpu in host.gpus if gpu.pcie), key=lambda link: link.gt_per_s * link.lanes)
    sources["host"] = f"PCIe links of the source ({slowest}), data sheet"
    kind: Any = pcie_kind(min(rates), slowest.lanes)
    return usual.model_copy(update={"kind": kind, "bytes_per_s": min(rates)})


def _place(host: Host, nic: Nic) -> dict[str, Any]:
    """A NIC's position: beside the GPUs within PXB; else on the CPU of its NUMA node, or of GPUs within PHB."""
    paths = {i: path for i, gpu in enumerate(host.gpus) if (path := host.path(gpu.name, nic.name)) is not None}
    beside = [i for i, path in paths.items() if path.kind in ("PIX", "PXB")]
    if beside:
        return {"gpus": beside}
    found = _sockets(host)
    same = [i for i, path in paths.items() if path.kind in ("PHB", "NODE")]
    numas = [host.gpus[gpus[0]].numa if gpus else "" for gpus in found]
    by_gpu = next((number for number, gpus in enumerate(found) if set(gpus) & set(same)), None)
    own = numas.index(nic.numa) if nic.numa and nic.numa in numas else len(found)
    return {"socket": own if by_gpu is None else by_gpu}


def _sockets(host: Host) -> list[list[int]]:
    """GPUs by NUMA node, or by the PCIe groups within NODE where NUMA is unknown."""
    numas = [gpu.numa for gpu in host.gpus]
    if all(map(_NUMBER.fullmatch, numas)):
        return [[i for i, numa in enumerate(numas) if numa == one] for one in dict.fromkeys(numas)]
    sockets = [list(group) for group in pcie_groups(host, "NODE")]
    if len(sockets) == len(numas) and len(domains(host)) == 1:
        return [list(range(len(numas)))]  # cables hide the paths below them: nothing says who sits where
    return sockets
