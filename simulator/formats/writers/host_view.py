"""A host, or SLURM's tree above the hosts, as JSON data and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulator.base.units import format_rate
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.host import (
    Finding,
    Host,
    Island,
    NodeTree,
    cuts,
    domains,
    gpu_paths,
    islands,
    nearest_nics,
    pcie_groups,
)

SCHEMA_VERSION: Final = 1
_SHAPES: Final = {
    "alone": "no NVLink",
    "unlisted": "NVLinks not listed",
    "pair": "pair",
    "switch": "NVSwitch",
    "mesh": "mesh, a cable for each pair",
    "cube_mesh": "cube mesh: two meshed quads joined pairwise",
    "partial": "some pairs only",
}
_REACHES: Final = ("PIX", "PXB", "PHB", "NODE")
_ROADS: Final = {
    "cable": "by cable",
    "relay": "over a GPU joined to both",
    "peer": "peer to peer on PCIe",
    "memory": "through host memory",
}
_MOST_SWITCHES = 40


def host_json(host: Host, findings: Iterable[Finding]) -> dict[str, Any]:
    """Plain data; docs/reference/topology-sources.md describes every key."""
    names = [gpu.name for gpu in host.gpus]
    return {
        "schema_version": SCHEMA_VERSION,
        "source": host.source,
        "format": host.format,
        "gpus": [{"index": i, **asdict(gpu)} for i, gpu in enumerate(host.gpus)],
        "nics": [asdict(nic) for nic in host.nics],
        "islands": [_island_json(island) for island in islands(host)],
        "domains": [list(part) for part in domains(host)],
        "pcie_groups": {reach: [list(part) for part in pcie_groups(host, reach)] for reach in _REACHES},
        "nearest_nic": [
            {
                "gpu": one.gpu,
                "nics": list(one.nics),
                "path": one.word or None,
                "own_path": str(own) if (own := _own_path(host, names[one.gpu])) else None,
                "via_gpu": one.via,
                "gpudirect": one.gpudirect,
            }
            for one in nearest_nics(host)
        ],
        "roads": [{"a": a, "b": b, "road": road} for (a, b), road in gpu_paths(host).items()],
        "min_cuts": [
            {
                "a": cut.a,
                "b": cut.b,
                "closest_path": str(cut.closest) if cut.closest else None,
                "bytes_per_s": cut.bytes_per_s,
            }
            for cut in cuts(host)
        ],
        "speeds": host.speeds or None,
        "findings": [asdict(finding) for finding in findings],
        "missing": list(host.missing),
    }


def _island_json(island: Island) -> dict[str, Any]:
    return {
        "gpus": list(island.gpus),
        "shape": island.shape,
        "links_per_gpu": list(island.links),
        "narrowest_split_links": island.narrowest_split,
        "pairs": [{"a": a, "b": b, "kind": path.kind, "links": path.count} for (a, b), path in island.pairs.items()],
    }


def _own_path(host: Host, gpu: str) -> object:
    paths = [path for nic in host.nics if (path := host.path(gpu, nic.name)) is not None]
    return min(paths, key=lambda path: path.rank, default=None)


def render_host(host: Host, findings: Iterable[Finding]) -> RenderableType:
    """The view for a rich console."""
    parts: list[RenderableType] = [
        Text(f"{host.source} ({host.format}): {len(host.gpus)} GPUs, {len(host.nics)} network cards")
    ]
    parts += [Text(line) for line in _island_lines(host)]
    parts += [Text(line) for line in _road_lines(host)]
    parts.append(_gpu_table(host))
    parts += [Text(line) for line in _cut_lines(host)]
    parts += [Text(f"! {finding.text}") for finding in findings]
    parts += [Text(f"? not in the source: {text}") for text in host.missing]
    return Group(*parts)


def _island_lines(host: Host) -> Iterator[str]:
    alone = [island.gpus[0] for island in islands(host) if len(island.gpus) == 1]
    for island in islands(host):
        if len(island.gpus) > 1:
            links = f"{max(island.links)} links a GPU"
            split = "" if island.narrowest_split is None else f", {island.narrowest_split} between halves"
            yield f"island {_span(island.gpus)}: {_SHAPES[island.shape]}, {links}{split}"
    if alone:
        shape = next(island.shape for island in islands(host) if len(island.gpus) == 1)
        yield f"{_span(alone)}: {_SHAPES[shape]}"
    before: list[tuple[int, ...]] = []
    for reach in _REACHES:
        groups = [part for part in pcie_groups(host, reach) if len(part) > 1]
        if groups not in ([], before) and len(groups[0]) < len(host.gpus):
            yield f"meet within {reach}: {'  '.join(map(_span, groups))}"
        before = groups


def _road_lines(host: Host) -> Iterator[str]:
    """How many pairs of GPUs NCCL joins by which route."""
    count = Counter(gpu_paths(host).values())
    counts = [f"{count[road]} {words}" for road, words in _ROADS.items() if count[road]]
    if counts:
        yield f"pairs of GPUs: {', '.join(counts)}"


def _gpu_table(host: Host) -> Table:
    table = Table("GPU", "NUMA", "PCI", "model", "nearest network cards", "path", box=None, padding=(0, 2, 0, 0))
    for gpu, one in zip(host.gpus, nearest_nics(host), strict=True):
        via = f" by {host.gpus[one.via].name}" if one.via is not None else ""
        nics = ", ".join(one.nics) if len(one.nics) <= 4 else f"any of {len(one.nics)}"
        table.add_row(
            gpu.name,
            gpu.numa or "–",
            gpu.pci or "–",
            gpu.model or "–",
            nics or "–",
            f"{one.word}{via}, through host memory" if one.gpudirect is False else one.word + via or "–",
        )
    return table


def _cut_lines(host: Host) -> Iterator[str]:
    parts = domains(host)
    for cut in cuts(host):
        rate = format_rate(cut.bytes_per_s) if cut.bytes_per_s is not None else "speed unknown (--device)"
        yield f"between {_span(parts[cut.a])} and {_span(parts[cut.b])}: {cut.closest or 'unknown'}, at most {rate}"
    if host.speeds and len(parts) > 1:
        yield f"speeds: {host.speeds}"


def _span(gpus: Iterable[int]) -> str:
    """GPUs 0–3, 6."""
    runs: list[list[int]] = []
    for gpu in gpus:
        if runs and gpu == runs[-1][1] + 1:
            runs[-1][1] = gpu
        else:
            runs.append([gpu, gpu])
    text = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
    return f"GPU{'s' if len(runs) > 1 or runs[0][0] != runs[0][1] else ''} {text}"


_PARTS: Final = tuple(2**k for k in range(1, 11))  # numbers of nodes, of which half send to the other half


def network_json(cluster: Cluster) -> dict[str, Any] | None:
    """What joins a cluster's nodes; None where nothing does. Cuts are between two halves, one way, all NICs sending."""
    inter, fabric = cluster.inter, cluster.fabric
    if inter is None:
        return None
    return {
        "kind": inter.kind,
        "rdma": inter.rdma,
        "num_nics": inter.num_nics,
        "nic_bytes_per_s": inter.nic_bytes_per_s,
        "node_bytes_per_s": cluster.node_bytes_per_s,
        "fabric": fabric.kind,
        "nodes_per_leaf": fabric.nodes_per_leaf,
        "nodes_used_per_leaf": fabric.used_per_leaf,
        "oversubscription": fabric.oversubscription,
        "above": [level.model_dump() for level in fabric.above],
        "nvlink_domain_size": cluster.nvlink_domain_size,
        "host": None if cluster.host is None else {"kind": cluster.host.kind, "bytes_per_s": cluster.host.bytes_per_s},
        "half_cuts": [{"nodes": n, "bytes_per_s": n / 2 * cluster.network_bytes_per_s(n)} for n in _PARTS],
    }


