"""Exact replays of what our own allocator did: whatever the program, the recording of it replays to the byte."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.base.errors import InputError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.memory.allocator import AllocatorSettings, Block, CachingAllocator
from simulator.memory.allocator.blocks import UNLIMITED_BYTES
from simulator.memory.policies import PoolInputs, make_pool
from simulator.studies.replay import RecordedBlock, RecordedSegment, Recording, of_recording, play, replay
from simulator.studies.replay.recording import (
    ACTIONS,
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    RecordedEvent,
)

MIB = 2**20

PROGRAM = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(1, 64 * MIB), st.integers(0, 1)),
        st.tuples(st.just("alloc"), st.integers(1, 4096), st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 100), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 100), st.just(0)),
        st.tuples(st.just("later"), st.integers(0, 100), st.just(0)),
        st.tuples(st.just("done"), st.integers(0, 100), st.just(0)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=80,
)
SETTINGS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([UNLIMITED_BYTES, 32 * MIB]),
    roundup_power2_divisions=st.sampled_from([(), (8,) * 16]),
)


class Recorder:
    """Runs a program on our allocator and records it as PyTorch would."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.events: list[RecordedEvent] = []
        self.stream = 0
        self.allocator = CachingAllocator(settings, capacity_bytes=2**34, on_driver=self.driver)
        self.live: list[Block] = []
        self.waiting: list[Block] = []

    def add(self, action: int, address: int, size: int, stream: int) -> None:
        self.events.append((action, address, size, stream, len(self.events)))

    def driver(self, call: str, address: int, size: int) -> None:
        at = next((s for s in self.allocator.blocks() if s.address <= address < s.address + s.size), None)
        stream = at.pool.stream if at is not None and "map" in call else self.stream
        self.add(ACTIONS.index(call), address, size, stream)

    def run(self, program: list[tuple[str, int, int]]) -> None:
        for what, value, stream in program:
            if what == "alloc":
                self.stream = stream
                block = self.allocator.malloc(value, stream)
                self.add(ALLOC, block.address, value, stream)
                self.live.append(block)
            elif what in ("free", "later") and self.live:
                block = self.live.pop(value % len(self.live))
                self.allocator.request_free(block)
                self.add(FREE_REQUESTED, block.address, block.requested, block.pool.stream)
                (self.complete if what == "free" else self.waiting.append)(block)
            elif what == "done" and self.waiting:
                self.complete(self.waiting.pop(value % len(self.waiting)))
            elif what == "empty":
                self.empty()

    def complete(self, block: Block) -> None:
        address, asked, stream = block.address, block.requested, block.pool.stream
        self.allocator.complete_free(block)
        self.add(FREE_COMPLETED, address, asked, stream)

    def empty(self) -> None:
        """As `empty_cache`, stream by stream, so that each page is recorded with its own."""
        for stream in {stream for stream, _ in self.allocator.pools}:
            self.stream = stream
            pools = dict(self.allocator.pools)
            self.allocator.pools = {key: pool for key, pool in pools.items() if key[0] == stream}
            self.allocator.empty_cache()
            self.allocator.pools = pools

    def recording(self, since: int = 0) -> Recording:
        return Recording(
            name="own",
            device=0,
            events=tuple(self.events[since:]),
            segments=tuple(self.segments()),
            settings=self.allocator.settings,
        )

    def segments(self) -> list[RecordedSegment]:
        found: list[list[Block]] = []
        for block in self.allocator.blocks():
            if block.prev is not None and block.prev.mapped:
                found[-1].append(block)
            else:
                found.append([block])
        return [
            RecordedSegment(
                address=blocks[0].address,
                total_bytes=sum(block.size for block in blocks),
                stream=blocks[0].pool.stream,
                is_small=blocks[0].pool.small,
                is_expandable=blocks[0].expandable,
                blocks=tuple(
                    RecordedBlock(
                        address=block.address,
                        size_bytes=block.size,
                        requested_bytes=block.requested,
                        state=self.state(block),
                    )
                    for block in blocks
                ),
            )
            for blocks in found
        ]

    def state(self, block: Block) -> str:
        if not block.used:
            return "inactive"
        return "active_awaiting_free" if block in self.waiting else "active_allocated"


def recorded(program: list[tuple[str, int, int]], settings: AllocatorSettings) -> Recorder:
    recorder = Recorder(settings)
    recorder.run(program)
    return recorder


