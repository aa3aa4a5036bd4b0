"""The typical machine of a GPU, for tables that state little more than the GPU. The rules are in the cluster file's docs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

from simulator.base.errors import ClusterError, Fault
from simulator.base.presets import TOPOLOGIES, facts
from simulator.base.schema import nearest, read_toml
from simulator.base.units import parse_bytes_per_s

# PCIe links of 16 lanes, one way, by transfer rate in GT/s (the same table; 1, 2, 3, 6: lanes × rate × coding). With the
# kind that stands for each.
_BY_RATE: Final = {
    2.5: (4e9, "pcie3"),
    5.0: (8e9, "pcie3"),
    8.0: (15.75e9, "pcie3"),
    16.0: (31e9, "pcie4"),
    32.0: (63e9, "pcie5"),
    64.0: (121e9, "pcie5"),
}
_HOSTS: Final = facts(__file__, "hosts")
_USUAL: Final[dict[str, str]] = _HOSTS["usual"]
_ONE_WAY: Final[dict[str, float]] = _HOSTS["one_way"]
_COUNTED: Final = re.compile(r"(\d+)\s*[x×*]\s*([^\s/.][^/]*?)(?<!\.toml)")
_MOST_GPUS: Final = 10_000_000
# bytes/s of one of several: EDR InfiniBand and 100 Gb/s Ethernet, in nodes of GPUs since 2016
_SLOWEST_NIC: Final = 100e9 / 8
_MOST_SLOTS: Final = 8
_WIRED: Final = ("mesh", "cube_mesh", "pairs")  # shapes that a larger node does not simply continue


def pcie_bytes_per_s(gt_per_s: float, lanes: int) -> float | None:
    """Data sheet of a PCIe link, one way; None for a rate that no generation has."""
    return _BY_RATE[gt_per_s][0] * lanes / 16 if gt_per_s in _BY_RATE else None


def pcie_kind(bytes_per_s: float, lanes: int = 16) -> str:
    """The generation whose link of so many lanes is nearest."""
    return min(_BY_RATE.values(), key=lambda one: abs(one[0] * lanes / 16 - bytes_per_s))[1]


@cache
def usual_links(device: str) -> tuple[str, float] | None:
    """(kind, bytes/s one way of all links of a GPU) of the machine a device usually sits in.

    None where no rule knows the machine, or its GPUs share no switch.
    """
    if device not in _USUAL:
        return None
    intra = read_toml(TOPOLOGIES / f"{_USUAL[device]}.toml", ClusterError)["intra"]
    return (intra["kind"], parse_bytes_per_s(intra["bytes_per_s"])) if intra["shape"] == "switch" else None


def usual_host(device: str) -> str:
    """The preset a device usually sits in. Raises ClusterError if no rule knows it."""
    if device in _USUAL:
        return _USUAL[device]
    raise ClusterError.at("device", f"no rule says which machine holds {device!r}", nearest(device, _USUAL))


def counted(text: str) -> tuple[int, str] | None:
    """(GPUs, name) of `8xh100`; None for anything else. Raises ClusterError for a number that no cluster has."""
    found = _COUNTED.fullmatch(text.strip())
    if found is None:
        return None
    if not 0 < int(found[1][:12]) <= _MOST_GPUS or len(found[1]) > 12:
        raise ClusterError.at("cluster", f"{found[1][:40]} GPUs", "for example 8xh100")
    return int(found[1]), found[2]


def adapt(
    data: dict[str, Any],
    num_devices: int,
    gpus_per_node: int | None,
    intra_kind: str | None,
    inter_bytes_per_s_per_node: float | None,
) -> dict[str, Any]:
    """A preset's data with what the table states put in. Raises ClusterError with every fault."""
    usual = int(data["gpus_per_node"])
    gpus = min(
        gpus_per_node or (_together(num_devices, usual) if data["intra"]["shape"] == "pcie" else usual), num_devices
    )
    faults = [*_size_faults(num_devices, gpus), *_kind_faults(intra_kind)]
    if gpus > usual and intra_kind is None and data["intra"]["shape"] in _WIRED:
        problem = f"{data['name']} wires {usual} GPUs to each other, not {gpus}"
        faults.append(Fault("gpus_per_node", problem, f"at most {usual}, or another intra_kind"))
    ClusterError.raise_for(faults)
    data |= {"num_nodes": num_devices // gpus} | first_gpus(data, gpus, intra_kind)
    data["inter"] = _inter(data["inter"], inter_bytes_per_s_per_node, gpus / usual)
    data["fabric"] |= {"confirmed": False}  # of the GPU, not of the network that joins it
    data["sources"] |= {"assumed": f"{data['name']}: the usual machine of this GPU, with what was stated put in"}
    return data


def _together(num_devices: int, usual: int) -> int:
    """GPUs in PCIe slots of one machine: as many as fill nodes evenly; slices of GPUs where it has more than slots."""
    if usual > _MOST_SLOTS:
        return usual
    return next((gpus for gpus in range(_MOST_SLOTS, 4, -1) if num_devices % gpus == 0), _MOST_SLOTS // 2)


def first_gpus(data: Mapping[str, Any], gpus: int, intra_kind: str | None = None) -> dict[str, Any]:
    """What changes of a cluster's data where a node has `gpus` GPUs: the first ones of as many as there were, as joined."""
    usual, domain = data["gpus_per_node"], data["nvlink_domain_size"]
    return {
        "gpus_per_node": gpus,
        "nvlink_domain_size": gpus if domain == usual else min(domain, gpus) if domain < usual else domain,
        "intra": _intra(data["intra"], intra_kind, gpus, usual),
        "pcie": _pcie(data["pcie"], gpus, usual),
        "inter": _beside(data["inter"], gpus, data["pcie"]),
    }


def _beside(inter: Mapping[str, Any] | None, gpus: int, pcie: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The NICs whose place is known, those that are left; of others a node keeps its number."""
    if inter is None or not inter["cards"]:
        return None if inter is None else dict(inter)
    left = [socket for socket in (pcie or {"sockets": ()})["sockets"] if min(socket, default=gpus) < gpus]
    near = [{**one, "gpus": tuple(gpu for gpu in one["gpus"] if gpu < gpus)} for one in inter["cards"]]
    cards = tuple(
        one for one in near if one["gpus"] or (one["socket"] is not None and one["socket"] < max(1, len(left)))
    )
    return {**inter, "cards": cards, "num_nics": len(cards) or inter["num_nics"]}


def _size_faults(num_devices: int, gpus: int) -> list[Fault]:
    if num_devices < 1 or gpus < 1:
        return [Fault("num_devices", f"{num_devices} devices on nodes of {gpus}", "at least 1 each")]
    if num_devices % gpus:
        near = f"{num_devices // gpus * gpus} or {(num_devices // gpus + 1) * gpus}"
        problem = f"{num_devices} devices do not fill nodes of {gpus}"
        return [Fault("num_devices", problem, f"{near}, or another gpus_per_node")]
    return []


def _kind_faults(kind: str | None) -> list[Fault]:
    if kind is None or kind in _ONE_WAY:
        return []
    known = nearest(kind, _ONE_WAY) or f"known: {', '.join(_ONE_WAY)}"
    return [Fault("intra_kind", f"no link is called {kind!r}", known)]


def _intra(intra: Mapping[str, Any], kind: str | None, gpus: int, usual: int) -> dict[str, Any]:
    """The stated kind at its data-sheet rate; else the first `gpus` of the usual node, with the links between them."""
    if kind is not None and kind != intra["kind"]:
        return _of_kind(intra, kind)
    if intra["edges"]:
        edges = tuple(edge for edge in intra["edges"] if max(edge["src"], edge["dst"]) < gpus)
        return {**intra, "edges": edges} if edges else {**intra, "shape": "mesh", "edges": ()}
    if intra["shape"] == "mesh" and gpus > 1:  # a pair's cable stays what it is
        return {**intra, "bytes_per_s": intra["bytes_per_s"] * (gpus - 1) / (usual - 1)}
    return dict(intra)


def _of_kind(intra: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Links of another kind at its data sheet's rate."""
    shape = "pcie" if kind.startswith("pcie") else "switch"
    return {**intra, "kind": kind, "shape": shape, "bytes_per_s": _ONE_WAY[kind], "edges": ()}


def other_intra(intra: Mapping[str, Any], host: Mapping[str, Any] | None, kind: str) -> dict[str, Any]:
    """The links between a node's GPUs replaced by another kind's at its data sheet's rate; `off`: the host link alone.

    Raises ClusterError: an unknown kind, or a node without a host link.
    """
    if kind != "off":
        faults = _kind_faults(kind)
        if faults:
            raise ClusterError(replace(fault, place="link.intra") for fault in faults)
        return _of_kind(intra, kind)
    if host is None:
        remedy = "link.intra=pcie4 or pcie5, or [host] in the cluster file"
        raise ClusterError.at("link.intra", "the nodes state no link to their host", remedy)
    if not host["kind"].startswith("pcie"):
        problem = f"GPUs do not meet over the {host['kind']} link to their hosts"
        raise ClusterError.at("link.intra", problem, "link.intra=pcie5")
    return {name: host[name] for name in ("kind", "bytes_per_s", "latency_s")} | {"shape": "pcie"}


def _pcie(pcie: Mapping[str, Any] | None, gpus: int, usual: int) -> dict[str, Any] | None:
    """The tree above the first `gpus`; a larger node has halves on two sockets, a root port each, if the usual one has."""
    if pcie is None:
        return None
    if gpus > usual:
        halves = (tuple(range(gpus // 2)), tuple(range(gpus // 2, gpus)))
        return (
            {**pcie, "sockets": halves, "switches": ()} if len(pcie["sockets"]) == 2 and not pcie["switches"] else None
        )
    parts = {
        key: tuple(part for part in (tuple(gpu for gpu in each if gpu < gpus) for each in pcie[key]) if part)
        for key in ("sockets", "switches")
    }
    return {**pcie, **parts}


def _inter(inter: Mapping[str, Any] | None, total: float | None, share: float) -> dict[str, Any] | None:
    """The stated total over the usual number of NICs, or over fewer where they would be slower than machines of GPUs have them.

    Without one, a node's NICs shrink or grow with its GPUs.
    """
    if inter is None:
        return None
    nics = max(1, round(inter["num_nics"] * share))
    if total is not None and total < nics * _SLOWEST_NIC:
        nics = max(1, int(total / _SLOWEST_NIC))
    rate = inter["nic_bytes_per_s"] if total is None else total / nics
    return {**inter, "num_nics": nics, "nic_bytes_per_s": rate}
