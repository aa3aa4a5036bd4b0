"""`--fabric`: what a network was measured to give, as numbers, nccl-tests logs, or a table of collectives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.schema import nearest
from simulator.base.units import UnitError, parse_bytes, parse_bytes_per_s
from simulator.cli.options import print_unread
from simulator.spec.cluster.measured import COLLECTIVES, bus_factor, canonical

if TYPE_CHECKING:
    from simulator.spec.cluster import Cluster

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FORM: Final = "--fabric allreduce=343@2,161@4"
# 343@2, 343GB/s@2x4:1GiB: bus bandwidth (GB/s), nodes, GPUs of each, size of the calls
_NUMBER = re.compile(r"([0-9.]+(?:e[0-9]+)?)([A-Za-z]+/s)?@([0-9]{1,6})(?:x([0-9]{1,4}))?(?::(\S+))?")
_HELP = (
    "What the links were measured to give: COLLECTIVE=BUSBW@NODES[xGPUS][:SIZE],... in GB/s of nccl-tests' busbw, 1 node: "
    "inside it; or what nccl-tests printed; or a table of collectives. May be repeated."
)


def fabric_option(function: _Command) -> _Command:
    """--fabric: all collectives follow it."""
    return click.option("--fabric", "fabric", multiple=True, metavar="NUMBERS|FILE", help=_HELP)(function)


def with_fabric(cluster: Cluster, given: Sequence[str]) -> Cluster:
    """The cluster with what the flags state, beside what its file does. Raises InputError, ClusterError: every fault."""
    if not given:
        return cluster
    found: list[dict[str, Any]] = []
    faults: list[Fault] = []
    for text in given:
        reader = _numbers if "=" in text and not Path(text).is_file() else _file
        with Collected(faults):
            found += reader(text)
    InputError.raise_for(faults)
    measured = [one.model_dump(exclude_none=True) for one in cluster.fabric.measured]
    return cluster.with_measured([*measured, *found], "--fabric")


def _numbers(text: str) -> list[dict[str, Any]]:
    name, _, numbers = text.partition("=")
    place, kind = f"--fabric {name}", canonical(name.strip())
    faults, found = list[Fault](), list[dict[str, Any]]()
    if kind is None:
        faults.append(Fault(place, "no collective is called so", nearest(name, tuple(COLLECTIVES))))
    for number in numbers.split(","):
        try:
            found.append({"collective": kind, **_number(number)})
        except UnitError as exc:
            faults.append(Fault(place, exc.problem, exc.remedy))
    InputError.raise_for(faults)
    return found


def _number(text: str) -> dict[str, Any]:
    """BUSBW@NODES. Raises UnitError."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise UnitError(f"{text!r} is not BUSBW@NODES", f"as {_FORM}")
    rate, unit, nodes, gpus, size = match.groups()
    one = {"nodes": int(nodes), "bus_bytes_per_s": parse_bytes_per_s(rate + (unit or "GB/s"))}
    sized = {} if size is None else {"size_bytes": parse_bytes(size)}
    return {**one, **sized, **({} if gpus is None else {"gpus_per_node": int(gpus)})}


def _file(text: str) -> list[dict[str, Any]]:
    """A log of nccl-tests, or a table of collectives; the median where a size stands several times."""
    path = Path(text)
    if not path.is_file():
        forms = f"{_FORM}, or a log of nccl-tests; NICs as sold: --set cluster.inter.nic_bytes_per_s=100Gb/s"
        raise InputError.at(f"--fabric {text}", "is no file and states no number", forms)
    by_call: dict[tuple[str, int, int, int], list[float]] = {}
    for *call, time_s in _rows_of_table(path) if _is_table(path) else _rows_of_log(path):
        by_call.setdefault(tuple(call), []).append(time_s)
    uneven = sorted({call[1:3] for call in by_call if call[1] % call[2]})
    if uneven or not by_call:
        problem = f"{uneven[0][0]} ranks on {uneven[0][1]} nodes" if uneven else "no row of a collective"
        remedy = "as many ranks on every node" if uneven else "the output of nccl-tests"
        raise InputError.at(f"--fabric {text}", problem, remedy)
    return [
        {
            "collective": kind,
            "nodes": nodes,
            "gpus_per_node": ranks // nodes,
            "size_bytes": size,
            "bus_bytes_per_s": float(bus_factor(kind, ranks)) * size / median(times),
        }
        for (kind, ranks, nodes, size), times in by_call.items()
        if ranks > 1
    ]


def _is_table(path: Path) -> bool:
    from simulator.formats.readers.measured_table import COLLECTIVES

    return path.name.removesuffix(".gz").endswith(".csv") and COLLECTIVES.matches(path)


def _rows_of_log(path: Path) -> Iterator[tuple[Any, ...]]:
    from validate.fit.nccl_tests import read_logs

    read = read_logs([path])
    print_unread(read.faults)
    for sample in read.samples:
        shape = sample.shape
        yield shape["op"], shape["num_ranks"], shape["num_nodes"], shape["size_bytes"], sample.time_s


def _rows_of_table(path: Path) -> Iterator[tuple[Any, ...]]:
    from simulator.formats.readers.measured_table import few_rows, read_collectives
    from simulator.studies.backtest.rows import KINDS, BadRow

    unread: list[Fault] = []
    for row in few_rows(read_collectives(path), str(path)):
        if isinstance(row, BadRow):
            unread += row.faults
        elif row.n_gpus is None or row.n_nodes is None:
            unread.append(Fault(f"line {row.line}", "n_gpus or n_nodes is blank"))
        elif not row.degraded:
            yield KINDS[row.collective], row.n_gpus, row.n_nodes, row.size_bytes, row.time_us * 1e-6
    print_unread(unread)
