"""Any description of a topology, by what it holds: a host as its tools describe it, a cluster's node, or SLURM's tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path as FilePath
from typing import Final

from simulator.base.errors import ClusterError
from simulator.base.files import ordinary
from simulator.formats.readers.host_cluster import GA102_LINK, ONE_LINK
from simulator.formats.readers.nccl_xml import read_xml
from simulator.formats.readers.nvidia_smi import looks_like_matrix, read_matrix
from simulator.formats.readers.slurm_topology import read_conf, read_yaml
from simulator.predict.link_loads import NodeLink, idle_links
from simulator.spec.cluster import Cluster, NicPlace, cluster_names
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.host import Cable, Gpu, Host, Nic, NodeTree, Path, rated
from simulator.spec.cluster.hosts import usual_host
from simulator.spec.cluster.nics import path_type, places_of
from simulator.spec.cluster.wiring import Wiring

_MOST_BYTES: Final = 8 * 2**20
_FORMATS: Final = (
    "a preset, a cluster's .toml, `nvidia-smi topo -m`, NCCL topology XML, SLURM topology.conf or .yaml, here"
)


def read_source(source: str) -> Host | Cluster | NodeTree:
    """What `source` describes: a preset's name, a file's path, "here", or "-" for standard input. Raises ClusterError."""
    if source == HERE:
        return read_here()
    if source in cluster_names() or source.endswith(".toml"):
        return Cluster.load(source)
    data = _data(source)
    name = "stdin" if source == "-" else source
    if data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        return read_xml(data, name)
    text = data.decode("utf-8-sig", "replace")
    if source.endswith((".yaml", ".yml")) or text.lstrip().startswith(("- topology:", "---")):
        return read_yaml(text, name)
    if looks_like_matrix(text):
        return read_matrix(text, name)
    if "SwitchName" in text or "BlockName" in text or source.endswith(".conf"):
        return read_conf(text, name)
    raise ClusterError.at(name, "is not a topology that can be recognised", _FORMATS)


def with_device(host: Host, device_name: str) -> tuple[Host, bool]:
    """The host with its GPU's speeds where the source has none, and whether such GPUs are usually joined by NVLink.

    Raises ClusterError for an unknown device.
    """
    device = Device.resolve(device_name)
    usual = Cluster.load(usual_host(device))
    link = usual.host_link
    joined = usual.intra.shape in ("switch", "mesh", "cube_mesh")
    if host.cables or link is None:
        return host, joined
    speeds = f"data sheets of {device} in {usual.name}; the CPUs' own link unlimited, so cuts are upper bounds"
    return rated(host, usual.intra.bytes_per_s, link.bytes_per_s, speeds), joined


def host_of(cluster: Cluster) -> Host:
    """One node of a cluster as a host: links counted by the data sheet's rate of one."""
    graph = cluster.graph()
    paths, wiring = {}, Wiring.of(cluster)
    has_sockets = cluster.pcie is not None and cluster.pcie.sockets
    gpus = tuple(
        Gpu(name=f"GPU{i}", model=cluster.device.name, numa=str(wiring.socket(i)) if has_sockets else "")
        for i in range(cluster.gpus_per_node)
    )
    places = _nic_groups(cluster)
    for number, place in enumerate(places):
        for index in range(len(gpus)):
            if (word := _to_nic(cluster, wiring, place, index)) is not None:
                paths[f"GPU{index}", f"nic{number}"] = Path(word)
    for src, dst, data in graph.edges(data=True):
        a, b = _name(src), _name(dst)
        if a.startswith("GPU") and b.startswith("GPU"):
            paths[a, b] = _direct(cluster, data["bytes_per_s"])
    paths |= dict(_joined(cluster, gpus, set(paths)))
    inter = cluster.inter
    rate = cluster.node_bytes_per_s / len(places) if places else None
    missing = (
        []
        if has_sockets
        else ["the PCIe tree: a cluster file gives each GPU its nearest card, all cards of a GPU as one"]
    )
    if inter is None:
        missing = ["network: the cluster file has none"]
    return Host(
        source=cluster.name,
        format="cluster file",
        gpus=gpus,
        nics=tuple(Nic(name=f"nic{number}", bytes_per_s=rate) for number in range(len(places))),
        paths=paths,
        switched=cluster.intra.shape == "switch",
        cables=tuple(_cables(cluster)),
        speeds="the cluster file",
        missing=tuple(missing),
    )


