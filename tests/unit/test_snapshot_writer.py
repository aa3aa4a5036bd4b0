"""The predicted allocator as a snapshot: plain data, what PyTorch's viewer expects, and exact when it is replayed."""

from __future__ import annotations

import io
import pickle
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError
from simulator.formats.readers.snapshot import read_snapshot
from simulator.formats.writers import snapshot as writer
from simulator.formats.writers.snapshot import write_snapshot
from simulator.memory import History, device_history, simulate_memory
from simulator.memory.allocator import AllocatorSettings
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.replay import replay
from simulator.work.ops import build_blocks

MODEL = Model(name="small", num_layers=4, d_model=512, num_heads=8, d_ff=1408, vocab_size=4096)
STACK = Stack.load("torch-2.6-eager")
DEVICE = Cluster.load("hgx-h100-8").device
PLANS = {
    "fsdp2": Plan(dp_shard=8, seq_len=512),
    "fsdp1": Plan(dp_shard=8, seq_len=512, data_parallel="fsdp1", num_micro_batches=2),  # frees that wait for streams
    "ddp": Plan(dp_replicate=8, zero=0, seq_len=512, recompute="full", optimizer_impl="foreach"),
}
EXPANDABLE = AllocatorSettings(expandable_segments=True)


class Plain(pickle.Unpickler):
    """Loads nothing but containers, numbers and text."""

    def find_class(self, module: str, name: str) -> Any:
        msg = f"asks for {module}.{name}"
        raise pickle.UnpicklingError(msg)


def history_of(plan: Plan) -> History:
    return device_history(MODEL, plan, STACK, DEVICE)


@pytest.fixture(params=sorted(PLANS))
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]


@pytest.fixture(params=[None, EXPANDABLE], ids=["segments", "expandable"])
def settings(request: pytest.FixtureRequest) -> AllocatorSettings | None:
    chosen: AllocatorSettings | None = request.param
    return chosen


def written(tmp_path: Path, plan: Plan, settings: AllocatorSettings | None = None) -> Path:
    path = tmp_path / "predicted.pickle"
    write_snapshot(path, history_of(plan), settings)
    return path


def test_the_file_is_a_pickle_of_plain_containers(tmp_path: Path, plan: Plan) -> None:
    data = written(tmp_path, plan).read_bytes()
    assert data[:2] == b"\x80\x04"
    loaded = Plain(io.BytesIO(data)).load()
    assert set(loaded) == {"segments", "device_traces", "allocator_settings", "external_annotations"}


def test_a_replay_of_it_is_exact(tmp_path: Path, plan: Plan, settings: AllocatorSettings | None) -> None:
    recording = read_snapshot(written(tmp_path, plan, settings))
    assert recording.notes == ()
    assert replay(recording).is_exact


def test_its_peak_is_the_predicted_one(tmp_path: Path, plan: Plan) -> None:
    use, _ = simulate_memory(MODEL, plan, STACK, build_blocks(MODEL, STACK, plan), DEVICE)
    data = Plain(io.BytesIO(written(tmp_path, plan).read_bytes())).load()
    assert sum(segment["total_size"] for segment in data["segments"]) == use.peak_reserved_bytes
    # summed as the viewer does, in the bytes asked for, which rounding only adds to
    live = peak = 0
    for entry in data["device_traces"][0]:
        live += {"alloc": entry["size"], "free_requested": -entry["size"]}.get(entry["action"], 0)
        peak = max(peak, live)
    assert 0.99 * use.peak_allocated_bytes < peak <= use.peak_allocated_bytes
    assert live == sum(segment["requested_size"] for segment in data["segments"])


def test_segments_are_whole(tmp_path: Path, plan: Plan, settings: AllocatorSettings | None) -> None:
    data = Plain(io.BytesIO(written(tmp_path, plan, settings).read_bytes())).load()
    for segment in data["segments"]:
        place = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == place
            place += block["size"]
        assert place == segment["address"] + segment["total_size"]
        active = sum(block["size"] for block in segment["blocks"] if block["state"] != "inactive")
        assert segment["active_size"] == active


def test_every_event_names_its_owner_and_moment(tmp_path: Path, plan: Plan) -> None:
    (trace,) = Plain(io.BytesIO(written(tmp_path, plan).read_bytes())).load()["device_traces"]
    counts = Counter(entry["action"] for entry in trace)
    assert counts["free_requested"] == counts["free_completed"]
    assert [entry["time_us"] for entry in trace] == list(range(len(trace)))
    for entry in trace:
        (frame,) = entry["frames"]
        if "category" in entry:
            assert frame["filename"] == entry["category"]
    moments = {entry["frames"][0]["name"] for entry in trace}
    assert any(moment.startswith("backward layer2 mb0") for moment in moments)


def test_equal_histories_make_equal_bytes(tmp_path: Path, plan: Plan) -> None:
    assert written(tmp_path, plan).read_bytes() == written(tmp_path, plan).read_bytes()


@pytest.mark.parametrize("batch", [1, 7, 1500])
def test_it_is_written_in_pieces_that_make_the_same_snapshot(
    batch: int, tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Plain(io.BytesIO(written(tmp_path, plan).read_bytes())).load()
    monkeypatch.setattr(writer, "_BATCH", batch)
    assert Plain(io.BytesIO(written(tmp_path, plan).read_bytes())).load() == whole


def test_memory_does_not_grow_with_what_is_written(tmp_path: Path) -> None:
    def most(layers: int) -> tuple[int, int]:
        model = MODEL.model_copy(update={"num_layers": layers})
        history = device_history(model, PLANS["fsdp2"], STACK, DEVICE)
        tracemalloc.start()
        write_snapshot(tmp_path / "a.pickle", history)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak, (tmp_path / "a.pickle").stat().st_size

    (few, small), (many, large) = most(40), most(160)
    # what lives on is held; with its entries held whole a snapshot takes ten times its file
    assert many - few < 3 * (large - small)


def test_a_folder_that_is_not_there_is_a_fault(tmp_path: Path, plan: Plan) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_snapshot(tmp_path / "absent" / "a.pickle", history_of(plan))
