"""A whole table judged: order kept, bad and failing rows reported, nothing stops the rest."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from simulator.cli import main, progress
from simulator.formats.readers.measured_table import read_measured
from simulator.formats.readers.runs_table import RunRow, read_runs
from simulator.spec.model import Model
from simulator.studies import backtest
from simulator.studies.backtest import evaluate as judging
from simulator.studies.backtest.resolve import resolve
from simulator.studies.backtest.work import work_of

HEADER = (
    "id,source,framework,model_name,n_layers,d_model,n_heads,d_ff,mlp_kind,vocab,seq_len,gpu,n_gpus,gpus_per_node,"
    "zero_or_fsdp,micro_batch,global_batch,precision,act_ckpt,metric,value,mem_metric,mem_value,notes"
)
ROWS = """\
ok,lab,PyTorch,llama-x,4,1024,8,4096,swiglu,32000,2048,H100-80GB-SXM,8,8,fsdp_full,1,64,bf16,none,step_time_s,4.0,peak_reserved_gib,60,
noise,lab,PyTorch,llama-x,4,1024,8,4096,swiglu,32000,2048,H100-80GB-SXM,8,8,fsdp_full,1,64,bf16,none,step_time_s,-4,,,
tp,lab,PyTorch,llama-x,4,1024,8,4096,swiglu,32000,2048,H100-80GB-SMX,8,8,fsdp_full,1,64,bf16,none,step_time_s,4.0,,,
memory,lab,PyTorch,llama-x,4,1024,8,4096,swiglu,32000,2048,H100-80GB-SXM,8,8,fsdp_full,1,64,bf16,full,,,peak_allocated_gib,40,
again,lab,PyTorch,llama-x,4,1024,8,4096,swiglu,32000,2048,H100-80GB-SXM,8,8,fsdp_full,1,64,bf16,none,step_time_s,4.0,peak_reserved_gib,60,seen elsewhere
half,lab,PyTorch,llama-x,4,1024,8,4096,swiglu,32000,2048,H100-80GB-SXM,8,8,fsdp_full,2,40,bf16,none,step_time_s,4.0,,,
"""
ASKED = judging._prediction  # before any test replaces it
_GIB = 2**30
_MEMORY = SimpleNamespace(peak_allocated_bytes=50 * _GIB, reserved_bytes=54 * _GIB, used_bytes=56 * _GIB)
FAKE = SimpleNamespace(step_s=2.0, low_s=1.9, high_s=2.1, fits=True, memory=_MEMORY)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n{ROWS}")
    return path


@pytest.fixture(autouse=True)
def predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the predictor by one that always says 2 s, and 50, 54 and 56 GiB allocated, reserved and used."""
    monkeypatch.setattr(judging, "_prediction", lambda *_: FAKE)


def test_every_row_stands_in_the_tables_order(table: Path) -> None:
    report = backtest.run(read_measured(table))
    assert [(o.id, o.status) for o in report.outcomes] == [
        ("ok", "ok"), ("noise", "bad"), ("tp", "refused"), ("memory", "ok"), ("again", "ok"), ("half", "ok"),
    ]  # fmt: skip


def test_rows_as_json(table: Path) -> None:
    data = backtest.run(read_measured(table)).as_json()
    assert data["schema_version"] == 1
    ok, noise, gpu, memory, again, half = data["rows"]
    assert (ok["predicted_step_s"], ok["low_step_s"], ok["high_step_s"], ok["measured_step_s"]) == (2.0, 1.9, 2.1, 4.0)
    assert (ok["predicted_memory_bytes"], ok["measured_memory_bytes"]) == (54 * 2**30, 60 * 2**30)
    assert ok["mfu_predicted"] == pytest.approx(2 * ok["mfu_measured"])
    assert noise["line"] == 3
    assert "value" in noise["reason"]
    assert noise["predicted_step_s"] is None
    assert "did you mean" in gpu["reason"]
    assert (memory["measured_step_s"], memory["predicted_memory_bytes"]) == (None, 50 * 2**30)
    assert again["duplicate_of"] == "ok"
    assert half["predicted_step_s"] == pytest.approx(2.0 * 2.5 / 3)  # 5 sequences a rank in micro-batches of 2


