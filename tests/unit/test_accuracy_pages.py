"""The page of accuracy: what its cells say of errors and intervals, and that each source has an appendix of its own."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from simulator.formats.readers.runs_table import RunRow
from simulator.studies.backtest.measured import MEMORY_FIGURES
from simulator.studies.backtest.outcome import RowOutcome

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def buyer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("_buyer")


def _outcome(name: str, predicted_s: float, **others: object) -> RowOutcome:
    """Measured as 1 s, with an interval of a fifth to each side of the prediction."""
    known = {"predicted_step_s": predicted_s, "low_step_s": predicted_s / 1.2, "high_step_s": predicted_s * 1.2}
    return RowOutcome(id=name, line=2, status="ok", **{"source": "a lab", "measured_step_s": 1.0, **known, **others})  # type: ignore[arg-type]


def test_cells_are_of_errors_and_of_the_interval(buyer: ModuleType) -> None:
    found = buyer.timed(
        [_outcome("a", 1.1), _outcome("b", 0.9), _outcome("c", 1.5), _outcome("d", 1.0, measured_step_s=None)]
    )
    assert found.cells("n", "median", "bias", "holds", "half") == ["3", "10.0 %", "+10.0 %", "66.7 %", "± 20 %"]
    assert buyer.timed([]) is None


def test_many_runs_outside_their_intervals_are_marked(buyer: ModuleType) -> None:
    inside, outside = ([_outcome(str(n), s) for n in range(11)] for s in (1.1, 1.5))
    assert buyer.timed([*inside, *outside]).cells("holds") == ["**50.0 %**"]
    assert buyer.timed([*inside[:5], *outside[:5]]).cells("holds") == ["50.0 %"]  # too few to judge
    assert buyer.timed([*inside, *inside]).cells("holds") == ["**100.0 %**"]  # wider than need be


def test_memory_is_told_by_what_was_measured_whoever_ran_it(buyer: ModuleType) -> None:
    gib = {"predicted_memory_bytes": 2**30, "measured_memory_bytes": 2**30}
    outcomes = [
        _outcome("a", 1.0, mem_metric="peak_allocated_gib(rank 0)", fits=True, **gib),
        _outcome("b", 1.0, mem_metric="peak_allocated_gib(last rank)", fits=False, **gib),
        _outcome("c", 1.0, mem_metric="oom", measured_oom=True, fits=False),
    ]
    lines = list(buyer._memory(outcomes))
    assert "| allocated by torch, peak | 2 | 0.0 % | 0.0 % | +0.0 % | 2 |" in lines
    assert "2 runs ran: 1 were predicted not to fit" in lines[-1]
    assert "1 runs ended for lack of memory: 1 were predicted not to fit" in lines[-1]


def test_each_source_of_the_carried_tables_has_an_appendix_of_its_own(buyer: ModuleType) -> None:
    accuracy = importlib.import_module("accuracy")
    sources = {
        one.source for table in accuracy.TABLES for one in buyer.read_measured(table).rows if isinstance(one, RunRow)
    }
    assert len({buyer.slug(source) for source in sources}) == len(sources)
    assert not {buyer.slug(source) for source in sources} & {"targets", "choices", "one-h200", "cpu", "collectives"}


def test_every_metric_of_memory_has_words(buyer: ModuleType) -> None:
    assert set(MEMORY_FIGURES) <= set(buyer.FIGURES)
