"""Chakra execution traces (mlcommons/chakra, schema/protobuf/et_def.proto) as recordings: one file is one rank.

What a trace has no times for is played as early as its dependencies and streams allow. Traces that we wrote say stream, category
and exact times; of others, nodes of a kind (computation, communication, memory, CPU) run one after another.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

from simulator.base.errors import Fault, InputError
from simulator.base.files import ordinary
from simulator.base.units import counted
from simulator.base.wire import FIXED64, LENGTH, VARINT, BrokenMessageError, fields, numbers, read_varint, signed
from simulator.formats.readers.kernel_names import category_of
from simulator.work.recorded.recording import Carried, RecordedOp, Recording, in_order, scheduled

SUFFIX: Final = ".et"
NAME_LENGTH: Final = 200
GROUPS: Final = "comm_groups.json"
_MOST_BYTES: Final = 2**30
_MOST_NODES: Final = 500_000
_MOST_FAULTS: Final = 20
_METADATA, _SEND, _RECV, _COLLECTIVE = 1, 5, 6, 7
_LANES: Final = {4: (0, ""), 2: (2, "h2d"), 3: (2, "d2h"), _SEND: (1, ""), _RECV: (1, ""), _COLLECTIVE: (1, "")}
_CPU_LANE: Final = 3
_KINDS: Final = {0: "all_reduce", 1: "reduce", 2: "all_gather", 3: "gather", 4: "scatter", 5: "broadcast", 6: "all_to_all",
                 7: "reduce_scatter", 8: "reduce_scatter", 9: "barrier"}  # fmt: skip
_NUMBERS: Final = (7, 9, 11, 13, 27)  # members of AttributeProto that are whole numbers or a truth
_DOUBLE, _STRING = 3, 29

Groups = Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class _Node:
    """A node as it stands. at: offset of its message in the file."""

    at: int
    id: int = 0
    name: str = ""
    kind: int = 0
    waits: list[int] = field(default_factory=list)
    start_us: int = 0
    duration_us: int = 0
    attrs: dict[str, Any] = field(default_factory=dict)


def read_chakra(path: Path) -> Recording:
    """A file as a recording. Raises InputError with every fault."""
    try:
        data = ordinary(path, _MOST_BYTES).read_bytes()
    except OSError as exc:
        raise InputError.at(str(path), f"cannot be read: {exc.strerror or exc}") from None
    head, nodes = _messages(path, data)
    groups, notes = _groups(path), []
    skipped = [node for node in nodes if node.kind not in _LANES and node.kind != _METADATA]
    if skipped:
        notes.append(f"{counted(len(skipped), 'node')} left out: of storage, batches or checkpoints")
    operations = [node for node in nodes if node.kind in _LANES]
    if not operations:
        raise InputError.at(str(path), "has no node that computes or communicates")
    known = _checked(path, nodes)
    ops, ours = _ops(path, operations, known, groups)
    timed = ours or all(node.start_us for node in operations)
    if not timed:
        notes.append("no start times: every node begins as early as its dependencies and the order of its kind allow")
        ops = scheduled(ops)
    first = min(op.start_s for op in ops) if timed and not ours else 0.0
    ops = [replace(op, start_s=op.start_s - first, end_s=op.end_s - first) for op in ops] if first else ops
    untimed = sum(not op.duration_s for op in ops if op.carried is not None)
    if untimed:
        notes.append(f"{counted(untimed, 'collective')} without a duration: --recorded-on CLUSTER prices them")
    return Recording(
        name=path.name, ops=ops, waits=(), step=None, step_s=max(op.end_s for op in ops), step_times_s={}, origin_s=0.0,
        host_ahead_s=0.0, host_end_s=None, on_host=False, rank=_rank(path, head), world_size=_count(head.get("world_size")),
        device="", peaks=None, notes=tuple(notes),
    )  # fmt: skip


# -- messages


def _messages(path: Path, data: bytes) -> tuple[dict[str, Any], list[_Node]]:
    """The attributes of the head, and the nodes."""
    head, nodes = dict[str, Any](), list[_Node]()
    try:
        for at, message in _framed(data):
            if at:
                nodes.append(_node(message, at))
            else:
                head = _head(message)
    except BrokenMessageError as exc:
        where = f"{path}: byte {exc.at:,}"
        remedy = "a Chakra trace: GlobalMetadata and nodes, each behind its length, not compressed"
        raise InputError.at(where, f"is no Chakra trace: {exc}", remedy) from None
    if len(nodes) > _MOST_NODES:
        problem, remedy = f"{len(nodes):,} nodes, and {_MOST_NODES:,} can be played", "a trace of one step"
        raise InputError.at(str(path), problem, remedy)
    return head, nodes


def _framed(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(offset, content) of each message. Raises BrokenMessageError."""
    at = 0
    while at < len(data):
        size, begin = read_varint(data, at)
        if begin + size > len(data):
            raise BrokenMessageError(f"a message of {size:,} bytes of which {len(data) - begin:,} are there", at)
        yield at, data[begin : begin + size]
        at = begin + size


