"""What waits for a GPU: the commands are ones that exist, the most valuable is first, nothing is done twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from simulator.base.errors import Fault, InputError
from simulator.base.exit_codes import ExitCode
from simulator.cli import main
from validate import queued
from validate.playable import unplayable
from validate.queued import Gpus, items, page, run_queue, runnable

H100 = Gpus(count=1, architecture="hopper", name="NVIDIA H100")
NODE = Gpus(count=8, architecture="hopper", name="NVIDIA H100")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu-queue.md"


def test_the_page_is_made_of_the_queue() -> None:
    measured = sorted(path.parent.name for path in PAGE.parents[1].glob("experiments/measured/*/README.md"))
    assert PAGE.read_text(encoding="utf-8") == page(measured)


def test_one_gpu_measures_what_needs_no_second_and_equal_commands_once() -> None:
    alone, node = runnable(items(), H100), runnable(items(), NODE)
    assert alone[0].commands[0][:2] == ("calibrate", "run")
    assert len({item.commands for item in alone}) == len(alone)
    assert all(item.gpus == 1 for item in alone)
    assert {item.number for item in node} > {item.number for item in alone}
    assert [item.value for item in node] == sorted(item.value for item in node)


def test_every_command_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options exist, and what it asks for can be played: the tools stop where they would look for a GPU."""
    asked: list[Any] = []

    def stop(task: Any = None, *_: object, **__: object) -> int:
        asked.append(task)
        raise InputError(Fault(place="here", problem="stops"))

    monkeypatch.setattr("validate.calibrate.run", stop)
    monkeypatch.setattr("validate.run_plan.play", stop)
    lines = {line for item in items() for line in item.commands}
    for line in lines:
        assert main([part.format(minutes="3", folder=str(tmp_path), gpus="8") for part in line]) == ExitCode.BAD_INPUT
    assert len(asked) == len(lines)
    for task in filter(None, asked):
        assert not unplayable(task.model, task.plan, task.stack, task.mode)


def test_what_is_done_is_not_done_again_and_what_failed_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[str] = []

    def play(command: Sequence[str]) -> int:
        played.append(command[-1] if "validate" in command else "samples")
        return 5 if len(played) == 2 else 0

    said: list[str] = []
    monkeypatch.setattr(queued, "find_spec", lambda _: True)
    assert run_queue(tmp_path, 600, NODE, play, said.append) == 5
    first = len(played)
    assert said[-1].startswith("left: items")
    assert run_queue(tmp_path, 600, NODE, play, said.append) == 0
    assert len(played) == first + 1  # only what had failed
    assert run_queue(tmp_path, 600, NODE, play, said.append) == 0
    assert len(played) == first + 1


def test_every_item_has_a_command_and_one_whose_library_is_missing_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(item.commands for item in items())
    there = {"transformer_engine"}
    monkeypatch.setattr(queued, "find_spec", lambda name: name in there or None)
    said: list[str] = []
    assert run_queue(tmp_path, 600, H100, lambda _: 0, said.append) == 0
    assert [line for line in said if " needs " in line] == [
        "item 20 needs mamba_ssm, causal_conv1d: install it, and the same command measures it"
    ]
    assert (tmp_path / "19-1.done").exists()
    assert not (tmp_path / "20-1.done").exists()
    there |= {"mamba_ssm", "causal_conv1d"}
    assert run_queue(tmp_path, 600, H100, lambda _: 0, said.append) == 0
    assert (tmp_path / "20-1.done").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "queue").write_text("")
    with pytest.raises(InputError, match="queue: is no folder: File exists"):
        run_queue(tmp_path / "queue", 30, H100, lambda _: 0)


def test_the_queue_is_told_no_more_than_time_and_place(capsys: pytest.CaptureFixture[str]) -> None:
    """What it would not heed is a usage error."""
    assert main(["calibrate", "run", "--queue", "--memory-fraction", "0.5", "--tiny"]) == ExitCode.USAGE
    assert "--queue chooses --memory-fraction, --tiny itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "calibrate run",
        "calibrate run --queue",
        "calibrate burn-in",
        "validate run",
        "validate rehearse",
        "capture x.py -o x",
    ],
)
def test_a_machine_without_torch_is_told_what_to_install(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("simulator.cli.options.find_spec", lambda _: None)
    assert main(command.split()) == ExitCode.BAD_INPUT
    assert "torch: is not installed (pip install 'shardwise[validate]')" in capsys.readouterr().err


def test_no_command_is_begun_that_cannot_end_in_time(tmp_path: Path) -> None:
    assert run_queue(tmp_path, 1.5, H100, lambda _: pytest.fail("too late"), lambda _: None) == 5


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued, "count_gpus", lambda: 0)
    with pytest.raises(InputError, match="torch sees no GPU"):
        Gpus.here()
