"""Nsight Systems' exports: the same events as in a Kineto trace are the same step; what is no export, or more than one, is refused."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from simulator import InputError
from simulator.cli import main
from simulator.formats.readers.kineto import KinetoTrace, read_kineto
from simulator.formats.readers.recording import is_recording, read_recording

# As the user guide's "SQLite Schema Reference" has them, of the columns that exports of 2021 to 2025 share
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
  shortName INTEGER NOT NULL, gridX INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
  copyKind INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
  globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, globalTid INTEGER,
  textId INTEGER);
"""
PID, OTHER = 0x1000 << 24, 0x2000 << 24
GEMM, ADAM, REDUCE = "ampere_bf16_gemm", "multi_tensor_adam", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
# (name, stream, start, duration, launched at): microseconds of two steps; the collective runs beside the second product
KERNELS = [
    (GEMM, 7, 100, 30, 90), (GEMM, 7, 130, 50, 92), (REDUCE, 20, 130, 60, 94), (ADAM, 7, 190, 10, 96),
    (GEMM, 7, 300, 30, 290), (GEMM, 7, 330, 50, 292), (REDUCE, 20, 330, 70, 294), (ADAM, 7, 400, 20, 296),
    (GEMM, 7, 500, 10, 490),
]  # fmt: skip
STEPS = [("step 1", 80, 99), ("step 2", 280, 299), ("step 3", 480, 499)]  # on the host


def export(
    path: Path, kernels: Sequence[tuple[str, int, int, int, int]] = KERNELS, schema: str = SCHEMA, pid: int = PID
) -> Path:
    """What `nsys export --type sqlite` writes of these kernels, by the documented schema."""
    with sqlite3.connect(path) as db:
        db.executescript(schema)
        texts = [
            *dict.fromkeys(row[0] for row in kernels),
            "cudaLaunchKernel_v7000",
            *(name for name, *_ in STEPS),
            "cudaMemcpyAsync_v3020",
        ]
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(texts))
        of = {text: number for number, text in enumerate(texts)}
        db.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 0, 'NVIDIA H100 80GB HBM3')")
        for number, (name, stream, start, duration, launched) in enumerate(kernels):
            times = start * 1000, (start + duration) * 1000
            db.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,0,1,?,?,?,?,?,1)",
                (*times, stream, number, pid, of[name], of[name]),
            )
            call = launched * 1000, (launched + 1) * 1000
            db.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,0,?,?,?,0)",
                (*call, pid | 5, number, of["cudaLaunchKernel_v7000"]),
            )
        db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (200000, 205000, 0, 1, 9, 900, ?, 4096, 1)", (pid,))
        for name, start, end in STEPS:
            db.execute(
                "INSERT INTO NVTX_EVENTS VALUES (?,?,59,NULL,?,?)", (start * 1000, end * 1000, pid | 5, of[name])
            )
        db.execute(
            "INSERT INTO NVTX_EVENTS VALUES (95500, 97000, 59, 'Optimizer.step#AdamW.step', ?, NULL)", (pid | 5,)
        )
        db.execute(
            "INSERT INTO NVTX_EVENTS VALUES (0, 999999, 34, 'step 77', ?, NULL)", (pid | 5,)
        )  # a mark is no range
    db.close()
    return path


