"""SLURM's tree above the nodes as the fabric of a cluster: leaves, levels above them, and the nodes that a job has there.

SLURM says which switch joins which nodes, and nothing of speeds (its LinkSpeed has no unit and no use): the node and its NICs
are another file's, and what switches send up over what they take in is stated, or taken as 1 and marked as unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from simulator.base.errors import ClusterError, Fault
from simulator.base.schema import nearest
from simulator.formats.readers.hostlist import expand
from simulator.spec.cluster import Cluster, Fabric, FabricLevel
from simulator.spec.cluster.host import NodeTree


def cluster_below(tree: NodeTree, node: Cluster, *, hosts: str = "", oversubscription: float | None = None) -> Cluster:
    """`node` as often as the tree has nodes, or as `hosts` names, on the tree's switches.

    hosts: a hostlist of the nodes that a job has. oversubscription: of the leaves; None where unknown. Raises
    ClusterError: a tree without leaves, nodes that it does not have, a node without a network.
    """
    if tree.kind == "flat" or not tree.num_nodes:
        problem = "shows no switches above the nodes" if tree.kind == "flat" else "has no nodes"
        raise ClusterError.at(tree.source, problem, "a tree, or blocks")
    if node.inter is None:
        raise ClusterError.at("--node", f"{node.name} has no network cards", "a file with [inter]")
    leaf_of = {name: switch.name for switch in tree.switches if switch.level == 0 for name in switch.nodes}
    used = Counter(leaf_of[name] for name in _chosen(hosts, leaf_of))
    fabric, note = _fabric(tree, node, used, oversubscription)
    data = {field: getattr(node, field) for field in Cluster.model_fields}
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", tree.source.rpartition("/")[2].rpartition(".")[0] or "tree")
    data |= {"name": f"{node.name}-{name}", "num_nodes": used.total(), "fabric": fabric}
    data["sources"] = {**node.sources, "fabric": note}
    return Cluster.parse(data, tree.source, ClusterError)


def _chosen(hosts: str, leaf_of: Mapping[str, str]) -> tuple[str, ...]:
    """The nodes of a job; all without a list."""
    if not hosts:
        return tuple(leaf_of)
    names = tuple(dict.fromkeys(expand(hosts, "--hosts")))
    strange = [name for name in names if name not in leaf_of]
    faults = [
        Fault("--hosts", f"{name} is below no switch of the tree", nearest(name, leaf_of)) for name in strange[:8]
    ]
    ClusterError.raise_for(faults)
    return names


def _fabric(tree: NodeTree, node: Cluster, used: Mapping[str, int], stated: float | None) -> tuple[Fabric, str]:
    """The fabric and where it stands. Leaves of unequal size count as the smallest, a job's part as its largest."""
    sizes = {switch.name: len(switch.nodes) for switch in tree.switches if switch.level == 0}
    leaf = min(sizes[name] for name in used)
    part = min(leaf, max(used.values()))
    taper = 1.0 if stated is None else stated
    fabric = Fabric(
        kind=node.fabric.kind,
        oversubscription=taper,
        nodes_per_leaf=leaf,
        nodes_used_per_leaf=part if part < leaf else None,
        above=tuple(FabricLevel(nodes=nodes) for nodes in _levels(tree, leaf)),
    )
    unknown = "SLURM does not say" if stated is None else "as stated; above the leaves 1"
    noun = "blocks" if tree.kind == "block" else "leaves"
    notes = [f"{noun} of {leaf} nodes as {tree.source} shows them", f"oversubscription: {unknown}"]
    notes += [f"{noun} differ in size: the smallest stands for all"] if len({sizes[name] for name in used}) > 1 else []
    if sum(used.values()) < tree.num_nodes:
        notes.append(f"a job's nodes on {len(used)} of them, {part} at most on one")
    return fabric, "; ".join(notes)


def _levels(tree: NodeTree, leaf: int) -> list[int]:
    """Nodes below one switch of each level between the leaves and the root, in whole leaves."""
    if tree.kind == "block":
        sizes = [size for size in tree.block_sizes if size > leaf]
    else:
        tops = range(1, tree.num_levels - 1)
        sizes = [min(switch.num_nodes for switch in tree.switches if switch.level == level) for level in tops]
    found = [leaf]
    for size in sizes:
        whole = size // found[-1] * found[-1]
        if whole > found[-1]:
            found.append(whole)
    return found[1:]
