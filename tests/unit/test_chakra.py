"""Chakra execution traces: the wire format against its own documentation, round trips, traces of others, bad files."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator import Cluster, InputError, Model, Plan, predict
from simulator.base.units import format_seconds
from simulator.base.wire import block, double, fields, integer, member, packed, varint
from simulator.cli import main
from simulator.formats.readers.chakra import read_chakra
from simulator.formats.readers.recording import read_recordings
from simulator.formats.writers.chakra import framed
from simulator.parallel.mesh import GroupShape
from simulator.play.engine import run
from simulator.play.lower import Lowering, lower
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.software.stack import Stack
from simulator.work.collectives import choose
from simulator.work.program import Collective, Program

FSDP = ["--model", "llama3.2-1b", "--cluster", "hgx-h100-8", "--seq-len", "1024"]
STAGES = [
    "--dp-shard",
    "2",
    "--tp",
    "2",
    "--pp",
    "2",
    "--zero",
    "1",
    "--num-micro-batches",
    "2",
    "--data-parallel",
    "megatron",
]
PIPELINE = Plan(dp_shard=2, tp=2, pp=2, zero=1, num_micro_batches=2, seq_len=1024, data_parallel="megatron")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("chakra") / name for name in ("fsdp", "pipeline")}
    assert main(["export", *FSDP, "--to", "chakra", "-o", str(found["fsdp"])]) == 0
    assert main(["export", *FSDP, *STAGES, "--to", "chakra", "--all-ranks", "-o", str(found["pipeline"])]) == 0
    return found


def lowered(plan: Plan) -> Lowering:
    model, cluster = Model.load("llama3.2-1b"), Cluster.load("hgx-h100-8")
    calibration = Calibration.for_device(cluster.device)
    curves = calibration.links or default_curves()
    return lower(model, plan, cluster, Stack.of(plan), calibration, curves)


def programs(plan: Plan) -> tuple[Program, ...]:
    return lowered(plan).programs(plan.num_micro_batches)


# -- the wire format, by the examples of protobuf.dev/programming-guides/encoding


def test_fields_are_written_as_the_documentation_has_them() -> None:
    assert integer(1, 150) == bytes.fromhex("089601")
    assert block(2, "testing") == bytes.fromhex("120774657374696e67")
    assert packed(6, [3, 270, 86942]) == bytes.fromhex("3206038e029ea705")
    assert varint(-2) == bytes.fromhex("feffffffffffffffff01")
    assert integer(1, 0) == b""
    assert member(9, 0) == bytes.fromhex("4800")


def test_fields_are_read_back_and_unknown_ones_passed() -> None:
    data = integer(1, 150) + block(2, "testing") + double(3, 0.5) + bytes.fromhex("fd0101020304")
    assert list(fields(data)) == [
        (1, 0, 150), (2, 2, b"testing"), (3, 1, bytes.fromhex("000000000000e03f")), (31, 5, b"\x01\x02\x03\x04"),
    ]  # fmt: skip


# -- out


def schema() -> Any:
    """Classes of the messages, from the public schema (mlcommons/chakra: schema/protobuf/et_def.proto), by protobuf itself."""
    descriptors: Any = importlib.import_module("google.protobuf.descriptor_pb2")
    pools: Any = importlib.import_module("google.protobuf.descriptor_pool")
    factory: Any = importlib.import_module("google.protobuf.message_factory")
    kind = descriptors.FieldDescriptorProto
    file = descriptors.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")

    def message(name: str, rows: list[tuple[str, int, int, bool, str]], oneof: tuple[str, ...] = ()) -> None:
        made = file.message_type.add(name=name)
        if oneof:
            made.oneof_decl.add(name="value")
        for field, number, type_, repeated, of in rows:
            label = kind.LABEL_REPEATED if repeated else kind.LABEL_OPTIONAL
            one = made.field.add(name=field, number=number, type=type_, label=label)
            if of:
                one.type_name = of
            if field in oneof:
                one.oneof_index = 0

    text, whole = kind.TYPE_STRING, kind.TYPE_UINT64
    values = [
        ("double_val", 3, kind.TYPE_DOUBLE, False, ""), ("int32_val", 7, kind.TYPE_INT32, False, ""),
        ("int64_val", 9, kind.TYPE_INT64, False, ""), ("uint64_val", 13, whole, False, ""),
        ("bool_val", 27, kind.TYPE_BOOL, False, ""), ("string_val", 29, text, False, ""),
    ]  # fmt: skip
    message("AttributeProto", [("name", 1, text, False, ""), *values], tuple(row[0] for row in values))
    attr = ("attr", 2, kind.TYPE_MESSAGE, True, ".ChakraProtoMsg.AttributeProto")
    message("GlobalMetadata", [("version", 1, text, False, ""), attr])
    message(
        "Node",
        [
            ("id", 1, whole, False, ""), ("name", 2, text, False, ""), ("type", 3, kind.TYPE_INT32, False, ""),
            ("ctrl_deps", 4, whole, True, ""), ("data_deps", 5, whole, True, ""),
            ("start_time_micros", 6, whole, False, ""), ("duration_micros", 7, whole, False, ""),
            ("attr", 10, *attr[2:]),
        ],
    )  # fmt: skip
    pool = pools.DescriptorPool()
    pool.Add(file)
    return [
        factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in ("GlobalMetadata", "Node")
    ]


def messages(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = shift = 0
        while True:
            byte, at = data[at], at + 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        yield data[at : at + size]
        at += size


def inside_of(stage: int) -> int:
    """How many collectives lie inside a stage's compute."""
    return sum(found.total() for found in lowered(PIPELINE).exchanges_inside(2)[stage].values())


