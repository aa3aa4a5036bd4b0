"""Captured events stored once where they repeat: what comes back, how much is stored, and damaged files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError
from simulator.formats.readers.capture import capture_of, read_capture, write_capture
from simulator.work.captured.capture import Capture, Kind
from simulator.work.captured.folding import folded, unfolded

PRODUCT = ["aten.mm.default", [[["T", "bf16", [64, 64], None]] * 2, []], ["T", "bf16", [64, 64], None]]


def step(layers: int, number: int) -> tuple[list[list[int]], dict[str, str]]:
    """Layers that make four storages each, keep two of them, and free those in the backward, newest first."""
    events: list[list[int]] = []
    categories: dict[str, str] = {}
    storage, call, kept = 1000 * number, 0, list[tuple[int, int]]()

    def allocate(category: str) -> int:
        nonlocal storage
        storage += 1
        categories[str(storage)] = category
        events.append([Kind.ALLOCATE, storage, 512 * (storage % 4 + 1), 0])
        return storage

    for layer in range(layers):
        for _ in range(2):
            kept.append((layer, allocate("activations")))
            events.append([Kind.OPERATOR, 0, 0, layer + 1, 0])
            events.append([Kind.FREE, allocate("temporaries")])
        events += [[Kind.COLLECTIVE, call, 0, 0, 4096, 0], [Kind.RECORD, call, 0], [Kind.WAIT_WORK, 0, call]]
        call += 1
    while kept:
        layer, last = kept.pop()
        gradient = allocate("gradients")  # stays to the end
        events += [[Kind.OPERATOR, 0, 0, layer + 1, 1], [Kind.FREE, last], [Kind.RECORD_STREAM, gradient, 3]]
        events += [[Kind.MESSAGE, call, 0, 0, 1, 64, 0, call - layers], [Kind.WAIT_EVENT, 0, layers - 1]]
        call += 1
    return [*events, [Kind.STEP, number]], categories


def data(layers: int, ranks: int = 1) -> dict[str, Any]:
    names = ["all_reduce", *(f"body.{layer}.block2.product" for layer in range(layers))]
    each = []
    for rank in range(ranks):
        events, categories = step(layers, 1)
        each.append({"rank": rank, "steady": 0, "categories": categories, "answers": {}, "events": events})
    return {
        "format": "shardwise capture", "version": 2, "target": "by hand", "torch": "2.13.0", "world_size": 8,
        "gpus_per_node": 8, "device": "h100-sxm5-80gb", "signatures": [PRODUCT], "names": names, "groups": [[0, 1]],
        "ranks": json.loads(json.dumps(each)),
    }  # fmt: skip


def told(one: Capture) -> list[Any]:
    """Events with their names in full."""
    place = {Kind.OPERATOR: 3, Kind.COLLECTIVE: 2}
    return [
        [one.names[value] if at == place.get(Kind(event[0])) else value for at, value in enumerate(event)]
        for event in one.events
    ]


def test_every_event_comes_back(tmp_path: Path) -> None:
    given, path = data(9, ranks=2), tmp_path / "one.capture.gz"
    write_capture(path, json.loads(json.dumps(given)))
    found, due = read_capture(path), capture_of(given, "by hand")
    assert told(found) == told(due)
    assert told(found.others[0]) == told(due.others[0])
    assert found.categories == due.categories


def test_equal_layers_and_equal_ranks_take_no_room() -> None:
    """Forth and back: ten times the layers, or the ranks, are a handful of tokens more."""
    ten, hundred = (len(folded(data(layers))["tokens"]) for layers in (10, 100))
    assert len(data(10)["ranks"][0]["events"]) > 2 * ten
    assert hundred <= ten + 4
    assert len(folded(data(10, ranks=8))["tokens"]) <= ten + 8
    assert len(folded(data(100))["names"]) == 2


@pytest.mark.parametrize("name", ["a.07.b", "layers.12", "norm1", "", "3", "12.34.5", "0"])
def test_paths_of_any_form(name: str) -> None:
    given = data(2)
    given["names"] = ["all_reduce", name, "layers.1"]
    back = unfolded(json.loads(json.dumps(folded(given))))
    assert told(capture_of(back, "x")) == told(capture_of(given, "x"))


@pytest.mark.parametrize(
    "tokens", [[[-1, 5, 2]], [[-2], [-1, 1, 1 << 40]], [[7]], [["x"]], [[-2], [3, 0, 7]], [[]], 3, [[-2], [99]]]
)
def test_damaged_files(tokens: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.capture.gz"
    path.write_bytes(gzip.compress(json.dumps({**folded(data(2)), "tokens": tokens}).encode()))
    with pytest.raises(InputError, match=r"tokens|is no event"):
        read_capture(path)
