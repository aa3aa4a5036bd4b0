"""Every option of every command refuses what does not exist: with an exit code, and without a traceback."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from simulator.cli import main, shardwise

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "experiments" / "measured"
STUDY = 'model = "llama3.2-1b"\ncluster = "hgx-h100-8"\n[plan]\nzero = 3\nseq_len = 1024\n'
FILES = {
    "runs.csv": ROOT / "tests" / "data" / "unseen_runs.csv",
    "runs.jsonl": MEASURED / "cpu-loop-2026-11-21" / "runs.jsonl",
    "samples.jsonl.gz": MEASURED / "cpu-loop-2026-11-21" / "samples-1.jsonl.gz",
    "snapshot.json.gz": MEASURED / "h200-2026-11-20" / "trace-random-default.json.gz",
    "trace.json.gz": MEASURED / "h200-2026-11-20" / "kineto-small.json.gz",
}
# What each command is asked with, so that it would answer: the argument first
ASKED = {
    "init": "new.toml",
    "predict": "a.toml",
    "serve": "b.toml",
    "search": "--model llama3.2-1b --cluster hgx-h100-8 --global-batch 8 --seq-len 512 --stack torch-2.6-eager --jobs 1 "
    "--fix tp=1 --fix cp=1 --fix pp=1 --fix zero=3 --fix recompute=none",
    "explore": "a.toml --vary plan.tp=1,2 --jobs 1",
    "ui": "a.toml",
    "place": "a.toml",
    "capture": "train.py -o x.capture.gz --warm-up 1",
    "goodput": "a.toml --steps 10 --replicas 2",
    "compare": "a.toml --what-if plan.zero=2 --no-ablations",
    "sensitivity": "a.toml --what-if plan.zero=2 --vary link.intra.bytes_per_s=x0.9..x1 --samples 8 --jobs 1",
    "backtest": "runs.csv --jobs 1",
    "validate run": "a.toml --mode fake",
    "validate compare": "runs.jsonl",
    "validate rehearse": "--quick",
    "calibrate burn-in": "--device cpu --minutes 0.02 --ranks 1",
    "calibrate check": "samples.jsonl.gz",
    "calibrate diff": "samples.jsonl.gz samples.jsonl.gz",
    "calibrate fit": "samples.jsonl.gz -o x.json",
    "calibrate fleet": "samples.jsonl.gz samples.jsonl.gz",
    "calibrate learn": "runs.csv",
    "calibrate run": "--device cpu --minutes 0.1 --ranks 1",
    "import": "trace.json.gz",
    "export": "a.toml --to toml",
    "replay": "snapshot.json.gz",
    "topo": "hgx-h100-8",
    "collective": "all_reduce",
    "doctor": "",
    "completions": "bash",
    "manual": "-o manual",
}


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def parameters() -> Iterator[tuple[str, str]]:
    """Command, and its argument ("") or option that takes a value."""
    for name, command in commands(shardwise):
        for one in command.params:
            if isinstance(one, click.Argument) and one.type is not click.UNPROCESSED:
                yield name, ""
            elif isinstance(one, click.Option) and not one.is_flag and one.metavar != "DIR":  # a kit makes its folder
                yield name, one.opts[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("inputs")
    (here / "a.toml").write_text(STUDY)
    (here / "b.toml").write_text('model = "llama3.2-1b"\ncluster = "hgx-h100-8"\n')
    for name, file in FILES.items():
        shutil.copy(file, here / name)
    return here


def test_every_command_is_asked() -> None:
    assert sorted(ASKED) == sorted(name for name, _ in commands(shardwise))


@pytest.mark.parametrize(("command", "option"), [*parameters()])
def test_what_does_not_exist_is_refused(
    command: str, option: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("validate.command.count_gpus", lambda: 0)  # asks a process that loads torch for it
    words = ASKED[command].split()
    if option == "--program" and words[0] == "a.toml":  # it has its own model and plan
        words = [*words[1:], *(["--tokens-per-step", "8192"] if command == "goodput" else [])]
    folder_name = f"absent-{command}{option}".replace(" ", "-")
    for absent in (f"{folder_name}/x.toml", f"{folder_name}/x.svg"):
        asked = [*words, option, absent] if option else [absent, *words[1:]]
        assert main([*command.split(), *asked]) in (2, 3)
        said = capsys.readouterr().err
        twice = (
            option in ("--images", "--image-size", "--freeze", "--adapter") and command != "search"
        )  # of no use besides
        assert f"shardwise: {'2 faults' if twice else '1 fault'} in the " in said or said.startswith("Usage: ")
        assert option in said or "absent" in said


def test_the_commands_would_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that it is the option that was refused. (`validate run`, `calibrate` and `backtest` have tests of their own.)"""
    monkeypatch.chdir(folder)
    for command in (
        "predict",
        "serve",
        "search",
        "explore",
        "goodput",
        "compare",
        "sensitivity",
        "import",
        "export",
        "replay",
    ):
        assert main([command, *ASKED[command].split()]) == 0
    capsys.readouterr()