def test_protobuf_reads_what_is_written_and_writes_the_same_bytes(folders: dict[str, Path]) -> None:
    pytest.importorskip("google.protobuf", reason="needs the package protobuf (pip install -e '.[dev]')")
    metadata, node = schema()
    for stage, program in enumerate(programs(PIPELINE)):
        rank = 4 * stage
        head, *rest = messages((folders["pipeline"] / f"llama3.2-1b.{rank}.et").read_bytes())
        told = metadata.FromString(head)
        assert told.version == "0.0.4"
        assert {one.name: one.int64_val for one in told.attr}["rank"] == rank
        assert told.SerializeToString() == head
        nodes = {}
        for data in rest:
            read = node.FromString(data)
            assert read.SerializeToString() == data  # nothing unknown, nothing in another order
            nodes[read.id] = read
        assert len(nodes) == len(rest) == len(program.ops) + inside_of(stage)
        for op in program.ops:
            read = nodes[op.id]
            assert read.name.endswith(op.label)
            assert read.name != op.label or set(op.after) <= set(read.data_deps)
            attrs = {one.name: one for one in read.attr}
            if isinstance(op, Collective) and op.kind == "reduce_scatter":
                assert (read.type, attrs["comm_type"].int64_val) == (7, 7)
                assert attrs["comm_size"].int64_val == op.size_bytes
                assert attrs["is_cpu_op"].bool_val is False


@pytest.mark.parametrize("name", ["fsdp", "pipeline"])
def test_a_step_that_was_written_is_the_step_that_is_read(name: str, folders: dict[str, Path]) -> None:
    """Every op: name, times, streams, what it carries and among whom."""
    plan = Plan(dp_shard=8, zero=3, seq_len=1024) if name == "fsdp" else PIPELINE
    timeline = run(played := programs(plan))
    for stage, program in enumerate(played):
        found = read_chakra(folders[name] / f"llama3.2-1b.{4 * stage}.et")
        spans = {span.id: span for span in timeline.of(program.name)}
        assert (found.rank, found.world_size) == (4 * stage, 8)
        assert [op.name for op in found.ops if " of " not in op.name] == [op.label for op in program.ops]
        last = {op.name.rpartition(" of ")[2]: op for op in found.ops}  # of an op that has collectives inside
        for op in program.ops:
            ours = last[op.label]
            assert ours.end_s == pytest.approx(float(spans[op.id].end_s), rel=1e-12, abs=1e-15)
            if isinstance(op, Collective):
                assert ours.carried is not None
                assert ours.carried.kind == op.kind
                if op.kind != "all_gather" or op.size_bytes % 8 == 0:
                    assert ours.carried.size_bytes == op.size_bytes


def test_collectives_inside_layers_are_nodes_of_their_own(folders: dict[str, Path]) -> None:
    """Tensor parallelism sums a layer's output twice each way (arXiv 1909.08053): b × s × h × 2 bytes = 1 × 1024 × 2048 × 2."""
    found = read_chakra(folders["pipeline"] / "llama3.2-1b.0.et")
    for label in ("forward layer3 mb0", "backward layer5 mb1"):
        inside = [op for op in found.ops if op.name == f"all_reduce of {label}"]
        kernels = next(op for op in found.ops if op.name == label)
        assert [op.carried and (op.carried.size_bytes, op.carried.ranks) for op in inside] == [(4 * 2**20, (0, 1))] * 2
        assert kernels.end_s <= inside[0].start_s + 1e-12 <= inside[1].start_s