def _nic_groups(cluster: Cluster) -> tuple[NicPlace, ...]:
    """Each NIC where the file says where it sits; else all NICs of a GPU as one."""
    places = places_of(cluster)
    return places if cluster.inter is not None and cluster.inter.cards else tuple(dict.fromkeys(places))


def _to_nic(cluster: Cluster, wiring: Wiring, place: NicPlace, gpu: int) -> str | None:
    """The stated path; otherwise a NIC is next to the first GPU that it serves, and paths to other GPUs are unknown."""
    if cluster.inter is not None and cluster.inter.cards:
        return path_type(wiring, place, gpu)
    if gpu not in place.gpus:
        return None
    return "PIX" if gpu == place.gpus[0] or cluster.pcie is None else wiring.path(gpu, place.gpus[0])


def _data(source: str) -> bytes:
    try:
        if source == "-":
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with ordinary(FilePath(source)).open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
    except OSError as exc:
        raise ClusterError.at(source, f"cannot be read: {exc.strerror or exc}", _FORMATS) from None
    if len(data) > _MOST_BYTES:
        raise ClusterError.at(source, f"is larger than {_MOST_BYTES // 2**20} MiB", "one host's topology")
    return data


def _name(node: str) -> str:
    """`node0.gpu3` -> GPU3, the rest without its node."""
    name = node.removeprefix("node0.").removeprefix("domain0.")
    return name.upper() if name.startswith("gpu") else name


def _direct(cluster: Cluster, bytes_per_s: float) -> Path:
    kind = cluster.intra.kind
    rates = [*(ONE_LINK[name] for name in (kind, cluster.device.architecture) if name in ONE_LINK), GA102_LINK]
    dividing = (rate for rate in rates if bytes_per_s % rate == 0)
    count = int(bytes_per_s // next(dividing, bytes_per_s))
    return Path("XGMI" if kind == "xgmi" else "NV", count)


def _joined(
    cluster: Cluster, gpus: tuple[Gpu, ...], known: set[tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], Path]]:
    """Pairs without a direct link: through the switch, or the host."""
    through, wiring = cluster.intra.shape == "switch", Wiring.of(cluster)
    switched = _direct(cluster, cluster.intra.bytes_per_s)
    for i, j in combinations(range(len(gpus)), 2):
        a, b = gpus[i].name, gpus[j].name
        if not {(a, b), (b, a)} & known:
            yield (a, b), switched if through else Path(wiring.path(i, j))


def _is_upwards(link: NodeLink) -> bool:
    """One of the two directions of a link of the PCIe tree."""
    kinds = ("gpu", "switch", "cpu")
    return link.dst.startswith(kinds[1:]) and link.src.startswith(kinds) and (link.src[0] != "c" or link.src < link.dst)


def _end(name: str) -> str:
    return name.upper() if name.startswith("gpu") else name


def _cables(cluster: Cluster) -> Iterator[Cable]:
    """Each link once for both directions; NICs are not a path between GPUs."""
    seen = set()
    tree = cluster.pcie is not None
    if tree:
        yield from (
            Cable(a=_end(link.src), b=_end(link.dst), bytes_per_s=link.bytes_per_s)
            for link in idle_links(cluster).links
            if _is_upwards(link)
        )
    for src, dst, data in cluster.graph().edges(data=True):
        ends = frozenset((src, dst))
        if ends not in seen and not {_name(src)[:3], _name(dst)[:3]} & {"nic", "hos" if tree else "nic"}:
            seen.add(ends)
            yield Cable(a=_name(src), b=_name(dst), bytes_per_s=data["bytes_per_s"])


HERE: Final = "here"
_PATIENCE_S: Final = 60


def read_here() -> Host:
    """The host that this process runs on. Raises ClusterError where no NVIDIA driver answers."""
    if shutil.which("nvidia-smi") is None:
        problem = "this machine has no nvidia-smi, so no NVIDIA GPU that could be asked"
        raise ClusterError.at(HERE, problem, "a saved matrix or NCCL's XML, on any machine")
    return read_matrix(_answer("topo", "-m"), HERE)


def _answer(*arguments: str) -> str:
    command = ("nvidia-smi", *arguments)
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE_S, check=False)  # noqa: S603  fixed words
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ClusterError.at(" ".join(command), f"does not answer: {exc}") from None
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        message = (done.stderr.decode("utf-8", "replace") or text).strip()[:200]
        raise ClusterError.at(" ".join(command), f"ends with code {done.returncode}: {message}")
    return text