def test_measured_mfu_is_the_models_flop_over_peak(table: Path) -> None:
    ok = backtest.run(read_measured(table)).as_json()["rows"][0]
    # by hand: 6 FLOP a weight of the matrices, 12 d/2 a token and layer of causal attention
    weights = 4 * (4 * 1024**2 + 3 * 1024 * 4096) + 32000 * 1024
    flop = (6 * weights + 12 * 4 * 1024 * 2048 // 2) * 64 * 2048
    assert ok["mfu_measured"] == pytest.approx(flop / (4.0 * 8 * 989.4e12), rel=1e-3)


def test_two_runs_give_the_same_bytes(table: Path) -> None:
    first, second = (json.dumps(backtest.run(read_measured(table)).as_json()) for _ in range(2))
    assert first == second


def test_a_defect_costs_one_row(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no luck")

    monkeypatch.setattr(judging, "_prediction", explode)
    report = backtest.run(read_measured(table))
    assert [o.status for o in report.outcomes] == ["failed", "bad", "refused", "failed", "failed", "failed"]
    assert report.outcomes[0].reason == "ZeroDivisionError: no luck"


def test_the_same_run_measured_again_is_predicted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = list[object]()
    monkeypatch.setattr(judging, "predict", lambda *asked, **_: predicted.append(asked) or FAKE)
    monkeypatch.setattr(judging, "_prediction", ASKED)
    seeds = [ROWS.splitlines()[0].replace("ok,", f"seed-{i},").replace("4.0", f"4.{i}") for i in range(9)]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEADER, *seeds]))
    report = backtest.run(read_measured(path))
    assert [one.measured_step_s for one in report.outcomes] == pytest.approx([4 + i / 10 for i in range(9)])
    assert len(predicted) == 1


def test_control_c_keeps_what_is_done(table: Path) -> None:
    def stop(done: int, total: int) -> None:
        assert total == 6
        if done == 2:
            raise KeyboardInterrupt

    report = backtest.run(read_measured(table), progress=stop)
    assert report.interrupted
    assert len(report.outcomes) == 2
    assert report.as_json()["interrupted"] is True


def test_a_log_says_how_long_the_other_rows_take(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a terminal heard of them: a table of long rows in a pipe stood for minutes without a word."""
    monkeypatch.setattr(progress, "_FIRST_S", 0.0)
    main(["backtest", str(table), "--plain"])
    assert re.search(r"^\d of 6 rows, .* left$", capsys.readouterr().err, re.MULTILINE)


def test_rows_that_calibrated_a_stack_are_not_scored(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = judging.resolve

    def resolve(row: Any) -> Any:
        run = whole(row)
        return replace(run, stack=run.stack.copy_with(calibration_runs=("ok",)))

    monkeypatch.setattr(judging, "resolve", resolve)
    report = backtest.run(read_measured(table))
    assert report.outcomes[0].status == "calibration"
    assert report.groups[1].step.n == 1  # only `half` is left: `again` repeats a row


def test_text_names_rows_and_reasons(table: Path) -> None:
    wide = Console(width=200, no_color=True)
    with wide.capture() as text:
        wide.print(backtest.render(backtest.run(read_measured(table))))
    shown = text.get()
    assert "4 ok, 1 refused, 1 bad" in shown
    assert "line 3: bad: noise" in shown
    assert "cluster refused" in shown


def test_work_of_a_step(table: Path) -> None:
    """GEMM FLOP are 6 a weight and token without recomputation; FSDP moves two gathers and an fp32 reduction."""
    row = next(r for r in read_runs(table) if isinstance(r, RunRow) and r.id == "ok")
    run = resolve(row)
    work, model = work_of(run), run.model
    assert isinstance(model, Model)
    tokens = 64 * 2048 / 8
    assert work.gemm_flop == pytest.approx(6 * model.num_matmul_parameters * tokens)
    # forward 2 and backward 5 products over half the square: 4 s/2 H C, then 2.5 times that
    assert work.attention_flop == pytest.approx(3.5 * 4 * 1024 * 2048 / 2 * 4 * tokens)
    layers = 4 * model.num_parameters_of("layer")
    root = model.num_parameters - layers
    per_micro_batch = 7 / 8 * (layers * (2 + 2 + 4) + root * (2 + 4))  # the root is not gathered again
    assert work.communication_bytes == pytest.approx(8 * per_micro_batch, rel=1e-3)


def test_torchtitan_makes_every_second_product_of_a_block_again(table: Path) -> None:
    """Of q k v out gate up down its policy keeps q, v, gate and down: k, out and up run once more."""
    row = next(r for r in read_runs(table) if isinstance(r, RunRow) and r.id == "ok")
    row = replace(row, framework="torchtitan (2025-06)", act_ckpt="selective")
    d, f, tokens = 1024, 4096, 64 * 2048 / 8
    again = 2 * 4 * (d * d + d * d + d * f) * tokens
    once = 6 * resolve(row).model.num_matmul_parameters * tokens
    assert work_of(resolve(row)).gemm_flop == pytest.approx(once + again)