def render_network(cluster: Cluster) -> RenderableType:
    """The same for a rich console."""
    inter, fabric = cluster.inter, cluster.fabric
    if inter is None:
        return Text("network: none")
    rdma = "" if inter.rdma else " without RDMA, through host memory"
    nics = f"{inter.num_nics} × {format_rate(inter.nic_bytes_per_s)} {inter.kind}{rdma}"
    own = "" if fabric.nodes_used_per_leaf is None else f" ({fabric.used_per_leaf} of them used)"
    leaves = f"{fabric.kind.replace('_', ' ')}, {fabric.nodes_per_leaf} nodes a leaf{own}"
    levels = "".join(f", {level.nodes} a switch above" for level in fabric.above)
    beyond = cluster.network_bytes_per_s(fabric.used_per_leaf + 1)
    lines = [
        f"network: {nics}, {format_rate(cluster.node_bytes_per_s)} a node",
        f"fabric: {leaves}{levels}; beyond a leaf {format_rate(beyond)} a node",
    ]
    if "SLURM does not say" in cluster.sources.get("fabric", ""):
        lines.append("? oversubscription of the leaves: SLURM does not say, 1 taken (--oversubscription)")
    if cluster.host is not None:
        kind = cluster.host.kind.upper() if cluster.host.kind == "c2c" else cluster.host.kind
        lines.insert(0, f"host: {kind}, {format_rate(cluster.host.bytes_per_s)} a GPU")
    if cluster.nvlink_domain_size > cluster.gpus_per_node:
        lines.append(f"one NVLink switch joins {cluster.nvlink_domain_size} GPUs of several nodes")
    return Group(*map(Text, lines))


