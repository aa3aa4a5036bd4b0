"""What choosing by prediction costs on grids whose answer is plain."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from simulator.formats.readers.runs_table import RunRow
from simulator.studies.backtest.outcome import RowOutcome

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def regret(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("search_regret")


def _row(name: str, tp: int, **others: object) -> RunRow:
    return RunRow(line=2, id=name, source="lab", model_name="m", n_gpus=64, gpu="A100", tp=tp, **others)  # type: ignore[arg-type]


def _outcome(name: str, predicted_s: float, measured_s: float | None) -> RowOutcome:
    return RowOutcome(id=name, line=2, status="ok", predicted_step_s=predicted_s, measured_step_s=measured_s)


def test_a_grid_s_regret_is_what_the_quickest_prediction_took_over_the_best(regret: ModuleType) -> None:
    """Predicted quickest: b, 1.2 s; measured best: d, 1 s, fourth of the predicted. e has no measured step."""
    rows = [_row(name, tp) for tp, name in enumerate("abcde", start=1)]
    predicted, measured = (1.1, 1.0, 1.2, 1.3, 0.5), (1.5, 1.2, 1.1, 1.0, None)
    outcomes = [_outcome(*one) for one in zip("abcde", predicted, measured, strict=True)]
    text = "\n".join(regret.section(outcomes, rows, 4))
    assert "| lab | 1 | 4 | 0% | 0% | 20.0% | 20.0% |" in text
    assert "| lab: m, 64 A100, None × None | 4 | 4 | 20.0% |" in text


def test_rows_of_other_grids_and_plans_met_before_do_not_count(regret: ModuleType) -> None:
    rows = [_row("a", 1), _row("again", 1), _row("b", 2), _row("other", 3, global_batch=8)]
    assert [[row.id for row in plans] for plans in regret.grids(rows, 2).values()] == [["a", "b"]]
    assert "lab" not in "".join(regret.section([_outcome("a", 1.0, 1.0)], rows, 2))
