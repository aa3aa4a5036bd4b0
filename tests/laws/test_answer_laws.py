"""Laws of whole answers: what one says of its inputs is what it was made of, and what is said twice is the same."""

from __future__ import annotations

import json

import pytest

from simulator import Cluster, Model, Plan, predict
from simulator.cli import main
from simulator.spec.plan.traits import implementation_names, traits_of

STAGES = [(name, zero) for name in implementation_names() for zero in traits_of(name).zero_stages]


@pytest.mark.parametrize(("name", "zero"), STAGES)
def test_an_answer_s_own_inputs_make_that_answer(name: str, zero: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the software is the implementation's usual one: nobody named it, and the answer does."""
    given = ("--data-parallel", name, "--zero", str(zero), "--seq-len", "512")
    main(["predict", "--model", "gpt2", "--cluster", "hgx-h100-8", *given, "--json"])
    told = json.loads(capsys.readouterr().out)
    plan = Plan.model_validate(told["inputs"]["plan"])
    again = predict(Model.load(told["inputs"]["model"]), plan, Cluster.load(told["inputs"]["cluster"]))
    assert again.step_s == told["step_s"]
    assert again.memory.used_bytes == told["memory"]["used_bytes"]
