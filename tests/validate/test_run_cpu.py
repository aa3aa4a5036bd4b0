"""Plans really run with gloo on this machine, from the command down to the record."""

from __future__ import annotations

import json
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from simulator.cli import main
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.work.program import COMPUTE_STREAM
from validate.command import nearest_stack
from validate.compare.borders import borders
from validate.records import read_records
from validate.run_plan import play
from validate.spanfile import read_spans
from validate.task import Task
from validate.torch_releases import EXACT, SCALED_BY_ROW, installed, release

SEEN_GLOO = (2, 13)  # the profiler of earlier releases does not name what DDP's reducer gives to gloo

TINY = Model(name="tiny", num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, d_ff=128, vocab_size=256)
CPU = Stack.load("torch-2.13-cpu")
POWERSGD = {"kind": "powersgd", "rank": 2, "error_feedback": False}


def task(mode: str, **options: Any) -> Task:
    plan = Plan(**{"seq_len": 64, "precision": "fp32", **options})
    return Task(mode=mode, model=TINY, plan=plan, stack=CPU, num_steps=2, num_warm_up=1)  # type: ignore[arg-type]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"dp_shard": 2, "recompute": "full"}, {"all_gather", "all_reduce"}),  # gloo scatters by reducing everywhere
        ({"zero": 0, "dp_replicate": 2, "num_micro_batches": 2}, {"all_reduce"}),
        ({"zero": 1, "dp_shard": 2}, {"all_reduce", "broadcast"}),
        ({"zero": 0, "dp_replicate": 2, "comm_hook": POWERSGD}, {"all_reduce"}),
    ],
    ids=["fsdp2", "ddp", "zero1", "powersgd"],
)
def test_two_ranks_run_the_plan(options: dict[str, Any], kinds: set[str], tmp_path: Path) -> None:
    asked = task("cpu", **options)
    record = play(asked, files=tmp_path / "run")
    assert record["verdict"] == "ok", record["trouble"]
    assert not record["partial"]
    time = record["time"]
    assert len(time["times_s"]) == 2
    phases = sum(time["phases"][name]["median_s"] for name in ("forward", "backward", "optimizer"))
    assert 0 < phases <= 1.001 * max(time["times_s"])
    seen = set(record["profile"]["communication"])
    assert seen == kinds or (release(record["machine"]["torch"]) < SEEN_GLOO and not seen)
    predicted = borders(TINY, asked.plan, CPU, granularity_bytes=1, library="gloo")
    assert record["memory"]["peak_bytes"] == pytest.approx(predicted.peak_bytes, rel=0.01)
    timeline = read_spans(tmp_path / record["files"]["spans.json.gz"])
    assert not seen or {span.stream for span in timeline.spans} > {COMPUTE_STREAM}
    compute = [span for span in timeline.spans if span.stream == COMPUTE_STREAM]
    assert {"gemm", "attention", "loss", "optimizer"} <= {span.category for span in compute}
    assert all(a.end_s <= b.start_s for a, b in pairwise(compute)), "one stream, one op at a time"
    assert not list(tmp_path.glob("shardwise-*"))


@pytest.mark.skipif(release(installed()) < SCALED_BY_ROW, reason="torch scales by tensor on a CPU")
@pytest.mark.usefixtures("warm_ranks")
def test_two_ranks_multiply_in_fp8() -> None:
    """By torch's scaled product, which a CPU has as well; 16-bit operands stay between forward and backward."""
    asked = task("cpu", dp_shard=2, precision="fp8", fp8_recipe="rowwise")
    record = play(asked)
    assert record["verdict"] == "ok", record["trouble"]
    predicted = borders(TINY, asked.plan, CPU, granularity_bytes=1, library="gloo")
    for name in ("start_bytes", "peak_bytes"):
        assert record["memory"][name] == pytest.approx(getattr(predicted, name), rel=0.02), name


@pytest.mark.usefixtures("warm_ranks")
def test_one_process_plays_a_rank_of_many() -> None:
    asked = task("solo", dp_shard=16, dp_replicate=4, precision="bf16")
    record = play(asked)
    assert record["verdict"] == "ok", record["trouble"]
    assert record["num_ranks"] == 64
    predicted = borders(TINY, asked.plan, CPU, granularity_bytes=1)
    assert record["memory"]["start_bytes"] == predicted.start_bytes
    if release(record["machine"]["torch"]) >= EXACT:
        assert record["memory"]["peak_bytes"] == pytest.approx(predicted.peak_bytes, rel=0.01)