@given(PROGRAM, SETTINGS)
def test_a_whole_program_replays_exactly(program: list[tuple[str, int, int]], settings: AllocatorSettings) -> None:
    report = replay(recorded(program, settings).recording())
    assert report.first_mismatch is None
    assert report.is_exact


@given(PROGRAM, PROGRAM, st.booleans())
def test_a_program_recorded_from_its_middle_replays_exactly_where_sizes_are_known(
    before: list[tuple[str, int, int]],
    after: list[tuple[str, int, int]],
    expandable: bool,  # noqa: FBT001
) -> None:
    """Blocks that are in use throughout are known by their size; so none of the first part is freed in the second."""
    recorder = recorded(before, AllocatorSettings(expandable_segments=expandable))
    kept, recorder.live = recorder.live, []
    waiting, recorder.waiting = recorder.waiting, []
    since = len(recorder.events)
    recorder.run(after)
    recorder.waiting += waiting
    recorder.live += kept
    assert replay(recorder.recording(since)).is_exact


@given(PROGRAM, SETTINGS, st.integers(0, 200), st.sampled_from(["drop", "double", "swap", "shift"]))
def test_a_damaged_recording_is_told_and_never_crashes(
    program: list[tuple[str, int, int]], settings: AllocatorSettings, at: int, how: str
) -> None:
    recording = recorded(program, settings).recording()
    events = list(recording.events)
    if not events:
        return
    at %= len(events)
    match how:
        case "drop":
            del events[at]
        case "double":
            events.insert(at, events[at])
        case "swap":
            events[at], events[at - 1] = events[at - 1], events[at]
        case _:
            events[at] = (events[at][0], events[at][1] + MIB, *events[at][2:])
    with suppress(InputError):
        report = replay(replace(recording, events=tuple(events)))
        assert report.num_events == len(events)


@given(PROGRAM, SETTINGS)
def test_a_recording_played_as_requests_leaves_the_same_blocks_in_use(
    program: list[tuple[str, int, int]], settings: AllocatorSettings
) -> None:
    recorder = recorded(program, settings)
    sequence = of_recording(recorder.recording())
    pool = make_pool("native", PoolInputs(settings=settings))
    play(sequence.requests, pool)
    assert pool.allocated_bytes == recorder.allocator.allocated_bytes
    assert pool.active_bytes == recorder.allocator.active_bytes


# --- the command line


@pytest.fixture
def file(tmp_path: Any) -> Any:
    """A small recording as a snapshot in JSON."""
    program = [("alloc", 30 * MIB, 0), ("alloc", 5 * MIB, 0), ("free", 0, 0), ("alloc", 20 * MIB, 0), ("free", 0, 0)]
    recording = recorded([*program, ("free", 0, 0)], AllocatorSettings()).recording()
    data = {
        "segments": [
            {
                "address": s.address,
                "total_size": s.total_bytes,
                "stream": s.stream,
                "segment_type": "small" if s.is_small else "large",
                "blocks": [
                    {"address": b.address, "size": b.size_bytes, "requested_size": b.requested_bytes, "state": b.state}
                    for b in s.blocks
                ],
            }
            for s in recording.segments
        ],
        "device_traces": [
            [
                dict(zip(("action", "addr", "size", "stream", "time_us"), (ACTIONS[e[0]], *e[1:]), strict=True))
                for e in recording.events
            ]
        ],
        "allocator_settings": {"max_split_size": -1},
    }
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(data))
    return path


def test_replay_says_exact_with_code_0(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(file), "--json"]) == ExitCode.OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["exact"]
    assert answer["allocations"] == {"total": 3, "matched": 3, "extra": 0}


def test_replay_says_what_differs_first_with_code_1(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(file.read_text())
    [event for event in data["device_traces"][0] if event["action"] == "alloc"][-1]["size"] = 40 * MIB
    file.write_text(json.dumps(data))
    code = main(["replay", str(file), "--plain"])
    out = capsys.readouterr().out
    assert code == 1
    assert out.startswith("DIFFERS")
    assert "first difference, event" in out
    assert "segment_alloc of 41943040 bytes" in out


def test_what_ifs_list_every_policy(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(file), "--compare-policies", "--json"]) == ExitCode.OK
    answer = json.loads(capsys.readouterr().out)
    names = [policy["policy"] for policy in answer["policies"]]
    assert names == ["native", "expandable", "first_fit", "arena", "slab", "checkpoint_buffer", "defrag", "fixed"]
    assert answer["demand"]["num_allocations"] == 3
    assert main(["replay", str(file), "--policy", "slab", "--plain"]) == ExitCode.OK
    assert "slab" in capsys.readouterr().out