def kineto(path: Path) -> Path:
    """The same as torch's profiler would have it, whose device marks are from the first to the last kernel of a step."""
    events: list[dict[str, Any]] = []
    for number, (name, stream, start, duration, launched) in enumerate(KERNELS):
        args = {"device": 0, "stream": stream, "correlation": number}
        events += [
            {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration, "args": args},
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": launched,
                "dur": 1,
                "tid": 5,
                "args": {"correlation": number},
            },
        ]
    events.append(
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy HtoD",
            "ts": 200,
            "dur": 5,
            "args": {"device": 0, "stream": 9, "correlation": 900},
        }
    )
    for (name, start, end), (first, last) in zip(STEPS, ((100, 200), (300, 420), (500, 510)), strict=True):
        called = f"ProfilerStep#{name[-1]}"
        events.append({"ph": "X", "cat": "user_annotation", "name": called, "ts": start, "dur": end - start, "tid": 5})
        events.append({"ph": "X", "cat": "gpu_user_annotation", "name": called, "ts": first, "dur": last - first})
    path.write_text(json.dumps({"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}], "traceEvents": events}))
    return path


def spans(trace: KinetoTrace) -> list[tuple[object, ...]]:
    return [
        (one.label, one.category, one.stream, round(float(one.start_s) * 1e9), round(float(one.end_s) * 1e9), one.cause)
        for one in trace.timeline.spans
    ]


@pytest.mark.parametrize("step", [1, 2])
def test_an_export_is_the_step_that_a_kineto_trace_of_the_same_events_is(tmp_path: Path, step: int) -> None:
    ours, theirs = read_kineto(export(tmp_path / "a.sqlite"), step), read_kineto(kineto(tmp_path / "a.json"), step)
    assert spans(ours) == spans(theirs)
    assert (ours.step, ours.about) == (theirs.step, theirs.about)
    assert ours.timeline.step_s == pytest.approx(200e-6)  # from the first kernel of a step to that of the next
    assert dict(ours.timeline.breakdown()) == pytest.approx(dict(theirs.timeline.breakdown()))


def test_an_export_is_played_as_that_trace_is(tmp_path: Path) -> None:
    ours, theirs = read_recording(export(tmp_path / "a.sqlite"), 1), read_recording(kineto(tmp_path / "a.json"), 1)
    assert is_recording(tmp_path / "a.sqlite")
    assert [(op.name, op.stream, op.category) for op in ours.ops] == [
        (op.name, op.stream, op.category) for op in theirs.ops
    ]
    assert [op.start_s for op in ours.ops] == pytest.approx([op.start_s for op in theirs.ops])
    assert [op.issued_s for op in ours.ops] == pytest.approx([op.issued_s for op in theirs.ops])


def test_the_commands_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step 1 by hand: products 80 us, an all-reduce of 60 us of which 50 us lie beside one, Adam 10 us, until the next begins."""
    file = str(export(tmp_path / "a.sqlite"))
    assert main(["import", file, "--step", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["breakdown_s"]["gemm"] == pytest.approx(80e-6)
    assert found["communication"]["all_reduce"]["exposed_s"] == pytest.approx(10e-6)
    assert found["communication"]["all_reduce"]["hidden_s"] == pytest.approx(50e-6)
    assert main(["predict", "--program", file, "--step", "1", "--communication", "free", "--json"]) == 0
    changed = json.loads(capsys.readouterr().out)
    assert changed["replayed_s"] == pytest.approx(200e-6)
    assert changed["step_s"] < changed["replayed_s"]


def test_of_several_processes_the_busiest_is_read(tmp_path: Path) -> None:
    file = export(tmp_path / "a.sqlite")
    with sqlite3.connect(file) as db:
        db.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (100000, 110000, 1, 1, 7, 5000, ?, 0, 0, 1)", (OTHER,)
        )
    db.close()
    trace = read_kineto(file, 1)
    assert len(trace.timeline.spans) == 5
    assert any("2 processes in it" in note for note in trace.notes)


def faults(path: Path) -> str:
    with pytest.raises(InputError) as told:
        read_kineto(path)
    return "\n".join(str(fault) for fault in told.value.faults)


def test_what_is_missing_is_told_together(tmp_path: Path) -> None:
    schema = SCHEMA.replace("CREATE TABLE StringIds", "CREATE TABLE Strings").replace(
        "correlationId INTEGER, nameId", "nameId"
    )
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript(schema)
    db.close()
    told = faults(path)
    assert "StringIds: is missing" in told
    assert "CUPTI_ACTIVITY_KIND_RUNTIME: has no column correlationId" in told


def test_reports_and_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "job.nsys-rep").write_bytes(b"anything")
    assert "nsys export --type sqlite job.nsys-rep" in faults(tmp_path / "job.nsys-rep")
    whole = export(tmp_path / "a.sqlite").read_bytes()
    (tmp_path / "cut.sqlite").write_bytes(whole[:5000])
    assert "is no export of Nsight Systems" in faults(tmp_path / "cut.sqlite")
    (tmp_path / "head.sqlite").write_bytes(whole[:16] + b"\xff" * 4000)
    assert "is no export of Nsight Systems" in faults(tmp_path / "head.sqlite")


@pytest.mark.parametrize(
    "trap",
    [
        "CREATE VIEW StringIds AS SELECT 1 AS id, load_extension('evil') AS value;",
        "CREATE VIEW StringIds AS WITH RECURSIVE a(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM a) SELECT id, 'x' AS value FROM a;",
        "CREATE VIRTUAL TABLE StringIds USING fts5(id, value);",
    ],
)
def test_nothing_but_plain_tables_is_read(tmp_path: Path, trap: str) -> None:
    schema = SCHEMA.replace("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);", trap)
    with sqlite3.connect(path := tmp_path / "a.sqlite") as db:
        db.executescript(schema)
    db.close()
    assert "StringIds: is missing" in faults(path)


def test_a_column_that_is_computed_can_take_no_memory(tmp_path: Path) -> None:
    """A generated column is part of a plain table; a value of more than a megabyte is refused."""
    schema = SCHEMA.replace(
        "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
        "id INTEGER PRIMARY KEY, value TEXT AS (hex(zeroblob(100000000)))",
    )
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript(schema)
        db.execute("INSERT INTO StringIds(id) VALUES (1)")
    db.close()
    assert "is no export of Nsight Systems: string or blob too big" in faults(path)


def test_the_file_is_left_as_it_was(tmp_path: Path) -> None:
    file = export(tmp_path / "a.sqlite")
    before = file.read_bytes()
    read_kineto(file, 1)
    assert file.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["a.sqlite"]
