"""`shardwise serve --search` on the command line: the answer, JSON, journal, users, prices, exit codes, faults."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from simulator import Cluster, InferencePlan, InputError, Model, Slo, Stack, Workload, search_serving
from simulator.base.errors import ArgumentError, PlanError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.spec.prices import Prices
from simulator.studies.search.driver import Progress
from simulator.studies.serving import with_defaults
from simulator.studies.serving_search import SearchInterrupted, ServingSearch, ServingSearchReport
from simulator.studies.serving_search import search_serving as find_plans
from simulator.studies.serving_search.answers import degrees_of
from simulator.studies.serving_search.space import layouts
from simulator.studies.serving_search.text import render

UNRATED = [
    *("serve", "--search", "--model", "llama3.2-1b", "--max-gpus", "2", "--requests", "30", "--output", "20"),
    *("--jobs", "1", "--fix", "pp=1"),
]
SMALL = [*UNRATED, "--rate", "30"]
LIMITS = ["--slo-ttft", "p95=100ms", "--slo-tpot", "p95=10ms"]

PRICES = """
currency = "USD"
[[price]]
cluster = "hgx-h100-8"
kind = "on-demand"
per_gpu_hour = 3.6
date = "2026-01-01"
source = "made up"
"""


def test_a_person_reads_how_many_gpus_and_which_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *LIMITS, "--plain"]) == ExitCode.OK
    told = capsys.readouterr().out
    for part in (
        "llama3.2-1b on 1 × hgx-h100-8 (2 GPUs) at 30 requests/s: 1 GPU (1 node), 1 × (tp 1)",
        "ttft p95",
        "tokens/s/user",
        "prompts 1 × (tp 1) → answers 1 × (tp 1)",
        "Equal engines are simulated once",
        "1 played whole",
        "The best, as flags of `shardwise serve`:",
    ):
        assert part in told


def test_json_prices_and_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    arguments = [*SMALL, *LIMITS, "--json", "--prices", str(prices)]
    assert main(arguments) == ExitCode.OK
    first = capsys.readouterr().out
    told = json.loads(first)
    assert told["schema_version"] == 1
    assert told["inputs"]["slo"][0] == {"name": "ttft", "percentile": 95.0, "limit_s": 0.1}
    assert told["gpus"] == told["plans"][0]["gpus"] == 1
    for row in told["plans"]:
        assert all(one["held"] for one in row["attainments"])
        assert row["tokens_per_s_gpu"] == pytest.approx(30 * 20 / row["gpus"])
        # 3.6 USD an hour are 0.001 a second
        assert row["million_output_tokens"] == pytest.approx(0.001 * row["gpus"] / (30 * 20) * 1e6)
    assert told["counts"]["met"] >= len(told["plans"])
    assert main([*arguments, "--jobs", "2"]) == ExitCode.OK
    assert capsys.readouterr().out == first


def test_a_journal_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = ["--journal", str(tmp_path / "journal"), "--json"]
    assert main([*SMALL, *LIMITS, *journal]) == ExitCode.OK
    first = capsys.readouterr().out
    assert main([*SMALL, *LIMITS, *journal]) == ExitCode.OK
    assert capsys.readouterr().out == first
    assert main([*SMALL, "--slo-ttft", "1s", *journal]) == ExitCode.BAD_INPUT
    assert "belongs to another study" in capsys.readouterr().err


def test_users_give_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*UNRATED, *LIMITS, "--json", "--users", "1800", "--every", "60s", "--top", "1"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["inputs"]["workload"]["rate"] == 30
    assert main([*SMALL, *LIMITS, "--users", "5", "--every", "0s"]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "--every: must be above zero" in told
    assert "--users: gives the rate, and so does --rate" in told
    assert main(["serve", "--users", "5"]) == ExitCode.BAD_INPUT
    assert "--users: says half of a rate (--every 60s)" in capsys.readouterr().err


def test_no_plan_meets_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--slo-tpot", "p90=0.1ms", "--plain"]) == ExitCode.DOES_NOT_FIT
    told = capsys.readouterr().out
    assert "no layout meets the limits" in told
    assert "Nearest: " in told
    assert "tpot p90: " in told
    assert "times 100 us; 0.0% of requests are within" in told
    assert "To try: narrower weights" in told


def test_more_than_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*UNRATED, "--rate", "90000", "--slo-ttft", "1s", "--plain"]) == ExitCode.DOES_NOT_FIT
    assert "The queue grows without end: no layout takes 90,000 requests/s on fewer than" in capsys.readouterr().out
    assert main(["serve", "--search", "--model", "llama3-405b", "--slo-ttft", "1s", "--plain"]) == ExitCode.DOES_NOT_FIT
    assert "No layout fits in memory" in capsys.readouterr().out


def test_every_fault_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        *("serve", "--search", "--rate", "-1", "--slo-ttft", "p0=1s", "--slo-tpot", "-5ms", "--interval", "--brief"),
        *("--fix", "tpp=2", "--fix", "weights=int3,fp8", "--fix", "stack=a", "--fix", "tp", "--model", "nope"),
    ]
    assert main(wrong) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    for part in (
        "--rate: must be at least 0; it is -1",
        "--slo-ttft: p0 is no percentile",
        "--slo-tpot: a limit must be above zero; it is -5ms",
        "--interval: is of one plan",
        "--brief: is of one plan",
        "--fix tpp: is no field of a serving plan",
        "--fix weights: must be",
        "--fix stack: cannot be searched",
        "--fix tp: has no value",
        "nope",
    ):
        assert part in told
    assert main(["serve", "--search", "--rate", "0"]) == ExitCode.BAD_INPUT
    told = capsys.readouterr().err
    assert "a search needs a limit to meet" in told
    assert "no rate to find GPUs for" in told
    assert main(["serve", "--search", "--slo-ttft", "1s", "--burstiness", "0.5"]) == ExitCode.BAD_INPUT
    assert "at a random share of a Poisson process" in capsys.readouterr().err
    assert main(["serve", "--gpus-needed", "--top", "3"]) == ExitCode.BAD_INPUT
    assert "--gpus-needed: belongs to --search" in capsys.readouterr().err
    assert main(["serve", "--search", "--slo-ttft", "1s", "--tp", "2", "--fix", "tp=4"]) == ExitCode.BAD_INPUT
    assert "--fix tp: is given twice: 2 too" in capsys.readouterr().err
    assert main(["serve", "--search", "--slo-ttft", "1s", "--tp", "3"]) == ExitCode.BAD_INPUT
    assert "tp = 3 does not divide" in capsys.readouterr().err


def test_from_python(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    nouns = (
        Model.load("llama3.2-1b"),
        Cluster.load("hgx-h100-8"),
        Workload(rate=20, num_requests=30, output_tokens=20),
    )
    report = search_serving(
        *nouns,
        Slo(ttft_s={95: 0.1}),
        plan=InferencePlan(tp=2),
        fix={"pp": 1},
        disaggregated="no",
        prices=Prices.load(prices),
        max_gpus=4,
    )
    assert report.best is not None
    assert report.best.answer.plan.tp == 2
    assert [row.answer.num_devices for row in report.rows] == [2]
    assert report.best.million_output_tokens == pytest.approx(0.002 / 400 * 1e6)
    with pytest.raises(ArgumentError) as caught:
        search_serving(*nouns, Slo(ttft_s=1), fix={"tpp": 1, "weights": ["int3"]}, disaggregated="maybe")  # type: ignore[arg-type]
    assert len(caught.value.faults) == 3


def small(**changes: Any) -> ServingSearch:
    usual = ServingSearch(
        model=Model.load("llama3.2-1b"),
        cluster=Cluster.load("hgx-h100-8"),
        plan=InferencePlan(),
        workload=Workload(rate=20, num_requests=20, output_tokens=10),
        slo=Slo(ttft_s=1.0),
        stack=Stack.load("vllm-2025"),
        fixed={"pp": (1,)},
        max_gpus=2,
    )
    return replace(usual, **changes)


def test_what_an_engine_sets_by_degrees_or_weights_is_that_of_each_layout() -> None:
    """As `serve` has it for the same flags; it is no setting of the plan's. What is stated holds for all."""

    def searched(name: str, fixed: dict[str, tuple[Any, ...]], **stated: Any) -> dict[int, InferencePlan]:
        stack = Stack.load(name)
        plan = InferencePlan(stack=name, **stated)
        study = small(stack=stack, plan=plan, fixed={"pp": (1,)} | fixed, max_gpus=4, disaggregated="no")
        found = find_plans(study)
        assert not any(
            "gpu_memory_utilization" in degrees_of(row.answer.plan, study) for row in found.rows if not stated
        )
        return {row.answer.plan.tp: row.answer.plan for row in found.rows}

    model, device = Model.load("llama3.2-1b"), Cluster.load("hgx-h100-8").device
    found = searched("sglang-2025", {"tp": (1, 4)})
    for tp, plan in found.items():
        alone = with_defaults(InferencePlan(stack="sglang-2025", tp=tp), Stack.load("sglang-2025"), device, model)
        assert plan.gpu_memory_utilization == alone.gpu_memory_utilization
    assert found[1].gpu_memory_utilization != found[4].gpu_memory_utilization
    assert searched("tensorrt-llm-2025", {"tp": (1,), "weights": ("fp8",)})[1].kv_cache == "fp8"
    assert searched("sglang-2025", {"tp": (4,)}, gpu_memory_utilization=0.7)[4].gpu_memory_utilization == 0.7


