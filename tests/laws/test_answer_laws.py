"""Laws of whole answers: what one says of its inputs is what it was made of, and what is said twice is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator import Cluster, Model, Plan, predict
from simulator.cli import main
from simulator.spec.plan.traits import implementation_names, traits_of

STAGES = [(name, zero) for name in implementation_names() for zero in traits_of(name).zero_stages]


@pytest.mark.parametrize(("name", "zero"), STAGES)
def test_an_answer_s_own_inputs_make_that_answer(name: str, zero: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the software is the implementation's usual one: nobody named it, and the answer does."""
    told = _told(capsys, "predict", *_small(name, zero))
    plan = Plan.model_validate(told["inputs"]["plan"])
    again = predict(Model.load(told["inputs"]["model"]), plan, Cluster.load(told["inputs"]["cluster"]))
    assert again.step_s == told["step_s"]
    assert again.memory.used_bytes == told["memory"]["used_bytes"]


@pytest.mark.parametrize("stack", [(), ("--stack", "torch-2.6-eager")])
@pytest.mark.parametrize(("name", "zero"), STAGES)
def test_an_exported_study_makes_the_same_answer(
    name: str, zero: int, stack: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether somebody named the software or not, which its interval knows, and which may be other software."""
    told = _told(capsys, "predict", *_small(name, zero), *stack)
    file = str(tmp_path / "study.toml")
    assert main(["export", "--to", "toml", "-o", file, *_small(name, zero), *stack]) == 0
    again = _told(capsys, "predict", file)
    assert [again[key] for key in ("step_s", "low_s", "high_s", "memory")] == [
        told[key] for key in ("step_s", "low_s", "high_s", "memory")
    ]


def test_a_search_s_row_names_the_software_that_its_plan_would_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = [f"--fix={field}" for field in ("data_parallel=megatron", "zero=1", "pp=1", "tp=1", "cp=1")]
    given = ("--model", "gpt2", "--cluster", "hgx-h100-8", "--global-batch", "8", "--seq-len", "2048", "--jobs", "1")
    row = _told(capsys, "search", *given, *fixed, "--stack", "torch-2.6-eager")["plans"][0]
    again = predict(Model.load("gpt2"), Plan(**row["plan"]), Cluster.load("hgx-h100-8"))
    assert again.step_s == row["step_s"]


def _small(name: str, zero: int) -> tuple[str, ...]:
    model = ("--model", "gpt2", "--cluster", "hgx-h100-8", "--seq-len", "512")
    return (*model, "--data-parallel", name, "--zero", str(zero))


def _told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    main([*words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
