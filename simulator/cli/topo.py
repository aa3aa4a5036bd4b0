"""`shardwise topo`: what a description of a host, a cluster or SLURM's tree says, and what looks wrong with it."""

from __future__ import annotations

import json

import click

from simulator.cli import ExitCode
from simulator.cli.terminal import show
from simulator.host import NodeTree, findings
from simulator.readers.topology_source import host_of, read_source, with_device
from simulator.topology import Cluster
from simulator.writers.host_view import host_json, render_host, render_tree, tree_json

_WIDTH = 140
_HELP = """Show a topology: NVLink islands, the network card nearest to each GPU and by what path, NUMA, minimum cuts
between islands, what looks wrong, and what the source does not say.

SOURCE is what `nvidia-smi topo -m` printed, an NCCL topology XML (NCCL_TOPO_DUMP_FILE), a preset's name, a cluster's
.toml, a SLURM topology.conf or topology.yaml, or - for standard input."""


@click.command("topo", help=_HELP)
@click.argument("source", metavar="SOURCE")
@click.option("--device", metavar="NAME", help="The GPUs of a matrix, which does not name them: gives speeds.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON (docs/reference/topology-sources.md).")
@click.option("--plain", is_flag=True, help="No colours, fixed width.")
def command(source: str, *, device: str | None, as_json: bool, plain: bool) -> int:
    """Read, show."""
    found = read_source(source)
    if isinstance(found, NodeTree):
        answer, data = render_tree(found), tree_json(found)
    else:
        host = host_of(found) if isinstance(found, Cluster) else found
        host, joined = with_device(host, device) if device else (host, False)
        wrong = findings(host, expects_nvlink=joined)
        answer, data = render_host(host, wrong), host_json(host, wrong)
    if as_json:
        click.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show(answer, plain=plain, width=_WIDTH)
    return ExitCode.OK
