"""`shardwise collective`: the time of one collective over its sizes, with the algorithm and protocol that NCCL picks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import click

from simulator.base.errors import ClusterError, InputError, PlanError
from simulator.base.exit_codes import ExitCode
from simulator.base.schema import nearest
from simulator.base.units import parse_bytes
from simulator.cli.fabric import fabric_option, with_fabric
from simulator.cli.finite import FiniteRange
from simulator.cli.options import (
    FILE,
    answer_options,
    cluster_option,
    print_answer,
    print_status,
    print_unread,
    quantity,
    set_option,
)
from simulator.formats.drawing import check_picture
from simulator.formats.study.loading import cluster_with
from simulator.formats.writers.collective_table import Sweep, bucket_rows, crossovers, plot, render, sweep_rows, to_data
from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.parts import MAX_NODES
from simulator.spec.software.nccl import Nccl, assignments
from simulator.spec.software.nccl.environment import TUNER_FILE
from simulator.spec.software.stack import Stack
from simulator.work.collectives import KINDS, Choice, LinkCurves, choose, source
from simulator.work.collectives.call import nic_paths

_MOST_SIZES = 1000
_MOST_BYTES = 2**50
_ALIASES = {name.replace("_", ""): name for name in KINDS}
_HELP = """Print an nccl-tests-like table of a collective on a cluster: size, algorithm, protocol, time, bandwidths.

