"""Backtest of tables of servers: what rows say, what is refused by name, and the report's shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.formats.readers.measured_table import read_measured
from simulator.studies.backtest import render, run
from simulator.studies.backtest.outcome import RefusedError
from simulator.studies.backtest.rows import ServingRow
from simulator.studies.backtest.serving import ServingReport
from simulator.studies.backtest.serving_rows import asked_of, load_of, resolve

ROW = ServingRow(
    line=2,
    id="one",
    source="lab",
    engine="vLLM",
    engine_version="0.9.0",
    model="meta-llama/Llama-3.1-8B-Instruct",
    gpu="h100_sxm",
    n_gpus=1,
    tp=1,
    precision="bf16",
    input_tokens=512,
    output_tokens=64,
    concurrency_or_rate="4",
    metric="ttft_mean",
    value=100.0,
    unit="ms",
)
HEADER = "id,source,engine,engine_version,model,gpu,n_gpus,tp,precision,input_tokens,output_tokens,concurrency_or_rate,metric,value,unit,colour"
TABLE = f"""{HEADER}
a,lab,vLLM,0.9.0,LLaMA v3.1 8B,H100-80GB-SXM,1,1,bf16,512,64,4,ttft_mean,30,ms,red
b,lab,vLLM,0.9.0,LLaMA v3.1 8B,H100-80GB-SXM,1,1,bf16,512,64,4,output_throughput_total,400,tokens/s,red
c,lab,vLLM,0.9.0,a model of ours,H100-80GB-SXM,1,1,bf16,512,64,4,ttft_mean,30,ms,red
a,lab,vLLM,0.9.0,LLaMA v3.1 8B,H100-80GB-SXM,1,1,bf16,512,64,4,ttft_mean,30,ms,red
d,lab,vLLM,0.9.0,LLaMA v3.1 8B,H100-80GB-SXM,1,1,bf16,512,-3,4,ttft_mean,30,ms,red
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ServingReport:
    file = tmp_path_factory.mktemp("serving") / "serving.csv"
    file.write_text(TABLE)
    found = run(read_measured(file))
    assert isinstance(found, ServingReport)
    return found


def test_rows_stand_in_the_tables_order_with_what_became_of_each(report: ServingReport) -> None:
    rows = json.loads(json.dumps(report.as_json()))["rows"]
    assert [(row["id"], row["status"]) for row in rows] == [
        ("a", "ok"), ("b", "ok"), ("c", "refused"), ("a", "bad"), ("d", "bad"),
    ]  # fmt: skip
    assert {"metric", "unit", "predicted", "low", "high", "measured", "reason"} <= rows[0].keys()
    assert rows[0]["low"] < rows[0]["predicted"] < rows[0]["high"]
    assert "a model of ours" in rows[2]["reason"]
    assert "line 2" in rows[3]["reason"]
    assert "output_tokens" in rows[4]["reason"]


def test_four_users_share_what_one_loop_serves(report: ServingReport) -> None:
    """Little's law: throughput = users / latency; a latency is at least its ttft, so tokens/s is at most 4 · 64 / ttft."""
    ttft_ms, rate = (row["predicted"] for row in report.as_json()["rows"][:2])
    assert 0 < rate < 4 * 64 / (ttft_ms * 1e-3)


def test_groups_and_unread_columns(report: ServingReport) -> None:
    groups = report.as_json()["groups"]
    assert [(group["metric"], group["n"], group["refused"]) for group in groups] == [
        ("output_throughput_total", 1, {}),
        ("ttft_mean", 1, {"model": 1}),
    ]
    assert any("colour" in column for column in report.unread)
    assert render(report) is not None


@pytest.mark.parametrize(
    ("text", "users", "rate"),
    [("16", 16, float("inf")), ("4 requests/s", 0, 4.0), ("INF requests/s", 0, float("inf")), ("0.5 req/s", 0, 0.5)],
)
def test_loads(text: str, users: int, rate: float) -> None:
    load = load_of(replace(ROW, concurrency_or_rate=text))
    assert (load.users, load.rate) == (users, rate)


@pytest.mark.parametrize(
    ("metric", "unit", "figure", "percentile", "factor"),
    [
        ("ttft_mean", "ms", "ttft", None, 1e-3),
        ("itl_p99", "us", "itl", 99.0, 1e-6),
        ("tpot_median", "s", "tpot", 50.0, 1.0),
        ("request_latency(static batch)", "ms", "latency", None, 1e-3),
        ("(prompt+output tokens)/total time", "tokens/s", "token_rate", None, 1.0),
        ("output_throughput_total", "tokens/s", "output_rate", None, 1.0),
    ],
)
def test_metrics(metric: str, unit: str, figure: str, percentile: float | None, factor: float) -> None:
    asked = asked_of(replace(ROW, metric=metric, unit=unit))
    assert (asked.figure, asked.percentile, asked.unit) == (figure, percentile, factor)


def test_a_rate_per_gpu_is_divided_by_the_gpus() -> None:
    row = replace(ROW, n_gpus=4, tp=2, metric="output_throughput_per_gpu", unit="tokens/s/GPU")
    server = resolve(row)
    assert (server.asked.unit, server.plan.tp, server.plan.dp) == (4.0, 2, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metric": "happiness"}, "happiness"),
        ({"unit": "tokens/s"}, "s or ms"),
        ({"concurrency_or_rate": "a few"}, "a few"),
        ({"n_gpus": 3, "tp": 2}, "tp 2"),
        ({"precision": "w2a2"}, "w2a2"),
        ({"input_tokens": None}, "blank"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        resolve(replace(ROW, **changes))


def test_requests_are_counted_from_the_remarks() -> None:
    assert load_of(replace(ROW, notes="500 requests, open loop at QPS; achieved req/s=2")).requests == 500
    assert load_of(replace(ROW, notes="requests 30000/3000 by length")).requests == 5 * 4


def test_an_empty_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "serving.csv"
    file.write_text(f"{HEADER}\n")
    assert run(read_measured(file)).outcomes == ()