def tree_json(tree: NodeTree) -> dict[str, Any]:
    """Plain data; nodes are counted, and listed at the leaves."""
    low, high = tree.nodes_per_leaf
    return {
        "schema_version": SCHEMA_VERSION,
        "source": tree.source,
        "format": f"SLURM {tree.kind}",
        "num_nodes": tree.num_nodes,
        "num_levels": tree.num_levels,
        "roots": list(tree.roots),
        "nodes_per_leaf": {"min": low, "max": high},
        "block_sizes": list(tree.block_sizes),
        "switches": [asdict(switch) for switch in tree.switches],
        "findings": [asdict(finding) for finding in tree_findings(tree)],
    }


def tree_findings(tree: NodeTree) -> tuple[Finding, ...]:
    """What looks wrong above the nodes: several roots without a route between them, leaves of unequal size."""
    low, high = tree.nodes_per_leaf
    found = []
    if tree.kind == "tree" and len(tree.roots) > 1:
        text = f"{len(tree.roots)} roots ({', '.join(tree.roots[:6])}): jobs cannot span them, or a switch is missing"
        found.append(Finding("several_roots", text))
    if low != high:
        found.append(Finding("unequal_leaves", f"leaves hold {low} to {high} nodes"))
    return tuple(found)


def render_tree(tree: NodeTree) -> RenderableType:
    """The tree for a rich console."""
    low, high = tree.nodes_per_leaf
    size = str(low) if low == high else f"{low} to {high}"
    noun = "block" if tree.kind == "block" else "leaf"
    lines = [
        f"{tree.source} (SLURM {tree.kind}): {tree.num_nodes} nodes, {tree.num_levels} levels, {size} nodes a {noun}"
    ]
    if tree.block_sizes:
        lines.append(f"block sizes: {', '.join(map(str, tree.block_sizes))}")
    for switch in sorted(tree.switches, key=lambda s: -s.level)[:_MOST_SWITCHES]:
        below = f"{len(switch.switches)} switches, " if switch.switches else ""
        lines.append(f"{'  ' * (tree.num_levels - 1 - switch.level)}{switch.name}: {below}{switch.num_nodes} nodes")
    if len(tree.switches) > _MOST_SWITCHES:
        lines.append(f"… and {len(tree.switches) - _MOST_SWITCHES} more; --json lists all")
    return Group(*(Text(line) for line in (*lines, *(f"! {finding.text}" for finding in tree_findings(tree)))))
