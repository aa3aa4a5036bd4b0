"""`shardwise export`: what is written, what is refused, and what is said beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from simulator.formats.study import read_study

PLANS = Path(__file__).resolve().parents[1] / "data" / "plans"


def test_a_script_becomes_a_study_and_a_script_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, again = tmp_path / "a.sh", tmp_path / "b.sh"
    source = ["--plan", str(PLANS / "gpt-175b.sh"), "--cluster", "dgx-a100-80-8"]
    assert main(["export", *source, "--to", "megatron", "-o", str(script)]) == ExitCode.OK
    assert f"written to {script}" in capsys.readouterr().err
    assert main(["export", "--plan", str(script), "--cluster", "dgx-a100-80-8", "--to", "megatron"]) == ExitCode.OK
    again.write_text(capsys.readouterr().out)
    assert again.read_bytes() == script.read_bytes()
    assert "torchrun --nnodes 128 --nproc_per_node 8" in script.read_text()


def test_our_own_study_is_read_back_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "llama3-8b", "--nodes", "2", "--data-parallel", "ddp", "--zero", "0", "--bucket-bytes", "7MB"]
    flags += ["--seq-len", "1024", "--set", "plan.offload.activations=host"]
    assert main(["export", *flags, "--to", "toml"]) == ExitCode.OK
    file = tmp_path / "study.toml"
    file.write_text(capsys.readouterr().out)
    plan = read_study(file, {}, {}, ()).plan
    assert (plan.ddp.bucket_bytes, plan.dp_replicate, plan.implementation, plan.seq_len) == (7_000_000, 16, "ddp", 1024)
    assert plan.offload.activations == "host"


def test_a_plan_on_one_gpu_stays_on_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "llama3-8b", "--tp", "8", "--dp-shard", "1", "--seq-len", "1024"]
    assert main(["export", *flags, "--to", "toml"]) == ExitCode.OK
    file = tmp_path / "study.toml"
    file.write_text(capsys.readouterr().out)
    assert read_study(file, {}, {}, ()).plan.num_data_parallel == 1


def test_what_a_framework_cannot_run_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--model",
        "llama3-8b",
        "--data-parallel",
        "deepspeed",
        "--zero",
        "3",
        "--pp",
        "2",
        "--optimizer-dtype",
        "bf16",
    ]
    assert main(["export", *flags, "--seq-len", "1024", "--to", "torchtitan"]) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert not out
    assert "data_parallel = deepspeed (data_parallel = fsdp2 is what it would run)" in err
    assert "optimizer_dtype = bf16 (optimizer_dtype = fp32 is what it would run)" in err
    assert main(["export", *flags, "--seq-len", "1024", "--to", "deepspeed"]) == ExitCode.BAD_INPUT
    assert "cannot keep pp = 2 (pp = 1 is what it would run)" in capsys.readouterr().err


def test_a_model_that_arguments_cannot_state_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "gpt-neox-20b", "--data-parallel", "megatron", "--zero", "1", "--reduce-dtype", "fp32"]
    assert main(["export", *flags, "--to", "megatron"]) == ExitCode.BAD_INPUT
    assert "model.parallel_residual" in capsys.readouterr().err
    assert main(["export", "--model", "gpt2", "--to", "torchtitan"]) == ExitCode.BAD_INPUT
    assert "gpt2 is not one of torchtitan's flavors (one of llama3 8B" in capsys.readouterr().err


def test_what_belongs_to_the_training_script_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "llama3-8b", "--data-parallel", "deepspeed", "--seq-len", "4096", "--recompute", "full"]
    assert main(["export", *flags, "--to", "deepspeed", "--json"]) == ExitCode.OK
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["beside"] == {"seq_len": 4096, "recompute": "full"}
    assert json.loads(answer["text"])["zero_optimization"]["stage"] == 3
    assert "for the training script: seq_len = 4096" in err


@pytest.mark.parametrize("model", ["deepseek-v3", "mixtral-8x7b", "llama3-405b"])
def test_models_survive_megatron_s_arguments(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", model, "--data-parallel", "megatron", "--zero", "1", "--reduce-dtype", "fp32", "--nodes", "4"]
    file = tmp_path / "a.sh"
    assert main(["export", *flags, "--seq-len", "2048", "--to", "megatron", "-o", str(file)]) == ExitCode.OK
    capsys.readouterr()
    assert main(["export", "--plan", str(file), "--to", "megatron"]) == ExitCode.OK
    assert capsys.readouterr().out == file.read_text()


def test_an_unknown_format_and_an_unwritable_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["export", "--to", "megatronn"]) == ExitCode.BAD_INPUT
    assert "did you mean megatron?" in capsys.readouterr().err
    assert main(["export"]) == ExitCode.USAGE
    assert main(["export", "--to", "torchtitan", "-o", str(tmp_path / "no" / "where")]) == ExitCode.BAD_INPUT
    assert "cannot be written" in capsys.readouterr().err
