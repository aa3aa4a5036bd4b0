"""Captured events stored once where they repeat: what comes back, how much is stored, and damaged files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError
from simulator.formats.readers.capture import capture_of, read_capture
from simulator.work.captured.capture import Capture, Kind
from simulator.work.captured.folding import unfolded
from tests.captures import data
from validate.capture.written import folded, write_capture


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
    "tokens",
    [
        [[-1, 5, 2]], [[-2], [-1, 1, 1 << 40]], [[7]], [["x"]], [[-2], [3, 0, 7]], [[]], 3, [[-2], [99]],
        [[-2], [2, 0, 0, 99, 512, 0]],  # of a category that is none
        [[-2], [2, 0, -1, 0, 512, 0]],  # a storage before the first
        [[-2], [2, 0, 0, 0, 512, 0], [2, 0, -1, 0, 512, 0]],  # begins while it is there
        [[-2], [2, 0, 0, 0, 512, 0], [3, 0, 0], [3, 0, 0]],  # ends twice
        [[-2], [0, 999, 0, 0, 0, 0]],  # no such signature
        [[-2], [0, True, 0, 0, 0, 0]],
    ],
)  # fmt: skip
def test_damaged_files(tokens: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.capture.gz"
    path.write_bytes(gzip.compress(json.dumps({**folded(data(2)), "tokens": tokens}).encode()))
    with pytest.raises(InputError, match=r"tokens|is no event"):
        read_capture(path)
