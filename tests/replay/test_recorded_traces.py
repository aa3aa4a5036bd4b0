"""The allocator against sequences recorded on real GPUs: every address it hands out, every segment it takes."""

from __future__ import annotations

import gzip
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.formats.readers.snapshot import read_snapshot
from simulator.studies.replay import Recording, ReplayReport, replay
from simulator.studies.replay.exact import Replay
from simulator.studies.replay.recording import ALLOC

ROOT = Path(__file__).resolve().parents[2]
OWN = sorted((ROOT / "experiments" / "measured").glob("*/trace-*.json.gz"))
PUBLIC = sorted((ROOT / ".." / "shared" / "data" / "snapshots").glob("*.*"))


def check(path: Path) -> ReplayReport:
    report = replay(read_snapshot(path))
    assert report.first_mismatch is None
    assert report.is_exact
    assert report.allocations.total > 0
    return report


@pytest.mark.parametrize("path", OWN, ids=lambda p: p.name.split(".")[0])
def test_own_traces_replay_to_the_byte(path: Path) -> None:
    check(path)


@pytest.mark.parametrize("path", PUBLIC or [None], ids=lambda p: p.name if p else "absent")
def test_public_traces_replay_to_the_byte(path: Path | None) -> None:
    if path is None:
        pytest.skip("the public snapshots are not in ../shared/data/snapshots")
    check(path)


def test_a_pickle_and_its_json_are_one_recording(reference_data: Path) -> None:
    folder = reference_data / "snapshots"
    one, other = (read_snapshot(folder / f"wl_medium_128_training.{kind}") for kind in ("pickle", "json.gz"))
    assert one.events == other.events
    assert one.segments == other.segments


@pytest.mark.parametrize("name", ["expandable_roundup", "roundup", "expandable"])
@pytest.mark.parametrize("tenths", [2, 5, 8])
def test_a_trace_that_starts_late_replays_to_the_byte(name: str, tenths: int) -> None:
    """As a ring buffer of events would leave it: what came before is known by the last segments alone."""
    path = next(path for path in OWN if path.name == f"trace-random-{name}.json.gz")
    whole = read_snapshot(path)
    late = replace(whole, events=whole.events[len(whole.events) * tenths // 10 :])
    assert replay(late).is_exact


def recorded() -> Recording:
    return read_snapshot(OWN[0])


def changed(recording: Recording, index: int, **parts: int) -> Recording:
    """The recording with one event's address or bytes replaced."""
    action, address, size, stream, time_us = recording.events[index]
    event = (action, parts.get("address", address), parts.get("size", size), stream, time_us)
    return replace(recording, events=(*recording.events[:index], event, *recording.events[index + 1 :]))


def test_a_wrong_size_is_seen_and_located() -> None:
    recording = recorded()
    index = next(i for i, event in enumerate(recording.events) if event[0] == ALLOC and event[2] > 2**22)
    report = replay(changed(recording, index, size=3 * recording.events[index][2]))
    assert not report.is_exact
    assert report.first_mismatch is not None
    assert report.first_mismatch.index >= index


def test_other_settings_do_not_pass_for_the_recorded_ones() -> None:
    recording = recorded()
    settings = replace(recording.settings, roundup_power2_divisions=(2,) * 16)
    assert not replay(replace(recording, settings=settings)).is_exact


def test_the_course_ends_where_the_snapshot_was_taken() -> None:
    """Event by event: what is allocated and reserved after the last is what the snapshot says, and the peak is the replay's."""
    recording = recorded()
    run, peak = Replay(recording), 0
    for event in recording.events:
        run.play((event,))
        peak = max(peak, run.allocator.allocated_bytes)
        assert run.allocator.reserved_bytes >= run.allocator.allocated_bytes
    blocks = [block for segment in recording.segments for block in segment.blocks]
    assert run.allocator.reserved_bytes == sum(segment.total_bytes for segment in recording.segments)
    assert run.allocator.allocated_bytes == sum(block.size_bytes for block in blocks if block.is_allocated)
    assert peak == replay(recording).peaks["allocated_bytes"]


def test_a_gzipped_pickle_is_read_too(reference_data: Path, tmp_path: Path) -> None:
    data = (reference_data / "snapshots" / "wl_medium_128_training.pickle").read_bytes()
    assert pickle.loads(data)["segments"]  # noqa: S301  shipped with the reference data
    packed = tmp_path / "snapshot.pickle.gz"
    packed.write_bytes(gzip.compress(data, compresslevel=1))
    assert check(packed).num_events > 0