def _head(message: bytes) -> dict[str, Any]:
    """The attributes of GlobalMetadata. Raises BrokenMessageError where the message is another."""
    found = list(fields(message))
    if any(number not in (1, 2) or kind != LENGTH for number, kind, _ in found):
        raise BrokenMessageError("its first message is no GlobalMetadata", 0)
    return dict(_attribute(value) for number, _, value in found if number == 2 and isinstance(value, bytes))


def _node(message: bytes, at: int) -> _Node:
    node = _Node(at)
    try:
        _fill(node, message)
    except BrokenMessageError as exc:
        raise BrokenMessageError(f"a node with {exc}", at) from None
    return node


def _fill(node: _Node, message: bytes) -> None:
    for number, kind, value in fields(message):
        if number in (4, 5):
            node.waits += numbers(kind, value)
        elif number in (1, 3, 6, 7) and isinstance(value, int):
            setattr(node, {1: "id", 3: "kind", 6: "start_us", 7: "duration_us"}[number], value)
        elif number == 2 and isinstance(value, bytes):
            node.name = _words(value)
        elif number == 10 and isinstance(value, bytes):
            name, content = _attribute(value)
            node.attrs[name] = content


def _attribute(message: bytes) -> tuple[str, Any]:
    """(name, value) of an AttributeProto; None for a value of a kind that is not used."""
    name, value = "", cast("Any", None)
    for number, kind, content in fields(message):
        if number == 1 and isinstance(content, bytes):
            name = _words(content)
        elif kind == VARINT and number in _NUMBERS and isinstance(content, int):
            value = signed(content)
        elif kind == FIXED64 and number == _DOUBLE and isinstance(content, bytes):
            (value,) = struct.unpack("<d", content)
        elif number == _STRING and isinstance(content, bytes):
            value = _words(content)
    return name, value


def _words(value: bytes) -> str:
    return value[: 4 * NAME_LENGTH].decode("utf-8", "replace")[:NAME_LENGTH]


# -- nodes as ops


def _checked(path: Path, nodes: list[_Node]) -> dict[int, _Node]:
    """The nodes by id. Raises InputError with ids that are given twice, and waits for nodes that are not there."""
    known: dict[int, _Node] = {}
    faults: list[Fault] = []
    for node in nodes:
        if node.id in known:
            faults.append(_fault(path, node, f"has the id {node.id}, as the node at byte {known[node.id].at:,} has"))
        known.setdefault(node.id, node)
    for node in nodes:
        missing = sorted({one for one in node.waits if one not in known})
        if missing:
            faults.append(_fault(path, node, f"waits for {missing[0]}, which is no node's id"))
        faults += [_fault(path, node, problem) for problem in _impossible(node)]
    if faults:
        raise InputError(faults[:_MOST_FAULTS])
    return known


def _impossible(node: _Node) -> Iterator[str]:
    if node.kind == _COLLECTIVE and node.attrs.get("comm_type") not in _KINDS:
        yield f"has comm_type {node.attrs.get('comm_type')}, and {min(_KINDS)} to {max(_KINDS)} are known"
    for name in ("comm_size", "tensor_size"):
        if isinstance(size := node.attrs.get(name, 0), int) and not 0 <= size < 2**60:
            yield f"has {name} {size}"
    for name in ("start_s", "duration_s"):
        if isinstance(seconds := node.attrs.get(name, 0.0), float) and not 0 <= seconds < 1e9:
            yield f"has {name} {seconds}"
    if max(node.start_us, node.duration_us) >= 2**60:
        yield "has a time out of all proportion"


def _fault(path: Path, node: _Node, problem: str) -> Fault:
    return Fault(place=f"{path}: byte {node.at:,}: node {node.name or node.id}", problem=problem)