def test_a_step_is_played_again(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    step_s = predict(
        Model.load("llama3.2-1b"), Plan(dp_shard=8, zero=3, seq_len=1024), Cluster.load("hgx-h100-8")
    ).step_s
    file = str(folders["fsdp"] / "llama3.2-1b.0.et")
    capsys.readouterr()
    assert main(["predict", "--program", file, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["replayed_s"] == pytest.approx(step_s, rel=1e-9)
    assert main(["import", file, "--json"]) == 0
    imported = json.loads(capsys.readouterr().out)
    assert imported["step_s"] == pytest.approx(step_s, rel=1e-9)
    assert imported["communication"]["all_gather"]["groups"] == ["shard.0 (8)"]


def test_every_message_has_both_ends(folders: dict[str, Path]) -> None:
    """Who sends what to whom under which tag is what that one receives."""
    sent: list[tuple[object, ...]] = []
    received: list[tuple[object, ...]] = []
    for rank in range(8):
        for _, data in zip(
            range(10**6),
            list(messages((folders["pipeline"] / f"llama3.2-1b.{rank}.et").read_bytes()))[1:],
            strict=False,
        ):
            rows = list(fields(data))
            kind = next(value for number, _, value in rows if number == 3)
            if kind in (5, 6):
                attrs = {}
                for _, _, value in (row for row in rows if row[0] == 10):
                    assert isinstance(value, bytes)
                    (_, _, name), (_, _, told) = fields(value)
                    attrs[name] = told
                ends = attrs[b"comm_src"], attrs[b"comm_dst"], attrs[b"comm_tag"], attrs[b"comm_size"]
                assert rank == ends[0 if kind == 5 else 1]
                (sent if kind == 5 else received).append(ends)
    assert len(sent) == len(set(sent)) > 0
    assert sorted(sent) == sorted(received)


def test_all_ranks_of_a_folder_are_read_and_meet(folders: dict[str, Path]) -> None:
    recordings = read_recordings(folders["pipeline"])
    assert [one.rank for one in recordings] == list(range(8))
    shards = {
        op.carried.ranks for one in recordings for op in one.ops if op.carried and op.carried.kind == "reduce_scatter"
    }
    assert shards == {(0, 2), (1, 3), (4, 6), (5, 7)}  # dp beside tp = 2, inside each of the two stages


# -- in: traces of others


def node(
    number: int,
    kind: int,
    *waits: int,
    us: int = 0,
    start: int = 0,
    control: tuple[int, ...] = (),
    **attrs: int | str | bool,
) -> bytes:
    told = [
        block(1, name)
        + (
            member(27, value)
            if isinstance(value, bool)
            else block(29, value)
            if isinstance(value, str)
            else member(9, value)
        )
        for name, value in attrs.items()
    ]
    return (
        integer(1, number) + block(2, f"n{number}") + integer(3, kind) + packed(4, control) + packed(5, waits)
        + integer(6, start) + integer(7, us) + b"".join(block(10, one) for one in told)
    )  # fmt: skip


def written(path: Path, *nodes: bytes, groups: object = None) -> Path:
    path.write_bytes(framed([block(1, "0.0.4"), *nodes]))
    if groups is not None:
        (path.parent / "comm_groups.json").write_text(json.dumps(groups))
    return path


def test_what_has_no_times_begins_as_early_as_it_may(tmp_path: Path) -> None:
    """Two products of 30 and 50 us, an all-reduce of 40 us behind the first, an update of 10 us behind both: max(80, 70) + 10."""
    file = written(
        tmp_path / "job.3.et",
        node(1, 4, us=30, is_cpu_op=False),
        node(2, 7, 1, us=40, comm_type=0, comm_size=800, pg_name="g"),
        node(3, 4, us=50, is_cpu_op=False),
        node(5, 1, 2),  # metadata in between passes on what it waits for
        node(4, 4, 3, us=10, control=(5,), is_cpu_op=False),
        groups={"g": [0, 1, 2, 3]},
    )
    found = read_chakra(file)
    assert found.rank == 3
    assert [op.name for op in found.ops] == ["n1", "n2", "n3", "n4"]
    assert [op.start_s for op in found.ops] == pytest.approx([0, 30e-6, 30e-6, 80e-6])
    assert found.ops[1].carried is not None
    assert found.ops[1].carried.ranks == (0, 1, 2, 3)
    assert found.step_s == pytest.approx(90e-6)


def test_start_times_count_from_the_first(tmp_path: Path) -> None:
    found = read_chakra(written(tmp_path / "a.et", node(1, 4, us=5, start=1000), node(2, 4, 1, us=5, start=1020)))
    assert [op.start_s for op in found.ops] == pytest.approx([0, 20e-6])


def test_collectives_without_times_are_priced_where_the_cluster_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An all-gather of 8 MiB a rank: nccl-tests' size of it is the full tensor."""
    size = 8 * 2**20
    file = written(
        tmp_path / "job.0.et", node(1, 4, us=100), node(2, 7, 1, comm_type=2, comm_size=size, pg_name="g"),
        groups={"g": list(range(8))},
    )  # fmt: skip
    assert main(["predict", "--program", str(file), "--recorded-on", "hgx-h100-8", "--json"]) == 0
    step_s = json.loads(capsys.readouterr().out)["replayed_s"]
    shape = GroupShape(num_ranks=8, num_nodes=1, ranks_per_node=8, num_groups_per_node=1, spans_domain=False)
    alone_s = float(choose("all_gather", 8 * size, shape, Cluster.load("hgx-h100-8"), default_curves()).time_s)
    assert step_s == pytest.approx(100e-6 + alone_s)


def faults_of(path: Path) -> str:
    with pytest.raises(InputError) as told:
        read_chakra(path)
    return "\n".join(str(fault) for fault in told.value.faults)


def test_bad_files_are_told_by_their_place(tmp_path: Path) -> None:
    good = framed([block(1, "0.0.4"), node(1, 4, us=5)])
    for name, data, words in (
        ("cut.et", good[:-1], "byte 8: is no Chakra trace: a message of"),
        ("text.et", b"hello, this is no trace", "byte 0: is no Chakra trace"),
        ("empty.et", b"", "has no node that computes or communicates"),
        ("head.et", framed([node(1, 4, us=5)]), "its first message is no GlobalMetadata"),
    ):
        (tmp_path / name).write_bytes(data)
        assert words in faults_of(tmp_path / name), name


def test_every_fault_of_the_nodes_is_told(tmp_path: Path) -> None:
    file = written(
        tmp_path / "bad.et", node(1, 4, us=5), node(1, 4, us=5), node(2, 4, 9), node(3, 7, comm_type=77, comm_size=-1)
    )
    told = faults_of(file)
    for words in (
        "has the id 1, as the node at byte",
        "waits for 9, which is no node's id",
        "has comm_type 77, and 0 to 9 are known",
        "has comm_size -1",
    ):
        assert words in told, words


def test_circles_and_groups_that_are_none_are_told(tmp_path: Path) -> None:
    assert "circle: n1, n2" in faults_of(written(tmp_path / "a.et", node(1, 4, 2), node(2, 4, 1), node(3, 4)))
    assert "is no table of process groups" in faults_of(written(tmp_path / "b.et", node(1, 4), groups={"g": "all"}))


# -- ASTRA-sim's analytical back end


def test_astra_sims_rings_are_its_public_formula() -> None:
    """By hand: 4 ranks, 4 MiB, a GB/s of 2**30 bytes, 500 ns: a send of 1 MiB takes 500 + 976,562.5 ns, cut; 6 of them."""
    astra = importlib.import_module("experiments.astra_sim")
    assert astra.astra_s("all_reduce", 4 * 2**20, 4, 1.0, 500) == pytest.approx(6 * 977_062e-9, rel=1e-12)
    assert astra.astra_s("all_gather", 4 * 2**20, 4, 1.0, 500) == pytest.approx(3 * 977_062e-9, rel=1e-12)


def test_without_latency_both_differ_by_what_a_gigabyte_is_alone() -> None:
    astra, cluster = importlib.import_module("experiments.astra_sim"), Cluster.load("hgx-h100-8")
    for kind, size in (("all_reduce", 2**30), ("all_gather", 2**28), ("reduce_scatter", 2**28)):
        shape = GroupShape(num_ranks=8, num_nodes=1, ranks_per_node=8, num_groups_per_node=1, spans_domain=False)
        ours = float(choose(kind, size, shape, cluster, LinkCurves.ideal()).time_s)
        theirs = astra.astra_s(kind, size, 8, float(cluster.intra.bytes_per_s) / 1e9, 0)
        assert theirs == pytest.approx(ours * 1e9 / 2**30, abs=14e-9), (kind, format_seconds(ours))
