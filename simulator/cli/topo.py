"""`shardwise topo`: print a description of a host, a cluster or SLURM's tree, and its suspicious points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Group

from simulator.base.errors import ClusterError, Fault
from simulator.base.exit_codes import ExitCode
from simulator.base.files import write_whole
from simulator.base.schema import check_writable
from simulator.cli.finite import FiniteRange
from simulator.cli.options import FILE, answer_options, print_answer, print_status
from simulator.formats.drawing import check_picture
from simulator.formats.readers.host_cluster import cluster_of
from simulator.formats.readers.topology_source import host_of, read_source, with_device
from simulator.formats.readers.tree_cluster import cluster_below
from simulator.formats.writers.cluster_toml import cluster_toml
from simulator.formats.writers.host_view import (
    host_json,
    network_json,
    render_host,
    render_network,
    render_tree,
    tree_json,
)
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.host import Host, NodeTree, findings

_WIDTH = 140
_HELP = """Show a topology: NVLink islands, the network card nearest to each GPU and by what path, NUMA, minimum cuts
between islands, what looks wrong, and what the source does not say.

SOURCE is what `nvidia-smi topo -m` printed, an NCCL topology XML (NCCL_TOPO_DUMP_FILE), a preset's name, a cluster's
.toml, a SLURM topology.conf or topology.yaml, `here` for this machine, or - for standard input.

With --save the host becomes a cluster file, which predict and collective take as --cluster: links as the source shows
them, speeds from data sheets. A SLURM tree becomes one with --node, the cluster file of a node below it."""


@click.command("topo", help=_HELP)
@click.argument("source", metavar="SOURCE")
@click.option("--device", metavar="NAME", help="The GPUs of a matrix, which does not name them: gives speeds.")
@click.option("--save", type=FILE, metavar="OUT.toml", help="Write a cluster file; needs --device.")
@click.option("--node", "node", metavar="NAME|FILE", help="The node below a SLURM tree: a preset or a .toml.")
@click.option("--hosts", default="", metavar="HOSTLIST", help="The nodes of a job in a SLURM tree, as node[1-8,33-40]. [all]")  # fmt: skip
@click.option("--oversubscription", type=FiniteRange(min=1.0, max=1000.0), metavar="X", help="Of a SLURM tree's leaves, downlinks over uplinks: SLURM does not say. [1, marked as unknown]")  # fmt: skip
@click.option("--draw", type=FILE, metavar="OUT.png|OUT.svg", help="Draw a node and its links; a matrix or XML needs --device. `predict --links` adds a plan's loads.")  # fmt: skip
@partial(answer_options, json_help="Write JSON (docs/reference/topology-sources.md).")
def command(
    source: str,
    *,
    device: str | None,
    save: Path | None,
    node: str | None,
    hosts: str,
    oversubscription: float | None,
    draw: Path | None,
) -> int:
    """Read, save, draw, show."""
    found = read_source(source)
    _check_tree_options(found, source, {"--node": node, "--hosts": hosts, "--oversubscription": oversubscription})
    if draw is not None:
        check_picture(draw, "--draw")
    if save is not None:
        check_writable(save, "--save")
    saved: Cluster | None = None
    if isinstance(found, NodeTree) and node is not None:
        found = saved = cluster_below(found, Cluster.load(node), hosts=hosts, oversubscription=oversubscription)
    elif save is not None:
        if isinstance(found, Cluster):
            raise ClusterError.at(source, "is a cluster file already", "--save takes a matrix or an XML")
        saved = _cluster(found, source, device)
    shown = None if draw is None else found if isinstance(found, Cluster) else _cluster(found, source, device)
    if isinstance(found, NodeTree):
        answer, data = render_tree(found), tree_json(found)
    else:
        host = host_of(found) if isinstance(found, Cluster) else found
        host, joined = with_device(host, device) if device else (host, False)
        wrong = findings(host, expects_nvlink=joined)
        answer, data = render_host(host, wrong), host_json(host, wrong)
        if isinstance(found, Cluster):
            answer, data = Group(answer, render_network(found)), data | {"network": network_json(found)}
    print_answer("topo", lambda: data, lambda: answer, lambda: _drawing(saved or found), width=_WIDTH)
    if save is not None and saved is not None:
        write_whole(save, cluster_toml(saved), "--save")
        nodes = "" if saved.num_nodes > 1 else " (--nodes N)"
        print_status(f"saved {save}: use it as --cluster {save}{nodes}")
    if draw is not None and shown is not None:
        from simulator.formats.writers.link_plot import write_link_plot
        from simulator.predict.link_loads import idle_links

        write_link_plot(draw, idle_links(shown), "--draw")
        print_status(f"drawn in {draw}")
    return ExitCode.OK


def _check_tree_options(found: Host | Cluster | NodeTree, source: str, given: Mapping[str, object]) -> None:
    """Refuse what a source cannot use. Raises ClusterError with every fault."""
    is_tree = isinstance(found, NodeTree)
    faults = [
        Fault(place=name, problem=f"{source} is not a SLURM tree", remedy="topology.conf or topology.yaml")
        for name, value in given.items()
        if value and not is_tree
    ]
    if is_tree and not given["--node"]:
        faults += [
            Fault(place=name, problem="has no effect without the machine below the tree", remedy="--node hgx-h100-8")
            for name in ("--hosts", "--oversubscription")
            if given[name]
        ]
    ClusterError.raise_for(faults)


def _cluster(found: Host | NodeTree, source: str, device: str | None) -> Cluster:
    """The host as a cluster. Raises ClusterError where there is no host, or its GPUs are not stated."""
    if isinstance(found, NodeTree):
        problem, remedy = "shows what is above the nodes, not a node", "--node with the cluster file of one"
        raise ClusterError.at(source, problem, remedy)
    if device is None:
        raise ClusterError.at(source, "does not say which GPUs these are", "--device with the GPU's name, as h100")
    return cluster_of(found, device)


def _drawing(found: object) -> Mapping[str, Any] | None:
    """A node's links, where the source is a cluster."""
    if not isinstance(found, Cluster):
        return None
    from simulator.formats.html.traffic import cluster_links

    return {"traffic": {"calls": [], "node": cluster_links(found)}}
