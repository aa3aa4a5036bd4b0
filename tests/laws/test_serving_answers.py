"""Laws of what a server's answer says: the same figures by every way to ask, and figures that agree with each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simulator import Cluster, InferencePlan, Model, Slo, Workload, search_serving, serve
from simulator.base.exit_codes import ExitCode
from simulator.cli import main


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
