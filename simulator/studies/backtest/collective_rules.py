"""A row of a table of collectives -> machine, group and NCCL settings, by written rules.

The rules look at the columns and at words of the notes that say what the machine or its software was.
docs/reference/collectives-table.md states them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from simulator.base.errors import ClusterError, InputError
from simulator.base.presets import facts
from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.hosts import usual_host
from simulator.spec.software.nccl import Nccl
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.rows import KINDS, CollectiveRow
from simulator.work.collectives.call import Links, network_of

# Words of the notes after which the algorithm column is what a log said, not what was asked for.
_LOGGED: Final = re.compile(r"as picked by NCCL|NCCL_NVLS_ENABLE=(1|unset)")
_DEGRADED: Final = re.compile(r"\breported as degraded\b")
_ASSIGNED: Final = re.compile(r"\b(NCCL_[A-Z0-9_]+)=([A-Za-z0-9,^:]+)")
_HOST_NIC: Final = 1.25  # a machine's total with its host's NIC over that of the NICs that serve GPUs, at most
_UNSET: Final = "unset"
_BRIDGES: Final = {"a100-pcie-80gb": ("nvlink3", 300e9), "h100-nvl": ("nvlink4", 300e9), "a40": ("nvlink3", 56.25e9)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRun:
    """A row made concrete. network: its kind, "" inside a node.

    assumed: what the row leaves open and the GPU's usual machine fills. logged: the algorithm that a log names.
    """

    kind: str
    size_bytes: int
    cluster: Cluster
    shape: GroupShape
    nccl: Nccl
    network: str
    assumed: str
    logged: str


def degraded(row: CollectiveRow) -> str:
    """Why the measured run was degraded, by its column or its notes; "" if it was not."""
    return row.degraded or ("its source reports it as degraded" if _DEGRADED.search(row.notes) else "")


def resolve(row: CollectiveRow) -> CollectiveRun:
    """The call that a row measured. Raises RefusedError, or ClusterError where no such machine can be built."""
    ranks, nodes = row.n_gpus, row.n_nodes
    if ranks is None or nodes is None:
        raise RefusedError(("number of ranks", "n_gpus or n_nodes is blank"))
    if ranks < nodes or ranks % nodes:
        raise RefusedError(("uneven ranks", f"{ranks} GPUs on {nodes} nodes"))
    if ranks == 1:
        raise RefusedError(("one rank", "nothing is sent"))
    device = _device(row.gpu)
    if device is None:
        raise RefusedError(("unknown GPU", row.gpu))
    network = _network(row.notes) if nodes > 1 else None
    cluster = _cluster(device, row.intra_link, ranks // nodes, nodes, _machine(row.notes), network, _rate(row))
    logged = row.algo_env.lower() if _LOGGED.search(row.notes) else ""
    return CollectiveRun(
        kind=KINDS[row.collective],
        size_bytes=row.size_bytes,
        cluster=cluster,
        shape=GroupShape.dealt(cluster, ranks, nodes),
        nccl=_software(row.nccl_version, row.algo_env, row.proto_env, row.notes, logged=bool(logged)),
        network=network_of(Links.of(cluster)) if nodes > 1 and cluster.inter else "",
        assumed=_assumed(row, network, cluster),
        logged=logged,
    )


def _words(kind: str) -> list[Any]:
    """Patterns of a kind, each with what it says."""
    return facts(__file__, "collective_words")[kind]  # type: ignore[no-any-return]


@cache
def _device(gpu: str) -> str | None:
    named = next((device for pattern, device in _words("gpus") if re.search(pattern, gpu)), None)
    try:
        return named or Device.resolve(gpu)
    except ClusterError:
        return None


def _machine(notes: str) -> str | None:
    return next((preset for pattern, preset in _words("machines") if re.search(pattern, notes)), None)


def _network(notes: str) -> tuple[str, bool] | None:
    return next(((kind, rdma) for pattern, kind, rdma in _words("networks") if re.search(pattern, notes)), None)


def _rate(row: CollectiveRow) -> float | None:
    """Bytes/s of the NICs that serve GPUs: a named machine's total may count its host's own NIC too (A3 Mega, 1.8 Tb/s)."""
    gbps, machine = row.inter_link_gbps_per_node, _machine(row.notes)
    if gbps is None:
        return None
    stated, cards = gbps * 1e9 / 8, Cluster.load(machine).node_bytes_per_s if machine else 0.0
    return cards if cards < stated < _HOST_NIC * cards else stated


def _assumed(row: CollectiveRow, network: tuple[str, bool] | None, cluster: Cluster) -> str:
    if row.n_nodes == 1:
        return ""
    named = network is not None or _machine(row.notes) is not None
    parts = [] if named else ["network"]
    parts += [] if row.inter_link_gbps_per_node or _machine(row.notes) else ["its speed"]
    return f"{' and '.join(parts)}: as usual, {cluster.name}" if parts else ""


@cache
def _software(version: str, algorithm: str, protocol: str, notes: str, *, logged: bool) -> Nccl:
    """NCCL as the columns and the notes configure it; what a log reports is a result, not a setting."""
    given = {name: value for name, value in _ASSIGNED.findall(notes) if value.lower() != _UNSET}
    for pattern, settings in _words("settings"):
        if re.search(pattern, notes):
            given |= settings
    forced = {"NCCL_ALGO": algorithm, "NCCL_PROTO": protocol}
    if algorithm.lower() == "nvls":
        forced["NCCL_ALGO"] = "nvls,nvlstree"  # over nodes it is the tree that nccl-tests' tables call so
    variables = given | ({} if logged else {name: value for name, value in forced.items() if value})
    try:
        return Nccl.of(version, variables, place="algo_env, proto_env and notes")
    except InputError as exc:
        raise RefusedError(("NCCL's settings", "; ".join(map(str, exc.faults)))) from None


@cache
def _cluster(
    device: str,
    intra_link: str,
    ranks_per_node: int,
    nodes: int,
    machine: str | None,
    network: tuple[str, bool] | None,
    bytes_per_s: float | None,
) -> Cluster:
    """The GPU's usual machine with the row's stated values."""
    data = _dump(_preset(device, intra_link))
    if "bridge pairs" in intra_link:
        data |= _bridged(device, data)
    if ranks_per_node > data["gpus_per_node"] or "DGX-2" in intra_link:
        data |= _switched(data, max(16, ranks_per_node), nodes)
    if machine is not None:
        data |= {key: _dump(machine)[key] for key in ("inter", "fabric")}
    if nodes > 1:
        data["inter"] = _inter(data["inter"], None if machine else network, bytes_per_s)
    return Cluster.parse(data | {"num_nodes": nodes}, f"{device} × {nodes * ranks_per_node}", ClusterError)


def _dump(preset: str) -> dict[str, Any]:
    cluster = Cluster.load(preset)
    return {field: getattr(cluster, field) for field in Cluster.model_fields} | {
        "intra": cluster.intra.model_dump(),
        "inter": cluster.inter.model_dump() if cluster.inter else None,
    }


def _preset(device: str, intra_link: str) -> str:
    if "full mesh" in intra_link and device == "a100-sxm4-40gb":
        return "hgx-a100-40-4"
    return usual_host(device)


def _bridged(device: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Neighbours joined by a bridge; the others through the host. Rates of bridges: data sheets, one way."""
    if data["intra"]["shape"] == "pairs":
        return {}
    kind, rate = _BRIDGES[device]
    intra = data["intra"]
    edges = [{"src": gpu, "dst": gpu + 1, "bytes_per_s": rate} for gpu in range(0, data["gpus_per_node"], 2)]
    host = {"kind": intra["kind"], "bytes_per_s": intra["bytes_per_s"], "latency_s": intra["latency_s"]}
    paired = {"kind": kind, "shape": "pairs", "bytes_per_s": rate, "latency_s": 0.6e-6, "edges": edges}
    return {"intra": paired, "host": host}


def _switched(data: Mapping[str, Any], gpus: int, nodes: int) -> dict[str, Any]:
    """A node of more GPUs than the usual one (DGX-2: 16 V100 on NVSwitch): their ports on a switch."""
    if nodes > 1:
        raise RefusedError(("node of another size", f"{gpus} GPUs a node, {data['name']} has {data['gpus_per_node']}"))
    return {
        "gpus_per_node": gpus,
        "nvlink_domain_size": gpus,
        "intra": data["intra"] | {"shape": "switch", "edges": ()},
    }


def _inter(
    inter: Mapping[str, Any] | None, network: tuple[str, bool] | None, bytes_per_s: float | None
) -> dict[str, Any]:
    """The usual network with the stated kind and total rate. Raises RefusedError without any."""
    if inter is None:
        raise RefusedError(("network", "neither the row nor the usual machine has one"))
    kind, rdma = network or (inter["kind"], inter["rdma"])
    rate = inter["nic_bytes_per_s"] if bytes_per_s is None else bytes_per_s / inter["num_nics"]
    return {**inter, "kind": kind, "rdma": rdma, "nic_bytes_per_s": rate}