def write_study(folder: Path, **plan: Any) -> Path:
    model = folder / "tiny.toml"
    model.write_text("\n".join(f"{k} = {v}" for k, v in TINY.model_dump(include=SIZES).items()), encoding="utf-8")
    study = folder / "study.toml"
    table = {"seq_len": 64, "precision": '"fp32"', "stack": '"torch-2.13-cpu"', **plan}
    lines = ['model = "tiny.toml"', 'cluster = "hgx-h100-8"', "[plan]", *(f"{k} = {v}" for k, v in table.items())]
    study.write_text("\n".join(lines), encoding="utf-8")
    return study


SIZES = {"num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "vocab_size"}


@pytest.mark.usefixtures("warm_ranks")
def test_run_and_compare_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    study, runs = write_study(tmp_path, dp_shard=8), tmp_path / "runs.jsonl"
    assert main(["validate", "run", str(study), "--mode", "fake", "-o", str(runs), "--json"]) == 0
    out, err = capfd.readouterr()
    record = json.loads(out)
    assert "memory" in err.splitlines(), "progress goes to stderr"
    assert (record["mode"], record["num_ranks"], record["time"]) == ("fake", 8, None)
    assert read_records(runs) == ([record], [])
    assert main(["validate", "compare", str(runs)]) == 0
    text = capfd.readouterr().out
    assert "peak" in text
    assert "most of the error in memory" in text


def test_a_bad_plan_starts_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    study = write_study(tmp_path, pp=2, dp_shard=4)
    assert main(["validate", "run", str(study), "--mode", "cpu"]) == 3
    assert "plan: sync_every_micro_batch" in capfd.readouterr().err


@pytest.mark.parametrize(("mode", "kind"), [("fake", "fake-cpu"), ("cpu", "cpu"), ("solo", "eager")])
def test_a_plan_without_a_stack_gets_that_of_the_installed_torch(
    mode: str, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Task] = []
    monkeypatch.setattr("validate.run_plan.play", lambda task, *_, **__: played.append(task) or {"verdict": "failed"})
    study = write_study(tmp_path, dp_shard=8)
    named = study.read_text(encoding="utf-8")
    study.write_text(named.replace('stack = "torch-2.13-cpu"', ""), encoding="utf-8")
    line = ["validate", "run", str(study), "--mode", mode, "--set", "stack.rope=complex_fp32", "-o", "/dev/full"]
    main(line)
    stack = nearest_stack(version("torch"), kind)
    assert f"stack {stack}, the nearest to torch" in capfd.readouterr().err
    study.write_text(named, encoding="utf-8")
    main(line)
    assert [task.stack.name for task in played] == [stack, "torch-2.13-cpu"]
    assert {task.stack.kernels.rope for task in played} == {"complex_fp32"}


def test_a_device_that_a_mode_does_not_have_is_a_usage_error(tmp_path: Path) -> None:
    assert main(["validate", "run", str(write_study(tmp_path)), "--mode", "cpu", "--device", "cuda"]) == 2


@pytest.mark.parametrize("flags", [["--mode", "cpu"], ["--device", "cuda"], ["--mode", "solo", "--device", "cpu"]])
def test_an_allocators_events_are_those_of_a_gpu_and_stay_beside_a_record(flags: list[str], tmp_path: Path) -> None:
    run = ["validate", "run", str(write_study(tmp_path)), "--record"]
    assert main([*run, *flags, "-o", str(tmp_path / "runs.jsonl")]) == 2
    assert main([*run, "--mode", "full"]) == 2, "no file to stay beside"


def test_a_full_disk_prints_the_record_instead(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    monkeypatch.setattr("validate.run_plan.play", lambda *_, **__: {"verdict": "ok", "kind": "run"})
    study = write_study(tmp_path, dp_shard=8)
    assert main(["validate", "run", str(study), "--mode", "fake", "-o", "/dev/full"]) == 5
    out, err = capfd.readouterr()
    assert json.loads(out)["verdict"] == "ok"
    assert "No space left" in err
