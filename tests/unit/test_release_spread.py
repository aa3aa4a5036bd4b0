"""What releases of one software differ by, and whose intervals hold it."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest

from simulator import Cluster, Model, Plan, predict
from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.predict import Z90, Prediction
from simulator.predict.difference import difference, timed
from simulator.spec.calibration.intervals import intervals
from simulator.spec.software.stack import Stack

STACK = Stack.load("megatron-core-2025")


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "experiments")
    return importlib.import_module("release_spread")


def _predicted(
    experts_sigma: float, model: str = "qwen3-30b-a3b", micro_batch_size: int = 1
) -> tuple[Plan, Prediction]:
    plan = Plan(
        dp_shard=8,
        ep=8 if model.endswith("a3b") else 1,
        zero=1,
        data_parallel="megatron",
        seq_len=1024,
        micro_batch_size=micro_batch_size,
        stack=STACK.name,
    )
    stack = STACK.copy_with(experts_sigma=experts_sigma)
    return plan, predict(Model.load(model), plan, Cluster.load("hgx-h100-8"), stack=stack)


def test_the_stack_states_what_the_table_shows(releases: ModuleType) -> None:
    rows = [row for row in read_runs(releases.RUNS) if isinstance(row, RunRow) and row.source == releases.SOURCE]
    assert releases.spread(releases.repeated(rows, experts=True)) == pytest.approx(
        STACK.fitted.experts_sigma, abs=0.005
    )
    assert releases.spread(releases.repeated(rows, experts=False)) < STACK.fitted.sigma


def test_a_group_of_n_rows_tells_n_minus_one_times(releases: ModuleType) -> None:
    assert releases.spread([[0.0, 2.0], [5.0, 5.0, 5.0]]) == pytest.approx(math.sqrt(2 / 3))


def test_releases_widen_the_interval_of_mixtures_alone() -> None:
    (_, without), (_, with_) = _predicted(0.0), _predicted(0.14)
    narrow, wide = (math.log(p.high_s / p.step_s) / Z90 for p in (without, with_))
    assert wide == pytest.approx(math.hypot(narrow, 0.14 * intervals().factor("experts")))
    assert _predicted(0.0, "llama3.2-1b")[1].high_s == _predicted(0.14, "llama3.2-1b")[1].high_s


def test_plans_under_one_stack_share_their_release() -> None:
    found = []
    for sigma in (0.0, 0.14):
        one, other = (_predicted(sigma, micro_batch_size=size) for size in (1, 2))
        steps = [timed(p.step_s, p.spread, p.stack_sigma, plan) for plan, p in (one, other)]
        found.append(difference(*steps))
    assert found[0] == found[1]