def test_settings_of_a_what_if_reach_the_allocator(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-split-size", "256MiB", "--roundup-power2-divisions", "4", "--expandable-segments"]
    assert main(["replay", str(file), *options, "--json"]) == ExitCode.OK
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["max_split_size_bytes"] == 256 * MIB
    assert settings["roundup_power2_divisions"] == [4] * 16
    assert settings["expandable_segments"]


def test_a_capacity_too_small_is_code_4(file: Any) -> None:
    assert main(["replay", str(file), "--capacity", "16MiB", "--plain"]) == ExitCode.DOES_NOT_FIT


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--capacity", "3", "--max-split-size", "1MiB"], ["--capacity", "--max-split-size: is 1MiB"]),
        (["--policy", "fixed", "--block-size", "3MiB"], ["in steps of 2 MiB"]),
        (["--vary-sizes", "0.5"], ["cannot be repeated"]),
    ],
)
def test_bad_options_are_told_together(
    file: Any, options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(file.read_text())
    data["device_traces"][0] = data["device_traces"][0][:-2]  # one block stays
    data["segments"] = recorded_segments(data)
    file.write_text(json.dumps(data))
    assert main(["replay", str(file), *options]) == ExitCode.BAD_INPUT
    err = capsys.readouterr().err
    assert all(word in err for word in words)


def recorded_segments(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The segments with the block that the last alloc took in use."""
    last = next(e for e in reversed(data["device_traces"][0]) if e["action"] == "alloc")
    for segment in data["segments"]:
        at, size = segment["address"], segment["total_size"]
        if at == last["addr"]:
            rest = size - last["size"]
            segment["blocks"] = [{"address": at, "size": last["size"], "state": "active_allocated"}]
            if rest:
                segment["blocks"].append({"address": at + last["size"], "size": rest, "state": "inactive"})
    return data["segments"]


def test_a_plan_takes_the_place_of_a_snapshot(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "study.toml"
    study.write_text('model = "gpt2"\ncluster = "hgx-h100-8"\n[plan]\nzero = 3\nseq_len = 128\n')
    assert main(["replay", "--plan", str(study), "--compare-policies", "--json"]) == ExitCode.OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["demand"]["num_allocations"] > 100
    live = answer["demand"]["peak_live_bytes"]
    assert all(policy["peak_reserved_bytes"] >= policy["peak_allocated_bytes"] >= live for policy in answer["policies"])


def test_exactly_one_source_is_due() -> None:
    assert main(["replay"]) == ExitCode.USAGE
    assert main(["replay", "a.pickle", "--plan", "b.toml"]) == ExitCode.USAGE


def test_what_moves_beside_a_step_is_a_share_of_its_links(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """bytes ÷ (rate × step): 3,350 GB/s of HBM read and written, 450 GB/s of NVLink 4, 63 GB/s of PCIe 5."""
    study = tmp_path / "study.toml"
    study.write_text('model = "gpt2"\ncluster = "hgx-h100-8"\n[plan]\nseq_len = 1024\n')
    asked = [
        "replay",
        "--plan",
        str(study),
        "--policy",
        "defrag",
        "--vary-sizes",
        "0.25",
        "--alloc-s",
        "1us",
        "--free-s",
        "2us",
    ]
    assert main([*asked, "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    moves, (score,), demand = found["moves"], found["policies"], found["demand"]
    assert moves["bytes"] == score.get("moved_bytes", 0) > 0
    rates = {"hbm": 3350e9 / 2, "nvlink4": 450e9, "pcie5": 63e9}
    assert moves["shares"] == pytest.approx(
        {name: moves["bytes"] / rate / moves["step_s"] for name, rate in rates.items()}
    )
    assert found["own_allocator_s"] == pytest.approx(1e-6 * demand["num_allocations"] + 2e-6 * demand["num_frees"])
    assert main([*asked[:-2], "--free-s", "2 apples"]) == ExitCode.BAD_INPUT
    assert "--free-s" in capsys.readouterr().err