def _ops(
    path: Path, operations: list[_Node], known: Mapping[int, _Node], groups: Groups
) -> tuple[list[RecordedOp], bool]:
    """The ops in order of their dependencies, and whether they have our own exact times."""
    waits = {node.id: _dependencies(node, known) for node in operations}
    order, stuck = in_order(waits)
    if stuck:
        names = ", ".join(known[one].name or str(one) for one in stuck[:5])
        raise InputError.at(str(path), f"nodes wait for each other in a circle: {names}")
    ours = all("start_s" in node.attrs and "duration_s" in node.attrs for node in operations)
    place = {one: index for index, one in enumerate(order)}
    streams = {"compute": 0}
    return [
        _op(known[one], tuple(sorted(place[before] for before in waits[one])), streams, groups, ours=ours)
        for one in order
    ], ours


def _dependencies(node: _Node, known: Mapping[int, _Node]) -> list[int]:
    """A node's dependencies; skipped nodes are replaced by their own dependencies."""
    found: dict[int, None] = {}
    seen, ahead = {node.id}, list(node.waits)
    while ahead:
        one = ahead.pop()
        if one in seen:
            if one == node.id:
                found[one] = None
            continue
        seen.add(one)
        if known[one].kind in _LANES:
            found[one] = None
        else:
            ahead += known[one].waits
    return list(found)


def _op(node: _Node, after: tuple[int, ...], streams: dict[str, int], groups: Groups, *, ours: bool) -> RecordedOp:
    attrs = node.attrs
    start_s = attrs["start_s"] if ours else node.start_us * 1e-6
    seconds = attrs["duration_s"] if ours else node.duration_us * 1e-6
    lane, category = _LANES[node.kind]
    on_cpu = node.kind == 4 and attrs.get("is_cpu_op") == 1
    named = attrs.get("stream")
    stream = streams.setdefault(named, len(streams)) if isinstance(named, str) else _CPU_LANE if on_cpu else lane
    carried = _carried(node, groups)
    stated = attrs.get("category")
    usual = carried.kind if carried else category or ("host" if on_cpu else category_of(node.name))
    return RecordedOp(
        name=node.name or f"node {node.id}", category=stated if isinstance(stated, str) and not carried else usual, stream=stream,
        start_s=start_s, end_s=start_s + seconds, carried=carried, after=after,
    )  # fmt: skip


def _carried(node: _Node, groups: Groups) -> Carried | None:
    if node.kind not in (_SEND, _RECV, _COLLECTIVE):
        return None
    size = _count(node.attrs.get("comm_size"))
    if node.kind != _COLLECTIVE:
        ends = tuple(
            sorted({one for name in ("comm_src", "comm_dst") if (one := _count(node.attrs.get(name))) is not None})
        )
        return Carried(kind="send_recv", size_bytes=size, group_size=2, ranks=ends if len(ends) == 2 else (), group="")
    group = str(node.attrs.get("pg_name") or "")
    ranks, kind = groups.get(group, ()), _KINDS[node.attrs["comm_type"]]
    if kind == "all_gather" and size is not None:
        size = size * len(ranks) if ranks else None  # the node says what a rank brings
    return Carried(kind=kind, size_bytes=size, group_size=len(ranks) or None, ranks=ranks, group=group)


# -- what stands beside


def _groups(path: Path) -> Groups:
    """The process groups that a file beside the trace names, as ASTRA-sim has them. Raises InputError where it is no such."""
    file = path.with_name(GROUPS)
    if not file.exists():
        return {}
    try:
        data = json.loads(ordinary(file, 2**26).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise InputError.at(str(file), f"cannot be read: {exc}") from None
    good = isinstance(data, dict) and all(
        isinstance(ranks, list) and all(type(one) is int and 0 <= one < 2**24 for one in ranks)
        for ranks in data.values()
    )
    if not good:
        raise InputError.at(str(file), "is no table of process groups", '{"group": [0, 1]}: lists of ranks by name')
    return {str(name): tuple(ranks) for name, ranks in data.items()}


def _rank(path: Path, head: Mapping[str, Any]) -> int | None:
    """By the head, else by the name: PREFIX.RANK.et."""
    if (rank := _count(head.get("rank"))) is not None:
        return rank
    found = re.search(r"\.(\d{1,7})\.et$", path.name)
    return int(found[1]) if found else None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**60 else None
