"""Rows whose notes hold Megatron's own options: vocabulary, structure, stack and refusals come from those."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from convert_runs import converted
from rich.console import Console
from runs_table.arguments import stated_options
from runs_table.meaning import resolve

from simulator.base.errors import PlanError
from simulator.studies.backtest.evaluate import evaluate_row
from simulator.studies.backtest.outcome import RefusedError, RowOutcome
from simulator.studies.backtest.report import make_report
from simulator.studies.backtest.rows import RunRow
from simulator.studies.backtest.text import render

GPT2 = {"--vocab-file": "${DATA}/bpe/vocab.json"}


def row(options: dict[str, Any] | None = None, **columns: Any) -> RunRow:
    notes = "a run of a test; ffn=2048; args: " + json.dumps({**GPT2, **(options or {})})
    basis = RunRow(
        line=7,
        id="row",
        framework="Megatron-Core CI (dev env)",
        model_name="gpt3_like",
        n_layers=12,
        d_model=512,
        n_heads=8,
        n_kv_heads=8,
        d_ff=2048,
        mlp_kind="gelu",
        seq_len=1024,
        gpu="H100-80GB-SXM",
        n_gpus=8,
        gpus_per_node=8,
        tp=2,
        pp=2,
        cp=1,
        ep=1,
        dp=2,
        vpp=1,
        zero_or_fsdp="ddp",
        micro_batch=4,
        global_batch=32,
        precision="bf16",
        act_ckpt="none",
        flash_attn="y",
        seq_parallel="n",
        metric="step_time_s",
        value=0.2,
        mem_metric="peak_allocated_gib",
        mem_metric_detail="last rank",
        mem_value=1.3,
        notes=notes,
    )
    return replace(basis, **columns)


def _outcome(told: RunRow) -> RowOutcome:
    return evaluate_row(converted(told))


@pytest.mark.parametrize(("tp", "padded"), [(1, 393 * 128), (2, 197 * 256), (4, 99 * 512)])
def test_gpt2s_files_mean_its_vocabulary_padded_for_tp(tp: int, padded: int) -> None:
    """50,257 tokens, up to a multiple of 128 x tp."""
    run = resolve(row(tp=tp, pp=1, dp=8 // tp))
    assert run.model.vocab_size == padded
    assert padded - 128 * tp < 50_257 <= padded


def test_another_file_says_nothing_of_the_vocabulary() -> None:
    with pytest.raises((RefusedError, PlanError), match="vocab"):
        resolve(row({"--vocab-file": "tokens.model"}))


def test_what_is_not_said_is_megatrons_default() -> None:
    stack = resolve(row()).stack
    assert (stack.kernels.dropout, stack.kernels.loss, stack.overlap.tp) == (True, "fp32_in_place", "backward")
    stated = {"--attention-dropout": 0.0, "--hidden-dropout": 0.0, "--cross-entropy-loss-fusion": True}
    stack = resolve(row({**stated, "--attention-backend": "unfused"})).stack
    assert (stack.kernels.dropout, stack.kernels.loss, stack.attention.kernel) == (False, "fused", "math")


def test_columns_and_options_make_one_plan() -> None:
    experts = {"--moe-token-dispatcher-type": "alltoall", "--untie-embeddings-and-output-weights": True}
    run = resolve(row(experts, n_experts=8, top_k=2, ep=2, d_ff=1024, seq_parallel="y", zero_or_fsdp="zero1"))
    plan, model = run.plan, run.model
    assert (plan.tp, plan.pp, plan.dp_shard, plan.ep, plan.zero, plan.num_micro_batches) == (2, 2, 2, 2, 1, 4)
    assert (plan.sequence_parallel, plan.experts.dispatcher, plan.precision.reduce) == (True, "all_to_all", "fp32")
    assert model.experts is not None
    assert (model.experts.d_ff, model.d_ff, model.tied_embeddings) == (1024, 2048, False)


def test_options_that_no_prediction_holds_are_named() -> None:
    run = resolve(row({"--deterministic-mode": True, "--bf16": True}))
    assert "--deterministic-mode" in run.unmodelled
    assert "--bf16" not in run.unmodelled


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"--optimizer": "muon"}, "muon"),
        ({"--fine-grained-activation-offloading": True}, "offload"),
        ({"--hybrid-layer-pattern": "MEM"}, "letters"),
    ],
)
def test_what_no_plan_has_a_word_for_is_refused(options: dict[str, Any], said: str) -> None:
    outcome = _outcome(row(options))
    assert outcome.status == "refused"
    assert said in (outcome.reason or "")


def test_the_last_rank_is_of_the_last_stage() -> None:
    """The first stage holds more micro-batches in flight; without logits it has the higher peak."""
    options = {"--vocab-size": 256, "--tokenizer-type": "NullTokenizer", "--attention-backend": "unfused"}
    last = _outcome(row(options)).predicted_memory_bytes
    fullest = _outcome(row(options, mem_metric_detail="")).predicted_memory_bytes
    assert last is not None
    assert fullest is not None
    assert last < fullest


def test_a_framework_s_own_table_is_of_the_rank_that_writes_it() -> None:
    """nanotron's is of rank 0, in the first stage; with one micro-batch the last stage's logits are the higher peak."""
    plan = {
        "framework": "nanotron",
        "mem_metric": "peak_reserved_gib",
        "vocab": 131_072,
        "notes": "",
        "zero_or_fsdp": "zero1",
    }
    found = {
        detail: _outcome(row(**plan, mem_metric_detail=detail, global_batch=8)).predicted_memory_bytes
        for detail in ("", "rank 0", "last rank", "every rank")
    }
    assert found[""] == found["rank 0"] is not None
    assert 2 * found["rank 0"] < (found["last rank"] or 0) == found["every rank"]


def test_what_a_row_s_test_says_beside_its_notes() -> None:
    """Every test logs norm and zeros of each parameter; some say more, and what the notes say holds."""
    place = "tests/functional_tests/test_cases/{}/golden_values_dev_dgx_h100.json"
    found = {}
    for name in ("gpt/gpt3_mcore_tp1_pp2", "gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer"):
        found[name] = resolve(replace(row(), source_location=place.format(name))).stack
    local, engine = found.values()
    assert (local.host.parameter_calls, engine.host.parameter_calls, resolve(row()).stack.host.parameter_calls) == (
        5,
        5,
        0,
    )
    assert (local.attention.kernel, engine.attention.kernel) == ("math", "cudnn")
    stated = replace(row({"--attention-backend": "flash"}), source_location=place.format("gpt/gpt3_mcore_tp1_pp2"))
    assert resolve(stated).stack.attention.kernel == "flash2"


def test_notes_without_options_hold_none() -> None:
    assert stated_options(row(notes="args: (none)")) is None
    assert stated_options(row(notes="args: {broken")) is None


def test_the_report_names_what_it_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [
        _outcome(row({"--deterministic-mode": True, "--overlap-grad-reduce": True})),
        _outcome(row({"--optimizer": "muon"})),
    ]
    report = make_report("table", outcomes)
    assert list(report.as_json()["rows"][0]["unmodelled"]) == ["--deterministic-mode"]
    Console(width=200).print(render(report))
    said = capsys.readouterr().out
    assert "in no prediction" in said
    assert "1  --deterministic-mode" in said
