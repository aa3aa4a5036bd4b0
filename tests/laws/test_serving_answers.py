"""Laws of what a server's answer says: the same figures by every way to ask, and figures that agree with each other."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import Cluster, InferencePlan, Model, Slo, Workload, search_serving, serve
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from tests.examples import examples
from tests.unit.test_serve_search_cli import PRICES


def answer(capsys: pytest.CaptureFixture[str], *options: object) -> dict[str, Any]:
    """Of `shardwise serve`."""
    assert main(["serve", *map(str, options), "--json"]) == ExitCode.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("model", ["llama3.2-1b", "qwen2.5-vl-3b"])
def test_one_study_has_one_answer(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line, from Python, as a search's only plan and as the highest rate; with images in its prompts, too."""
    limit = "--slo-ttft", "150ms"
    highest = answer(capsys, "--model", model, "--requests", 40, "--output", 20, *limit, "--highest-rate")
    rate = highest["inputs"]["workload"]["rate"]
    told = answer(capsys, "--model", model, "--requests", 40, "--output", 20, *limit, "--rate", repr(rate))
    for key in ("latencies", "load", "attainments"):
        assert told[key] == highest[key]
    given = Model.load(model), Cluster.load("hgx-h100-8"), Workload(rate=rate, num_requests=40, output_tokens=20)
    slo = Slo(ttft_s={99.0: 0.15})
    own = serve(given[0], InferencePlan(), *given[1:], slo=slo)
    assert own.load is not None
    assert own.load.capacity_per_s == told["load"]["capacity_per_s"]
    assert own.attainments[0].measured_s == told["attainments"][0]["measured_s"]
    (row,) = search_serving(*given, slo, fix={"tp": [1], "pp": [1], "dp": [1]}, disaggregated="no").rows
    assert row.answer.capacity_per_s == told["load"]["capacity_per_s"]
    assert row.answer.attainments[0].measured_s == told["attainments"][0]["measured_s"]
    assert row.whole is not None
    assert row.whole[0].measured_s == told["attainments"][0]["measured_s"]


@examples(40)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 40),
    prompt=st.integers(1, 900),
    prefix=st.integers(1, 900),
    shape=st.sampled_from([0.3, 1.0, 4.0]),
)
def test_a_prefix_that_is_never_found_is_a_longer_prompt(
    seed: int, count: int, prompt: int, prefix: int, shape: float
) -> None:
    """And comes when it would."""
    drawn: dict[str, Any] = {"rate": 3.0, "burstiness": shape, "num_requests": count, "seed": seed, "output_tokens": 7}
    shared = Workload(**drawn, prompt_tokens=prompt, prefix_tokens=prefix, cache_hits=0.0).requests()
    assert list(shared) == list(Workload(**drawn, prompt_tokens=prompt + prefix).requests())


