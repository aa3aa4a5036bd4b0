"""Journals whose rows somebody changed and signed again: the sum is right, and the row is looked at all the same."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import InputError
from simulator.base.fit import Fit
from simulator.cli.explore_points import FIGURES, PointJournal
from simulator.studies.search.journal import Journal
from simulator.studies.search.outcome import PlanOutcome
from simulator.studies.serving_search.notes import Notes

ROW: dict[str, Any] = json.loads(
    PlanOutcome(key="a", status=Fit.FITS, num_devices=8, step_s=0.3, low_s=0.2, high_s=0.4, tokens_per_step=64, used_bytes=7).to_json()
)  # fmt: skip
RECORD: dict[str, Any] = {"verdict": "fits", **dict.fromkeys(FIGURES[:-1], 8), "step_s": 0.3}
SURVEY: dict[str, Any] = {"layout": "tp1", "missing_bytes": 0, "capacity": {"both": 2.0}, "least": {"both": 1}, "floor": {"both": 0.5}}  # fmt: skip
TASK = json.dumps(["survey", "tp1", ["both"], []])


def _signed(path: Path, key: str, row: object) -> None:
    """The row as somebody writes it who knows how rows are summed."""
    text = row if isinstance(row, str) else json.dumps(row)
    with sqlite3.connect(path) as database:
        told = zlib.crc32(f"{key}\n{text}".encode())
        database.execute("INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?)", (key, text, told))
    database.close()


def _read(kind: type[Journal], key: str, row: object, path: Path) -> object:
    with kind(path, "study"):
        pass
    _signed(path, key, row)
    readers: dict[type[Journal], Callable[[Any], object]] = {
        Journal: Journal.outcomes,
        PointJournal: PointJournal.records,
        Notes: Notes.known,
    }
    with kind(path, "study") as journal:
        return readers[kind](journal)


@pytest.mark.parametrize(
    ("kind", "key", "row"), [(Journal, "a", ROW), (PointJournal, "[]", RECORD), (Notes, TASK, SURVEY)]
)
def test_a_row_as_it_is_written_is_read(kind: type[Journal], key: str, row: object, tmp_path: Path) -> None:
    assert _read(kind, key, row, tmp_path / "x.journal")


WRONG = {
    "a step before it began": (Journal, "a", ROW | {"step_s": -1.0}),
    "a step of nothing that fits": (Journal, "a", ROW | {"step_s": 0.0}),
    "a step without end": (Journal, "a", json.dumps(ROW).replace("0.3", "Infinity")),
    "a step that is no number": (Journal, "a", json.dumps(ROW).replace("0.3", "NaN")),
    "a step beyond all times": (Journal, "a", ROW | {"step_s": 1e300}),
    "a step in words": (Journal, "a", ROW | {"step_s": "0.3"}),
    "another plan's row": (Journal, "b", ROW),
    "a verdict that nobody gives": (Journal, "a", ROW | {"status": "surely"}),
    "half a GPU": (Journal, "a", ROW | {"num_devices": 0.5}),
    "memory below nothing": (Journal, "a", ROW | {"used_bytes": -1}),
    "an uncertainty beyond all factors": (Journal, "a", ROW | {"stack_sigma": 60.0}),
    "a key that nobody knows": (Journal, "a", ROW | {"rank": 1}),
    "no status": (Journal, "a", {k: v for k, v in ROW.items() if k != "status"}),
    "no table": (Journal, "a", [ROW]),
    "no JSON": (Journal, "a", "{"),
    "a point that fits without a figure": (PointJournal, "[]", {k: v for k, v in RECORD.items() if k != "mfu"}),
    "a point whose step is before it began": (PointJournal, "[]", RECORD | {"step_s": -1.0}),
    "a point with a verdict of its own": (PointJournal, "[]", RECORD | {"verdict": "\x1b[2Jfits"}),
    "a point that is true": (PointJournal, "[]", RECORD | {"step_s": True}),
    "engines below none": (Notes, TASK, SURVEY | {"capacity": {"both": -2.0}}),
    "a survey of another layout": (Notes, TASK, SURVEY | {"layout": "tp2"}),
    "a role that no engine has": (Notes, TASK, SURVEY | {"least": {"cook": 1}}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_no_prediction_makes_is_refused(name: str, tmp_path: Path) -> None:
    kind, key, row = WRONG[name]
    with pytest.raises(InputError, match="is damaged"):
        _read(kind, key, row, tmp_path / "x.journal")
