"""Verdicts on rows that ran: fits, too much, or left open by what the row does not state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.studies.backtest.evaluate import evaluate_row
from simulator.studies.backtest.scores import Verdicts, verdicts

PUBLISHED = Path(__file__).parents[2] / "experiments" / "measured" / "runs-plain.csv.gz"


def test_a_verdict_that_hangs_on_recomputation_is_left_open() -> None:
    """70B on 64 GB200: the row ran, and does not say what it recomputed. Nothing of it would be too much, all fits."""
    rows = {row.id: row for row in read_runs(PUBLISHED) if isinstance(row, RunRow)}
    row = rows["mbridge-26.04-121"]
    outcome = evaluate_row(row)
    assert outcome.fits is None
    assert "fits with full" in outcome.open
    stated = evaluate_row(replace(row, act_ckpt="none"))
    assert (stated.fits, stated.open) == (False, "")
    assert verdicts([outcome, stated]) == Verdicts(ran=2, said_oom=1, open=1)


def test_an_open_row_is_predicted_in_the_first_way_that_fits_and_spans_the_others() -> None:
    """8B on eight 80 GB: replicated, its 16 bytes a parameter alone are 128 GB; sharded, it fits, recomputed or not."""
    row = RunRow(
        line=2, id="row", framework="somebody's", model_name="llama3-8b", seq_len=4096, gpu="H100", n_gpus=8,
        micro_batch=1, global_batch=8, precision="bf16", metric="step_time_s", value=1.0,
    )  # fmt: skip
    outcome = evaluate_row(row)
    stated = {again: evaluate_row(replace(row, zero_or_fsdp="fsdp_full", act_ckpt=again)) for again in ("none", "full")}
    assert outcome.predicted_step_s == stated["none"].predicted_step_s
    assert outcome.low_step_s == min(each.low_step_s or 0 for each in stated.values())
    assert outcome.high_step_s == max(each.high_step_s or 0 for each in stated.values())
    assert (outcome.fits, outcome.status) == (None, "ok")
    assert "zero_or_fsdp fsdp_full, act_ckpt none" in outcome.open
    assert "2 of 4 ways" in outcome.open
