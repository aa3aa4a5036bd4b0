"""No change makes the predictions of measured runs worse unseen: `python tests/accuracy/gate.py --pin` where it is meant."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.studies.backtest.rows import RunRow
from tests.accuracy import gate
from tests.accuracy.gate import Known

BEFORE = [*(Known(f"a{n}", "a", 0.10, None) for n in range(3)), *(Known(f"b{n}", "b", -0.02, 0.01) for n in range(4))]


def test_no_source_is_worse_than_when_it_was_pinned() -> None:
    lines, holds = gate.verdict(gate.read())
    assert holds, "\n".join(["python tests/accuracy/gate.py --pin, where this is meant:", *lines])


def test_no_source_of_servers_is_worse_than_when_it_was_pinned() -> None:
    pinned = gate.read(gate.PINNED_SERVERS)
    assert len({one.id for one in pinned}) == gate.FIGURES
    lines, holds = gate.verdict(pinned)
    assert holds, "\n".join(["python tests/accuracy/gate.py --pin, where this is meant:", *lines])


def test_a_source_that_becomes_worse_by_more_than_a_tenth_is_named() -> None:
    then = gate.medians(BEFORE)
    assert then == {
        ("a", "time"): 0.10,
        ("b", "time"): 0.02,
        ("all", "time"): 0.02,
        ("b", "memory"): 0.01,
        ("all", "memory"): 0.01,
    }
    little, much = ([replace(k, time=k.time * f) if k.source == "a" else k for k in BEFORE] for f in (-1.09, 1.11))
    assert gate.worse(then, gate.medians(little)) == []
    assert gate.worse(then, gate.medians(much)) == [("a", "time")]


def test_the_whole_may_not_become_worse_by_a_twentieth_though_each_source_may() -> None:
    """0.3 points are little of 2 %, and more than a twentieth of it."""
    slightly = [replace(k, time=k.time * 1.14) if k.source == "b" else k for k in BEFORE]
    assert gate.worse(gate.medians(BEFORE), gate.medians(slightly)) == [("all", "time")]


def test_a_source_whose_memory_is_no_longer_predicted_is_worse() -> None:
    gone = [replace(k, memory=None) for k in BEFORE]
    assert gate.worse(gate.medians(BEFORE), gate.medians(gone)) == [("b", "memory"), ("all", "memory")]


def test_a_row_that_is_no_longer_predicted_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        f"{s}{n}": RunRow(line=1, id=f"{s}{n}", source=s) for s, count in (("a", 3), ("b", 4)) for n in range(count)
    }
    monkeypatch.setattr(gate, "rows", lambda: rows)
    known = {one.id: one for one in BEFORE}
    monkeypatch.setattr(gate, "now", lambda row: None if row.id == "b3" else known[row.id])
    lines, holds = gate.verdict(BEFORE)
    assert (lines[0], holds) == ("b3: is no longer predicted", False)


def test_every_source_gives_as_many_rows_as_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"one": 1, "few": 3, "many": 50, "more": 90}
    rows = [
        RunRow(line=1, id=f"{s}{n}", source=s, pp=1 + 7 * (n % 2)) for s, size in sizes.items() for n in range(size)
    ]
    monkeypatch.setattr(gate, "now", lambda row: Known(row.id, row.source, 0.0, None))
    taken = gate.chosen(rows, most=20)
    # ids with an odd number are pipelines of eight; of the rest each source has 1, 2, 25 and 45
    assert Counter(k.source for k in taken) == {"one": 1, "few": 2, "many": 9, "more": 8}
    assert gate.chosen(reversed(rows), most=20) == taken


def test_what_is_pinned_is_read_back(tmp_path: Path) -> None:
    gate.write(BEFORE, tmp_path / "pinned.csv")
    assert gate.read(tmp_path / "pinned.csv") == BEFORE
    pinned = gate.read()
    assert len({one.id for one in pinned}) == gate.ROWS