COLLECTIVE is all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all or send_recv. Sizes are of the full
tensor, as nccl-tests prints them (all_to_all and send_recv: what one rank sends). Rows that begin with > are the first
of another choice; the exact sizes stand below the table. --compare puts what nccl-tests measured beside it."""


@click.command("collective", help=_HELP)
@click.argument("collective", metavar="COLLECTIVE")
@cluster_option(default="hgx-h100-8", show_default=True)
@set_option("Any leaf of cluster or device. May be repeated.")
@click.option("--nodes", type=click.IntRange(1, MAX_NODES), help="How many of the cluster's nodes. [the file's]")
@click.option("--group", type=click.IntRange(min=2), metavar="N", help="Ranks of the group, the first N. [all]")
@click.option("--per-node", type=click.IntRange(min=1), metavar="K", help="Groups of K ranks on every node, all at once.")  # fmt: skip
@fabric_option
@click.option("--size", default="8B:8GB", show_default=True, metavar="SIZE[:SIZE]", help="One size, or from:to.")
@click.option("--factor", default=2.0, show_default=True, type=FiniteRange(min=1.01), help="Between sizes.")
@click.option("--nccl", default="", metavar="VERSION", help="Of NCCL, as 2.18. [a current one]")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="NCCL's variables, as in a shell. May be repeated.")
@click.option("--tuner", type=click.Path(path_type=Path), metavar="CSV", help="A tuner's table, as NCCL's example's.")
@click.option("--stack", metavar="NAME|FILE", help="Whose version and variables; --nccl and --env come on top.")
@click.option("--compare", multiple=True, type=FILE, metavar="LOG", help="What nccl-tests printed, or its JSON (-J): its sizes, ranks and nodes, with times and errors beside. May be repeated.")  # fmt: skip
@click.option("--bucket", metavar="SIZE", help="Also: the same bytes in calls of this size, one after the other.")
@click.option("--calibration", metavar="NAME|FILE", help="Whose links. [as shipped; `ideal`: the closed forms]")
@click.option("--plot", "picture", type=FILE, metavar="OUT.png|OUT.svg", help="Draw it.")
@partial(answer_options, json_help="Write JSON (docs/reference/topology-sources.md).")
def command(  # noqa: PLR0913  one an option
    collective: str,
    *,
    cluster: str,
    settings: tuple[str, ...],
    nodes: int | None,
    group: int | None,
    per_node: int | None,
    fabric: tuple[str, ...],
    size: str,
    factor: float,
    nccl: str,
    env: tuple[str, ...],
    tuner: Path | None,
    stack: str | None,
    compare: tuple[Path, ...],
    bucket: str | None,
    calibration: str | None,
    picture: Path | None,
) -> int:
    """Sweep, print, draw."""
    kind = _kind(collective)
    if picture is not None:
        check_picture(picture, "--plot")
    if compare and (group is not None or per_node is not None):
        raise InputError.at("--compare", "cannot be combined with --group or --per-node", "the log says who took part")
    measured = _measured(compare, kind) if compare else None
    machine, shape = _machine(partial(cluster_with, cluster, settings), nodes, group, per_node, measured)
    machine = with_fabric(machine, fabric)
    curves, software = _curves(calibration), _software(nccl, env, tuner, stack)
    for name in software.environment.unmodelled:
        print_status(f"not modelled: {name}")

    def pick(size_bytes: int) -> Choice:
        return choose(kind, size_bytes, shape, machine, curves, nccl=software)

    sizes = sizes_of(size, factor) if measured is None else tuple(measured.times_s)
    rows = sweep_rows(kind, shape.num_ranks, sizes, pick)
    if measured is not None:
        rows = tuple(replace(row, measured_time_s=measured.times_s[row.size_bytes]) for row in rows)
    sweep = Sweep(
        collective=kind,
        cluster=machine.name,
        num_ranks=shape.num_ranks,
        num_nodes=shape.num_nodes,
        rows=rows,
        crossovers=crossovers(rows, pick),
        buckets=bucket_rows(rows, _bytes("--bucket", bucket), pick) if bucket else (),
        source=source(machine, curves, nccl=software),
        unmodelled=software.environment.unmodelled,
        cards=nic_paths(machine, shape, kind, software),
    )
    print_answer("collective", lambda: to_data(sweep), lambda: render(sweep))
    if picture is not None:
        plot(sweep, picture)
        print_status(f"drawn in {picture}")
    return ExitCode.OK


def _machine(
    load: Callable[[int | None], Cluster],
    nodes: int | None,
    group: int | None,
    per_node: int | None,
    measured: Measured | None,
) -> tuple[Cluster, GroupShape]:
    """The cluster and the group: as the options say, or as the log was measured."""
    if measured is not None:
        return _as_logged(load(nodes or measured.num_nodes), measured)
    machine = load(nodes)
    return machine, group_shape(machine, group) if per_node is None else side_by_side(machine, per_node, group)


@dataclass(frozen=True, slots=True)
class Measured:
    """A collective from a log: its ranks, and seconds by size in increasing order (median of repeated sizes)."""

    num_ranks: int
    num_nodes: int
    times_s: dict[int, float]


def _measured(paths: tuple[Path, ...], kind: str) -> Measured:
    """The logs' measurements of `kind`. Raises CalibrationError or InputError if there are none, or several groups."""
    from validate.fit.nccl_tests import read_logs

    read = read_logs(list(paths))
    print_unread(read.faults)
    matching = [sample for sample in read.samples if sample.shape["op"] == kind]
    groups = sorted({(sample.shape["num_ranks"], sample.shape["num_nodes"]) for sample in matching})
    place = "--compare"
    if not matching:
        seen = ", ".join(sorted({str(sample.shape["op"]) for sample in read.samples}))
        raise InputError.at(place, f"no row of {kind}", f"the logs have {seen}")
    if len(groups) > 1:
        several = ", ".join(f"{ranks} ranks on {nodes} nodes" for ranks, nodes in groups)
        raise InputError.at(place, f"logs of several groups: {several}", "one at a time")
    times: dict[int, list[float]] = {}
    for sample in matching:
        times.setdefault(int(sample.shape["size_bytes"]), []).append(sample.time_s)
    return Measured(*groups[0], {size: median(times[size]) for size in sorted(times)})


