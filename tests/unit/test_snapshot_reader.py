"""Memory snapshots that nobody can trust: refused or repaired with words that say which, and never executed."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError
from simulator.formats.readers.snapshot import contradiction, read_snapshot
from simulator.studies.replay import replay
from simulator.studies.replay.recording import ALLOC, FREE_COMPLETED, FREE_REQUESTED

MIB = 2**20
BASE = 2**40


def entry(action: str, address: int, size: int, time_us: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us, "frames": [], **more}


def snapshot() -> dict[str, Any]:
    """A small program from its beginning: 4 MiB taken, 6 MiB taken, the first freed, both in one segment of 20 MiB."""
    first, second = BASE, BASE + 4 * MIB
    return {
        "segments": [
            {
                "device": 0,
                "address": BASE,
                "total_size": 20 * MIB,
                "allocated_size": 6 * MIB,
                "active_size": 6 * MIB,
                "requested_size": 6 * MIB,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "blocks": [
                    {"address": first, "size": 4 * MIB, "requested_size": 4 * MIB, "state": "inactive"},
                    {"address": second, "size": 6 * MIB, "requested_size": 6 * MIB, "state": "active_allocated"},
                    {"address": BASE + 10 * MIB, "size": 10 * MIB, "requested_size": 0, "state": "inactive"},
                ],
            }
        ],
        "device_traces": [
            [
                entry("segment_alloc", BASE, 20 * MIB, 10),
                entry("alloc", first, 4 * MIB, 11),
                entry("alloc", second, 6 * MIB, 12),
                entry("free_requested", first, 4 * MIB, 13),
                entry("free_completed", first, 4 * MIB, 13),
            ]
        ],
        "allocator_settings": {"max_split_size": -1, "expandable_segments": False, "garbage_collection_threshold": 0.0},
    }


def write(tmp_path: Path, data: object, *, protocol: int = 4) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(data, protocol=protocol))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_snapshot(path)
    return str(caught.value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    recording = read_snapshot(write(tmp_path, snapshot(), protocol=protocol))
    assert [event[0] for event in recording.events[1:]] == [ALLOC, ALLOC, FREE_REQUESTED, FREE_COMPLETED]
    assert replay(recording).is_exact


def test_json_is_the_same(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    plain.write_text(json.dumps(snapshot()))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert (
        read_snapshot(plain).events == read_snapshot(packed).events == read_snapshot(write(tmp_path, snapshot())).events
    )


# --- hostile


class Evil:
    """Would write a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_global_is_never_loaded(tmp_path: Path) -> None:
    target = tmp_path / "pwned"
    data = snapshot()
    data["external_annotations"] = Evil(target)
    path = write(tmp_path, data)
    assert "asks for the global" in refusal(path)
    assert not target.exists()
    pickle.loads(path.read_bytes())  # noqa: S301  ours: the trap does work where globals are loaded
    assert target.exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "asks for the global os.system"),
        (b"\x80\x02cbuiltins\neval\nq\x00X\x03\x00\x00\x001+1\x85R.", "asks for the global builtins.eval"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93.", "asks for the global builtins.exec"),
        (b"(i__builtin__\neval\n.", "asks for the global"),
        (b"\x80\x02\x82\x01.", ""),  # an extension
        (b"\x80\x02K\x01Q.", "outside object"),
        (b"\x80\x02}K\x01\x85R.", ""),  # a dict is called
        (b"\x80\x02}}b.", "holds dict"),  # state for a dict: nothing to set
        (b"\x80\x05\x97.", ""),  # an out-of-band buffer
        (b"\x80\x63.", "pickle"),  # a protocol of the future
        (b"", "empty"),
        (b"\x80\x04", "ends early"),
        (b"hello", ""),
        (b"\x00" * 100, ""),
    ],
)
def test_hostile_and_broken_pickles_are_refused(tmp_path: Path, code: bytes, words: str) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(code)
    told = refusal(path)
    if words not in ("holds dict", "empty", "pickle"):
        assert words in told
    assert "bad.pickle" in told


@pytest.mark.parametrize(
    "code",
    [
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a memo of two thousand million places
        b"\x80\x05\x96\x00\x00\x00\x00\x80\x00\x00\x00.",  # 512 GiB of bytes to come
    ],
)
def test_what_asks_for_too_much_memory_is_refused(tmp_path: Path, code: bytes) -> None:
    path = tmp_path / "bomb.pickle"
    path.write_bytes(code)
    assert "bomb.pickle" in refusal(path)


def test_a_gzip_bomb_is_refused(tmp_path: Path) -> None:
    member = gzip.compress(b"a" * (16 * MIB))  # members of a gzip file follow each other
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"segments": "') + 64 * member)
    assert "unzips to more than" in refusal(path)


@pytest.mark.parametrize("deep", [b"[" * 200_000, b'{"a":' * 200_000])
def test_deep_json_is_refused(tmp_path: Path, deep: bytes) -> None:
    path = tmp_path / "deep.json"
    path.write_bytes(deep)
    assert "nested too deeply" in refusal(path)


def test_a_deep_pickle_is_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "deep.pickle"
    path.write_bytes(b"\x80\x02" + b"(" * 200_000 + b"l" * 200_000 + b".")
    assert "is a list" in refusal(path)


