"""Chakra execution traces (mlcommons/chakra, schema/protobuf/et_def.proto): a predicted step, a file a rank.

A file is a sequence of messages, each behind its length: GlobalMetadata, then a Node for every op, in the order of launch.
Nodes have the attributes that Chakra's feeder reads (`is_cpu_op`, `comm_type`, `comm_size`, `comm_src`, `comm_dst`, `comm_tag`,
`pg_name`), so that ASTRA-sim runs them; `stream`, `category` and the exact times beside the schema's microseconds are ours.
Dependencies are those of the program and the order of each stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final
from zlib import crc32

from simulator.base.sums import summed
from simulator.base.wire import block, double, integer, member, packed, varint
from simulator.play.lower.builder import Exchanges
from simulator.play.lower.fabric import MeshFabric
from simulator.work.program import Collective, Program, ProgramOp
from simulator.work.trace import Span

VERSION: Final = "0.0.4"  # of the schema, as Chakra's own generator has it
SUFFIX: Final = ".et"
SOURCE: Final = "shardwise"
MEM_LOAD, MEM_STORE, COMP, SEND, RECV, COLLECTIVE = 2, 3, 4, 5, 6, 7
COMM_TYPES: Final[Mapping[str, int]] = {  # CollectiveCommType
    "all_reduce": 0, "reduce": 1, "all_gather": 2, "broadcast": 5, "all_to_all": 6, "reduce_scatter": 7,
}  # fmt: skip
_LOADS: Final = ("h2d", "nvme_read", "from_peer")
_STORES: Final = ("d2h", "nvme_write", "to_peer")
_PAIR: Final = re.compile(r"nccl:pp (\d+) (?:to|and) (\d+)")


def trace_files(
    fabric: MeshFabric,
    programs: Sequence[Program],
    inside: Sequence[Mapping[int, Exchanges]],
    spans: Mapping[str, Sequence[Span]],
    ranks: Iterable[int],
    model: str,
) -> dict[str, bytes]:
    """A file for each of the ranks, named by it, and the process groups of all of them, as ASTRA-sim reads them.

    programs: of the stages, in order, played to `spans`. inside: the collectives in each of their compute ops.
    """
    mesh = fabric.mesh
    writers = [_Stage(fabric, stage, one, inside[stage], spans[one.name], model) for stage, one in enumerate(programs)]
    groups: dict[str, list[int]] = {}
    files: dict[str, bytes] = {}
    for rank in ranks:
        files[f"{model}.{rank}{SUFFIX}"] = writers[mesh.coordinates(rank)["pp"]].file(rank, groups)
    files["comm_groups.json"] = (json.dumps(dict(sorted(groups.items())), indent=1) + "\n").encode()
    return files


def framed(messages: Iterable[bytes]) -> bytes:
    """Messages, each behind its length (Chakra's protolib: encodeMessage)."""
    return b"".join(varint(len(one)) + one for one in messages)


class _Stage:
    """The trace of a stage's ranks, which differ in their groups and peers alone."""

    def __init__(
        self,
        fabric: MeshFabric,
        stage: int,
        program: Program,
        inside: Mapping[int, Exchanges],
        spans: Sequence[Span],
        model: str,
    ) -> None:
        self._inside, self._fresh = inside, 0
        self._fabric, self._mesh, self._stage, self._program, self._model = fabric, fabric.mesh, stage, program, model
        self._spans = {span.id: span for span in spans}

    def file(self, rank: int, groups: dict[str, list[int]]) -> bytes:
        return framed([self._head(rank), *self._nodes(rank, groups)])

    def _head(self, rank: int) -> bytes:
        attrs = [
            _text("source", SOURCE), _text("model", self._model), _number("rank", rank),
            _number("world_size", self._mesh.num_ranks), _text("program", self._program.name),
        ]  # fmt: skip
        return block(1, VERSION) + b"".join(block(2, one) for one in attrs)

    def _nodes(self, rank: int, groups: dict[str, list[int]]) -> Iterator[bytes]:
        last: dict[str, int] = {}
        self._fresh = 1 + max((op.id for op in self._program.ops), default=0)
        for op in self._program.ops:
            before = last.get(op.stream)
            waits = list(dict.fromkeys((*op.after, *(() if before is None else (before,)))))
            span = self._spans[op.id]
            if inside := self._inside.get(op.id):
                yield from self._parted(op, span, waits, inside, rank, groups)
            else:
                begins = span.start_s if span.joined_s is None else span.joined_s  # until then it waits for its members
                node_type = self._type_of(op, rank, groups)
                yield _node(
                    op.id, op.label, node_type, waits, float(begins), float(span.end_s), op.stream, span.category
                )
            last[op.stream] = op.id

    def _parted(
        self, op: ProgramOp, span: Span, waits: list[int], inside: Exchanges, rank: int, groups: dict[str, list[int]]
    ) -> Iterator[bytes]:
        """A compute op, and behind its kernels the collectives inside it, by their bytes in what of it they are exposed.

        The last of them has the op's number, so that what waits for the op waits for all.
        """
        start_s, end_s = float(span.start_s), float(span.end_s)
        total_s = float(summed(seconds for _, seconds in span.parts))
        exposed_s = float(summed(seconds for name, seconds in span.parts if name.startswith("exposed:")))
        at_s = end_s - (end_s - start_s) * (exposed_s / total_s if total_s else 0.0)
        number, self._fresh = self._fresh, self._fresh + 1
        yield _node(
            number, op.label, (COMP, [_flag("is_cpu_op", value=False)]), waits, start_s, at_s, op.stream, span.category
        )
        one_by_one = list(inside.elements())
        total_bytes, waited_s = max(1, summed(size for _, _, size in one_by_one)), end_s - at_s
        for index, (kind, role, size) in enumerate(one_by_one):
            before, until_s = number, at_s + waited_s * size / total_bytes
            number = op.id if index + 1 == len(one_by_one) else self._fresh
            self._fresh += number != op.id
            node_type = self._collective(
                kind, role, size, self._fabric.mesh.group_of(self._fabric.axis(role), rank), groups
            )
            yield _node(number, f"{kind} of {op.label}", node_type, [before], at_s, until_s, f"nccl:{role}", kind)
            at_s = until_s

    def _type_of(self, op: ProgramOp, rank: int, groups: dict[str, list[int]]) -> tuple[int, list[bytes]]:
        """The node's type and its attributes for the feeder."""
        if not isinstance(op, Collective):
            return COMP, [_flag("is_cpu_op", value=op.stream == "host")]
        if op.kind in COMM_TYPES:
            return self._collective(op.kind, *self._group(op, rank), groups)
        if op.kind in (*_LOADS, *_STORES):
            kind = MEM_LOAD if op.kind in _LOADS else MEM_STORE
            return kind, [_flag("is_cpu_op", value=False), block(1, "tensor_size") + member(13, op.size_bytes)]
        if pair := _PAIR.match(op.stream):
            return self._message(op, rank, (int(pair[1]), int(pair[2])))
        return COMP, [_flag("is_cpu_op", value=op.kind.startswith("cpu"))]

    def _collective(
        self, kind: str, role: str, size_bytes: int, ranks: Sequence[int], groups: dict[str, list[int]]
    ) -> tuple[int, list[bytes]]:
        """A collective of a group, which is named by its role and first rank."""
        name = f"{role}.{ranks[0]}"
        groups[name] = list(ranks)
        size = size_bytes // (len(ranks) if kind == "all_gather" else 1)  # what a rank brings
        comm = [_number("comm_type", COMM_TYPES[kind]), _number("comm_size", size)]
        return COLLECTIVE, [_flag("is_cpu_op", value=False), *comm, _text("pg_name", name)]

    def _group(self, op: Collective, rank: int) -> tuple[str, int, Sequence[int]]:
        """(role, bytes, ranks) of the op's group."""
        role = op.stream.removeprefix("nccl:").partition(" ")[0]
        ranks = self._mesh.group_of(self._fabric.axis(role), rank)
        if role == "pp" and op.members == 2:  # the first and the last stage share the embedding
            return "ends", op.size_bytes, [ranks[0], ranks[-1]]
        return role, op.size_bytes, ranks

    def _message(self, op: Collective, rank: int, stages: tuple[int, int]) -> tuple[int, list[bytes]]:
        sends = op.label.startswith("send")
        other = stages[0] if stages[1] == self._stage else stages[1]
        peer = rank + (other - self._stage) * self._mesh.stride("pp")
        source, target = (rank, peer) if sends else (peer, rank)
        tag = crc32(op.key.encode()) & 0x7FFFFFFF  # equal at both ends, which share the key
        attrs = [_flag("is_cpu_op", value=False), _small("comm_src", source), _small("comm_dst", target)]
        return SEND if sends else RECV, [*attrs, _small("comm_tag", tag), _number("comm_size", op.size_bytes)]


def _node(
    number: int,
    name: str,
    node_type: tuple[int, list[bytes]],
    waits: Sequence[int],
    start_s: float,
    end_s: float,
    stream: str,
    category: str,
) -> bytes:
    """A Node. node_type: its type, and its attributes for the feeder."""
    kind, attrs = node_type
    exact = [_seconds("start_s", start_s), _seconds("duration_s", end_s - start_s)]
    attrs = [*attrs, _text("stream", stream), _text("category", category), *exact]
    return (
        integer(1, number) + block(2, name) + integer(3, kind) + packed(5, waits)
        + integer(6, round(start_s * 1e6)) + integer(7, round((end_s - start_s) * 1e6))
        + b"".join(block(10, one) for one in attrs)
    )  # fmt: skip


def _flag(name: str, *, value: bool) -> bytes:
    return block(1, name) + member(27, value)


def _small(name: str, value: int) -> bytes:
    return block(1, name) + member(7, value)


def _number(name: str, value: int) -> bytes:
    return block(1, name) + member(9, value)


def _text(name: str, value: str) -> bytes:
    return block(1, name) + block(29, value)


def _seconds(name: str, value: float) -> bytes:
    return block(1, name) + double(3, value)
