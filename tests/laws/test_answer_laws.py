"""Laws of whole answers: what one says of its inputs is what it was made of, and what is said twice is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator import Cluster, Model, Plan, predict
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.spec.plan.traits import implementation_names, traits_of

STAGES = [(name, zero) for name in implementation_names() for zero in traits_of(name).zero_stages]

SAID = ("step_s", "low_s", "high_s", "memory")


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
    assert [again[key] for key in SAID] == [told[key] for key in SAID]


@pytest.mark.parametrize(
    ("study", "more", "lost"),
    [
        ('calibration = "ideal"', "--cluster hgx-h100-8", ""),
        ('calibration = "datasheet"', "--cluster hgx-h100-8 --nodes 2", ""),
        ("", "--gpus 4xh100", ""),
        ("", "--gpus 128xa100", ""),
        ("", "--cluster hgx-h100-8 --nodes 2 --set link.inter.bytes_per_s=10GB/s", "cluster"),
        ("", "--cluster hgx-h100-8 --set device.memory_bytes=40GB", "cluster"),
        ("", "--cluster hgx-h100-8 --set model.num_layers=2", "model"),
        ("", "--cluster hgx-h100-8 --set stack.kernels.loss=fused_linear", "stack"),
        ("", "--cluster hgx-h100-8 --set checkpoint.mode=sharded", "[checkpoint]"),
    ],
)
def test_an_exported_study_says_all_or_what_it_does_not(
    study: str, more: str, lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, file = tmp_path / "given.toml", tmp_path / "study.toml"
    given.write_text(f'model = "gpt2"\n{study}\n')
    assert main(["export", str(given), "--to", "toml", "-o", str(file), *more.split()]) == 0
    notes = capsys.readouterr().err
    assert f"no name for it: {lost}\n" in notes if lost else "not in the file" not in notes
    if lost in ("cluster", "model"):
        assert main(["predict", str(file)]) == ExitCode.BAD_INPUT
    elif not lost:
        again = _told(capsys, "predict", str(file))
        told = _told(capsys, "predict", str(given), *more.split())
        assert [again[key] for key in SAID] == [told[key] for key in SAID]


def test_a_search_s_row_names_the_software_that_its_plan_would_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = [f"--fix={field}" for field in ("data_parallel=megatron", "zero=1", "pp=1", "tp=1", "cp=1")]
    given = ("--model", "gpt2", "--cluster", "hgx-h100-8", "--global-batch", "8", "--seq-len", "2048", "--jobs", "1")
    row = _told(capsys, "search", *given, *fixed, "--stack", "torch-2.6-eager")["plans"][0]
    again = predict(Model.load("gpt2"), Plan(**row["plan"]), Cluster.load("hgx-h100-8"))
    assert again.step_s == row["step_s"]


@pytest.mark.parametrize(("pp", "peft"), [(1, "none"), (1, "lora"), (2, "lora"), (1, "qlora")])
def test_a_search_over_two_values_finds_the_better_of_two_searches(
    pp: int, peft: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers below adapters have a backward only where activations are recomputed: plans with and without share no blocks."""
    fixed = [f"--fix={field}" for field in ("data_parallel=fsdp2", f"pp={pp}", "tp=1", "cp=1", f"peft={peft}")]
    shape = ("--model", "llama3.2-1b", "--cluster", "dgx-a100-80-8", "--global-batch", "16", "--seq-len", "2048")
    given = (*shape, "--jobs", "1", "--stack", "torch-2.6-eager", *fixed)
    none, full, both = (
        _told(capsys, "search", *given, f"--fix=recompute={modes}")["plans"][0]["step_s"]
        for modes in ("none", "full", "none,full")
    )
    assert both == min(none, full) < full


def _small(name: str, zero: int) -> tuple[str, ...]:
    model = ("--model", "gpt2", "--cluster", "hgx-h100-8", "--seq-len", "512")
    return (*model, "--data-parallel", name, "--zero", str(zero))


def _told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    main([*words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("key", ["link.inter.latency_s", "cluster.intra.latency_s"])
def test_a_setting_that_enters_no_time_says_so(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    two = (*_small("fsdp2", 3), "--nodes", "2")
    plain, slow = _told(capsys, "predict", *two), _told(capsys, "predict", *two, "--set", f"{key}=1ms")
    assert slow["step_s"] == plain["step_s"]
    assert [one["detail"] for one in slow["sources"] if one["what"] == key and "without effect" in one["detail"]]
    waiting = _told(capsys, "predict", *two, "--set", "cluster.fabric.wait=100")  # which it names instead
    assert waiting["step_s"] > 2 * plain["step_s"]