def test_answers_of_one_token_and_a_single_request() -> None:
    """No further token: no speed for a user, no pool that decodes."""
    found = find_plans(
        small(workload=Workload(rate=20, num_requests=20, output_tokens=1), slo=Slo(tpot_s=0.1, ttft_s=1))
    )
    assert [row.answer.plan.prefill_dp for row in found.rows] == [0, 0]
    assert [row.answer.tokens_per_s_user for row in found.rows] == [None, None]
    assert "tpot p99" in told(found)
    alone = find_plans(small(workload=Workload(rate=0.001, num_requests=1, output_tokens=3)))
    assert alone.best is not None
    assert alone.best.answer.num_devices == 1


def told(report: ServingSearchReport) -> str:
    console = Console(file=StringIO(), width=150, no_color=True)
    console.print(render(report))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_what_no_search_can_answer_is_refused() -> None:
    with pytest.raises(InputError, match="are 9000, beyond 8192"):
        find_plans(
            small(model=Model.load("llama3-8b"), workload=Workload(rate=1, prompt_tokens=8000, output_tokens=1000))
        )
    with pytest.raises(PlanError, match="tp = 7 does not divide"):
        find_plans(small(fixed={"tp": (7,)}, max_gpus=8))
    with pytest.raises(PlanError, match="takes more than 2 GPUs"):
        find_plans(small(fixed={"tp": (4,)}))
    with pytest.raises(InputError, match=r"states of mixers.* are not handed over"):
        small(model=Model.load("nemotron-h-8b"), disaggregated="yes")
    assert small(fixed={"dcp": (1,), "attention_dp": (False,)}).hands_over
    assert not small(fixed={"dcp": (1, 2)}).hands_over
    assert layouts(small(model=Model.load("nemotron-h-8b"))).prompts == ()
    with pytest.raises(InputError, match="a trace has its own rate"):
        small(workload=Workload(trace="day.csv"))


