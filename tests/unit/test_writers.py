"""What is written of a prediction: text for people, JSON for programs, a trace for Perfetto."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError
from simulator.formats.writers.chrome_trace import chrome_trace, write_chrome_trace
from simulator.formats.writers.json_report import SCHEMA_VERSION, report, to_json
from simulator.formats.writers.text import render, to_text
from simulator.predict import Prediction
from simulator.work.trace import MemorySample, MemoryTrace, Span, Timeline

ROOT = Path(__file__).resolve().parents[2]


def test_json_has_the_numbers_unrounded_and_the_ratios_by_definition(made_prediction: Prediction) -> None:
    document = json.loads(to_json(made_prediction, {"model": "tiny"}))
    assert document["schema_version"] == SCHEMA_VERSION
    assert document["inputs"] == {"model": "tiny"}
    assert document["mfu"] == 8e15 / (2.0 * 8 * 1e15)
    assert document["hfu"] == 10e15 / (2.0 * 8 * 1e15)
    assert document["tokens_per_s"] == 65_536 / 2.0
    assert sum(document["breakdown_s"].values()) == document["step_s"]
    assert document["communication"] == {"all_gather": {"exposed_s": 0.25, "hidden_s": 0.5}}
    unasked = ("pool", "spilled_bytes")
    memory = {name: value for name, value in asdict(made_prediction.memory).items() if name not in unasked}
    assert document["memory"] == {
        **memory,
        "reserved_bytes": 54 * 2**30,
        "used_bytes": 56 * 2**30,
        "retries": False,
    }


def test_every_key_of_the_json_is_documented(made_prediction: Prediction) -> None:
    page = (ROOT / "docs/reference/json-output.md").read_text()
    document = report(made_prediction)
    said = set(re.findall(r"`([\w.*]+)`", page))
    missing = [*document.keys() - said, *(key for key in document["memory"] if not {key, f"memory.{key}"} & said)]
    assert not missing


def test_json_refuses_what_json_cannot_say(made_prediction: Prediction) -> None:
    with pytest.raises(ValueError, match="JSON"):
        to_json(replace(made_prediction, high_s=float("inf")))


def test_text_begins_with_the_verdict_and_the_margin(made_prediction: Prediction) -> None:
    first = to_text(render(made_prediction)).splitlines()[0]
    assert first.startswith("FITS  tiny on one-node, 8 devices: 56.0 GiB of 80.0 GiB needed, 24.0 GiB (30%) to spare")


def test_text_says_what_is_too_much(made_prediction: Prediction) -> None:
    memory = replace(made_prediction.memory, capacity_bytes=40 * 2**30)
    first = to_text(render(replace(made_prediction, memory=memory))).splitlines()[0]
    assert first.startswith("DOES NOT FIT")
    assert "16.0 GiB (40%) too much" in first


@pytest.mark.parametrize(
    "fact",
    [
        "2.00 s",
        "1.90 s to 2.10 s",
        "32,768 tokens/s",
        "50.0%",
        "62.5%",
        "allocated",
        "reserved",
        "outside torch",
        "backward loss mb0",
        "30.0 GiB",
        "250 ms exposed",
        "500 ms hidden",
        "calibrated",
        "gemm m=1",
        "micro_batch_size = 2",
    ],
)
def test_text_holds_the_fact(made_prediction: Prediction, fact: str) -> None:
    assert fact in to_text(render(made_prediction))


def test_the_breakdown_shows_its_sum(made_prediction: Prediction) -> None:
    lines = to_text(render(made_prediction)).splitlines()
    (total,) = (line for line in lines if line.split()[:1] == ["sum"])
    assert total.split() == ["sum", "2.00", "s", "100.0%"]


def test_plain_text_has_no_escapes_and_colour_has(made_prediction: Prediction) -> None:
    assert "\x1b" not in to_text(render(made_prediction))
    assert "\x1b" in to_text(render(made_prediction), color=True, width=100)


def test_text_of_a_hostile_name_is_text(made_prediction: Prediction) -> None:
    assert "[red]x[/red]" in to_text(render(replace(made_prediction, model="[red]x[/red]")))


def span(
    index: int, program: str, stream: str, label: str, *, at: tuple[float, float], joined_s: float | None = None
) -> Span:
    return Span(
        program=program,
        stream=stream,
        id=index,
        label=label,
        category="all_gather" if joined_s is not None else "gemm",
        start_s=at[0],
        end_s=at[1],
        nominal_s=at[1] - at[0],
        joined_s=joined_s,
    )


TIMELINE = Timeline(
    spans=(
        span(0, "a", "gather", "gather 0", at=(0.0, 1.0), joined_s=0.25),
        span(1, "a", "compute", "forward 0", at=(1.0, 3.0)),
        span(0, "b", "compute", "forward 0", at=(2.0, 3.0)),
    ),
    step_s=3.0,
)
MEMORY = MemoryTrace(
    samples=(
        MemorySample(label="start", allocated_bytes=10, reserved_bytes=20),
        MemorySample(label="forward 0: q", allocated_bytes=15, reserved_bytes=20),
        MemorySample(label="forward 0: k", allocated_bytes=30, reserved_bytes=40),
        MemorySample(label="end", allocated_bytes=10, reserved_bytes=40),
    ),
    peak_index=2,
    by_category={"activations": 30},
)


def events(phase: str, **having: object) -> list[dict[str, Any]]:
    document = json.loads(gzip.decompress(chrome_trace(TIMELINE, MEMORY, outside_torch_bytes=5)))
    return [e for e in document["traceEvents"] if e["ph"] == phase and having.items() <= e.items()]


def test_a_process_is_a_program_and_a_thread_a_stream_compute_first() -> None:
    assert [e["args"]["name"] for e in events("M", name="process_name")] == ["a", "b"]
    assert [e["args"]["name"] for e in events("M", name="thread_name", pid=0)] == ["compute", "gather"]


def test_spans_are_in_microseconds_on_their_threads() -> None:
    (gather,) = events("X", name="gather 0")
    assert (gather["pid"], gather["tid"], gather["ts"], gather["dur"]) == (0, 1, 0.0, 1e6)
    assert gather["args"]["waited_for_others_s"] == 0.25
    assert [(e["pid"], e["ts"], e["dur"]) for e in events("X", name="forward 0")] == [(0, 1e6, 2e6), (1, 2e6, 1e6)]


def test_memory_samples_stand_where_their_ops_run() -> None:
    allocated = events("C", name="allocated (bytes)")
    assert [e["args"]["allocated"] for e in allocated] == [10, 15, 30, 10]
    assert [e["ts"] for e in allocated] == [0.0, 1e6, 2e6, 3e6]


def test_a_counter_has_an_event_for_each_change() -> None:
    reserved = events("C", name="reserved (bytes)")
    assert [(e["ts"], e["args"]["reserved"]) for e in reserved] == [(0.0, 20), (2e6, 40)]
    assert [e["args"]["outside torch"] for e in events("C", name="outside torch (bytes)")] == [5]


def test_equal_predictions_make_equal_bytes(made_prediction: Prediction, tmp_path: Path) -> None:
    once, again = tmp_path / "once.json.gz", tmp_path / "again.json.gz"
    for path in (once, again):
        write_chrome_trace(path, replace(made_prediction, timeline=TIMELINE, memory_trace=MEMORY))
    assert once.read_bytes() == again.read_bytes()
    assert once.read_bytes()[4:8] == bytes(4)  # gzip's time stamp


def test_a_trace_that_cannot_be_written_is_a_fault(made_prediction: Prediction, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_chrome_trace(tmp_path / "missing" / "t.json.gz", made_prediction)
