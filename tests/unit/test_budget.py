"""The table of sizes that CI shows: every room has a budget, and counting counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/bench"))

import budget  # noqa: E402


def test_every_room_has_a_budget_and_together_they_are_the_total() -> None:
    folders = {path.name for path in (ROOT / "simulator").iterdir() if (path / "__init__.py").is_file()}
    assert set(budget.BUDGET) == folders
    assert sum(budget.BUDGET.values()) == budget.TOTAL


def test_lines_and_short_functions_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    return 1\n")
    (tmp_path / "b.py").write_text("class A:\n    def g(self):\n" + "        x = 1\n" * budget.SHORT)
    found = budget.room("base", sorted(tmp_path.glob("*.py")), tmp_path)
    assert (found.lines, found.largest) == (2 + 2 + budget.SHORT, (2 + budget.SHORT, "b.py"))
    assert (found.functions, found.short) == ((2, 1 + budget.SHORT), 0.5)


def test_a_limit_in_force_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(budget, "events_per_s", lambda: 1.0)
    for name in budget.BUDGET:
        (tmp_path / "simulator" / name).mkdir(parents=True)
        (tmp_path / "simulator" / name / "a.py").write_text("def f():\n    return 1\n")
    monkeypatch.setattr(budget, "ROOT", tmp_path)
    for limit, code in ((None, 0), (10**9, 0), (1, 1)):
        monkeypatch.setattr(budget, "FAILS_OVER", limit)
        assert budget.main() == code
    assert "at most 1 pass" in capsys.readouterr().out