def test_an_absurd_rate_is_an_answer() -> None:
    found = find_plans(small(workload=Workload(rate=1e9, num_requests=20, output_tokens=10), fixed={"pp": (1, 2)}))
    assert found.best is None
    assert found.counts.plays == 0
    assert found.least_devices is not None
    assert found.least_devices > 1e5
    assert "The queue grows without end" in told(found)


def test_what_is_known_is_told_when_interrupted() -> None:
    def stop(progress: Progress) -> None:
        if progress.best is not None:
            raise KeyboardInterrupt

    with pytest.raises(SearchInterrupted) as caught:
        find_plans(small(), tell=stop)
    report = caught.value.report
    assert report.interrupted
    assert report.rows
    assert told(report).startswith("INTERRUPTED, best so far: llama3.2-1b")
    assert report.as_json()["interrupted"] is True


def test_numbers_that_are_fixed_are_kept() -> None:
    found = find_plans(small(fixed={"pp": (1,), "tp": (1,), "dp": (2,), "prefill_dp": (2,)}, max_gpus=4))
    assert {(row.answer.plan.dp, row.answer.plan.prefill_dp) for row in found.rows} == {(2, 0), (2, 2)}
    fp8 = find_plans(small(fixed={"pp": (1,), "tp": (1,), "weights": ("bf16", "fp8")}, disaggregated="no"))
    assert {row.answer.plan.weights for row in fp8.rows} == {"bf16", "fp8"}
    assert fp8.best is not None
    assert fp8.best.answer.plan.weights == "fp8"  # as few GPUs, and quicker