def _as_logged(cluster: Cluster, measured: Measured) -> tuple[Cluster, GroupShape]:
    """The group of the log on `cluster`: as many ranks on each node. Raises ClusterError where it does not fit."""
    per_node = -(-measured.num_ranks // measured.num_nodes)
    if per_node > cluster.gpus_per_node or measured.num_nodes > cluster.num_nodes:
        problem = f"the log has {measured.num_ranks} ranks on {measured.num_nodes} nodes; {cluster.name} has "
        problem += f"{cluster.num_nodes} of {cluster.gpus_per_node} GPUs"
        raise ClusterError.at("--compare", problem, "--cluster and --nodes of the log")
    return cluster, GroupShape.dealt(cluster, measured.num_ranks, measured.num_nodes)


def _software(version: str, env: tuple[str, ...], tuner: Path | None, stack: str | None) -> Nccl:
    """NCCL's settings from the stack, the version and the environment. Raises InputError with every fault."""
    base = Stack.load(stack) if stack else None
    variables = {**(base.nccl.env if base else {}), **assignments(env, "--env")}
    if tuner is not None:
        variables[TUNER_FILE] = str(tuner)
    return Nccl.of(version or (base.nccl.version if base else ""), variables, place="--env")


def _bytes(flag: str, text: str) -> int:
    found = quantity(flag, parse_bytes, text, "as 1MiB")
    if not 0 < found <= _MOST_BYTES:
        raise InputError.at(flag, f"{found} bytes", "1B to 1PiB")
    return found


def _curves(calibration: str | None) -> LinkCurves | None:
    """The link curves of a calibration file; None: use the built-in curves."""
    if calibration == "ideal":
        return LinkCurves.ideal()
    return Calibration.load(calibration).links if calibration else None


def _kind(name: str) -> str:
    """The collective, however it is spelled: all_reduce, allreduce, all-reduce."""
    found = _ALIASES.get(name.lower().replace("_", "").replace("-", ""))
    if found is None:
        raise PlanError.at("collective", f"no collective is called {name!r}", nearest(name, KINDS))
    return found


def sizes_of(text: str, factor: float) -> tuple[int, ...]:
    """`8B:8GB` in steps of a factor, both ends among them. Raises InputError."""
    first, colon, last = text.partition(":")
    low, high = (quantity("--size", parse_bytes, one, "as 8B:8GB") for one in (first, last if colon else first))
    if not 0 < low <= high <= _MOST_BYTES:
        raise InputError.at("--size", f"from {low} to {high} bytes", "1B:1PiB at most, in order")
    sizes = [low]
    while sizes[-1] < high and len(sizes) <= _MOST_SIZES:
        sizes.append(max(sizes[-1] + 1, int(min(sizes[-1] * factor, high))))
    if len(sizes) > _MOST_SIZES:
        raise InputError.at("--factor", f"more than {_MOST_SIZES} sizes", "a larger factor")
    return tuple(sizes)


def group_shape(cluster: Cluster, num_ranks: int | None) -> GroupShape:
    """The first `num_ranks` ranks in one group, all if None; other ranks are idle. Raises ClusterError."""
    ranks = cluster.num_devices if num_ranks is None else num_ranks
    if not 2 <= ranks <= cluster.num_devices:
        problem = f"a group of {ranks} on {cluster.num_devices} GPUs"
        raise ClusterError.at("--group", problem, f"2 to {cluster.num_devices}, or more --nodes")
    return GroupShape.of_neighbours(cluster, ranks)


def side_by_side(cluster: Cluster, per_node: int, num_ranks: int | None) -> GroupShape:
    """Groups of `per_node` neighbours of each node, all GPUs busy in one. Raises ClusterError."""
    gpus = cluster.gpus_per_node
    if num_ranks is not None or gpus % per_node or per_node * cluster.num_nodes < 2:
        problem = f"{per_node} ranks on each of {cluster.num_nodes} nodes of {gpus} GPUs"
        problem = "cannot be combined with --group" if num_ranks is not None else problem
        raise ClusterError.at("--per-node", problem, f"a divisor of {gpus}, two ranks at least")
    return GroupShape.dealt(cluster, per_node * cluster.num_nodes, cluster.num_nodes, gpus // per_node)