def test_a_cycle_is_not_followed(tmp_path: Path) -> None:
    data = snapshot()
    data["external_annotations"] = [data]
    data["device_traces"][0][1]["frames"] = data["device_traces"]
    assert replay(read_snapshot(write(tmp_path, data))).is_exact


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["pickle", "json", "json.gz"])
def test_truncated_files_are_refused(tmp_path: Path, share: float, kind: str) -> None:
    text = json.dumps(snapshot()).encode()
    data = {"pickle": pickle.dumps(snapshot()), "json": text, "json.gz": gzip.compress(text)}[kind]
    path = tmp_path / f"cut.{kind}"
    path.write_bytes(data[: int(share * len(data))])
    assert "cut." in refusal(path)


# --- not what it should be


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("segments"), "segments: is missing"),
        (lambda s: s.pop("device_traces"), "_record_memory_history"),
        (lambda s: s.update(device_traces=[[]]), "no events"),
        (lambda s: s["device_traces"][0][1].pop("addr"), "device_traces[0][1].addr: is missing"),
        (lambda s: s["device_traces"][0][1].update(size=-4), "device_traces[0][1].size: is '-4'"),
        (lambda s: s["device_traces"][0][1].update(size=4.5), "a whole number"),
        (lambda s: s["device_traces"][0][1].update(size=True), "a whole number"),
        (lambda s: s["device_traces"][0].__setitem__(1, "alloc"), "is not an event"),
        (lambda s: s["segments"][0].update(total_size=21 * MIB), "its blocks make"),
        (lambda s: s["segments"][0]["blocks"][1].update(state="lent"), "active_allocated"),
        (lambda s: s["segments"][0].update(segment_type="huge"), "small or large"),
        (lambda s: s["segments"].append(copy.deepcopy(s["segments"][0])), "overlap"),
        (lambda s: s.update(allocator_settings=3), "allocator_settings"),
        (lambda s: s["allocator_settings"].update(max_split_size="big"), "max_split_size: is 'big'"),
        (lambda s: s["allocator_settings"].update(roundup_power2_divisions={"1": 4}), "16 whole numbers"),
        (lambda s: s["allocator_settings"].update(garbage_collection_threshold=7), "from 0 to 1"),
        (lambda s: s["device_traces"][0][1].update(size=2**60), "to 2^48"),
    ],
)
def test_faults_are_named(tmp_path: Path, change: Any, words: str) -> None:
    data = snapshot()
    change(data)
    assert words in refusal(write(tmp_path, data))


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    data = snapshot()
    for event in data["device_traces"][0][:3]:
        del event["stream"]
    assert refusal(write(tmp_path, data)).count("stream: is missing") == 3


def test_segments_alone_are_refused_with_the_way_to_record(tmp_path: Path) -> None:
    told = refusal(write(tmp_path, snapshot()["segments"]))
    assert "segments without events" in told
    assert "_record_memory_history" in told


def test_an_absent_file_and_an_absent_device(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "nowhere.pickle")
    with pytest.raises(InputError, match="has events of device 0"):
        read_snapshot(write(tmp_path, snapshot()), device=3)


def test_unknown_events_are_left_out_and_told(tmp_path: Path) -> None:
    data = snapshot()
    data["device_traces"][0].insert(2, entry("teleport", BASE, 1, 11))
    data["device_traces"][0].append(entry("snapshot", 0, 0, 20))
    recording = read_snapshot(write(tmp_path, data))
    assert recording.notes == ("1 events 'teleport' left out: unknown",)
    assert replay(recording).is_exact


def test_without_settings_those_of_pytorch_are_assumed(tmp_path: Path) -> None:
    data = snapshot()
    del data["allocator_settings"]
    assert "assumed" in read_snapshot(write(tmp_path, data)).notes[0]


# --- order


def test_events_out_of_order_are_sorted_by_time_where_that_makes_sense(tmp_path: Path) -> None:
    data = snapshot()
    events = data["device_traces"][0]
    for turn, event in enumerate(events):
        event["time_us"] = turn
    straight = read_snapshot(write(tmp_path, data))
    random.Random(1).shuffle(events)  # noqa: S311
    repaired = read_snapshot(write(tmp_path, data))
    assert contradiction(events_of(data)) is not None
    assert repaired.events == straight.events
    assert "sorted by time" in repaired.notes[0]


def events_of(data: dict[str, Any]) -> list[tuple[int, int, int, int, int]]:
    names = {"alloc": ALLOC, "free_requested": FREE_REQUESTED, "free_completed": FREE_COMPLETED, "segment_alloc": 3}
    return [(names[e["action"]], e["addr"], e["size"], 0, e["time_us"]) for e in data["device_traces"][0]]


def test_clocks_that_go_back_do_not_move_events_whose_order_makes_sense(tmp_path: Path) -> None:
    data = snapshot()
    data["device_traces"][0][2]["time_us"] = 5
    recording = read_snapshot(write(tmp_path, data))
    assert "go back 1 times" in recording.notes[0]
    assert replay(recording).is_exact


def test_what_no_order_explains_is_refused(tmp_path: Path) -> None:
    data = snapshot()
    data["device_traces"][0].append(entry("free_completed", BASE, 4 * MIB, 14))
    assert "is freed twice" in refusal(write(tmp_path, data))
    data = snapshot()
    data["device_traces"][0].insert(2, entry("alloc", BASE, 4 * MIB, 11))
    assert "is handed out, and is in use" in refusal(write(tmp_path, data))


def test_a_recording_that_lost_its_beginning_is_refused_where_it_cannot_be_rebuilt(tmp_path: Path) -> None:
    data = snapshot()
    data["device_traces"][0].append(entry("free_completed", 77 * BASE, 512, 14))
    recording = read_snapshot(write(tmp_path, data))
    with pytest.raises(InputError, match="lies in no segment"):
        replay(recording)
