"""The accuracy page's sets of runs: which rows belong to one, and what is told of those that miss."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from simulator.formats.readers.runs_table import RunRow
from simulator.studies.backtest.outcome import RowOutcome

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("_targets")


def _row(name: str, **others: object) -> RunRow:
    return RunRow(line=2, id=name, **{"source": "lab", "gpu": "A100", "n_gpus": 8, **others})  # type: ignore[arg-type]


def _outcome(name: str, predicted_s: float, **others: object) -> RowOutcome:
    return RowOutcome(id=name, line=2, status="ok", predicted_step_s=predicted_s, measured_step_s=1.0, **others)  # type: ignore[arg-type]


def test_a_row_belongs_to_the_sets_whose_every_condition_it_meets(targets: ModuleType) -> None:
    row = _row("a", precision="bf16", n_experts=8, pp=2)
    for met in ({}, {"precisions": ("bf16",)}, {"experts": True}, {"split": True}, {"max_gpus": 8}, {"gpu": "A1"}):
        assert targets.Target(name="", source="lab", **met).holds(row)
    for unmet in ({"precisions": ("fp8",)}, {"experts": False}, {"split": False}, {"min_gpus": 9}, {"gpu": "H100"}):
        assert not targets.Target(name="", source="lab", **unmet).holds(row)


def test_the_stated_sets_of_a_source_hold_each_of_its_rows_once(targets: ModuleType) -> None:
    """Sources of which every row is judged: halves of them that overlap or leave rows out would hide rows."""
    sets = targets.targets()
    for source in ("VIA-Research/vTrain", "pytorch/torchtitan", "NVIDIA/dgxc-benchmarking", "mosaicml/llm-foundry"):
        for precision, n_gpus, pp, experts in (("bf16", 8, 1, None), ("fp8", 64, 2, 8), ("bf16", 9, 1, 8)):
            row = _row("a", source=source, precision=precision, n_gpus=n_gpus, pp=pp, n_experts=experts)
            assert sum(one.holds(row) for one in sets) == 1, (source, row)


def test_misses_are_told_by_cause_the_unexplained_last(targets: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    target = targets.Target(name="the lab", source="lab", median=0.05, p90=0.1)
    known = [targets.Note(why="wide", where={"d_model": 64}), targets.Note(why="odd", rows=("c",))]
    monkeypatch.setattr(targets, "targets", lambda: [target])
    monkeypatch.setattr(targets, "notes", lambda: known)
    rows = [_row("a", d_model=64), _row("b", d_model=64), _row("c"), _row("d"), _row("e"), _row("f", d_model=64)]
    outcomes = [_outcome(*one) for one in zip("abcde", (1.2, 0.8, 1.5, 2.0, 1.1 - 1e-9), strict=True)]
    outcomes.append(_outcome("f", 9.0, duplicate_of="a"))
    lines = list(targets.why(outcomes, rows))[1:]
    assert lines == [
        "| the lab | wide | 2 | -20.0 % to +20.0 % | `a`, `b` |",
        "| the lab | odd | 1 | +50.0 % | `c` |",
        f"| the lab | {targets.NO_CAUSE} | 1 | +100.0 % | `d` |",
    ]
    (line,) = list(targets.at_a_glance(outcomes, rows))[1:]
    assert line.startswith("| the lab | 5 | **20.0 %** | **80.0 %** | 5 % / 10 % | +20.0 % |")
