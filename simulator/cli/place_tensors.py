"""`shardwise place --tensors`: which GPU of a node holds each tensor when, or what moves between tiers in a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.exit_codes import ExitCode
from simulator.base.units import parse_bytes
from simulator.cli.options import FILE, all_of, also_as_page, print_text, quantity, requested, write_json
from simulator.formats.study import Study
from simulator.studies.tensors.assign import Node
from simulator.work.offload.tiered import POLICIES, Moves, Tensor

OWN: Final = "own"
NAMES: Final = ("tensors", "room", "evict", "moves")
_MOVES: Final = ("copy", "prefetch", "fault", "overcommit")


tensor_options = all_of(  # what `place` is asked of tensors
    click.option(
        "--tensors", type=FILE, metavar="TABLE.csv|own", help="Tensors instead of ranks: a table's, or the plan's own."
    ),
    click.option("--room", metavar="SIZE", help="Of each GPU, for the tensors. [what a process can get]"),
    click.option(
        "--evict", type=click.Choice(list(POLICIES)), help="Tensors of GPU 0 over HBM, idle peers, host and NVMe."
    ),
    click.option("--moves", type=click.Choice(_MOVES), help="With --evict: how what is missing comes. [copy]"),
)


def answer(study: Study, given: dict[str, Any]) -> int:
    """Place, print. Raises InputError with every fault of what is asked."""
    from simulator.studies.tensors import assign_shards, schedule_transfers, text, tiered

    tensors, room = _inputs(study, given)
    if given["evict"] is not None:
        tiers, moves = _tiers(study, room[0], given["moves"] or "copy")
        found = tiered([one for one in tensors if one.gpu == 0], tiers, given["evict"], moves)
        _show(text.tiered_data(found), text.tiered_text(found))
        return ExitCode.DOES_NOT_FIT if found.over_bytes else ExitCode.OK
    node = Node.of(study.cluster, room)
    assigned = assign_shards(tensors, node)
    transfers = schedule_transfers(tensors, node, assigned)
    inputs = (tensors, node, assigned, transfers)
    _show(text.placed_data(*inputs), text.placed_text(*inputs))
    return ExitCode.DOES_NOT_FIT if assigned.too_much else ExitCode.OK


def _show(data: dict[str, Any], lines: Any) -> None:  # noqa: ANN401  an iterator of lines
    if requested("json"):
        write_json(data)
    else:
        print_text("\n".join(lines))
    also_as_page("answer", lambda: data)


def _inputs(study: Study, given: dict[str, Any]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The tensors, and the bytes of each GPU for them."""
    faults: list[Fault] = []
    size: int | None = None
    if given["moves"] is not None and given["evict"] is None:
        faults.append(Fault(place="--moves", problem="is how --evict moves", remedy=f"--evict {'|'.join(POLICIES)}"))
    with Collected(faults):
        size = quantity("--room", parse_bytes, given["room"]) if given["room"] is not None else None
    InputError.raise_for(faults)
    count, device = study.cluster.gpus_per_node, study.cluster.device
    if str(given["tensors"]) == OWN:
        from simulator.play.lower import lowered
        from simulator.studies.tensors.own import own_tensors

        tensors, own_room = own_tensors(lowered(*study.parts))
        return tensors, own_room if size is None else (size,) * count
    from simulator.formats.readers.tensors_table import read_tensors

    room = device.usable_bytes - device.hypervisor_bytes if size is None else size
    return read_tensors(Path(given["tensors"]), count), (room,) * count


def _tiers(study: Study, room: int, how: str) -> tuple[Any, Moves]:
    """The memory hierarchy of one GPU, and what one move in it costs beside its bytes."""
    from simulator.memory.driver_costs import DriverCosts
    from simulator.work.offload.hierarchy import hierarchy

    tiers = hierarchy(study.cluster, min(study.plan.num_devices, study.cluster.gpus_per_node))
    host = study.cluster.host_tier
    assert host is not None  # hierarchy has refused a cluster without
    units = {
        "copy": Moves(unit_s=host.copy_latency_s),
        "prefetch": Moves(unit_s=host.copy_latency_s, ahead=True),
        "fault": Moves(unit_bytes=host.fault_bytes, unit_s=host.fault_latency_s),
        "overcommit": Moves(unit_s=host.copy_latency_s + DriverCosts.of(study.calibration).malloc.call_s),
    }
    return (replace(tiers[0], num_bytes=room), *tiers[1:]), units[how]
