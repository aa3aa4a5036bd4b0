"""Verdicts on rows that ran: fits, too much, or left open by what the row does not state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from simulator.backtest.judge import judge
from simulator.backtest.scores import Verdicts, verdicts
from simulator.readers.runs_table import RunRow, read_runs


def test_a_verdict_that_hangs_on_recomputation_is_left_open(reference_data: Path) -> None:
    """70B on 64 GB200: the row ran, and does not say what it recomputed. Nothing of it would be too much, all fits."""
    rows = {row.id: row for row in read_runs(reference_data / "runs.csv") if isinstance(row, RunRow)}
    row = rows["mbridge-26.04-121"]
    outcome = judge(row)
    assert outcome.fits is None
    assert "fits with full" in outcome.open
    stated = judge(replace(row, act_ckpt="none"))
    assert (stated.fits, stated.open) == (False, "")
    assert verdicts([outcome, stated]) == Verdicts(ran=2, said_oom=1, open=1)