@examples(30)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 40), turns=st.integers(2, 5), gap_s=st.floats(0, 100))
def test_turns_come_between_the_beginning_and_the_last_conversation(
    seed: int, count: int, turns: int, gap_s: float
) -> None:
    """Which begins when it does without turns: nobody's first request comes at another time."""
    load = Workload(rate=2.0, num_requests=count, seed=seed, turns=turns, turn_gap_s=gap_s, prompt_tokens=10)
    alone = Workload(rate=2.0 / turns, num_requests=-(-count // turns), seed=seed).requests()
    begun = sorted(one.arrival_s for one in load.requests() if one.prompt_tokens == 10)
    assert begun == pytest.approx([one.arrival_s for one in alone])
    assert all(0 <= one.arrival_s <= begun[-1] for one in load.requests())


ENGINES = ["vllm-2025", "vllm-2024", "sglang-2025", "tensorrt-llm-2025", "tgi-2025", "lmdeploy-2024"]
PROMPTS: dict[str, Any] = {"prompt_tokens": {"distribution": "uniform", "low": 1, "high": 900}}


@pytest.mark.parametrize("engine", ENGINES)
@examples(4)
@given(
    load=st.fixed_dictionaries(
        {
            "warmup": st.sampled_from([0.0, 0.1, 0.5]),
            "num_requests": st.integers(2, 40),
            "output_tokens": st.integers(1, 40),
        }
    ),
    comes=st.sampled_from([{"rate": 0.0}, {"concurrency": 1}, {"concurrency": 5}, {"rate": 20.0}]),
    prompts_apart=st.integers(0, 1),
)
def test_what_came_is_counted_alike(
    engine: str, load: dict[str, Any], comes: dict[str, Any], prompts_apart: int
) -> None:
    """Tokens a second are requests a second times their lengths; Little's law; a user who never thinks is always inside."""
    model, cluster, workload = (
        Model.load("llama3.2-1b"),
        Cluster.load("hgx-h100-8"),
        Workload(**PROMPTS, **load, **comes),
    )
    plan = InferencePlan(stack=engine, prefill_dp=prompts_apart, max_sequences=64)
    found, whole = (
        serve(model, plan, cluster, one).load for one in (workload, workload.model_copy(update={"warmup": 0.0}))
    )
    assert found is not None
    assert whole is not None
    assert found.in_system == whole.in_system  # over everything
    if comes.get("rate", 0.0):
        return
    assert found.requests_per_s * load["output_tokens"] == pytest.approx(found.output_tokens_per_s)
    assert found.requests_per_s * found.measured_s == pytest.approx(load["num_requests"])
    latencies = serve(model, plan, cluster, workload.model_copy(update={"warmup": 0.0})).latencies
    assert latencies is not None
    assert found.in_system == pytest.approx(found.requests_per_s * latencies.latency.mean_s)
    if comes == {"concurrency": 1}:
        assert found.in_system == pytest.approx(1.0)


@pytest.mark.parametrize("plan", [{}, {"pp": 2}, {"pp": 3}, {"tp": 2}])
def test_two_engines_answer_twice_as_many_in_the_same_time(plan: dict[str, int]) -> None:
    model, cluster, load = (
        Model.load("gpt2"),
        Cluster.load("hgx-h100-8"),
        Workload(rate=0.0, output_tokens=30, warmup=0.0),
    )
    for count in (1, 3):
        one, two = (
            serve(model, InferencePlan(**plan, dp=dp), cluster, load.model_copy(update={"num_requests": dp * count}))  # type: ignore[arg-type]
            for dp in (1, 2)
        )
        assert one.latencies is not None
        assert two.latencies is not None
        assert asdict(two.latencies.latency) == pytest.approx(asdict(one.latencies.latency))


@pytest.mark.parametrize("engine", ENGINES)
def test_no_answer_ends_before_it_begins(engine: str) -> None:
    """Where prompts have engines of their own: the front end that sends their tokens may be behind the one of those that decode."""
    model, cluster, plan = Model.load("gpt2"), Cluster.load("hgx-h100-8"), InferencePlan(prefill_dp=1, stack=engine)
    load = Workload(rate=0.0, num_requests=20, prompt_tokens=14, output_tokens=2, warmup=0.0)
    found = serve(model, plan, cluster, load).latencies
    assert found is not None
    assert found.tpot is not None
    assert found.tpot.p50_s > 0
    assert found.ttft.mean_s < found.latency.mean_s


def test_a_trace_says_what_its_requests_said(tmp_path: Path) -> None:
    """Written out, or an hour later."""
    drawn = Workload(rate=9.0, num_requests=30, seed=5, **PROMPTS, output_tokens=20)
    given = Model.load("llama3.2-1b"), InferencePlan(prefill_dp=1), Cluster.load("hgx-h100-8")
    expected = serve(*given, drawn)
    for later_s in (0.0, 3600.0):
        rows = [f"{one.arrival_s + later_s!r},{one.prompt_tokens},{one.output_tokens}" for one in drawn.requests()]
        (file := tmp_path / "trace.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
        found = serve(*given, Workload(trace=str(file)))
        assert found.load is not None
        for mine, theirs in ((found.load, expected.load), (found.handed_over, expected.handed_over)):
            assert mine is not None
            assert theirs is not None
            assert asdict(mine) == pytest.approx(asdict(theirs), rel=1e-6)


def test_a_token_costs_what_capacity_makes_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Money a second over tokens a second, however few requests were answered in the measured time."""
    (prices := tmp_path / "prices.toml").write_text(PRICES, encoding="utf-8")
    for requests, output in ((400, 50), (30, 700)):
        told = answer(capsys, "--requests", requests, "--output", output, "--rate", 2, "--prices", prices)
        (cost,), load = told["costs"], told["load"]
        full = 3.6 / 3600 / (load["capacity_per_s"] * output) * 1e6
        assert cost["million_output_tokens_at_capacity"] == pytest.approx(full)
        assert cost["low_at_capacity"] < full < cost["high_at_capacity"]


@pytest.mark.parametrize(
    "given",
    [
        ("--host-cache", "8GiB", "--kv-cache", "fp8"),
        ("--replicate", "embedding,head", "--cuda-graphs", "false", "--gpu-memory-utilization", "0.7"),
        ("--speculative", "draft", "--draft-model", "llama3.2-1b", "--acceptance", "0.7", "--stack", "sglang"),
    ],
)
def test_the_flags_of_the_best_plan_show_it(given: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    load = "--model", "llama3.2-3b", "--requests", "20", "--output", "9", "--rate", "5", "--slo-ttft", "1s"
    search = "serve", "--search", *load, *given, "--max-gpus", "1", "--disaggregated", "no", "--jobs", "1"
    assert main([*search, "--plain"]) == ExitCode.OK
    flags = capsys.readouterr().out.split("as flags of `shardwise serve`:")[1]
    assert main([*search, "--json"]) == ExitCode.OK
    row = json.loads(capsys.readouterr().out)["plans"][0]
    assert answer(capsys, *load, *shlex.split(flags))["attainments"] == row["attainments"]


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2, "prefill_dp": 1, "prefill_tp": 1},
        {"tp": 1, "prefill_dp": 1, "prefill_tp": 4},
        {"tp": 1, "prefill_dp": 2, "prefill_tp": 2},
        {"tp": 1},
    ],
)
def test_what_is_advised_fits(plan: dict[str, int]) -> None:
    """Every change that is named is a legal plan on these GPUs, and its cache has the tokens that are told."""
    given = Model.load("llama3-70b"), Cluster.load("hgx-h100-8"), Workload(num_requests=2)
    refused = serve(given[0], InferencePlan(**plan), *given[1:])  # type: ignore[arg-type]
    assert refused.remedies
    for remedy in refused.remedies:
        found = serve(given[0], InferencePlan(**plan | remedy.plan), *given[1:])
        own = found.prefill_memory if refused.memory == refused.prefill_memory else found.memory
        assert found.fits
        assert own is not None
        assert own.kv_tokens == remedy.kv_tokens
        assert found.num_devices == remedy.num_devices
