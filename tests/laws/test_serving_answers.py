"""Laws of what a server's answer says: the same figures by every way to ask, and figures that agree with each other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import Cluster, InferencePlan, Model, Slo, Workload, search_serving, serve
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from tests.examples import examples


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
    slo = Slo(ttft_s={99: 0.15})
    own = serve(given[0], InferencePlan(), *given[1:], slo=slo)
    assert own.load is not None
    assert own.load.capacity_per_s == told["load"]["capacity_per_s"]
    assert own.attainments[0].measured_s == told["attainments"][0]["measured_s"]
    (row,) = search_serving(*given, slo, fix={"tp": [1], "pp": [1], "dp": [1]}, disaggregated="no").rows
    assert row.answer.capacity_per_s == told["load"]["capacity_per_s"]
    assert row.answer.attainments[0].measured_s == told["attainments"][0]["measured_s"]
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
    drawn = {"rate": 3.0, "burstiness": shape, "num_requests": count, "seed": seed, "output_tokens": 7}
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
    assert all(0 <= one.arrival_s <= alone[-1].arrival_s for one in load.requests())
